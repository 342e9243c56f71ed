"""Fixtures for tests that run the real scheduler: one worker process per kind of engine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import ENGINE_ARGS, Engine
from tiny_models import head_dim_for, make_model

StartEngine = Callable[..., Engine]

MAX_ENGINES = 4
"""Engines of one test process that run at once; each takes most of a GB."""


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def start_engine(model_folder: Path) -> Iterator[StartEngine]:
    """Start engines on demand; equal settings share one, all end with the module.

    The engine that was asked for longest ago ends when there are too many: a test gets all it needs
    before it uses them, and needs fewer than that.
    """
    running: dict[str, Engine] = {}

    def start(kind: str = "llama", **settings: Any) -> Engine:
        settings = {"enable_blend": True, **settings}
        if settings["enable_blend"]:
            # The models have four layers: the lowest check layer leaves most of them to blending.
            settings.setdefault("blend_check_layer", 1)
            settings.setdefault("blend_when", "always")
        kind, _, kv_dtype = kind.partition("+")
        if kv_dtype:
            settings.setdefault("kv_cache_dtype", kv_dtype)
        key = f"{kind} {sorted(settings.items())}"
        engine = running.pop(key, None)
        if engine is None:
            if len(running) == MAX_ENGINES:
                running.pop(next(iter(running))).close()
            head_dim = head_dim_for({**ENGINE_ARGS, **settings})
            engine = Engine(make_model(kind, model_folder, head_dim=head_dim), **settings)
        running[key] = engine  # after all others
        return engine

    yield start
    for engine in running.values():
        engine.close()
