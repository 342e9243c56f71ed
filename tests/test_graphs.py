"""Graphs of the layers above the check layer, with a stand-in whose replay is what was recorded."""

from typing import Any

import pytest
import torch
from engines import StartEngine, model_folder, start_engine
from graph_stand_in import (
    BUCKETS,
    Compared,
    Counted,
    StandIn,
    compared,
    differing,
    give_graphs,
    pools,
    with_graphs,
)
from harness import Driver, Prompt, rag_prompt, random_tokens
from law_prompts import CHUNKS, QUESTION, SYSTEM, scattered
from sparse_path import (
    assert_drops_and_is_full_prefill,
    assert_keeps_all_and_is_full_prefill,
    on_all_rows,
    on_true_kv,
)

from sgl_blend.fusion.graphs import BUCKETS as SERVED_BUCKETS
from sgl_blend.fusion.graphs import Rest, choose_bucket
from sgl_blend.kernels.ragged_attention_fixed import MAX_REQUESTS

__all__ = ["model_folder", "start_engine"]  # fixtures

POLICIES = ["hkvd", "funnel", "remembered", "first-k"]
LAYOUTS = [
    pytest.param({}, id="plain"),
    pytest.param({"page_size": 16}, id="pages of 16"),
    pytest.param({"chunked_prefill_size": 64}, id="chunked prefill"),
]


# --- which forward takes a graph ---


def rest(
    num_rows: int, num_requests: int = 1, next_layer: int = 3, *, dropped: bool = True
) -> Rest:
    return Rest(next_layer, num_rows, num_requests, dropped)


def test_rows_are_rounded_up_to_the_next_bucket() -> None:
    chosen = {rows: choose_bucket(rest(rows), 3, SERVED_BUCKETS) for rows in (1, 64, 65, 448, 513)}
    assert chosen == {1: 64, 64: 64, 65: 128, 448: 448, 513: 640}
    assert choose_bucket(rest(1024, MAX_REQUESTS), 3, SERVED_BUCKETS) == 1024


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(rest(1025), id="more rows than the largest has"),
        pytest.param(rest(100, MAX_REQUESTS + 1), id="too many requests"),
        pytest.param(rest(100, next_layer=4), id="a gradual policy has selected above"),
        pytest.param(rest(100, dropped=False), id="nothing dropped, the server attends"),
    ],
)
def test_other_forwards_take_no_graph(other: Rest) -> None:
    assert choose_bucket(other, 3, SERVED_BUCKETS) is None
    assert choose_bucket(rest(100), 3, ()) is None


# --- a replay is what would have run without it ---


def prompt_in(order: tuple[int, ...], policy: str, *, more: int = 0, **rest: Any) -> Prompt:
    params = {"sgl_blend_policy": policy, "sgl_blend_ratio": 0.3}
    chunks = [CHUNKS[i] for i in order]
    question = QUESTION + random_tokens(200 + more, more)
    return rag_prompt(SYSTEM, chunks, question, params=params, max_new_tokens=2, **rest)


def warm(driver: Driver, policy: str) -> None:
    """Store all chunks, and forget what earlier tests asked."""
    driver.settle()
    driver.flush()
    driver.ask(prompt_in((0, 1, 2), policy), prompt_in((3, 4, 5), policy))
    driver.settle()


def ask_twice(driver: Driver, batches: list[list[Prompt]], policy: str) -> list[Compared]:
    """Ask batches one after another with graphs; every forward runs without them too."""
    warm(driver, policy)
    recorder = give_graphs(driver)
    with compared(driver, recorder) as found:
        for batch in batches:
            driver.ask(*batch)
    driver.settle()
    driver.runtime._fusor.graphs = None
    return found


def assert_bit_equal(found: list[Compared]) -> None:
    for forward in found:
        assert forward.same_logits, f"logits differ by {forward.largest}"
        assert forward.slots == [], "slots of the pool differ"
        padded = forward.replayed and sum(forward.rows) not in BUCKETS
        assert forward.scratch == padded
        assert forward.empty or not forward.replayed


