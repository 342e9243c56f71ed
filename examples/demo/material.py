"""What the demo runs on: real documents, a tokenizer trained on them, a Llama of random weights.

Everything is derived from the running Python and fixed seeds, made once and reused as long as the
recipe stays the same. Nothing is downloaded.
"""

import hashlib
import importlib
import json
import platform
import pydoc
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SEPARATOR = "<|reserved_0|>"
"""Special token between chunks; its name lets the plugin find it by itself."""

MODULES = (
    "argparse", "bisect", "calendar", "configparser", "csv", "datetime", "difflib", "fractions",
    "heapq", "json", "statistics", "textwrap",
)  # fmt: skip
"""One chunk of each is in the prompts; none of them prints the environment or a path."""

MORE_MODULES = (
    "ast", "asyncio", "collections", "decimal", "email.message", "functools", "http.client",
    "inspect", "ipaddress", "logging", "pathlib", "pickle", "random", "smtplib", "socket", "ssl",
    "string", "subprocess", "tarfile", "threading", "typing", "unittest", "urllib.request",
    "xml.dom.minidom", "zipfile",
)  # fmt: skip
"""More text for the tokenizer."""

SYSTEM = (
    "You are a careful assistant for programmers. Below you find excerpts from the documentation "
    "of the Python standard library. Read all of them, note which functions and classes they "
    "describe, and answer the question at the end with facts from these excerpts only. If they do "
    "not contain the answer, say that they do not. Name the module that every fact comes from.\n"
)

CHUNK_TOKENS = 360
MIN_CHUNK_TOKENS, MAX_CHUNK_TOKENS = 200, 500
CHUNKS_PER_PROMPT = 10
NUM_PROMPTS = 8
END_OF_QUESTION = "\nAnswer:"


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything the model and tokenizer depend on; a changed recipe makes them anew.

    Attributes:
        initializer_range: Standard deviation of the random weights. With the usual 0.02 attention
            is nearly uniform and the answer hardly depends on it; this large, heads look at
            particular tokens, so wrong KV shows in the answer.
        readers_share: Of the documents' tokens, those that look at other text. In trained models
            few tokens depend on what stands before them, too, and which is mostly a property of
            the token (docs/quality.md). With 0 all tokens look wherever the random weights have
            them look.
    """

    seed: int = 2405
    vocab_size: int = 8192
    hidden_size: int = 512
    intermediate_size: int = 2560
    num_hidden_layers: int = 32
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    initializer_range: float = 0.05
    readers_share: float = 0.1
    max_position_embeddings: int = 4096


@dataclass(frozen=True, slots=True)
class Prompt:
    """System prompt, chunks and question; rendered with or without separators."""

    chunks: tuple[str, ...]
    question: str

    def marked(self) -> str:
        """Return the text for the blending server."""
        return SYSTEM + SEPARATOR + SEPARATOR.join(self.chunks) + SEPARATOR + self.question

    def plain(self) -> str:
        """Return the text for the stock server."""
        return SYSTEM + "".join(self.chunks) + self.question


@dataclass(frozen=True, slots=True)
class Material:
    """What the demo sends, and the model it sends it to.

    Attributes:
        model: Directory of model and tokenizer.
        num_parameters: Of the model.
        vocab_size: Of the tokenizer, special tokens included.
        chunk_tokens: Length of every chunk.
        prompt_tokens: Length of every measured prompt, separators not counted.
        warm_up: Prompts that show every chunk to the server once; their times are not used.
        prompts: Measured prompts. No two begin with the same chunk.
    """

    model: Path
    num_parameters: int
    vocab_size: int
    chunk_tokens: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    warm_up: tuple[Prompt, ...]
    prompts: tuple[Prompt, ...]


def prepare(folder: Path, recipe: Recipe, say: Callable[[str], None]) -> Material:
    """Make what is missing under folder and put the prompts together.

    Args:
        folder: Where model and tokenizer are kept.
        recipe: What to make.
        say: Called with a line about what is going on.
    """
    from transformers import PreTrainedTokenizerFast

    say(f"documents of {len(MODULES)} modules")
    documents = [render(name) for name in MODULES]
    corpus = [*documents, *(render(name) for name in MORE_MODULES)]
    model = folder / "model"
    stamp = folder / "stamp.json"
    wanted = {"digest": _digest(recipe, corpus)}
    made = json.loads(stamp.read_text()) if stamp.exists() else {}
    if made.get("digest") != wanted["digest"]:
        stamp.unlink(missing_ok=True)
        shutil.rmtree(model, ignore_errors=True)
        say(f"tokenizer, trained on {sum(map(len, corpus)) / 1e6:.1f} MB of text")
        vocab_size = make_tokenizer(corpus, recipe.vocab_size, model)
        say(f"model of {recipe.num_hidden_layers} layers")
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
        readers = choose_readers(documents, tokenizer, recipe.readers_share)
        made = {**wanted, "num_parameters": make_model(recipe, vocab_size, model, readers)}
        stamp.write_text(json.dumps(made))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model)
    chunks = [next(cut(document, tokenizer)) for document in documents]
    prompts = make_prompts(chunks)
    return Material(
        model=model,
        num_parameters=made["num_parameters"],
        vocab_size=len(tokenizer),
        chunk_tokens=tuple(len(tokens_of(tokenizer, chunk)) for chunk in chunks),
        prompt_tokens=tuple(count_tokens(tokenizer, prompt) for prompt in prompts),
        warm_up=make_warm_up(chunks),
        prompts=prompts,
    )


def _digest(recipe: Recipe, corpus: list[str]) -> str:
    from tokenizers import __version__ as tokenizers_version
    from torch import __version__ as torch_version
    from transformers import __version__ as transformers_version

    versions = [platform.python_version(), tokenizers_version, transformers_version, torch_version]
    return hashlib.sha256(repr((asdict(recipe), versions, corpus)).encode()).hexdigest()


# --- text ---------------------------------------------------------------------------------------


def render(name: str) -> str:
    """Return a module's documentation as pydoc prints it, the same in every run."""
    text = pydoc.plain(pydoc.render_doc(importlib.import_module(name)))
    text = text.split("\nFILE\n")[0]
    return re.sub(r"0x[0-9a-f]+", "0x0", text).rstrip() + "\n"


