"""What a build runs (law L4): which forwards, on top of what, and with which rows.

Bit-equality of chunk KV alone would not tell: a small model's matrix products round alike for many row
counts. So SGLang's model itself is watched here: every extend forward that it runs, in every batch.
"""

import functools
import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver, Engine, Prompt, rag_prompt, random_tokens
from tiny_models import VOCAB_SIZE

from sgl_blend.scheduler.build_steps import BuildStep
from sgl_blend.scheduler.probes import PROBE_TOKENS, made_up_texts

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

SYSTEM = random_tokens(1, 40)
CHUNKS = [random_tokens(10 + i, 60 + 9 * i) for i in range(6)]
QUESTION = random_tokens(99, 20)

Step = tuple[tuple[int, ...], int]
"""A forward that a build must run: the path up to its last row, and the position of its first."""


@dataclass(frozen=True)
class Forward:
    """One extend forward as SGLang's model saw it, and the batch that it was a part of."""

    num_requests: int
    tokens: list[int]
    positions: list[int]
    prefix_lens: list[int]
    builds: list[list[int]]
    """Prompts of the builds among its requests."""
    batch_builds: int
    batch_others: int

    @property
    def step(self) -> Step:
        """What the build of this forward runs."""
        stop = self.prefix_lens[0] + len(self.tokens)
        return tuple(self.builds[0][:stop]), self.prefix_lens[0]


@contextmanager
def _watched_forwards(driver: Driver) -> Iterator[list[Forward]]:
    """Note every extend forward of the model, whoever asks for it."""
    from sgl_blend.scheduler.builds import is_build

    scheduler = driver.scheduler
    model = scheduler.tp_worker.model_runner.model
    seen: list[Forward] = []
    batches: list[dict[str, Any]] = [{}]

    run_batch = scheduler.run_batch

    def watched_run(batch: Any, *args: Any, **kwargs: Any) -> Any:
        batches[0] = {req.rid: req for req in batch.reqs}
        return run_batch(batch, *args, **kwargs)

    def watched(original: Any) -> Any:
        @functools.wraps(original)
        def forward(
            input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kw: Any
        ) -> Any:
            if forward_batch.forward_mode.is_extend():
                reqs = batches[0]
                builds = [req for req in reqs.values() if is_build(req)]
                here = [reqs[rid] for rid in forward_batch.rids if is_build(reqs[rid])]
                seen.append(
                    Forward(
                        num_requests=len(forward_batch.rids),
                        tokens=input_ids.tolist(),
                        positions=positions.tolist(),
                        prefix_lens=list(forward_batch.extend_prefix_lens_cpu),
                        builds=[list(req.origin_input_ids) for req in here],
                        batch_builds=len(builds),
                        batch_others=len(reqs) - len(builds),
                    )
                )
            return original(input_ids, positions, forward_batch, *args, **kw)

        return forward

    with (
        patch.object(scheduler, "run_batch", watched_run),
        patch.object(model, "forward", watched(model.forward)),
        patch.object(model, "forward_split_prefill", watched(model.forward_split_prefill)),
    ):
        yield seen


def _serve(driver: Driver, *rounds: list[Prompt]) -> tuple[list[Forward], int]:
    """Serve rounds of requests on an empty cache; return the forwards, and how long steps are."""
    driver.settle()
    driver.flush()
    with _watched_forwards(driver) as seen:
        for prompts in rounds:
            driver.ask(*prompts)
            driver.settle()
    return seen, driver.runtime.builder.step_tokens


def _serve_beside_a_decode(
    driver: Driver, decoding: Prompt, prompts: list[Prompt]
) -> tuple[list[Forward], int]:
    """Serve requests on an empty cache while another decodes."""
    driver.settle()
    driver.flush()
    first = driver.submit(decoding)
    driver.run_until(lambda: len(first.output_ids) > 2)
    with _watched_forwards(driver) as seen:
        driver.ask(*prompts)
        assert not first.finished(), "nothing decoded beside the builds"
        driver.run_until(first.finished)
        driver.settle()
    return seen, driver.runtime.builder.step_tokens