@pytest.mark.engine
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("settings", LAYOUTS)
def test_a_replay_gives_the_bits_of_the_layers_alone(
    start_engine: StartEngine, settings: dict[str, Any], policy: str
) -> None:
    engine = start_engine(**settings)
    batches = [
        # The first chunk stands where it was built: an exact prefix. The last batch is far smaller
        # than the one before it, whose rows must not be seen any more.
        [prompt_in((0, 2, 1), policy)],
        [prompt_in((5, 4, 3), policy), prompt_in((3, 2, 5, 1), policy), prompt_in((1, 0), policy)],
        [prompt_in((4, 3), policy)],
    ]

    found = engine.call(ask_twice, batches, policy)

    assert_bit_equal(found)
    replays = [forward.rows for forward in found if forward.replayed]
    assert len(replays) >= 3
    if not settings.get("chunked_prefill_size"):
        assert max(map(len, replays)) == 3
        assert sum(replays[-1]) < max(map(sum, replays))


@pytest.mark.engine
@pytest.mark.parametrize("kind", ["llama-partial-gptj", "qwen2", "qwen3-yarn", "mistral"])
def test_every_kind_of_model_hands_on_its_states(start_engine: StartEngine, kind: str) -> None:
    batches = [
        [prompt_in((0, 2, 1), "hkvd"), prompt_in((3, 5), "hkvd")],
        [prompt_in((4, 1), "hkvd")],
    ]

    found = start_engine(kind).call(ask_twice, batches, "hkvd")

    assert_bit_equal(found)
    assert all(forward.replayed for forward in found)


@pytest.mark.engine
def test_rounding_alone_may_differ_where_products_depend_on_the_rows(
    start_engine: StartEngine,
) -> None:
    found = start_engine("llama-wide").call(ask_twice, [[prompt_in((0, 2, 1), "hkvd")]], "hkvd")

    assert [forward.replayed for forward in found] == [True]
    assert found[0].largest <= 1e-4


@pytest.mark.engine
def test_forwards_without_a_graph_may_stand_between_two_replays(start_engine: StartEngine) -> None:
    batches = [
        [prompt_in((0, 2, 1), "hkvd")],
        [prompt_in((2, 0, 1), "gradual")],
        [prompt_in((1, 2), "hkvd", more=i + 1) for i in range(MAX_REQUESTS + 1)],
        [prompt_in((5, 3, 4), "hkvd", more=500)],  # more rows than the largest bucket
        [prompt_in((4, 3), "hkvd")],
    ]

    found = start_engine().call(ask_twice, batches, "hkvd")

    assert_bit_equal(found)
    assert [forward.replayed for forward in found] == [True, False, False, False, True]


@pytest.mark.engine
def test_rows_whose_logprobs_are_wanted_go_through_the_last_layer(
    start_engine: StartEngine,
) -> None:
    prompt = prompt_in((5, 1), "hkvd", logprob_start_len=150)

    found = start_engine().call(ask_twice, [[prompt, prompt_in((4, 0), "hkvd")]], "hkvd")

    assert_bit_equal(found)
    assert any(forward.replayed for forward in found)


def ask_a_server(driver: Driver, batches: list[list[Prompt]]) -> list[Compared]:
    warm(driver, "hkvd")
    with compared(driver, Counted(driver)) as found:
        for batch in batches:
            driver.ask(*batch)
    driver.settle()
    return found


@pytest.mark.engine
@pytest.mark.gpu
def test_captured_graphs_answer_as_kernel_by_kernel(start_engine: StartEngine) -> None:
    # Not bit by bit: matrix products of other shapes and other shares of the KV round differently.
    batches = [
        [prompt_in((0, 2, 1), "hkvd"), prompt_in((3, 5), "hkvd")],
        [prompt_in((4, 1), "hkvd")],
    ]

    found = start_engine(blend_attention="triton", blend_cuda_graph="on").call(
        ask_a_server, batches
    )

    assert [forward.replayed for forward in found] == [True, True]
    for forward in found:
        assert forward.largest <= 0.02 * forward.range
        assert forward.scratch
        assert forward.empty


# --- the laws, with graphs ---


