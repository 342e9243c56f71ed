"""Hostile requests of many classes: the server lives, and answers afterwards as it did before."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

import httpx
import pytest
from attacks import AT_ONCE, CLASSES, Attack
from live_server import BLEND, LiveServer, Servers
from tiny_models import make_text_model

pytestmark = pytest.mark.engine

SHORT_FORM, LONG_FORM = 3, 24
"""Requests of each class; the long form sends 360."""
STEPS = ("--chunked-prefill-size", "512")
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


@pytest.mark.parametrize(
    "num_requests",
    [
        pytest.param(SHORT_FORM, id="short"),
        pytest.param(LONG_FORM, id="long", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", CLASSES)
def test_the_server_survives(servers: Servers, name: str, num_requests: int) -> None:
    at_once = AT_ONCE.get(name, 1)
    attacks = [
        CLASSES[name](Random(f"{name} {i}")) for i in range(num_requests * max(1, at_once // 3))
    ]
    with servers.use(*BLEND, *STEPS) as server:
        with ThreadPoolExecutor(at_once) as pool:
            found = list(pool.map(lambda attack: send(server, attack), attacks))

        server.check_unharmed()
    for attack, answer in zip(attacks, found, strict=True):
        check_status(servers, attack, answer)
