"""What every file of results says: the machine, the versions, the command; never a folder of ours."""

import importlib.util
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

PACKAGES = ("sgl-blend", "sglang", "torch", "triton")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What it ran on."""

    processor: str
    gpu: str | None
    cores: int

    def __str__(self) -> str:
        """Return it as benchmarks name it; the GPU, where there is one, is named first."""
        return ", ".join(filter(None, [self.gpu, self.processor, f"{self.cores} cores"]))


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where figures come from.

    Attributes:
        command: Without this machine's paths.
        commit: Of the checkout that sgl-blend ran from, with ``-dirty`` if it was changed; null if
            it was installed.
    """

    command: str
    date: str
    versions: dict[str, str]
    commit: str | None
    machine: Machine


def find_origin(command: str) -> Origin:
    """Return where figures come from that a command measures now."""
    return Origin(
        command=command,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=find_versions(PACKAGES),
        commit=find_commit(),
        machine=describe_machine(),
    )


def origin_of_script() -> dict[str, Any]:
    """Return where the figures of the running module come from, as fields for its JSON."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = Path(sys.argv[0]).name if spec is None else f"-m {spec.name.removesuffix('.__main__')}"
    words = " ".join(map(without_folders, sys.argv[1:]))
    found: dict[str, Any] = msgspec.to_builtins(find_origin(f"python {name} {words}".strip()))
    return found


def find_commit() -> str | None:
    """Return the commit of the checkout this runs from, ``-dirty`` if changed; None outside of one."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None
    describing = ["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *describing], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def to_json(report: msgspec.Struct) -> bytes:
    """Return a report as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def command_line(argv: Sequence[str]) -> str:
    """Return a command as it may be published; argv is what stands after ``sgl-blend``."""
    return shlex.join(["sgl-blend", *map(without_folders, argv)])


def without_folders(word: str) -> str:
    """Return a word of a command line with the last part alone of an absolute path."""
    name, equals, value = word.rpartition("=")
    return f"{name}{equals}{Path(value).name}" if value.startswith(("/", "~")) else word


def describe_machine() -> Machine:
    """Name processor and GPU; without torch no GPU is seen."""
    return Machine(
        processor=_processor(),
        gpu=_gpu(),
        cores=len(os.sched_getaffinity(0)),
    )


def _gpu() -> str | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def find_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
