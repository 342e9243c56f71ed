import json
import os
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent / "launch_kernels.py"


def test_a_kernel_is_compiled_once_however_many_rows_and_requests_come(tmp_path: Path) -> None:
    # A compilation takes seconds, and a request would wait for it.
    done = subprocess.run(
        [sys.executable, PROGRAM],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_CACHE_DIR": str(tmp_path)},
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "_copy_rotated_layers": 1,
        "_deviation": 1,
        "_unquantise": 1,
        "_segmented_topk": 1,
        "_select_rows": 1,
        "_compact_rows": 1,
        "_ragged_attention": 4,  # whole and split, for a batch and for a graph
        "_merge_splits": 2,
    }
