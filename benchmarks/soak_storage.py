"""A folder of stored KV that is damaged while a server uses it."""

from __future__ import annotations

import random
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

STORAGE_FLAGS = ["--page-size", "16", "--hicache-storage-backend", "file"]
STORAGE_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
_PAUSE_S = 0.3


@dataclass(slots=True)
class DamagedStore:
    """A folder, and what was done to its files.

    Attributes:
        folder: Where the server stores.
        damages: How often each kind of damage was done.
    """

    folder: Path
    damages: Counter[str] = field(default_factory=Counter)

    def damage(self, draw: random.Random) -> None:
        """Flip a bit of a file, cut it, empty it or remove it."""
        files = list(self.folder.glob("*.bin"))
        if not files:
            return
        path = draw.choice(files)
        kind = draw.choice(("bit", "cut", "empty", "gone"))
        try:
            data = bytearray(path.read_bytes())
            if kind == "gone":
                path.unlink()
            elif data:
                place = draw.randrange(len(data))
                data[place] ^= 1 << draw.randrange(8)
                kept = {"bit": len(data), "cut": place, "empty": 0}[kind]
                path.write_bytes(data[:kept])
        except FileNotFoundError:  # the server has just removed it
            return
        self.damages[kind] += 1


@contextmanager
def damaged_store() -> Iterator[DamagedStore]:
    """Give a folder to a server, and damage a file of it several times a second."""
    draw, over = random.Random("storage"), threading.Event()
    with tempfile.TemporaryDirectory(prefix="soak-store-") as folder:
        store = DamagedStore(Path(folder))

        def run() -> None:
            while not over.wait(_PAUSE_S):
                store.damage(draw)

        thread = threading.Thread(target=run, name="damage")
        thread.start()
        try:
            yield store
        finally:
            over.set()
            thread.join()
