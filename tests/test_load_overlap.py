"""A load from host memory hides behind the layers that need none of it yet."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from engines import StartEngine, model_folder, start_engine
from harness import Driver
from pushed_out import other_order, push_out, settings, slow_loads, store_chunks

__all__ = ["model_folder", "start_engine"]  # fixtures

pytestmark = pytest.mark.engine


@contextmanager
def _slow_layers(driver: Driver, seconds: float) -> Iterator[None]:
    """Let each layer take so long to compute."""
    layers = driver.scheduler.tp_worker.model_runner.model.model.layers
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda *args: time.sleep(seconds)) for layer in layers
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _seconds(driver: Driver, where: str, load_s: float, compute_s: float) -> float:
    """Return how long a prefill takes whose layers take so long to come back and to compute."""
    store_chunks(driver)
    if where == "host":
        push_out(driver)
    with slow_loads(load_s), _slow_layers(driver, compute_s):
        begun = time.monotonic()
        (answer,) = driver.ask(other_order(max_new_tokens=1))
        taken = time.monotonic() - begun
    assert answer.report["host_tokens"] == (200 if where == "host" else 0)
    driver.settle()
    return taken


@pytest.mark.parametrize(
    ("load_s", "compute_s"),
    [
        (0.1, 0.1),
        pytest.param(0.12, 0.06, marks=pytest.mark.slow),
        pytest.param(0.06, 0.12, marks=pytest.mark.slow),
    ],
)
def test_a_load_hides_behind_the_layers(
    start_engine: StartEngine, load_s: float, compute_s: float
) -> None:
    engine = start_engine(**settings())
    layers = 4
    compute = engine.call(_seconds, "device", 0.0, compute_s)
    taken = engine.call(_seconds, "host", load_s, compute_s)
    assert compute > layers * compute_s
    bar = 1.15 * max(layers * load_s, compute) + load_s
    assert bar < layers * load_s + compute, "one after the other would pass too"
    assert taken <= bar
