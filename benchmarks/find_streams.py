"""What benchmarks/find.py asks: streams of prompts as clients without marks write them.

All text is the documentation and the source of Python's own modules. Documents are rendered as
frameworks render them, inside a chat template with headers of special tokens. Two tokenizers are
trained on other modules: one splits words as GPT-2 does, the other as Llama 3 does, which joins line
ends with what stands before them.
"""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.demo.material import MODULES, MORE_MODULES, render

Tokens = NDArray[np.int64]

NUM_DOCUMENTS, DOCUMENT_TOKENS, FEWEST_TOKENS = 250, 360, 150
PER_PROMPT = 6
ZIPF = 0.9
RENDERINGS = ("blank lines", "numbered", "xml", "dashes")
SPLITS = ("gpt2", "llama3")
WINDOW = "sliding window of messages"
SPECIAL = ("<|bos|>", "<|eos|>", "<|start|>", "<|end|>", "<|eot|>", "<|reserved_0|>")
VOCABULARY = 12_000
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits text before its byte pairs, from its published tokenizer."""
_NOT_READ = {*MODULES, *MORE_MODULES, "antigravity", "this", "idlelib", "test", "turtledemo"}
SYSTEM = (
    "You help people who maintain a large program. The documents below were found for their "
    "question. Read them, answer in a few sentences, and say which document each fact is from. "
    "Where the documents do not have the answer, say so instead of guessing."
)
TASKS = (
    "Which of these would you use to read a file line by line?",
    "What changes if two threads call this at once?",
    "Explain the second document to somebody who knows C.",
    "Which errors can be raised here, and by what?",
    "Find a function that has a better replacement.",
    "What would you test first?",
)


@dataclass(frozen=True, slots=True)
class Marked:
    """A prompt, and the spans that a client with marks would name.

    Attributes:
        tokens: int64 [n].
        spans: (start, stop) of each, ascending. The first one begins where the fixed text ends.
    """

    tokens: Tokens
    spans: list[tuple[int, int]] = field(default_factory=list)


# --- tokenizers ---------------------------------------------------------------------------------


def make_tokenizer(
    split: str, folder: Path, modules: Sequence[str] = (*MODULES, *MORE_MODULES)
) -> Any:
    """Train a tokenizer, or load the one that was trained; see SPLITS.

    Args:
        split: How text is split.
        folder: Where it is, or is put.
        modules: Of Python, whose help it learns from.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if not (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer(models.BPE())
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split == "gpt2")
        if split == "gpt2":
            tokenizer.pre_tokenizer = byte_level
        else:
            words = pre_tokenizers.Split(Regex(_LLAMA3), "isolated")
            tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, byte_level])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY,
            special_tokens=list(SPECIAL),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(map(render, modules), trainer)
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<|bos|>",
            eos_token="<|eos|>",
            additional_special_tokens=list(SPECIAL[2:]),
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def make_model(folder: Path) -> None:
    """Write a Llama of random weights so slim that shares are measured and times mean nothing."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "model.safetensors").is_file():
        return
    torch.manual_seed(2_411)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32_768,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)


# --- documents ----------------------------------------------------------------------------------


@cache
def modules() -> dict[str, str]:
    """Return the documentation of modules that the tokenizers were not trained on, by name."""
    found = {}
    for name in sorted(sys.stdlib_module_names - _NOT_READ):
        if not name.startswith("_"):
            with suppress(ImportError):  # of another platform
                found[name] = render(name)
    return found


def make_documents(tokenizer: Any) -> list[tuple[str, str]]:
    """Cut documents of about DOCUMENT_TOKENS at line ends; return names and texts.

    Raises:
        ValueError: The modules have too little text.
    """
    cut = [
        (f"{name}, part {number}", text)
        for name, whole in modules().items()
        for number, text in enumerate(_cut(whole, tokenizer), start=1)
    ]
    if len(cut) < NUM_DOCUMENTS:
        raise ValueError(f"{NUM_DOCUMENTS} documents are needed, the modules have {len(cut)}")
    return random.Random("documents").sample(cut, NUM_DOCUMENTS)


def _cut(whole: str, tokenizer: Any) -> Iterator[str]:
    lines: list[str] = []
    size = 0
    for line in whole.splitlines(keepends=True):
        length = len(tokenizer.encode(line, add_special_tokens=False))
        if size + length > DOCUMENT_TOKENS and size >= FEWEST_TOKENS:
            yield "".join(lines).strip("\n")
            lines, size = [], 0
        lines.append(line)
        size += length


def make_files(count: int, lines: int) -> dict[str, list[str]]:
    """Return the first lines of source files that the tokenizers were not trained on."""
    found: dict[str, list[str]] = {}
    for name in modules():
        try:
            source = inspect.getsource(importlib.import_module(name)).split("\n")
        except (OSError, TypeError):  # built in
            continue
        if len(source) >= lines:
            found[f"{name}.py"] = source[:lines]
        if len(found) == count:
            break
    return found


# --- prompts ------------------------------------------------------------------------------------


class Chat:
    """A chat template with headers of special tokens; finds where texts stand in it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids = {name: tokenizer.convert_tokens_to_ids(name) for name in SPECIAL}

    def render(self, messages: Sequence[tuple[str, str]], marked: Sequence[str] = ()) -> Marked:
        """Tokenise a conversation up to the answer's header.

        Args:
            messages: Roles and texts.
            marked: Texts that the last message holds one after the other. The first one begins the
                chunks, and what stands between two is one as well.
        """
        ids = [self._ids["<|bos|>"]]
        spans: list[tuple[int, int]] = []
        for number, (role, text) in enumerate(messages, start=1):
            ids += self._header(role)
            encoded = self._tokenizer(
                "\n\n" + text, add_special_tokens=False, return_offsets_mapping=True
            )
            if number == len(messages):
                spans = _spans(encoded["offset_mapping"], "\n\n" + text, marked, len(ids))
            ids += [*encoded["input_ids"], self._ids["<|eot|>"]]
        ids += self._header("assistant")
        return Marked(np.array(ids, np.int64), spans)

    def _header(self, role: str) -> list[int]:
        name = self._tokenizer.encode(role, add_special_tokens=False)
        return [self._ids["<|start|>"], *name, self._ids["<|end|>"]]