def _serve_while_builds_wait(
    driver: Driver, first: Prompt, then: list[Prompt]
) -> tuple[list[Forward], int]:
    """Serve requests on an empty cache, the first alone; its chunks are built among the others."""
    driver.settle()
    driver.flush()
    builder = driver.runtime.builder
    with _watched_forwards(driver) as seen:
        driver.ask(first)
        assert builder.num_pending > 0, "nothing waits to be built"
        reqs = [driver.submit(prompt) for prompt in then]
        with patch.object(builder._budget, "affords_step", lambda: True):
            driver.run_until(lambda: all(req.finished() for req in reqs))
        driver.settle()
    return seen, builder.step_tokens


def expected_steps(
    prefix: list[int], chunk: list[int], step_tokens: int, page_size: int
) -> list[Step]:
    """Return the forwards that build a chunk of no common beginning: its build prefix, then itself.

    Args:
        prefix: The build prefix.
        chunk: The chunk.
        step_tokens: Most rows of a forward.
        page_size: Tokens of a page: the tree holds whole ones, so that the chunk's rows begin at one.
    """
    path = [*prefix, *chunk]
    begin = len(prefix) // page_size * page_size
    steps = []
    for start, stop in ((0, len(prefix) if begin else 0), (begin, len(path))):
        cuts = list(range(start, stop, step_tokens))
        steps += [(tuple(path[:b]), a) for a, b in zip(cuts, [*cuts[1:], stop], strict=True)]
    return steps


def assert_builds_are(
    served: tuple[list[Forward], int],
    chunks: list[tuple[list[int], list[int]]],
    page_size: int = 1,
) -> list[Forward]:
    """Accept forwards that build chunks, each (build prefix, chunk), each step once and alone."""
    forwards, step_tokens = served
    building = [forward for forward in forwards if forward.builds]
    for forward in building:
        assert forward.num_requests == 1, "a build shares its forward"
        path, start = forward.step
        assert forward.tokens == list(path[start:])
        assert forward.positions == list(range(start, len(path)))
    got = [forward.step for forward in building]
    want = {
        step
        for prefix, chunk in chunks
        for step in expected_steps(prefix, chunk, step_tokens, page_size)
    }
    assert set(got) == want
    assert len(got) == len(want), "a step ran twice"
    done: set[tuple[int, ...]] = set()
    for path, start in got:
        assert start == 0 or path[:start] in done, "a step runs before what it stands on"
        done |= {path[:stop] for stop in range(start, len(path) + 1)}
    return building


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("on_miss", ["compute", "build"])
def test_each_build_is_a_forward_of_its_own_after_its_prefix(
    start_engine: StartEngine, on_miss: str, page_size: int
) -> None:
    engine = start_engine(
        blend_policy="hkvd", blend_on_miss=on_miss, page_size=page_size, chunked_prefill_size=-1
    )
    other = random_tokens(8, 25)
    together = [
        rag_prompt(SYSTEM, [CHUNKS[i] for i in (2, 0, 4)], QUESTION),
        Prompt([random_tokens(3, 130)]),
        rag_prompt(other, [CHUNKS[2], CHUNKS[1]], QUESTION),
        rag_prompt(SYSTEM, [CHUNKS[4], CHUNKS[5]], QUESTION),
    ]

    served = engine.call(_serve, together, [rag_prompt(SYSTEM, [CHUNKS[3]], QUESTION)])

    expected = [(SYSTEM, CHUNKS[i]) for i in (0, 2, 3, 4, 5)]
    building = assert_builds_are(
        served, [*expected, (other, CHUNKS[2]), (other, CHUNKS[1])], page_size
    )
    assert all(forward.batch_others == 0 for forward in building)
    if on_miss == "build":
        assert any(forward.batch_builds > 1 for forward in building), "no builds shared a batch"


