"""What the agent works with: a model with a chat template, source files, and documents.

The model has random weights: no tool is called by it. So the agent's steps are written down in
conversation.py, and what the tools answer is real.
"""

import importlib
import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from examples.demo.material import (
    MODULES,
    MORE_MODULES,
    Recipe,
    cut,
    make_model,
    make_tokenizer,
    render,
)

RECIPE = Recipe(seed=2_411, max_position_embeddings=8_192)
CHAT_TOKENS = ("<|start|>", "<|end|>", "<|eot|>")
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "<|start|>{{ message.role }}<|end|>\n\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "\n<call>{{ call.function.name }}({{ call.function.arguments | tojson }})</call>"
    "{% endfor %}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
FILES = {"bisect.py": "bisect", "queue.py": "queue"}
"""Name in the agent's folder, and the module whose source it is."""
FILE_LINES = 110
DOCUMENTS = ("calendar", "csv", "datetime", "fractions", "heapq", "statistics")


def prepare_model(folder: Path, recipe: Recipe, say: Callable[[str], None]) -> Path:
    """Make tokenizer and model, or find those that were made; return their folder."""
    from transformers import __version__ as version

    model, stamp = folder / "model", folder / "stamp.json"
    wanted = json.dumps([asdict(recipe), TEMPLATE, version])
    if not stamp.exists() or stamp.read_text() != wanted:
        stamp.unlink(missing_ok=True)
        shutil.rmtree(model, ignore_errors=True)
        model.mkdir(parents=True)
        say("a tokenizer with a chat template")
        corpus = [render(name) for name in (*MODULES, *MORE_MODULES)]
        size = make_tokenizer(corpus, recipe.vocab_size, model, more=CHAT_TOKENS, chat=TEMPLATE)
        say(f"a model of {recipe.num_hidden_layers} layers")
        make_model(recipe, size, model)
        stamp.write_text(wanted)
    return model


def make_workspace(folder: Path) -> None:
    """Put source files of Python's library into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, module in FILES.items():
        lines = inspect.getsource(importlib.import_module(module)).splitlines(keepends=True)
        (folder / name).write_text("".join(lines[:FILE_LINES]))


def make_documents(model: Path) -> dict[str, str]:
    """Return one document of each module, of about 360 tokens, by the module's name."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    return {name: next(cut(render(name), tokenizer)) for name in DOCUMENTS}
