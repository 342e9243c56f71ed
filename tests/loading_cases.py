"""Models, links and prompts for tests of the loading controller's formulas."""

from dataclasses import replace

from hypothesis import strategies as st

from sgl_blend.tuning.links import LinkSpeed
from sgl_blend.tuning.load_choice import Ratios
from sgl_blend.tuning.loading import Chunk, Links, ModelTimes, Place, Prompt, Step

KV_BYTES = 4096
FLOOR = Ratios(0.15, 0.15)


def times(
    per_row: float = 1e-6,
    *,
    fixed: float = 0.0,
    layers: int = 32,
    check: int = 2,
    copy: float = 0.0,
    early: float = 1.0,
    step: float = 0.0,
) -> ModelTimes:
    return ModelTimes(
        num_layers=layers,
        check_layer=check,
        kv_bytes=KV_BYTES,
        layer_s=lambda rows: (fixed + per_row * rows) if rows else 0.0,
        copy_s=lambda rows: copy * rows,
        early_share=early,
        step_s=step,
    )


def magnitudes(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high).map(lambda power: 10.0**power)


MODELS = st.builds(
    times,
    magnitudes(-7, -5),
    fixed=st.sampled_from([0.0, 1e-4, 1e-3]),
    layers=st.sampled_from([4, 8, 32]),
    check=st.integers(0, 2),
    copy=st.sampled_from([0.0, 1e-7]),
    early=st.sampled_from([1.0, 0.4, 0.0]),
    step=st.sampled_from([0.0, 1e-3, 0.1]),
)
SPEEDS = st.builds(LinkSpeed, magnitudes(-5, -1), magnitudes(7, 11))
LINKS = st.builds(Links, SPEEDS, SPEEDS, st.sampled_from([0.0, 0.05]))
STEPS = st.integers(0, 20_000).flatmap(
    lambda reused: st.builds(
        Step, st.integers(0, 4000), st.just(reused), st.sampled_from([0, reused // 2, reused])
    )
)
PLACES = st.sampled_from(list(Place))


def a_chunk(num_tokens: int, place: Place, packed: float = 1.0) -> Chunk:
    num_bytes = int(num_tokens * KV_BYTES * 32 * packed)
    return Chunk(num_tokens, place, num_bytes if place is Place.STORAGE else 0)


def prompts(most: int, places: st.SearchStrategy[Place] = PLACES) -> st.SearchStrategy[Prompt]:
    chunk = st.builds(a_chunk, st.integers(16, 5000), places, st.sampled_from([1.0, 0.2]))
    chunks = st.tuples(st.lists(chunk, max_size=most), st.booleans()).map(_with_exact_first)
    return st.builds(Prompt, chunks, st.integers(1, 500))


def _with_exact_first(drawn: tuple[list[Chunk], bool]) -> tuple[Chunk, ...]:
    chunks, is_exact = drawn
    return (*(replace(chunk, is_exact=is_exact) for chunk in chunks[:1]), *chunks[1:])
