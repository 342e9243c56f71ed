"""Hostile requests, by class; test_attack.py sends them.

Each function draws one request of its class. What stock SGLang itself dies of is sent only together
with blend parameters, where the gate has to refuse it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

SEP = "<|reserved_0|>"
SEP_ID = 3
BIG = (2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**30)
JSON_HEADERS = {"Content-Type": "application/json"}
REFUSED = frozenset({400})
ABORTED = 499
"""Status of a request that was aborted before its answer."""
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        -1,
        0.5,
        "",
        "x",
        "0.5",
        [],
        {},
        [[]],
        [{}],
        {"a": []},
        {"a": {"b": 1}},
    ),
    *(10**400, -(2**63), 1e308, [None], ["\x00"], [0.5, 1], {"": ""}, "é" * 999, [1] * 5000),
)


@dataclass(frozen=True)
class Attack:
    """One request.

    Attributes:
        path: Where it is sent.
        body: What is sent as JSON; bytes are sent as they are.
        expected: Statuses it may get; None for whatever stock could answer.
        patience_s: The client hangs up after so many seconds.
        headers: Of the request.
    """

    path: str
    body: Any
    expected: frozenset[int] | None = None
    patience_s: float | None = None
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON_HEADERS))
    method: str = "POST"

    def content(self) -> bytes:
        """Return what is sent."""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def tokens(draw: Random, count: int) -> list[int]:
    return draw.choices(range(10, 380), k=count)


def sampling(draw: Random, **params: Any) -> dict[str, Any]:
    # SGLang's penalties look at every request of a batch, also at the server's own.
    penalties = {"min_new_tokens": 1, "frequency_penalty": 0.2} if draw.random() < 0.2 else {}
    return {"temperature": 0, "max_new_tokens": draw.choice((1, 2, 5)), **penalties, **params}


def blended(draw: Random, num_chunks: int = 3, length: int = 60, **more: Any) -> dict[str, Any]:
    """Return a well-formed request with chunks out of a few, so that some are stored."""
    ids, spans = [1, *range(20, 60)], []
    for _ in range(num_chunks):
        spans += [len(ids), len(ids) + length]
        ids += tokens(Random(f"chunk {draw.randrange(5)} {length}"), length)
    params = {"sgl_blend_spans": spans, **more.pop("params", {})}
    body = {"input_ids": ids + tokens(draw, 9)}
    return {**body, "sampling_params": sampling(draw, custom_params=params, **more)}


def custom_params(draw: Random) -> Attack:
    name = draw.choice(
        (
            "sgl_blend",
            "sgl_blend_ratio",
            "sgl_blend_policy",
            "sgl_blend_spans",
            "sgl_blend_x",
            "own",
        )
    )
    body: dict[str, Any] = {"text": "x" * 200, "sampling_params": sampling(draw)}
    value = draw.choice(ODD)
    whole = draw.random() < 0.2
    body["sampling_params"]["custom_params"] = value if whole else {name: value}
    return Attack("/generate", body, frozenset({200, 400}))


def spans(draw: Random) -> Attack:
    length = draw.randrange(40, 300)
    a, b = sorted(draw.sample(range(length), 2))
    wrong: list[list[Any]] = [
        *([a, b, a, b], [a, b + length], [b, a], [a, a], [-b, a], [a, b, b - 1, length], [a]),
        *([a, draw.choice(BIG)], [draw.choice(BIG), b], [[a, b]], [float(a), b], [a, None]),
        *([str(a), b], [a, b, length, length + 1], list(range(draw.choice((601, 10**5))))),
        *([True, b + 1], [a, b, 0, 1], [0, length, length, length], [{"start": a}, b]),
    ]
    body = blended(draw)
    body["input_ids"] = tokens(draw, length)
    body["sampling_params"]["custom_params"]["sgl_blend_spans"] = draw.choice(wrong)
    return Attack("/generate", body, REFUSED)


def separators(draw: Random) -> Attack:
    text = "".join(chr(draw.randrange(97, 123)) for _ in range(draw.randrange(80)))
    forms = (
        *(SEP, SEP * 2, SEP * draw.randrange(3, 3000), f"{SEP}{text}", f"{text}{SEP}", text),
        *(f"{SEP}{text}{SEP}", f"{text}{SEP}{SEP}{text}", f"{SEP} {SEP}\n{SEP}{text}{SEP}"),
        *(SEP.join(text), f"<s>{SEP}<s>{text}{SEP}</s>", f"{SEP[:-1]}{text}{SEP[1:]}", ""),
        *(f"{text}{SEP}{text * 20}{SEP}{text}", f"<|user|>{SEP}{text}<|bot|>{SEP}<pad>"),
    )
    form = draw.choice(forms)
    if draw.random() < 0.3:
        message = {"role": draw.choice(("user", "system", "assistant")), "content": form}
        return Attack(
            "/v1/chat/completions", {"messages": [message], "max_tokens": 1, "model": "x"}
        )
    return Attack("/generate", {"text": form, "sampling_params": sampling(draw)})


def tiny_chunks(draw: Random) -> Attack:
    count, length = draw.choice(((3000, 1), (1500, 2), (400, 15), (250, 16), (100, 33)))
    if draw.random() < 0.3:
        text = SEP.join("ab"[: length % 3] for _ in range(count))
        return Attack(
            "/generate", {"text": f"a{SEP}{text}{SEP}b", "sampling_params": sampling(draw)}
        )
    ids, at = [1, *tokens(draw, count * length)], range(1, 1 + count * length, length)
    offsets = [place for start in at for place in (start, start + length)]
    params = {"sgl_blend_spans": offsets, "sgl_blend_ratio": draw.random()}
    body = {"input_ids": ids, "sampling_params": sampling(draw, custom_params=params)}
    return Attack("/generate", body, frozenset({200}))


def huge_chunk(draw: Random) -> Attack:
    length = draw.choice((1500, 3000, 8100, 9000, 30_000))
    ids = [1, *tokens(draw, length + 40)]
    params = {"sgl_blend_spans": [20, 20 + length], "sgl_blend_ratio": draw.choice((0, 0.5, 1))}
    body = {"input_ids": ids, "sampling_params": sampling(draw, custom_params=params)}
    return Attack("/generate", body, patience_s=draw.choice((None, None, 0.05, 0.4)))


def namespaces(draw: Random) -> Attack:
    odd = ("", " ", "a" * 100_000, "\x00", "é\u202e", "sgl-blend", None, "/", "0" * 64)
    wrong = ("sgl-blend:", "sgl-blend:c:0123:", 5, ["a"], {"a": 1}, True)
    body = blended(draw)
    for name in draw.sample(("cache_salt", "extra_key", "priority", "session_params", "rid"), 2):
        body[name] = draw.choice(odd + wrong) if draw.random() < 0.8 else draw.choice(BIG)
    if draw.random() < 0.2:
        body["session_params"] = {"id": "nobody", "rid": "nobody", "offset": -1, "replace": True}
    return Attack("/generate", body)


def sampled(draw: Random) -> Attack:
    name, value = draw.choice(
        (
            *(("n", 3), ("n", 0), ("n", -1), ("n", 40), ("regex", "(yes|no)"), ("regex", "(")),
            *(
                ("json_schema", '{"type": "object"}'),
                ("json_schema", "{"),
                ("ebnf", 'root ::= "a"'),
            ),
            *(("stop", [""]), ("stop", ["a"] * 999), ("stop_token_ids", [-1]), ("top_p", 7)),
            *(("min_new_tokens", 9), ("max_new_tokens", 0), ("max_new_tokens", -1)),
            *(("temperature", -1), ("top_k", 0), ("frequency_penalty", 9), ("ignore_eos", "x")),
            *(("max_new_tokens", 10**9), ("repetition_penalty", 0), ("stop_regex", "(")),
            *(("temperature", 1e-9), ("min_p", 2), ("skip_special_tokens", False), ("unknown", 1)),
        )
    )
    body = blended(draw)
    body["sampling_params"][name] = value
    return Attack("/generate", body)


def logprobs(draw: Random) -> Attack:
    body = blended(draw, params={"sgl_blend_ratio": draw.choice((0, 0.3, 1))})
    body["return_logprob"] = True
    name, value = draw.choice(
        (
            *(("logprob_start_len", value) for value in (-5, -1, 0, 1, 50, 229, 10**6, 2**40, "x")),
            *(("top_logprobs_num", value) for value in (-1, 0, 5, 384, 385, 10**6, [1], None)),
            *(("token_ids_logprob", value) for value in ([1], [-1], [400], [10**9], [[1, 2]], [])),
            ("return_text_in_logprobs", True),
            ("return_hidden_states", True),
        )
    )
    body[name] = value
    if draw.random() < 0.5:
        body["logprob_start_len"] = body.get("logprob_start_len", draw.choice((0, 60, 100)))
    return Attack("/generate", body)


def token_ids(draw: Random) -> Attack:
    body = blended(draw)
    place = draw.randrange(len(body["input_ids"]))
    body["input_ids"][place] = draw.choice((-1, -5, 384, 385, 10**6, *BIG))
    return Attack("/generate", body, REFUSED)


def endpoints(draw: Random) -> Attack:
    text = f"Sys{SEP}{'alpha ' * 20}{SEP}{'beta ' * 20}{SEP}Say."
    params = draw.choice(({}, {"sgl_blend_ratio": 0.5}, {"sgl_blend_ratio": 7}, {"sgl_blend": 1}))
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
    path, body = draw.choice(
        (
            ("/v1/completions", {"prompt": text, "max_tokens": 2, "echo": True, "logprobs": 2}),
            ("/v1/completions", {"prompt": [text, text], "max_tokens": 1, "n": 2}),
            ("/v1/completions", {"prompt": [[1, 20, SEP_ID, 30, 31, SEP_ID]], "suffix": "x"}),
            ("/v1/completions", {"prompt": text, "max_tokens": 0, "echo": True, "stream": True}),
            ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 5, "n": 2}),
            ("/v1/chat/completions", {**chat, "stream": True, "response_format": {"type": "x"}}),
            ("/v1/chat/completions", {**chat, "tools": [{"type": "function"}]}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}),
            ("/v1/responses", {"input": text, "max_output_tokens": 2}),
            ("/v1/messages", chat),
            ("/v1/messages/count_tokens", chat),
            ("/v1/score", {"query": text, "items": [text], "label_token_ids": [20, 30]}),
            ("/v1/embeddings", {"input": text}),
            ("/v1/tokenize", {"prompt": text}),
            ("/classify", {"text": text}),
            ("/api/generate", {"prompt": text, "model": "x", "options": {"num_predict": 1}}),
            ("/invocations", chat),
            ("/generate", {"prompt": text}),
        )
    )
    return Attack(path, {"model": "x", **body, "custom_params": params})


def batches(draw: Random) -> Attack:
    text = f"Sys{SEP}{'alpha ' * 20}{SEP}{'beta ' * 20}{SEP}Say."
    count = draw.choice((1, 2, 5))
    params: Any = sampling(draw, n=draw.choice((1, 1, 2)))
    ratios = [sampling(draw, custom_params={"sgl_blend_ratio": 0.2 * i}) for i in range(count)]
    body: dict[str, Any] = draw.choice(
        (
            {"text": [text] * count, "sampling_params": params},
            {"text": [text] * count, "sampling_params": ratios},
            {"text": [text] * count, "sampling_params": ratios[1:]},
            {"text": [text] * count, "cache_salt": ["a", "b"], "sampling_params": params},
            {"text": [text] * count, "extra_key": ["sgl-blend:"] * count},
            {"input_ids": [blended(draw)["input_ids"]] * count, "sampling_params": params},
            {"input_ids": [[1, SEP_ID, 20, SEP_ID], []], "sampling_params": params},
            {"text": [], "sampling_params": []},
            {"text": [text, None, 5], "sampling_params": params},
            {"text": text, "input_ids": [1, 2]},
            {"text": [text] * 2, "rid": ["same", "same"], "sampling_params": params},
            {"text": [text] * count, "sampling_params": {**params, "custom_params": [{}] * count}},
        )
    )
    return Attack("/generate", body)


def wire(draw: Random) -> Attack:
    good = json.dumps(blended(draw))
    head = '{"text": "x", "sampling_params": {"max_new_tokens": 1, "custom_params": '
    depth = draw.choice((90, 5000, 200_000))
    content = draw.choice(
        (
            *("", "null", "[]", "5", good[:-9], good + "}", "\x00" * 99, "{" * 9999),
            *(head + '{"sgl_blend_ratio": NaN}}}', head + '{"sgl_blend_ratio": Infinity}}}'),
            *(head + '{"a": -Infinity}}}', head + '{"\\ud800": 1}}}', head + '{"a": "\\udfff"}}}'),
            *(head + '{"sgl_blend_ratio": 1e999}}}', head + "[" * depth + "]" * depth + "}}"),
            *('{"text": "\\ud800 lone", "sampling_params": {}}', '{"a": 1, "a": 2}'),
            head + '{"sgl_blend_spans": [' + "0," * 300_000 + "1]}}}",
            '{"text": "' + "x" * 10_000_000 + '"}',
            '{"text": "' + f"{SEP}y" * 30_000 + '"}',
        )
    )
    kinds = ("application/json",) * 3 + (
        "text/plain",
        "application/x-www-form-urlencoded",
        "",
        "x/",
    )
    headers = {"Content-Type": draw.choice(kinds)}
    if draw.random() < 0.1:
        headers["Content-Encoding"] = "gzip"
    path = draw.choice(("/generate", "/generate", "/v1/completions", "/v1/chat/completions"))
    return Attack(path, content.encode(), headers=headers)


def hang_ups(draw: Random) -> Attack:
    body = blended(draw, draw.choice((3, 12)), draw.choice((60, 250)), max_new_tokens=300)
    body["sampling_params"]["ignore_eos"] = True
    body["stream"] = draw.random() < 0.7
    return Attack("/generate", body, patience_s=draw.choice((0.001, 0.01, 0.05, 0.2, 0.6)))


def floods(draw: Random) -> Attack:
    kinds = (custom_params, spans, separators, tiny_chunks, sampled, batches, hang_ups, endpoints)
    return draw.choice(kinds)(draw)


def operators(draw: Random) -> Attack:
    if draw.random() < 0.6:
        attack = draw.choice((hang_ups, floods))(draw)
        if attack.expected is None:
            return attack
        # One that is sent at the same time may abort all requests.
        return replace(attack, expected=attack.expected | {ABORTED})
    path, body = draw.choice(
        (
            *(
                ("/flush_cache", None),
                ("/flush_cache?timeout=1", None),
                ("/flush_cache?timeout=x", {}),
            ),
            *(("/abort_request", {"rid": "", "abort_all": True}), ("/abort_request", {"rid": "x"})),
            *(("/abort_request", {"rid": "sgl-blend-build"}), ("/continue_generation", {})),
            *(("/server_info", None), ("/get_load", None), ("/health_generate", None)),
            *(("/update_weights_from_disk", {"model_path": "/nowhere"}), ("/freeze_gc", {})),
            *(("/pause_generation", {"mode": "x"}), ("/open_session", {"capacity_of_str_len": 9})),
            *(
                ("/close_session", {"session_id": "x"}),
                ("/set_internal_state", {"server_args": {}}),
            ),
            *(("/release_memory_occupation", {"tags": 5}), ("/update_weights_from_tensor", {})),
        )
    )
    return Attack(path, body, method="GET" if body is None else "POST")


CLASSES: dict[str, Callable[[Random], Attack]] = {
    attack.__name__: attack
    for attack in (
        *(custom_params, spans, separators, tiny_chunks, huge_chunk, namespaces, sampled, logprobs),
        *(token_ids, endpoints, batches, wire, hang_ups, floods, operators),
    )
}
AT_ONCE = {"hang_ups": 6, "floods": 12, "operators": 6}
"""Classes whose requests are sent at the same time, and how many."""
