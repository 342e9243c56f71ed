"""Chunks in storage behind two tensor-parallel ranks: both find them, each its own half."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import model_folder
from harness import ENGINE_ARGS, Ranks
from stored_chunks import CHUNKS, ask_for_stored, fill, same
from stored_files import NEEDS_NAMESPACES, settings, store
from tiny_models import head_dim_for, make_model

__all__ = ["model_folder", "store"]  # fixtures

pytestmark = [pytest.mark.engine, pytest.mark.slow, NEEDS_NAMESPACES]


@pytest.fixture(scope="module")
def ranks(model_folder: Path) -> Iterator[Ranks]:
    model = make_model("llama", model_folder, head_dim=head_dim_for(ENGINE_ARGS))
    more = {"enable_blend": True, "blend_check_layer": 1, "blend_when": "always"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")  # SGLang wants a NUMA node for each rank
        running = Ranks(model, 2, **settings(**more))
    yield running
    running.close()


def test_both_ranks_find_their_half(ranks: Ranks, store: Path) -> None:
    warm = ranks.call(fill, "two ranks")
    back = ranks.call(ask_for_stored, "two ranks")
    for (answer, kv, _), (answer_back, kv_back, built) in zip(warm, back, strict=True):
        assert answer_back.report["chunk_hits"] == len(CHUNKS)
        assert answer_back.report["storage_tokens"] > 0
        assert answer_back.logprobs == answer.logprobs
        assert same(kv, kv_back)
        assert built == 0
    assert not same(warm[0][1], warm[1][1]), "the ranks hold the same heads"
    assert len(list(store.iterdir())) % 2 == 0, "the ranks share a name"
