"""Other models for the soak: a mixture of experts, and LoRA adapters of the test model."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


@dataclass(frozen=True)
class Setup:
    """What a soak runs on.

    Attributes:
        model: Folder of the model.
        adapters: Folders of its LoRA adapters by name.
    """

    model: Path
    adapters: dict[str, Path] = field(default_factory=dict)

    @property
    def flags(self) -> list[str]:
        """Flags of a server that has the adapters, beside the base model."""
        if not self.adapters:
            return []
        paths = [f"{name}={folder}" for name, folder in self.adapters.items()]
        most = str(len(paths) + 1)
        backend = [] if torch.cuda.is_available() else ["--lora-backend", "torch_native"]
        return ["--lora-paths", *paths, "--max-loras-per-batch", most, *backend]

    def new_adapter(self, seed: int) -> Path:
        """Write another adapter beside the others."""
        config = json.loads((self.model / "config.json").read_text())
        return make_adapter(next(iter(self.adapters.values())).parent / str(seed), seed, config)


TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "initializer_range": 0.2,
}
"""Shape of its experts. Weights are drawn wide, or nobody would see a wrong value in the answers."""
RANK = 4


def make_experts(model: Path, folder: Path) -> Path:
    """Write a Qwen3-MoE of random weights, with the tokenizer and the width of a model.

    Args:
        model: Folder of that model.
        folder: Of the new one; one that is there is kept.

    Returns:
        The folder.
    """
    if (folder / "model.safetensors").is_file():
        return folder
    import transformers

    config = json.loads((model / "config.json").read_text())
    for name in ("architectures", "model_type", "torch_dtype"):
        del config[name]
    torch.manual_seed(0)
    settings = transformers.Qwen3MoeConfig(**{**config, **EXPERTS})
    transformers.Qwen3MoeForCausalLM(settings).save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(model / name, folder / name)
    return folder


def make_adapter(folder: Path, seed: int, config: Mapping[str, Any]) -> Path:
    """Write a LoRA adapter of all linear modules of a Llama, as PEFT does.

    Args:
        folder: Of the adapter.
        seed: Of its weights.
        config: The model's config.json.

    Returns:
        The folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    queries, keys = (
        config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    widths = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, (width, out) in widths.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            weights[f"{name}.lora_A.weight"] = 0.3 * torch.randn(RANK, width, generator=draw)
            weights[f"{name}.lora_B.weight"] = 0.3 * torch.randn(out, RANK, generator=draw)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": sorted(module.split(".")[1] for module in widths),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
