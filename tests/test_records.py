"""What files of results say about where their figures come from."""

import subprocess
import sys
from pathlib import Path

import pytest

from sgl_blend.commands.common import records

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not in a checkout")
def test_the_commit_is_that_of_the_checkout() -> None:
    head = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    )
    found = records.find_commit()
    assert found is not None
    assert found.removesuffix("-dirty") == head.stdout.strip()


def test_a_script_names_its_command_without_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x.py", "--json=/home/of/somebody/out.json"])
    found = records.origin_of_script()
    assert found["command"].startswith("python ")
    assert found["command"].endswith("--json=out.json")
    assert set(found) == {"command", "date", "versions", "commit", "machine"}