def cut(document: str, tokenizer: Any) -> Iterator[str]:
    """Cut a document into chunks at line ends, each of about CHUNK_TOKENS tokens."""
    lines: list[str] = []
    size = 0
    for line in document.splitlines(keepends=True):
        length = len(tokens_of(tokenizer, line))
        if size + length > CHUNK_TOKENS and size >= MIN_CHUNK_TOKENS:
            yield "".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += length
    if MIN_CHUNK_TOKENS <= size <= MAX_CHUNK_TOKENS:
        yield "".join(lines)


def make_prompts(chunks: list[str]) -> tuple[Prompt, ...]:
    """Put the measured prompts together: other chunks in another order each time."""
    rng = random.Random(CHUNK_TOKENS)
    prompts = []
    for first in range(NUM_PROMPTS):
        others = [i for i in range(len(chunks)) if i != first]
        order = [first, *rng.sample(others, CHUNKS_PER_PROMPT - 1)]
        question = (
            f"Question {first + 1}: what does the module {MODULES[order[3]]} offer that "
            f"{MODULES[order[1]]} does not, and how would you use it together with "
            f"{MODULES[first]}?{END_OF_QUESTION}"
        )
        prompts.append(Prompt(tuple(chunks[i] for i in order), question))
    return tuple(prompts)


def make_warm_up(chunks: list[str]) -> tuple[Prompt, ...]:
    """Put prompts together that hold every chunk once, then one that finds them all stored.

    They begin with chunks that no measured prompt begins with, so that a radix cache profits from
    them by the system prompt only.
    """
    question = f"Which modules are described above?{END_OF_QUESTION}"
    orders = ((8, 0, 1, 2, 3, 4), (9, 5, 6, 7, 10, 11), (10, 4, 0, 5, 11, 2))
    return tuple(Prompt(tuple(chunks[i] for i in order), question) for order in orders)


def tokens_of(tokenizer: Any, text: str) -> list[int]:
    """Tokenise a piece of a prompt."""
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def count_tokens(tokenizer: Any, prompt: Prompt) -> int:
    """Return a prompt's length, the same with and without separators.

    Raises:
        ValueError: The two renderings are not the same tokens, so they cannot be compared.
    """
    separator = tokenizer.convert_tokens_to_ids(SEPARATOR)
    marked = [token for token in tokenizer.encode(prompt.marked()) if token != separator]
    if marked != tokenizer.encode(prompt.plain()):
        raise ValueError("prompts with and without separators must have the same tokens")
    return len(marked)


