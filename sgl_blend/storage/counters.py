"""What happened between a server and its KV store, added up."""

from __future__ import annotations

from collections import Counter
from threading import Lock

TOTALS = {
    "hits": "Pages that were read.",
    "misses": "Pages that were asked for and are not stored.",
    "read_bytes": "Bytes of KV that were read.",
    "read_seconds": "Seconds in which they were read.",
    "writes": "Pages that were written.",
    "written_bytes": "Bytes of KV that were written.",
    "write_seconds": "Seconds in which they were written.",
    "not_stored": "Pages that could not be written. Those behind one in its batch are not tried.",
    "removed": "Faulty objects that were removed.",
    "clipped": "Values beyond the outermost bin of a coded page.",
    "left_for_text": "Pages that are stored and were left, because computing their text was faster.",
}


class StorageCounters:
    """Totals of one store. SGLang's storage threads add to them, the scheduler reads them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._totals: Counter[str] = Counter(dict.fromkeys(TOTALS, 0))
        self._seconds = {"read_seconds": 0.0, "write_seconds": 0.0}
        self._faults: Counter[str] = Counter()
        self._levels: Counter[str] = Counter()

    def add(self, name: str, count: int = 1) -> None:
        """Add to a total of TOTALS."""
        with self._lock:
            self._totals[name] += count

    def add_moved(self, kind: str, num_bytes: int, seconds: float) -> None:
        """Note bytes of KV that were moved.

        Args:
            kind: "read" or "write".
            num_bytes: Of KV, not of what the store keeps.
            seconds: It took, objects made or checked.
        """
        with self._lock:
            self._totals["read_bytes" if kind == "read" else "written_bytes"] += num_bytes
            self._seconds[f"{kind}_seconds"] += seconds

    def add_level(self, level: str) -> None:
        """Count a page that was read by its level."""
        with self._lock:
            self._levels[level] += 1

    def fault(self, reason: str) -> None:
        """Count a fault by its reason: of the container (Fault) or of a call (CallFault)."""
        with self._lock:
            self._faults[reason] += 1

    def snapshot(self) -> dict[str, int | float | dict[str, int]]:
        """Return all totals by name, the pages that were read by level, and the faults by reason."""
        with self._lock:
            parts = {"levels": dict(self._levels), "faults": dict(self._faults)}
            return {**self._totals, **self._seconds, **parts}
