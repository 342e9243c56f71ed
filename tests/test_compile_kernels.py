"""Every kernel compiles for sm_90 without a spill: what the interpreter cannot see."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "compile_kernels.py"


def compile_kernels(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # A process of its own: in this one the kernels are Python functions (conftest.py).
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, TOOL, *arguments], capture_output=True, text=True, env=environment
    )


def test_default_configurations_of_common_models_do_not_spill(tmp_path: Path) -> None:
    done = compile_kernels(tmp_path, "--quick")

    assert done.returncode == 0, done.stderr
    for op in (
        "copy_rotated_layers",
        "kv_deviation_at",
        "segmented_topk",
        "compact_rows",
        "ragged_attention",
        "merge_splits",
    ):
        assert op in done.stdout


@pytest.mark.slow
def test_no_default_configuration_spills(tmp_path: Path) -> None:
    done = compile_kernels(tmp_path)

    assert done.returncode == 0, done.stderr


def test_a_configuration_that_spills_is_a_failure(tmp_path: Path) -> None:
    done = compile_kernels(
        tmp_path, "--only", "copy_rotated_layers bf16 neox 8x128", "--max-registers", "32"
    )

    assert done.returncode == 1
    assert "spills" in done.stderr
