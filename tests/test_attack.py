"""Hostile requests of many classes: the server lives, and answers afterwards as it did before."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import pytest
from attacks import AT_ONCE, CLASSES, Attack
from attacks_unmarked import ALL, MOST_AT_ONCE, document
from live_server import BLEND, MAX_LOGPROB_ERROR, LiveServer, Servers, new_tokens
from tiny_models import make_text_model

pytestmark = pytest.mark.engine

SHORT_FORM, LONG_FORM = 3, 24
"""Requests of each class; the long form sends 360."""
STEPS = ("--chunked-prefill-size", "512")
LEARN = (*BLEND, "--blend-find", "learned", "--blend-learn-share", "1")
TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    model = make_text_model("llama", tmp_path_factory.mktemp("model"))
    started = Servers(model, tmp_path_factory.mktemp("servers"))
    yield started
    started.close()


def send(server: LiveServer, attack: Attack) -> tuple[int, str] | None:
    """Send one; return status and text, or None if its client hung up.

    Raises:
        AssertionError: The server broke the connection.
    """
    patience_s = TIMEOUT_S if attack.patience_s is None else attack.patience_s
    try:
        response = server.http.request(
            attack.method,
            attack.path,
            content=None if attack.body is None else attack.content(),
            # After a status 500 uvicorn closes the connection without a word: it must not be reused.
            headers={**attack.headers, "Connection": "close"},
            timeout=httpx.Timeout(TIMEOUT_S, read=patience_s),
        )
    except httpx.ReadTimeout:
        assert attack.patience_s is not None, f"no answer in {TIMEOUT_S:.0f} s: {describe(attack)}"
        return None
    except httpx.TransportError as err:
        raise AssertionError(
            f"{type(err).__name__} after {describe(attack)}:\n{server.last_words()}"
        ) from None
    return response.status_code, response.text


def describe(attack: Attack) -> str:
    body = attack.content()
    return f"{attack.method} {attack.path} {body[:300]!r} of {len(body)} bytes {attack.headers}"


def check_status(servers: Servers, attack: Attack, found: tuple[int, str] | None) -> None:
    """Check that a status is one that it may be; a fault of the server's only if stock has it too."""
    if found is None:
        return
    status, text = found
    if attack.expected is not None:
        assert status in attack.expected, f"{status} {text[:300]} for {describe(attack)}"
    elif status >= httpx.codes.INTERNAL_SERVER_ERROR:
        try:
            at_stock = send(servers.get(*STEPS), attack)
        except AssertionError:
            return  # stock dies of it
        assert at_stock is None or at_stock[0] >= httpx.codes.INTERNAL_SERVER_ERROR, (
            f"{status} {text[:300]} where stock says {at_stock} for {describe(attack)}"
        )


def attack(
    servers: Servers,
    flags: Sequence[str],
    attacks: Sequence[Attack],
    at_once: int,
    check: Callable[[LiveServer], None] = LiveServer.check_unharmed,
) -> None:
    """Send all, some at the same time, and check that the server is as it was."""
    with servers.use(*flags, *STEPS) as server:
        with ThreadPoolExecutor(at_once) as pool:
            found = list(pool.map(lambda attack: send(server, attack), attacks))

        check(server)
    for one, answer in zip(attacks, found, strict=True):
        check_status(servers, one, answer)


def drawn(
    kind: Callable[[Random], Attack], name: str, num_requests: int, at_once: int
) -> list[Attack]:
    return [kind(Random(f"{name} {i}")) for i in range(num_requests * max(1, at_once // 3))]


OFTEN = ("repeats", "finds", "everything")
"""Classes whose short form is not slow, of those that a server is sent that learns."""
LENGTHS = pytest.mark.parametrize(
    "num_requests",
    [
        pytest.param(SHORT_FORM, id="short"),
        pytest.param(LONG_FORM, id="long", marks=pytest.mark.slow),
    ],
)


@LENGTHS
@pytest.mark.parametrize("name", CLASSES)
def test_the_server_survives(servers: Servers, name: str, num_requests: int) -> None:
    at_once = AT_ONCE.get(name, 1)
    attack(servers, BLEND, drawn(CLASSES[name], name, num_requests, at_once), at_once)


OTHERS = {
    "drafts": (
        "llama",
        ("--speculative-algorithm", "NGRAM", "--speculative-ngram-capacity", "10000"),
    ),
    "experts": ("qwen3-moe", ()),
    "KV in 8 bit": ("llama", ("--kv-cache-dtype", "fp8_e4m3")),
    "Block-Attention": ("llama", ("--blend-preset", "block")),
    "images": ("mistral3", ()),
}
"""Servers beside the usual one: kind of model, and further flags."""


@pytest.fixture(scope="module", params=OTHERS)
def other(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Servers, tuple[str, ...]]]:
    kind, flags = OTHERS[request.param]
    model = make_text_model(kind, tmp_path_factory.mktemp("model"))
    started = Servers(model, tmp_path_factory.mktemp("servers"))
    yield started, flags
    started.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_other_servers_survive(other: tuple[Servers, tuple[str, ...]], name: str) -> None:
    servers, flags = other
    at_once = AT_ONCE.get(name, 1)
    requests = drawn(CLASSES[name], name, SHORT_FORM, at_once)
    attack(servers, (*BLEND, *flags), requests, at_once)


def check_what_is_found(server: LiveServer) -> None:
    """Check the server, that it finds, that another tenant finds nothing, and that ratio 1 is exact."""
    server.check_unharmed()
    known = [token for number in (0, 1, 2, 0) for token in document(number)]
    for beginning in (7, 60, 61, 62):  # by then the documents are built, whatever was flushed
        ids = [1, *new_tokens(beginning), *known, *new_tokens(20)]
        found = answered(server, ids, ratio=1.0)
        server.wait_until_at_rest()
    assert found["sgl_blend"][0]["found_tokens"] > 0.5 * len(known)
    full = answered(server, ids, extra_key=f"nobody but {ids[1:9]}")  # SGLang 0.5.17 knows no salts
    assert full["sgl_blend"][0]["computed_tokens"] == full["prompt_tokens"]
    pairs = zip(logprobs_of(found), logprobs_of(full), strict=True)
    assert max(abs(ours - theirs) for ours, theirs in pairs) < MAX_LOGPROB_ERROR


def answered(server: LiveServer, ids: list[int], **way: Any) -> dict[str, Any]:
    """Return what the server tells of its answer, log-probabilities included."""
    told: dict[str, Any] = server.generate(ids, max_new_tokens=4, return_logprob=True, **way)
    meta_info: dict[str, Any] = told["meta_info"]
    return meta_info


def logprobs_of(told: dict[str, Any]) -> list[float]:
    return [entry[0] for entry in told["output_token_logprobs"]]


@LENGTHS
@pytest.mark.parametrize(
    "name",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in ALL],
)
def test_a_server_that_learns_survives(servers: Servers, name: str, num_requests: int) -> None:
    at_once = MOST_AT_ONCE.get(name, 1)
    attacks = drawn(ALL[name], name, num_requests, at_once)
    attack(servers, LEARN, attacks, at_once, check_what_is_found)
