"""The blended forward at start: it finds what the list of models does not know, and leaves no trace."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from engines import StartEngine, model_folder, start_engine
from forked import run_forked
from unlisted_model import start_unlisted

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine

POLICIES = ["hkvd", "hkvd-k", "gradual", "hybrid", "query-aware", "first-k", "random", "oracle"]


def _start_unlisted(folder: Path, listed: bool) -> None:
    start_unlisted(folder, listed=listed)


def test_a_model_that_was_never_blended_is_refused_by_name(tmp_path: Path) -> None:
    status, log = run_forked(_start_unlisted, tmp_path / "model", False)
    assert status != 0
    assert "enable_blend: models of class Exaone4ForCausalLM are not supported, only Arcee" in log


def test_what_the_list_does_not_know_ends_the_start(tmp_path: Path) -> None:
    status, log = run_forked(_start_unlisted, tmp_path / "model", True)
    assert status != 0
    assert (
        "enable_blend: models of class Exaone4ForCausalLM cannot be blended: a trial with made-up "
        "tokens failed with ValueError"
    ) in log


def look(driver: Any) -> dict[str, Any]:
    scheduler = driver.scheduler
    rows = scheduler.req_to_token_pool
    told = driver.runtime.describe()
    return {
        "pool": told["pool"],
        "rows in use": int(rows.req_to_token.count_nonzero()),
        "rows": rows.available_size() - rows.size,
        "requests": told["requests"],
        "forwards": scheduler.tp_worker.model_runner.forward_pass_id,
    }


@pytest.mark.parametrize("page_size", [1, 64])
def test_the_trial_leaves_no_trace(start_engine: StartEngine, page_size: int) -> None:
    found = start_engine(page_size=page_size, max_total_tokens=256).call(look)
    assert found == {
        "pool": {"capacity": 256, "free": 256, "evictable": 0, "locked": 0},
        "rows in use": 0,
        "rows": 0,
        "requests": 0,
        "forwards": 0,
    }


def try_once(driver: Any, **settings: Any) -> None:
    from sgl_blend.settings.config import BlendConfig
    from sgl_blend.tuning.trial import run_trial

    config = BlendConfig.of(driver.scheduler.server_args)
    run_trial(driver.runtime._fusor, driver.scheduler, msgspec.structs.replace(config, **settings))


def count_rows(driver: Any, policy: str) -> list[int]:
    """Try a policy and return how many rows each layer's MLP sees."""
    runner = driver.scheduler.tp_worker.model_runner
    seen: list[int] = []
    handles = [
        layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[0]))
        for layer in runner.model.model.layers
    ]
    try_once(driver, blend_policy=policy, blend_eval=policy == "oracle")
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("policy", POLICIES)
def test_the_trial_drops_rows_in_the_check_layer(start_engine: StartEngine, policy: str) -> None:
    seen = start_engine().call(count_rows, policy)
    first, check, *above = seen[-4:]
    assert first == 14  # of 16, two are an exact prefix
    assert check < first
    assert all(rows <= check for rows in above)


def spoil_and_try(driver: Any) -> str:
    """Give the model weights that are no numbers, try it, and mend it again."""
    from sgl_blend.errors import UnsupportedError

    weight = driver.scheduler.tp_worker.model_runner.model.model.norm.weight.data
    kept = weight.clone()
    weight.fill_(float("nan"))
    try:
        try_once(driver)
    except UnsupportedError as err:
        return str(err)
    finally:
        weight.copy_(kept)
    return ""


def test_a_model_whose_answer_is_no_number_is_refused(start_engine: StartEngine) -> None:
    message = start_engine().call(spoil_and_try)
    assert message.endswith("a trial with made-up tokens gave logits that are not finite")


def try_without_room(driver: Any) -> str:
    from sgl_blend.errors import UnsupportedError

    allocator = driver.scheduler.token_to_kv_pool_allocator
    taken = allocator.alloc(allocator.available_size() - 16)
    try:
        try_once(driver)
    except UnsupportedError as err:
        return str(err)
    finally:
        allocator.free(taken)
    return ""


def test_a_pool_without_room_for_a_chunk_is_refused(start_engine: StartEngine) -> None:
    message = start_engine().call(try_without_room)
    assert message.endswith("beside a chunk; raise --max-total-tokens")