@pytest.mark.engine
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("settings", LAYOUTS)
def test_l1_holds_through_graphs(
    start_engine: StartEngine, settings: dict[str, Any], policy: str
) -> None:
    engine = start_engine(blend_on_miss="build", **settings)
    params = {"sgl_blend_ratio": 0.3, "sgl_blend_policy": policy}
    prompt = scattered(params=params, max_new_tokens=3)

    dropped, replays = engine.call(with_graphs, on_true_kv, [prompt])
    assert_drops_and_is_full_prefill(dropped)
    assert replays > 0

    # All rows are kept by selecting all of them in each layer that may select, as a gradual policy
    # does. A graph then runs for the policy alone that never looks at a layer.
    kept, replays = engine.call(with_graphs, on_all_rows, [prompt])
    assert_keeps_all_and_is_full_prefill(kept)
    assert (replays > 0) == (policy == "first-k")


# --- capture, and its end ---


def capture(driver: Driver) -> tuple[list[int], list[int], list[int]]:
    """Return which slots a capture touches, in which order it goes, and what the server says then."""
    before = pools(driver)
    recorder = give_graphs(driver)
    touched = {s for a, b in zip(before, pools(driver), strict=True) for s in differing(a, b)}
    buckets = list(driver.runtime.describe()["cuda_graph_rows"])
    driver.runtime._fusor.graphs = None
    return sorted(touched), recorder.recorded, buckets


@pytest.mark.engine
def test_a_capture_touches_no_slot_that_a_request_may_have(start_engine: StartEngine) -> None:
    touched, recorded, buckets = start_engine().call(capture)
    assert touched == [0]
    assert recorded == sorted(BUCKETS, reverse=True)
    assert buckets == list(BUCKETS)


@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="there the server captures")
def test_without_cuda_there_are_no_graphs(start_engine: StartEngine) -> None:
    described = start_engine().call(describe)
    assert described["blend_cuda_graph"] == "on"
    assert described["cuda_graph_rows"] == []


def fail_to_capture(driver: Driver) -> tuple[list[str], list[int], list[Compared]]:
    """Return the warnings of a capture that fails midway, the graphs left, and how it serves then."""
    from sgl_blend.fusion import graphs

    warm(driver, "hkvd")
    recorder, warnings = StandIn(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "record", failing_after(2, recorder.record))
        patch.setattr(graphs.logger, "warning", lambda text, *args: warnings.append(text % args))
        give_graphs(driver, recorder=recorder)
    with compared(driver, recorder) as found:
        driver.ask(prompt_in((0, 2, 1), "hkvd"))
    driver.settle()
    left = list(driver.runtime.describe()["cuda_graph_rows"])
    driver.runtime._fusor.graphs = None
    return warnings, left, found


def failing_after(count: int, record: Any) -> Any:
    left = [count]

    def maybe(body: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("out of memory")
        return record(body)

    return maybe


@pytest.mark.engine
def test_a_capture_that_fails_leaves_a_server_without_graphs(start_engine: StartEngine) -> None:
    warnings, left, found = start_engine().call(fail_to_capture)

    (warning,) = warnings
    assert "RuntimeError: out of memory" in warning
    assert "--blend-cuda-graph off" in warning
    assert left == []
    assert [forward.replayed for forward in found] == [False]
    assert found[0].same_logits


def describe(driver: Driver) -> dict[str, Any]:
    described: dict[str, Any] = driver.runtime.describe()
    return described


def move_weights(driver: Driver) -> list[list[int]]:
    """Return the buckets after new weights in the place of the old, and in another place."""
    give_graphs(driver)
    runtime = driver.runtime
    model = driver.scheduler.tp_worker.model_runner.model
    weight = next(iter(model.parameters()))
    found = []
    for data in (weight.data, weight.data.clone()):
        weight.data = data
        runtime.weights_changed()
        found.append(list(runtime.describe()["cuda_graph_rows"]))
    runtime._fusor.graphs = None
    return found


@pytest.mark.engine
def test_graphs_are_given_up_when_weights_move(start_engine: StartEngine) -> None:
    assert start_engine().call(move_weights) == [list(BUCKETS), []]