# --- tokenizer and model ------------------------------------------------------------------------


def make_tokenizer(
    corpus: list[str], vocab_size: int, folder: Path, *, more: Sequence[str] = (), chat: str = ""
) -> int:
    """Train a byte-level BPE tokenizer and save it for transformers.

    Args:
        corpus: Texts to train on.
        vocab_size: Tokens, special ones included.
        folder: Where to save it.
        more: Special tokens besides the usual three.
        chat: Its chat template, if it has one.

    Returns:
        Its vocabulary size.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|bos|>", "<|eos|>", SEPARATOR, *more]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|bos|>",
        eos_token="<|eos|>",
        additional_special_tokens=special[2:],
        clean_up_tokenization_spaces=False,
    )
    if chat:
        fast.chat_template = chat
    fast.save_pretrained(folder)
    return len(fast)


def choose_readers(documents: Sequence[str], tokenizer: Any, share: float) -> frozenset[int]:
    """Return the token ids that look at other text, a share of all tokens in the documents.

    The first token of every prompt is one, and the last one: its row of logits is the answer.
    None is with a share of 0.
    """
    if not share:
        return frozenset()
    counts = Counter(token for text in documents for token in tokens_of(tokenizer, text))
    readers = {tokenizer.bos_token_id, tokens_of(tokenizer, END_OF_QUESTION)[-1]}
    left = share * counts.total() - sum(counts[token] for token in readers)
    order = sorted(counts)
    random.Random("readers").shuffle(order)
    for token in order:
        if token not in readers and counts[token] <= left:
            readers.add(token)
            left -= counts[token]
    return frozenset(readers)


def make_model(recipe: Recipe, vocab_size: int, folder: Path, readers: Collection[int] = ()) -> int:
    """Save a Llama with random weights and return how many parameters it has.

    Args:
        recipe: Its shape.
        vocab_size: Token ids.
        folder: Where to save it.
        readers: Token ids that look at other text; every other one looks at itself. Without any,
            all tokens look wherever the random weights have them look.

    Raises:
        ValueError: It is smaller or larger than the demo promises.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    shape = asdict(recipe)
    torch.manual_seed(shape.pop("seed"))
    shape["vocab_size"] = vocab_size
    config = LlamaConfig(
        **shape,
        head_dim=recipe.hidden_size // recipe.num_attention_heads,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    if readers:
        with torch.no_grad():
            _let_few_read(model, sorted(readers))
    num_parameters = int(sum(weight.numel() for weight in model.parameters()))
    if recipe == Recipe() and not 80e6 <= num_parameters <= 160e6:
        raise ValueError(f"the model must have 80 to 160 M parameters, got {num_parameters}")
    model.save_pretrained(folder)
    return num_parameters


def _let_few_read(model: Any, readers: list[int]) -> None:
    """Change the random weights of a Llama so that only some tokens look at other text.

    Every other token has a long part of its own in its embedding. Queries and keys read it alike, and
    no layer writes to it. So these tokens look at themselves, and their KV hardly depends on what
    stands before them. Readers have a mark in place of that part, by which they look at each other.
    The factors make attention sharp, and let layers add little to the stream, as in trained models.
    """
    own = model.config.hidden_size // 8
    mark, head_dim = own, model.config.head_dim
    embeddings = model.model.embed_tokens.weight
    embeddings.normal_()
    embeddings[:, :own] *= 12.0
    embeddings[:, mark] = 0.0
    embeddings[readers, :own] = 0.0
    embeddings[readers, mark] = 3.0
    model.lm_head.weight *= 2.0
    for layer in model.model.layers:
        attention = layer.self_attn
        q, k = attention.q_proj.weight, attention.k_proj.weight
        k[:, :own] *= 2.0
        q *= 3.0
        queries, keys = q.unflatten(0, (-1, head_dim)), k.unflatten(0, (-1, head_dim))
        queries[..., :own] = keys[..., :own].repeat_interleave(len(queries) // len(keys), 0)
        for heads in (queries, keys):
            heads[..., mark] = 0.0
            heads[:, head_dim // 2 - 1, mark] = 3.0  # the pair of dimensions that turns slowest
        attention.v_proj.weight *= 3.0
        for writes in (attention.o_proj.weight, layer.mlp.down_proj.weight):
            writes *= 0.15
            writes[: mark + 1] = 0.0
