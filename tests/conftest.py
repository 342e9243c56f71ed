import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).parents[1]
# For examples/ and tools/, which tests import. Last, so that installed packages win.
sys.path.append(str(ROOT))

# Hypothesis draws the same cases every time, so that a change is judged by what it changes. `make slow`
# and `make test-versions` search on.
settings.register_profile("same", deadline=None, derandomize=True, database=None)
settings.register_profile("search", deadline=None, print_blob=True)
settings.load_profile("same")

# Raised while SGLang and what it imports are loaded; nothing of ours can avoid them.
_FOREIGN_WARNINGS = (
    r"ignore:.torch\.jit\.script_method. is deprecated:DeprecationWarning:torch\.jit\._script",
    r"ignore:builtin type Swig\w+ has no __module__ attribute:DeprecationWarning",
    r"ignore:Triton is not supported on current platform:UserWarning",
    r"ignore:TRITON_DEFAULT_FP_FUSION is unset:UserWarning",
    r"ignore:Only .* support:UserWarning:sglang\.srt\.layers\.quantization",
)


def _interpret_kernels() -> None:
    """Load our Triton kernels as Python functions, so that they run on CPU tensors.

    Triton decides when a kernel is decorated, its own library's functions when it is imported first.
    The variable goes again at once: engines that tests start must not inherit it.
    """
    if torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ:
        return
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.experimental.gluon")  # which the first launch would import
    for path in sorted((ROOT / "kernels").glob("*_triton.py")):
        importlib.import_module(f"sgl_blend.kernels.{path.stem}")
    del os.environ["TRITON_INTERPRET"]


_interpret_kernels()


def pytest_configure(config: pytest.Config) -> None:
    # Tensors here are tiny, and idle threads that spin slow a busy machine down tenfold. Engines
    # are processes of their own and keep theirs.
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the fork server imports the hub's client
    for line in _FOREIGN_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if not config.getoption("-m"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.fixture(scope="session", autouse=True)
def _forked_servers() -> Iterator[None]:
    """Let the commands start their servers as forks of a process that has imported SGLang."""
    from forked import fork_servers

    with pytest.MonkeyPatch.context() as patch:
        fork_servers(patch)
        yield


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill what torch.empty returns with NaN or the largest integer, on the CPU."""
    if torch.cuda.is_available():  # there the switch would refuse half of cuBLAS
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
