"""Each chunk comes at the finest level that is there in time."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sgl_blend.storage.codec.streams import ChunkStream, RequestStream, StoreSpeed

SHARES = [("lossless", 0.75), ("q8", 0.35), ("q4", 0.12), ("q4-2.0", 0.08)]
MB = 1_000_000


class Clock:
    """A clock that is turned by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def speed(bytes_per_s: float = 100.0 * MB) -> StoreSpeed:
    made = StoreSpeed()
    made.heard(10**9, 10**9 / bytes_per_s)
    for level, _ in SHARES:
        made.decoded(level, 10**9, 1e-3)
    return made


def stream(deadline_s: float | None, kv_mb: float = 100.0, **more: object) -> RequestStream:
    given_: dict[str, Any] = {"speed": speed(), "clock": Clock(), **more}
    return RequestStream(deadline_s, int(kv_mb * MB), **given_)


def chunk_of(request: RequestStream, num_pages: int = 4, **names: str) -> ChunkStream:
    return ChunkStream(request, num_pages, 25 * MB, names)


def test_the_finest_level_that_is_there_in_time() -> None:
    # 100 MB of KV at 100 MB/s: a second times the share of the level, and a quarter more.
    for deadline_s, level in (
        (0.94, "lossless"), (0.93, "q8"), (0.42, "q4"), (0.1, "q4-2.0"), (0.01, "q4-2.0"),
    ):  # fmt: skip
        assert stream(deadline_s).choose(100 * MB, SHARES) == level, deadline_s


def test_chunks_that_come_later_count() -> None:
    assert stream(0.94, kv_mb=200).choose(100 * MB, SHARES) == "q8"
    assert stream(0.94, kv_mb=100).choose(50 * MB, SHARES) == "lossless"


def test_without_a_deadline_the_coarsest_comes() -> None:
    assert stream(None).choose(100 * MB, SHARES) == "q4-2.0"


def test_a_level_that_is_not_stored_does_not_come() -> None:
    assert stream(0.76).choose(100 * MB, SHARES[1:2]) == "q8"
    assert stream(0.01).choose(100 * MB, SHARES[1:2]) == "q8"


def test_text_where_computing_is_faster() -> None:
    # The coarsest takes 0.08 s.
    for text_s, level in ((0.07, None), (0.09, "q4-2.0")):
        made = stream(0.01, text_s=lambda kv_bytes, text_s=text_s: text_s)
        assert made.choose(100 * MB, SHARES) == level
    assert stream(0.09, text_s=lambda kv_bytes: 0.0).choose(100 * MB, SHARES) == "q4-2.0"


def test_the_throughput_of_the_last_chunk_counts() -> None:
    store = speed()
    made = stream(2.0, kv_mb=200, speed=store)
    assert made.choose(100 * MB, SHARES) == "lossless"
    made.add(-100 * MB)
    store.heard(75 * MB, 7.5)  # a tenth of what was expected
    assert made.choose(100 * MB, SHARES) == "q4"


def test_a_chunk_must_be_in_time_though_the_store_becomes_as_slow_as_it_was() -> None:
    clock = Clock()
    store = StoreSpeed(clock)
    for level, _ in SHARES:
        store.decoded(level, 10**9, 1e-3)
    store.heard(5 * MB, 0.5)  # 10 MB/s for a moment
    clock.now = 1.0
    store.heard(MB, 1e-3)  # jitter is no slow second, nor is a fast one
    clock.now = 5.0
    store.heard(100 * MB, 1.0)
    made = stream(5.0 + 2.0, kv_mb=40, speed=store, clock=clock)
    # At 10 MB/s 20 MB take 1.5 s losslessly, and the rest at the coarsest 0.16 s.
    assert made.choose(20 * MB, SHARES) == "lossless"
    clock.now = 5.4
    assert made.choose(20 * MB, SHARES) == "q8"
    clock.now = 64.0
    store.heard(100 * MB, 1.0)  # a minute later nobody knows of that moment any more
    made = stream(64.0 + 0.7, kv_mb=40, speed=store, clock=clock)
    assert made.choose(20 * MB, SHARES) == "lossless"


def test_the_coarsest_comes_in_time_however_slow_the_store_once_was() -> None:
    clock = Clock()
    store = StoreSpeed(clock)
    store.heard(MB, 10.0)
    clock.now = 2.0
    store.heard(100 * MB, 1.0)
    made = stream(3.0, speed=store, clock=clock, text_s=lambda kv_bytes: 0.0)
    assert made.choose(100 * MB, SHARES) == "q4-2.0"


def test_while_nothing_was_read_the_coarsest_comes() -> None:
    # And no text, however fast: nobody would ever learn how fast the store is.
    made = stream(1e6, speed=StoreSpeed(), text_s=lambda kv_bytes: 0.0)
    assert made.choose(100 * MB, SHARES) == "q4-2.0"


def test_a_slow_decoder_says_nothing_about_the_link() -> None:
    store = speed(1e4 * MB)
    for _ in range(50):
        store.decoded("q4-2.0", 100 * MB, 10.0)
    assert store.seconds("q4-2.0", 0.08, 100 * MB) > 9
    assert store.seconds("lossless", 0.75, 100 * MB) < 0.01


