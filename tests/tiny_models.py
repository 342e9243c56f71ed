"""Tiny models of every supported kind, made from configs; nothing is downloaded.

Weights are drawn wide (initializer_range 0.2): with the usual 0.02 the logits hardly depend on
attention, and wrong KV would go unseen.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCAB_SIZE = 384
GPU_HEAD_DIM = 64
"""On a GPU SGLang rotates heads of 64, 128, 256 or 512 values in place by a table in float32. For
others it has another path, with the table in the model's dtype, which no model that is served takes."""
NUM_LAYERS = 4

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

THETA = {"rope_theta": 10000.0}

# On a CPU SGLang pads a rank's part of an expert to a multiple of 32 values and leaves the padding
# as it finds it: narrower experts compute with whatever stands in that memory.
EXPERT_WIDTH = 128
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": EXPERT_WIDTH}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-mha-tied": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "llama-llama3": (
        "Llama",
        {
            "rope_parameters": {
                **THETA,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-linear": (
        "Llama",
        {"rope_parameters": {**THETA, "rope_type": "linear", "factor": 4.0}},
    ),
    "llama-partial-gptj": (
        "Llama",
        {"partial_rotary_factor": 0.5, "rope_is_neox_style": False},
    ),
    "llama-dynamic": (
        "Llama",
        {"rope_parameters": {**THETA, "rope_type": "dynamic", "factor": 4.0}},
    ),
    # Wide enough for the rounding of its matrix products to depend on how many rows they have.
    "llama-wide": (
        "Llama",
        {"hidden_size": 512, "intermediate_size": 1536, "initializer_range": 0.05},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3-yarn": (
        "Qwen3",
        {
            "rope_parameters": {
                **THETA,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 2048,
            }
        },
    ),
    "qwen2-moe": (
        "Qwen2Moe",
        {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 64},
    ),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 8, "norm_topk_prob": True}),
    "glm4-moe": (
        "Glm4Moe",
        {
            **EXPERTS,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": True,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {
            "num_experts_per_tok": 2,
            "intermediate_size": EXPERT_WIDTH,
            "num_local_experts": 8,
            "rotary_dim": 8,
            "partial_rotary_factor": 0.5,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
        },
    ),
    "mixtral": (
        "Mixtral",
        {"num_experts_per_tok": 2, "intermediate_size": EXPERT_WIDTH, "num_local_experts": 8},
    ),
    "arcee": ("Arcee", {}),
    "gemma": ("Gemma", {"tie_word_embeddings": True}),
    "glm4": ("Glm4", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "ministral3": ("Ministral3", {}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "mistral3": ("Mistral", {"sliding_window": None}),
}
WITH_IMAGES = {"mistral3": ("Mistral3", "Pixtral")}
"""Kinds whose language model, as above, stands behind a vision tower: the family and the tower's."""
IMAGE_TOKEN = 10
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "image_size": 32,
    "patch_size": 8,
}


def has_experts(kind: str) -> bool:
    """Say whether a model of KINDS, KV dtype after a plus sign or not, is a mixture of experts."""
    return "num_experts_per_tok" in KINDS[kind.partition("+")[0]][1]


def head_dim_for(engine_settings: Mapping[str, Any]) -> int:
    """Return the head dimension of test models for an engine with such settings."""
    return GPU_HEAD_DIM if engine_settings.get("device") == "cuda" else int(COMMON["head_dim"])


def make_model(
    kind: str, folder: Path, seed: int = 0, *, head_dim: int = COMMON["head_dim"]
) -> Path:
    """Write a model with random weights and return its folder; an existing one is kept."""
    path = folder / (kind if head_dim == COMMON["head_dim"] else f"{kind}-{head_dim}")
    if (path / "model.safetensors").is_file():
        return path
    import torch
    import transformers

    family, overrides = KINDS[kind]
    settings = {**COMMON, "rope_parameters": {**THETA, "rope_type": "default"}, **overrides}
    settings["head_dim"] = head_dim
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(seed)
    if kind in WITH_IMAGES:
        model = _with_images(config, *WITH_IMAGES[kind])
    else:
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(path)
    return path


def _with_images(text: Any, family: str, tower: str) -> Any:
    import transformers

    config = getattr(transformers, f"{family}Config")(
        text_config=text,
        vision_config=getattr(transformers, f"{tower}VisionConfig")(**VISION),
        image_token_index=IMAGE_TOKEN,
        tie_word_embeddings=False,
        architectures=[f"{family}ForConditionalGeneration"],
    )
    return getattr(transformers, f"{family}ForConditionalGeneration")(config)


def class_of(kind: str) -> str:
    """Return SGLang's class of a kind of model, KV dtype after a plus sign or not."""
    name = kind.partition("+")[0]
    if name in WITH_IMAGES:
        return "LlavaForConditionalGeneration"  # which SGLang's Mistral3 is inside
    return f"{KINDS[name][0]}ForCausalLM"


def make_slim_model(folder: Path) -> Path:
    """Write a model whose KV takes so little memory that a pool can hold fifty million tokens."""
    import torch
    import transformers

    path = folder / "slim"
    if (path / "model.safetensors").is_file():
        return path
    config = transformers.LlamaConfig(
        **{
            **COMMON,
            "vocab_size": 120_000,
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 4,
            "max_position_embeddings": 32768,
        }
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def make_text_model(kind: str, folder: Path) -> Path:
    """Make a model that also reads and writes text, and images if it can; return its folder."""
    path = make_model(kind, folder)
    _add_tokenizer(path)
    if kind in WITH_IMAGES:
        _add_image_processor(path)
    return path


def _add_tokenizer(path: Path) -> None:
    """Give a model folder a byte-level tokenizer with idle special tokens and a chat template."""
    if (path / "tokenizer.json").is_file():
        return
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<|reserved_0|>", "<|reserved_1|>", "<|user|>", "<|bot|>"]
    names = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=(
            "{% for m in messages %}{% if m.role == 'assistant' %}<|bot|>{% else %}<|user|>"
            "{% endif %}{{ m.content }}{% endfor %}<|bot|>"
        ),
    ).save_pretrained(path)


def _add_image_processor(path: Path) -> None:
    """Give a model folder what turns an image into pixels, and tokens for where they stand."""
    if (path / "processor_config.json").is_file():
        return
    from transformers import AutoTokenizer, PixtralImageProcessor, PixtralProcessor

    tokenizer = AutoTokenizer.from_pretrained(path)
    names = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    side = VISION["image_size"]
    PixtralProcessor(
        PixtralImageProcessor(
            size={"longest_edge": side},
            patch_size={"height": VISION["patch_size"], "width": VISION["patch_size"]},
        ),
        tokenizer,
        patch_size=VISION["patch_size"],
        spatial_merge_size=2,
        chat_template=tokenizer.chat_template,
    ).save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    config["image_token_index"] = tokenizer.convert_tokens_to_ids(names[0])
    (path / "config.json").write_text(json.dumps(config))
