"""Run a program to its end, offline, and keep what it printed."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path


def run_program(
    command: Sequence[str], cwd: Path, *, timeout_s: float = 300, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command without a look at the hub; its exit status is the caller's to judge."""
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", **environment},
        cwd=cwd,
        check=False,
    )