def test_a_read_that_was_given_up_tells_how_slow_the_store_is() -> None:
    store = StoreSpeed()
    store.gave_up(10 * MB, 2.0)
    assert store.seconds("q4", 0.12, 100 * MB) == 0.12 * 100 / 5
    store.gave_up(10 * MB, 0.001)  # one that was hopeless at once says nothing new
    assert store.seconds("q4", 0.12, 100 * MB) == 0.12 * 100 / 5
    store.heard(10 * MB, 1.0)
    assert store.seconds("q4", 0.12, 100 * MB) == 0.12 * 100 / 10


def test_what_was_heard_long_ago_is_forgotten() -> None:
    clock = Clock()
    store = StoreSpeed(clock)
    store.gave_up(1, 2.0)
    made = stream(1.0, speed=store, clock=clock, text_s=lambda kv_bytes: 0.0)
    assert made.choose(100 * MB, SHARES) is None
    clock.now = 11.0
    assert made.choose(100 * MB, SHARES) == "q4-2.0"


def test_a_chunk_that_is_left_for_text_leaves_time_to_the_next() -> None:
    store = speed()
    request = stream(-1.0, kv_mb=200, text_s=lambda kv_bytes: 0.0, speed=store)
    chunk = chunk_of(request)
    chunk.found("a", ("q4",))
    assert chunk.level_of("a", dict(SHARES).__getitem__) is None
    chunk.stop()
    assert request.left == 100 * MB
    chunk.found_all()
    chunk.read("q4")
    assert request.left == 100 * MB


def test_what_is_left_follows_what_comes() -> None:
    request = stream(1.0, kv_mb=200)
    chunk, other = chunk_of(request), chunk_of(request)
    for key in "ab":
        chunk.found(key, ("q4",))
    chunk.found_all()  # half of it is not stored
    assert request.left == 150 * MB
    chunk.read("q4")
    assert request.left == 125 * MB
    chunk.stop()
    assert request.left == 100 * MB
    chunk.stop()
    other.stop()
    assert request.left == 0


def test_pages_are_named_by_another_namespace() -> None:
    chunk = chunk_of(stream(1.0), a="A", b="B")
    assert [chunk.stored_name(key) for key in "abc"] == ["A", "B", "c"]


def test_two_requests_for_a_page_are_served_in_turn() -> None:
    first, second = chunk_of(stream(None)), chunk_of(stream(None))
    for chunk in (first, second):
        assert not chunk.waits_for("a")
        chunk.found("a", ("q4",))
    assert [first.waits_for("a"), second.waits_for("a")] == [True, True]
    first.take("a")
    assert [first.waits_for("a"), second.waits_for("a")] == [False, True]
    second.stop()
    assert not second.waits_for("a")


def test_time_passes() -> None:
    clock = Clock()
    made = stream(1.0, clock=clock)
    assert made.choose(100 * MB, SHARES) == "lossless"
    clock.now = 0.5
    assert made.choose(100 * MB, SHARES) == "q8"
    clock.now = 5.0
    assert made.choose(100 * MB, SHARES) == "q4-2.0"


@given(
    deadline_s=st.floats(0.0, 10.0),
    rate=st.floats(1.0, 1e11),
    kv=st.integers(1, 10**12),
    left=st.integers(0, 10**12),
)
def test_more_time_never_means_a_coarser_level(
    deadline_s: float, rate: float, kv: int, left: int
) -> None:
    names = [name for name, _ in SHARES]

    def chosen(deadline: float) -> int:
        made = RequestStream(deadline, left, speed(rate), clock=Clock())
        level = made.choose(kv, SHARES)
        assert level is not None
        return names.index(level)

    assert chosen(deadline_s + 1.0) <= chosen(deadline_s)


def test_all_pages_of_a_chunk_come_at_one_level() -> None:
    clock = Clock()
    request = stream(0.94, clock=clock)
    chunk = chunk_of(request)
    share_of = dict(SHARES).__getitem__
    for key in "abc":
        chunk.found(key, ("lossless", "q8", "q4"))
    chunk.found("d", ("lossless", "q4"))
    levels = []
    for key in "abcd":
        levels.append(chunk.level_of(key, share_of))
        clock.now += 1.0  # later pages do not choose anew
    assert levels == ["lossless"] * 4
    for level in levels:
        assert level is not None
        chunk.read(level)
    assert chunk.level == "lossless"
    assert chunk.level_of("unknown", share_of) is None


def test_a_level_that_not_all_pages_have_is_not_chosen() -> None:
    chunk = chunk_of(stream(1e6))
    share_of = dict(SHARES).__getitem__
    for key in "abc":
        chunk.found(key, ("lossless", "q8", "q4"))
    chunk.found("d", ("q8", "q4"))  # the disk was full
    assert [chunk.level_of(key, share_of) for key in "abcd"] == ["q8"] * 4


def test_pages_without_a_common_level_come_at_their_coarsest() -> None:
    chunk = chunk_of(stream(1e6))
    share_of = dict(SHARES).__getitem__
    chunk.found("a", ("lossless",))
    chunk.found("b", ("q4",))
    assert [chunk.level_of(key, share_of) for key in "ab"] == ["lossless", "q4"]


def test_a_chunk_that_is_left_stays_left() -> None:
    chunk = chunk_of(stream(0.0, text_s=lambda kv_bytes: 0.0))
    for key in "ab":
        chunk.found(key, ("q4",))
    assert [chunk.level_of(key, dict(SHARES).__getitem__) for key in "ab"] == [None, None]
    assert chunk.level is None
