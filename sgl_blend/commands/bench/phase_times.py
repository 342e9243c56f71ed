"""Reads the phases of blended prefills out of a trace of torch.profiler.

A trace shows every phase (fusion/phases.py) twice on a GPU: when the host went through it and when
the device did. What lies inside another phase, or while another runs on the same thread or stream, is
counted for the inner one only.
"""

import gzip
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sgl_blend.fusion.phases import PREFIX

_HOST, _DEVICE = "user_annotation", "gpu_user_annotation"


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace file, gzipped or not."""
    packed = path.read_bytes()
    text = gzip.decompress(packed) if path.suffix == ".gz" else packed
    events: list[dict[str, Any]] = msgspec.json.decode(text, strict=False)["traceEvents"]
    return events


def add_up(events: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return the seconds of each phase: ``host`` and ``device``, each by name, without inner phases."""
    lanes: dict[tuple[str, Any, Any], list[tuple[float, float, str]]] = {}
    for event in events:
        kind, name = event.get("cat"), str(event.get("name", ""))
        if event.get("ph") == "X" and kind in (_HOST, _DEVICE) and name.startswith(PREFIX):
            start, length = float(event["ts"]), float(event["dur"])
            lane = lanes.setdefault((str(kind), event.get("pid"), event.get("tid")), [])
            lane.append((start, start + length, name.removeprefix(PREFIX)))
    seconds: dict[str, dict[str, float]] = {"host": {}, "device": {}}
    for (kind, _, _), spans in lanes.items():
        place = seconds["host" if kind == _HOST else "device"]
        for name, microseconds in _own_times(spans):
            place[name] = place.get(name, 0.0) + microseconds / 1e6
    return seconds


def _own_times(spans: list[tuple[float, float, str]]) -> Iterable[tuple[str, float]]:
    """Yield every span's time without that of the spans directly inside it."""
    open_spans: list[tuple[float, str]] = []
    for start, stop, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_spans and open_spans[-1][0] <= start:
            open_spans.pop()
        yield name, stop - start
        if open_spans:
            yield open_spans[-1][1], start - stop
        open_spans.append((stop, name))
