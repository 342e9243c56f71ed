"""Every kernel compiles for sm_90 without a spill: what the interpreter cannot see."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import triton

ROOT = Path(__file__).parents[1]
GPU_TRITON = "3.6.0"
"""What comes with torch 2.11, which SGLang 0.5.17 pins."""


def compile_kernels(
    cache: Path, *arguments: str, triton_folder: Path | None = None
) -> subprocess.CompletedProcess[str]:
    # A process of its own: in this one the kernels are Python functions (conftest.py).
    folders = [triton_folder, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(cache),
        "COLUMNS": "120",
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in folders if folder),
    }
    return subprocess.run(
        [sys.executable, "-m", "tools.compile_kernels", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment,
    )


@pytest.mark.slow  # .ci/run runs it
def test_default_configurations_of_common_models_do_not_spill(tmp_path: Path) -> None:
    done = compile_kernels(tmp_path, "--quick")

    assert done.returncode == 0, done.stderr
    for op in (
        "copy_rotated_layers",
        "kv_deviation_at",
        "unquantise",
        "segmented_topk",
        "compact_rows",
        "ragged_attention",
        "merge_splits",
    ):
        assert op in done.stdout


def assert_all_head_dimensions(done: subprocess.CompletedProcess[str], version: str) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().endswith(f"Triton {version}")
    for dim in (16, 32, 64, 80, 96, 128, 192, 256):
        for op in (f"ragged_attention bf16/bf16 d{dim} ", f"merge_splits {dim} "):
            assert op in done.stdout
        assert f"copy_rotated_layers bf16 neox 2x{dim} " in done.stdout
        assert f"unquantise 4 bits anchors bf16 8x{dim} neox {dim} " in done.stdout


@pytest.mark.slow
def test_no_default_configuration_spills(tmp_path: Path) -> None:
    assert_all_head_dimensions(compile_kernels(tmp_path), triton.__version__)


@pytest.mark.slow
def test_the_triton_of_gpu_servers_compiles_every_kernel(tmp_path: Path) -> None:
    wheels, unpacked = tmp_path / "wheels", tmp_path / "triton"
    fetch = ["pip", "download", "--quiet", "--no-deps", "--dest", str(wheels)]
    subprocess.run([sys.executable, "-m", *fetch, f"triton=={GPU_TRITON}"], check=True)
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    for program in (unpacked / "triton" / "backends" / "nvidia" / "bin").iterdir():
        program.chmod(0o755)  # which zipfile forgets

    done = compile_kernels(tmp_path / "cache", triton_folder=unpacked)

    assert_all_head_dimensions(done, GPU_TRITON)


def test_a_configuration_that_spills_is_a_failure(tmp_path: Path) -> None:
    done = compile_kernels(
        tmp_path, "--only", "copy_rotated_layers bf16 neox 8x128", "--max-registers", "32"
    )

    assert done.returncode == 1
    assert "spills" in done.stderr