def _spans(
    offsets: Sequence[tuple[int, int]], text: str, marked: Sequence[str], base: int
) -> list[tuple[int, int]]:
    """Return the spans of texts in a message whose tokens begin at base."""
    starts = np.array([start for start, _ in offsets])
    stops = np.array([stop for _, stop in offsets])
    spans = []
    at = 0
    for piece in marked:
        at = text.index(piece, at)
        first = int(np.searchsorted(starts, at))
        last = int(np.searchsorted(stops, at + len(piece), side="right"))
        if first < last:  # a seam may belong to the tokens around it
            spans.append((base + first, base + last))
        at += len(piece)
    return spans


def glue(rendering: str, documents: Sequence[tuple[str, str]]) -> list[str]:
    """Return the pieces of a text with documents: what stands before each, the document, the end."""
    pieces: list[str] = []
    for number, (name, text) in enumerate(documents, start=1):
        match rendering:
            case "blank lines":
                pieces += ["" if number == 1 else "\n\n", text]
            case "numbered":
                begin = "" if number == 1 else "\n\n"
                pieces += [f"{begin}Document [{number}](Title: {name}) ", text]
            case "xml":
                begin = "<documents>\n" if number == 1 else "\n</document>\n"
                pieces += [f'{begin}<document index="{number}">\n<source>{name}</source>\n', text]
            case "dashes":
                begin = "-" * 20 + "\n" if number == 1 else "\n\n"
                pieces += [f"{begin}file_path: {name}\n\n", text]
            case _:
                raise ValueError(f"no rendering {rendering!r}")
    ends = {"xml": "\n</document>\n</documents>", "dashes": "\n" + "-" * 20 + "\n"}
    return [*pieces, ends.get(rendering, "")]


