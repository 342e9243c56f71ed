"""Models without weights: the published shape of a real one is all that speed depends on."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_blend.errors import CommandError

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_COMMON: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA3_ROPE,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "vocab_size": 32768,
        "max_position_embeddings": 32768,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "qwen3-8b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 512,
        "vocab_size": 1024,
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
    },
}
"""What differs between the models, as in their published config.json; ``tiny`` is nobody's."""


def full_config(name: str) -> dict[str, Any]:
    """Return the config.json of a shape; name is one of SHAPES."""
    return {**_COMMON, **SHAPES[name]}


def write_shape(name: str, folder: Path) -> Path:
    """Write the config of a shape and return the folder that SGLang takes for a model.

    Args:
        name: Of SHAPES.
        folder: Where the model's folder is made.
    """
    model = folder / name
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(full_config(name), indent=1) + "\n")
    return model


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model the benchmarks need to know.

    Attributes:
        num_positions: Longest context.
    """

    num_layers: int
    vocab_size: int
    num_positions: int


def read_shape(model: Path | str) -> Shape:
    """Read a model's config.

    Raises:
        CommandError: There is none.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as err:
        reason = str(err).strip().splitlines()[0]
        raise CommandError(f"cannot read the model's config: {reason}") from None
    return Shape(
        num_layers=int(config.num_hidden_layers),
        vocab_size=int(config.vocab_size),
        num_positions=int(config.max_position_embeddings),
    )