@pytest.mark.parametrize("on_miss", ["compute", "build"])
def test_probes_are_forwards_of_their_own_and_change_no_build(
    start_engine: StartEngine, on_miss: str
) -> None:
    engine = start_engine(blend_on_miss=on_miss, chunked_prefill_size=-1)
    prompts = [rag_prompt(SYSTEM, [CHUNKS[i] for i in order], QUESTION) for order in ((2, 0), (4,))]

    forwards, step_tokens = engine.call(_serve, prompts)

    texts = [array("q", text).tolist() for text in made_up_texts(VOCAB_SIZE)]
    building: list[Forward] = []
    probing: list[Forward] = []
    for forward in filter(lambda forward: forward.builds, forwards):
        then = forward.builds[0][len(SYSTEM) :][:PROBE_TOKENS]
        is_probe = bool(then) and any(text[: len(then)] == then for text in texts)
        (probing if is_probe else building).append(forward)
    assert_builds_are((building, step_tokens), [(SYSTEM, CHUNKS[i]) for i in (0, 2, 4)])
    # A probe passes the layers below the check layer in one call, and the check layer in another.
    assert [forward.step for forward in probing[::2]] == [forward.step for forward in probing[1::2]]
    # A request that waits needs the memory of what it moves; others may move the rest.
    probed = [0] if on_miss == "build" else [0, 2, 4]
    assert_builds_are(
        (probing[::2], step_tokens),
        [([*SYSTEM, *text], CHUNKS[i]) for text in texts for i in probed],
    )


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("on_miss", ["compute", "build"])
def test_a_chunk_that_begins_like_another_is_computed_whole(
    start_engine: StartEngine, on_miss: str, page_size: int
) -> None:
    engine = start_engine(
        blend_policy="hkvd", blend_on_miss=on_miss, page_size=page_size, chunked_prefill_size=-1
    )
    longer = [*CHUNKS[5], *random_tokens(60, 50)]
    fork = [*CHUNKS[5][:70], *random_tokens(61, 40)]

    served = engine.call(
        _serve, *([rag_prompt(SYSTEM, [c], QUESTION)] for c in (CHUNKS[5], longer, fork))
    )

    assert_builds_are(served, [(SYSTEM, c) for c in (CHUNKS[5], longer, fork)], page_size)


def test_missing_chunks_that_begin_alike_are_built_in_one_batch(start_engine: StartEngine) -> None:
    engine = start_engine(blend_policy="hkvd", blend_on_miss="build", chunked_prefill_size=-1)
    forks = [[*CHUNKS[5][:70], *random_tokens(60 + i, 40)] for i in range(3)]

    served = engine.call(_serve, [rag_prompt(SYSTEM, forks, QUESTION)])

    building = assert_builds_are(served, [(SYSTEM, fork) for fork in forks])
    assert max(forward.batch_builds for forward in building) == len(forks)


def test_a_chunk_begins_where_its_own_prefix_ends_though_another_is_stored(
    start_engine: StartEngine,
) -> None:
    # The second request's system prompt is the first's and the beginning of its chunk.
    engine = start_engine(blend_policy="hkvd", blend_on_miss="compute", chunked_prefill_size=-1)
    prefix = [*SYSTEM, *CHUNKS[5][:10]]
    chunk = [*CHUNKS[5][10:], *random_tokens(60, 30)]

    forwards, step_tokens = engine.call(
        _serve,
        [rag_prompt(SYSTEM, [CHUNKS[5]], QUESTION)],
        [rag_prompt(prefix, [chunk], QUESTION)],
    )

    last = [forward for forward in forwards if forward.builds][-1]
    assert last.step == expected_steps(prefix, chunk, step_tokens, 1)[-1]