def rag(
    chat: Chat, documents: Sequence[tuple[str, str]], rendering: str, count: int
) -> list[Marked]:
    """Draw prompts of six documents each by Zipf's law, in random order, with a new question."""
    draw = random.Random(f"rag/{rendering}")
    order = draw.sample(range(len(documents)), len(documents))
    weights = [1 / (rank + 1) ** ZIPF for rank in range(len(documents))]
    prompts = []
    for number in range(count):
        chosen: list[int] = []
        while len(chosen) < PER_PROMPT:
            (rank,) = draw.choices(range(len(order)), weights)
            if order[rank] not in chosen:
                chosen.append(order[rank])
        draw.shuffle(chosen)
        question = f"Request {number}: {draw.choice(TASKS)}"
        prompts.append(_ask(chat, rendering, [documents[one] for one in chosen], question))
    return prompts


def unique(chat: Chat) -> list[Marked]:
    """Make prompts of source text, no line of which comes twice."""
    draw = random.Random("unique")
    known: set[str] = set()
    texts = []
    for name, lines in make_files(count=90, lines=120).items():
        new = [line for line in lines if line.strip() and line not in known]
        known.update(new)
        texts.append((name, "\n".join(new)))
    draw.shuffle(texts)
    groups = [texts[at : at + 2] for at in range(0, len(texts) - 1, 2)]
    return [_ask(chat, "blank lines", group, draw.choice(TASKS)) for group in groups]


def _ask(chat: Chat, rendering: str, documents: Sequence[tuple[str, str]], question: str) -> Marked:
    pieces = glue(rendering, documents)
    text = "".join(pieces) + "\n\n" + question
    marked = [piece for piece in pieces if piece]
    return chat.render([("system", SYSTEM), ("user", text)], marked)


def coding_agent(chat: Chat, conversations: int = 24, turns: int = 6) -> list[Marked]:
    """An agent reads files, edits some, and reads them again; the history grows within a task."""
    draw = random.Random("coding agent")
    files = make_files(count=16, lines=150)
    system = SYSTEM + "\nTools: read(path), edit(path, old, new), run(command)."
    prompts = []
    for conversation in range(conversations):
        messages = [("system", system), ("user", f"Task {conversation}: {draw.choice(TASKS)}")]
        mine = draw.sample(sorted(files), 2)
        for turn in range(turns):
            name = draw.choice(mine)
            messages.append(("assistant", f"Step {conversation}.{turn}: I read {name}."))
            shown = "\n".join(files[name])
            messages.append(("tool", f'<file path="{name}">\n{shown}\n</file>'))
            prompts.append(chat.render(messages))
            if draw.random() < 0.5:
                line = draw.randrange(15, len(files[name]) - 15)
                new = f"    limit_{conversation}_{turn} = {draw.randrange(10**6)}"
                files[name][line : line + draw.randrange(2)] = [new]
                messages.append(("assistant", f"I put {new.strip()} into line {line} of {name}."))
                messages.append(("tool", "done"))
    return prompts


def sliding_window(
    chat: Chat, documents: Sequence[tuple[str, str]], conversations: int = 20, turns: int = 8
) -> list[Marked]:
    """An agent that keeps its last six messages; documents of a topic come back."""
    draw = random.Random("sliding window")
    prompts = []
    for conversation in range(conversations):
        topic = draw.sample(list(documents), 12)
        history: list[tuple[str, str]] = []
        for turn in range(turns):
            found = draw.sample(topic, 3)
            history.append(("user", f"{draw.choice(TASKS)} ({conversation}.{turn})"))
            history.append(("tool", "".join(glue("xml", found))))
            prompts.append(chat.render([("system", SYSTEM), *history[-6:]]))
            said = " ".join(draw.choice(TASKS) for _ in range(4))
            history.append(("assistant", f"{said} {draw.randrange(10**6)}"))
    return prompts


# --- all ----------------------------------------------------------------------------------------


def streams(
    chat: Chat, documents: Sequence[tuple[str, str]]
) -> dict[str, Callable[[], list[Marked]]]:
    """Return the streams that are not of documents by Zipf's law."""
    return {
        "agent that edits files": lambda: coding_agent(chat),
        WINDOW: lambda: sliding_window(chat, documents),
        "never repeated": lambda: unique(chat),
    }
