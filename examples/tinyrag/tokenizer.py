"""The test model's tokenizer: one token per word, BOS in front as Llama's."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from examples.tinyrag.words import ASK, BOS, CHUNK, EOS, PAD, SPECIAL, UNKNOWN, vocabulary

TEMPLATES = {
    "system_template": "{system}",
    "chunk_template": f"{CHUNK} {{chunk}}",
    "question_template": f"{ASK} {{question}}",
}
"""How the parts of a prompt become text; ``sgl-blend eval`` finds them in the model's folder."""


def make_tokenizer() -> Tokenizer:
    """Build the tokenizer; special tokens come first, so a word's id is its place."""
    ids = {word: number for number, word in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ids[BOS])]
    )
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write the files that AutoTokenizer and ``sgl-blend eval`` read."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
    }
    _write(folder / "tokenizer_config.json", config)
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    _write(folder / "sgl_blend_templates.json", TEMPLATES)


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