def test_builds_stay_alone_in_batches_that_mix_prefill_and_decode(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(
        blend_policy="hkvd",
        blend_on_miss="build",
        chunked_prefill_size=2048,
        enable_mixed_chunk=True,
    )
    decoding = Prompt([random_tokens(3, 30)], max_new_tokens=40, logprobs=False)
    prompts = [
        rag_prompt(SYSTEM, [CHUNKS[i] for i in order], QUESTION, logprobs=False)
        for order in ((3, 1), (2, 4))
    ]

    served = engine.call(_serve_beside_a_decode, decoding, prompts)

    building = assert_builds_are(served, [(SYSTEM, CHUNKS[i]) for i in (1, 2, 3, 4)])
    assert any(forward.batch_others for forward in building), "no build met a decode step"


def test_a_build_that_sglang_sorts_after_clients_does_not_join_them(
    start_engine: StartEngine,
) -> None:
    engine = start_engine(blend_policy="hkvd", enable_priority_scheduling=True)
    others = [Prompt([random_tokens(50 + i, 70)], priority=1) for i in range(3)]
    served = engine.call(_serve_while_builds_wait, rag_prompt(SYSTEM, CHUNKS[:2], QUESTION), others)

    building = assert_builds_are(served, [(SYSTEM, chunk) for chunk in CHUNKS[:2]])
    assert not any(forward.batch_others for forward in building), "clients wait for a build"


def test_builds_are_cut_where_their_own_lengths_say(start_engine: StartEngine) -> None:
    engine = start_engine(blend_policy="hkvd", blend_on_miss="build", chunked_prefill_size=48)
    served = engine.call(
        _serve,
        [rag_prompt(SYSTEM, CHUNKS[:2], QUESTION), Prompt([random_tokens(3, 130)])],
        [rag_prompt(random_tokens(8, 100), [CHUNKS[0]], QUESTION)],
    )
    assert served[1] < len(CHUNKS[0]), "one step is enough, the test shows nothing"

    building = assert_builds_are(
        served, [(SYSTEM, CHUNKS[0]), (SYSTEM, CHUNKS[1]), (random_tokens(8, 100), CHUNKS[0])]
    )

    assert max(len(forward.tokens) for forward in building) == served[1] <= 48


def _serve_and_lose(driver: Driver, prompt: Prompt) -> tuple[list[Forward], int]:
    """Evict all that can be, once, between the offer of a chunk's second step and its admission."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    driver.settle()
    driver.flush()
    builder, tree = driver.runtime.builder, driver.scheduler.tree_cache
    offer_next, lost = builder._offer_next, list[BuildStep]()

    def offer_and_lose(*args: Any, **more: Any) -> Any:
        is_free = offer_next(*args, **more)
        offered = builder._offer is not None and builder._offer.build.sgl_blend_step
        if offered and offered.done > len(SYSTEM) and not lost:
            tree.evict(EvictParams(num_tokens=10**6))
            lost.append(offered)
        return is_free

    with _watched_forwards(driver) as seen, patch.object(builder, "_offer_next", offer_and_lose):
        driver.ask(prompt)
        driver.settle()
    assert lost, "no step stood on another one"
    return seen, builder.step_tokens


def test_a_step_that_lost_its_beginning_does_not_run(start_engine: StartEngine) -> None:
    engine = start_engine(blend_policy="hkvd", chunked_prefill_size=-1)
    chunk = random_tokens(70, 600)
    forwards, step_tokens = engine.call(_serve_and_lose, rag_prompt(SYSTEM, [chunk], QUESTION))
    ran = [forward.step for forward in forwards if forward.builds]
    assert set(ran) == set(expected_steps(SYSTEM, chunk, step_tokens, 1))


def _expected_of_traffic(engine: Engine, seed: int) -> None:
    drawn = random.Random(seed)
    systems = [SYSTEM, random_tokens(8, 25)]
    chunks: dict[Any, tuple[list[int], list[int]]] = {}
    rounds = []
    for _ in range(6):
        prompts = []
        for _ in range(drawn.randint(1, 4)):
            system = drawn.choice(systems)
            picked = drawn.sample(CHUNKS, drawn.randint(1, 3))
            for chunk in picked:
                chunks[array("q", system + chunk).tobytes()] = (system, chunk)
            prompts.append(rag_prompt(system, picked, random_tokens(drawn.randrange(10**6), 9)))
            if drawn.random() < 0.4:
                prompts.append(Prompt([random_tokens(drawn.randrange(10**6), 70)]))
        rounds.append(prompts)

    assert_builds_are(engine.call(_serve, *rounds), list(chunks.values()))


@pytest.mark.parametrize("on_miss", ["compute", "build"])
def test_builds_of_random_traffic_run_as_if_alone(start_engine: StartEngine, on_miss: str) -> None:
    engine = start_engine(blend_policy="hkvd", blend_on_miss=on_miss, chunked_prefill_size=-1)
    for seed in range(3):
        _expected_of_traffic(engine, seed)
