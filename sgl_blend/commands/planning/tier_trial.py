"""How fast this machine brings KV from its own memory and from a folder."""

from __future__ import annotations

import importlib.util
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sgl_blend.errors import CommandError
from sgl_blend.tuning.links import LinkSpeed, TimedLoad, fit_speed

SMALL_BYTES = 4096
_REPEATS = 5
_BLOCK_BYTES = 4 << 20


def time_host_copy(num_bytes: int) -> LinkSpeed:
    """Measure copies from host memory: to the GPU if there is one, else within the memory.

    Args:
        num_bytes: Of the large copy, more than SMALL_BYTES.
    """
    if _has_gpu():
        return fit_speed(_time_gpu_copies(num_bytes))
    import numpy as np

    trial = []
    for size in (SMALL_BYTES, num_bytes):
        source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        trial += _timed(size, partial(np.copyto, target, source))
    return fit_speed(trial)


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _time_gpu_copies(num_bytes: int) -> list[TimedLoad]:
    import torch

    trial = []
    for size in (SMALL_BYTES, num_bytes):
        source = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(size, dtype=torch.uint8, device="cuda")

        def copy(source: torch.Tensor = source, target: torch.Tensor = target) -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        trial += _timed(size, copy)
    return trial


def _timed(num_bytes: int, work: Callable[[], object]) -> list[TimedLoad]:
    """Time some work a few times, after one that is not counted."""
    work()
    found = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        found.append(TimedLoad(num_bytes, max(time.perf_counter() - start, 1e-9)))
    return found


def time_file_reads(folder: Path, num_bytes: int) -> LinkSpeed:
    """Measure reads of a new file in a folder, after Linux was asked to forget its contents.

    A file system that lives in memory forgets nothing; then the speed is that of the memory.

    Args:
        folder: Where a file is made and removed again.
        num_bytes: Of the file, more than SMALL_BYTES.

    Raises:
        CommandError: The folder does not take the file.
    """
    try:
        with tempfile.TemporaryFile(dir=folder, prefix="sgl-blend-trial-") as file:
            block = random.Random(0).randbytes(_BLOCK_BYTES)  # which no file system compresses well
            for start in range(0, num_bytes, _BLOCK_BYTES):
                file.write(block[: num_bytes - start])
            file.flush()
            os.fsync(file.fileno())
            return fit_speed(_time_reads(file.fileno(), num_bytes))
    except OSError as err:
        raise CommandError(f"--store-dir {folder}: {err.strerror}") from err


def _time_reads(descriptor: int, num_bytes: int) -> list[TimedLoad]:
    buffer = bytearray(_BLOCK_BYTES)
    draw = random.Random(1)
    trial = []
    for size in (SMALL_BYTES, num_bytes):
        for _ in range(_REPEATS):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            at = draw.randrange((num_bytes - size) // SMALL_BYTES + 1) * SMALL_BYTES
            start = time.perf_counter()
            end = at + size
            while at < end:
                view = memoryview(buffer)[: min(end - at, _BLOCK_BYTES)]
                at += os.preadv(descriptor, [view], at)
            trial.append(TimedLoad(size, time.perf_counter() - start))
    return trial
