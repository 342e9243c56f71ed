"""Hostile requests without a mark, for a server that learns; test_attack.py sends them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from attacks import ABORTED, AT_ONCE, CLASSES, ODD, REFUSED, Attack, sampling, tokens

TENANTS = (None, "", "a", "b", "a" * 5000)
DOCUMENT_TOKENS = (64, 90, 200, 500)
NUM_DOCUMENTS = 6


def document(number: int) -> list[int]:
    """Return one of the documents that come again and again: token ids."""
    draw = Random(f"document {number}")
    return tokens(draw, draw.choice(DOCUMENT_TOKENS))


def request(
    draw: Random, parts: Sequence[list[int]], *, tenant: str | None = None, **params: Any
) -> dict[str, Any]:
    """Return a request of a new beginning and some parts, in token ids."""
    ids = [1, *tokens(draw, draw.choice((0, 5, 40)))]
    for part in parts:
        ids += part
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling(draw)}
    if params:
        body["sampling_params"]["custom_params"] = params
    return body if tenant is None else {**body, "cache_salt": tenant}


def some_documents(draw: Random) -> list[list[int]]:
    return [document(draw.randrange(NUM_DOCUMENTS)) for _ in range(draw.randrange(1, 6))]


def repeats(draw: Random) -> Attack:
    """Documents in every order, whole, cut at both ends, or one inside another."""
    parts = some_documents(draw)
    for number, part in enumerate(parts):
        begin, end = draw.choice(((0, None), (1, None), (0, -1), (draw.randrange(40), None)))
        parts[number] = part[begin:end]
        if draw.random() < 0.2:
            parts[number] = [*part[:30], *document(draw.randrange(NUM_DOCUMENTS)), *part[30:]]
    ratio = draw.choice((0.0, 0.15, 1.0))
    return Attack("/generate", request(draw, parts, sgl_blend_ratio=ratio), frozenset({200}))


def tenants(draw: Random) -> Attack:
    body = request(draw, some_documents(draw), tenant=draw.choice(TENANTS))
    if draw.random() < 0.3:
        body["extra_key"] = draw.choice(("", "a", "b", "sgl-blend:c:0123:"))
    return Attack("/generate", body)


def periods(draw: Random) -> Attack:
    """Text that looks like itself at every offset."""
    period = tokens(draw, draw.choice((1, 2, 15, 16, 17, 64)))
    length = draw.choice((300, 2000, 8000))
    body = request(draw, [(period * (length // len(period) + 1))[:length]])
    return Attack("/generate", body, frozenset({200}))


def many_parts(draw: Random) -> Attack:
    """Hundreds of short parts that all come again, far more than are looked up."""
    parts = [tokens(Random(f"part {draw.randrange(40)}"), 20) for _ in range(350)]
    return Attack("/generate", request(draw, parts), frozenset({200}))


def finds(draw: Random) -> Attack:
    """Odd values of the request's own switch."""
    value = draw.choice((*ODD, "known", "marks", "learned", "Learned", "all"))
    body = request(draw, some_documents(draw), sgl_blend_find=value)
    return Attack("/generate", body, frozenset({200, *REFUSED}))


def marks_beside(draw: Random) -> Attack:
    """Marks that cut through what would be found."""
    parts = some_documents(draw)
    body = request(draw, parts)
    at = sorted(draw.sample(range(len(body["input_ids"])), 2))
    body["sampling_params"]["custom_params"] = {"sgl_blend_spans": at}
    return Attack("/generate", body, frozenset({200}))


def answers(draw: Random) -> Attack:
    """Log-probabilities from within what is found, samples, batches, one token of answer or none."""
    body = request(draw, some_documents(draw))
    middle = len(body["input_ids"]) // 2
    more: dict[str, Any] = draw.choice(
        (
            {"return_logprob": True, "logprob_start_len": draw.choice((0, 1, middle))},
            {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": middle},
            {
                "input_ids": [body["input_ids"]] * 3,
                "sampling_params": [body["sampling_params"]] * 3,
            },
            {"sampling_params": {**body["sampling_params"], "n": 3}},
            {
                "sampling_params": {
                    **body["sampling_params"],
                    "max_new_tokens": 0,
                    "min_new_tokens": 0,  # SGLang refuses more
                }
            },
            {"stream": True},
        )
    )
    return Attack("/generate", {**body, **more}, frozenset({200}))


def hang_ups(draw: Random) -> Attack:
    body = request(draw, [*some_documents(draw), tokens(draw, draw.choice((20, 3000)))])
    body["sampling_params"] |= {"max_new_tokens": 300, "ignore_eos": True}
    body["stream"] = draw.random() < 0.5
    return Attack("/generate", body, patience_s=draw.choice((0.001, 0.02, 0.1, 0.4)))


def texts(draw: Random) -> Attack:
    """The same through chat, as agents send it: a history that grows, with a tool's answer in it."""
    paper = "".join(chr(draw.randrange(32, 0x17F)) for _ in range(draw.choice((0, 70, 400))))
    known = Random(f"paper {draw.randrange(4)}")
    paper += "".join(chr(known.randrange(97, 123)) for _ in range(300))
    messages = [
        {"role": "system", "content": f"It is {draw.randrange(10**9)}."},
        {"role": "user", "content": draw.choice((paper, [{"type": "text", "text": paper}]))},
        {"role": "assistant", "content": draw.choice(("", None, "Yes.")), "tool_calls": []},
        {"role": "tool", "content": paper, "tool_call_id": "0"},
    ]
    cut = draw.randrange(1, 5)
    body = {"model": "x", "messages": messages[:cut], "max_tokens": 2}
    return Attack("/v1/chat/completions", body)


def everything(draw: Random) -> Attack:
    kinds = (repeats, tenants, finds, marks_beside, answers, hang_ups, texts, CLASSES["operators"])
    attack = draw.choice(kinds)(draw)
    if attack.expected is None:
        return attack
    return replace(attack, expected=attack.expected | {ABORTED})  # an operator may abort all


UNMARKED: dict[str, Callable[[Random], Attack]] = {
    attack.__name__: attack
    for attack in (
        *(repeats, tenants, periods, many_parts, finds, marks_beside, answers, hang_ups, texts),
        everything,
    )
}
MARKED = ("separators", "huge_chunk", "namespaces", "sampled", "logprobs", "batches", "floods")
"""Classes of attacks.py that may do something else to a server that learns."""
ALL = {**UNMARKED, **{f"marked_{name}": CLASSES[name] for name in MARKED}}
MOST_AT_ONCE = {"hang_ups": 6, "everything": 8, "marked_floods": AT_ONCE["floods"]}
