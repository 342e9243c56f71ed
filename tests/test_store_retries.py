"""A store that was too slow for every chunk is asked again, later each time."""

from collections.abc import Sequence

from sgl_blend.engine.tp_group import TPGroup
from sgl_blend.scheduler.loading_controller import LoadingController
from sgl_blend.tuning.links import LinkSpeed
from sgl_blend.tuning.load_choice import Ratios
from sgl_blend.tuning.loading import Chunk, ModelTimes, Place

TOKEN_BYTES = 64 * 1024
TOKENS, NUM_CHUNKS = 512, 6
FAST, SLOW = 2e9, 1e7
"""Bytes per second."""
HOST = LinkSpeed(1e-4, 2e10)


class Clock:
    """Seconds as a test sets them."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Server:
    """A controller and a store of any speed; each request asks for the same chunks."""

    def __init__(self) -> None:
        self.clock = Clock()
        # About 8,000 tokens a second in 32 layers.
        times = ModelTimes(32, 1, TOKEN_BYTES // 32, lambda rows: 4e-6 * max(rows, 32))
        self._controller = LoadingController(times, HOST, TOKEN_BYTES, TPGroup(), self.clock)

    def ask(self, bytes_per_s: float, place: Place = Place.STORAGE) -> int:
        """Answer a request; return how many chunks it read from the store."""
        num_bytes = TOKENS * TOKEN_BYTES
        chunks = [Chunk(TOKENS, place, num_bytes * (place is Place.STORAGE))] * NUM_CHUNKS
        loaded = self._controller.choose(chunks, 100, ratios=Ratios(0.15)).loaded
        if place is not Place.STORAGE:
            return 0
        for _ in loaded:
            self._controller.storage_read(num_bytes, num_bytes / bytes_per_s)
        return len(loaded)

    def slow_down(self) -> None:
        """Ask until the store is not asked any more."""
        for _ in range(20):
            if not self.ask(SLOW):
                return
        raise AssertionError("a slow store is still asked")

    def reads_at(self, seconds: Sequence[float], bytes_per_s: float) -> list[bool]:
        """Ask at several times; return whether anything was read."""
        reads = []
        for now_s in seconds:
            self.clock.now_s = now_s
            reads.append(self.ask(bytes_per_s) > 0)
        return reads


def test_a_store_that_is_fast_again_is_found_out() -> None:
    server = Server()
    server.slow_down()
    assert server.reads_at((1, 5, 9), FAST) == [False, False, False]
    assert server.reads_at((10, 10.1, 11, 60, 600), FAST) == [True] * 5


def test_a_store_that_stays_slow_is_asked_ever_less() -> None:
    server = Server()
    server.slow_down()
    begun = []
    for second in range(1, 400):
        server.clock.now_s = second
        if server.ask(SLOW):
            begun.append(second)
            server.slow_down()
    gaps = [later - earlier for earlier, later in zip([0, *begun], begun, strict=False)]
    assert gaps == [10, 20, 40, 60, 60, 60, 60, 60]


def test_a_store_that_was_fast_for_a_while_is_soon_asked_again() -> None:
    server = Server()
    server.slow_down()
    server.reads_at((10,), SLOW)
    server.slow_down()
    assert server.reads_at((30, 31, 32), FAST) == [True] * 3
    server.slow_down()
    assert server.reads_at((41, 42.5), FAST) == [False, True]


def test_a_quiet_store_is_not_forgotten() -> None:
    server = Server()
    for _ in range(4):
        server.ask(FAST / 4)
    before = server._controller.describe()
    server.clock.now_s = 1000.0
    server.ask(FAST, Place.DEVICE)
    server.clock.now_s = 2000.0
    server.ask(FAST, Place.HOST)
    assert server._controller.describe() == before
