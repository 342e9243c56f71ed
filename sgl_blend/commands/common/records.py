"""What every file of results says: the machine, the versions, the command; never a folder of ours."""

import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What it ran on."""

    processor: str
    gpu: str | None
    cores: int

    def __str__(self) -> str:
        """Return it as benchmarks name it; the GPU, where there is one, is named first."""
        return ", ".join(filter(None, [self.gpu, self.processor, f"{self.cores} cores"]))


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
    """Name processor and GPU."""
    import torch

    return Machine(
        processor=_processor(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        cores=len(os.sched_getaffinity(0)),
    )


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
