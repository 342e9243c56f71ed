"""Fixtures for tests that run the real scheduler: one worker process per kind of engine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Engine
from tiny_models import make_model

StartEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def start_engine(model_folder: Path) -> Iterator[StartEngine]:
    """Start engines on demand; equal settings share one, all end with the module."""
    running: dict[str, Engine] = {}

    def start(kind: str = "llama", **settings: Any) -> Engine:
        settings = {"enable_blend": True, **settings}
        if settings["enable_blend"]:
            # The models have four layers: the lowest check layer leaves most of them to blending.
            settings.setdefault("blend_check_layer", 1)
            settings.setdefault("blend_when", "always")
        key = f"{kind} {sorted(settings.items())}"
        if key not in running:
            running[key] = Engine(make_model(kind, model_folder), **settings)
        return running[key]

    yield start
    for engine in running.values():
        engine.close()
