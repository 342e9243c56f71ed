"""Pages for those who make a profile: keys before their rotation, nothing rounded to bins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_blend.storage.codec.coded_pages import read_body
from sgl_blend.storage.codec.coder import Coded, Rotation
from sgl_blend.storage.codec.quantiser import turn
from sgl_blend.storage.container import PageFormat
from sgl_blend.storage.envelope import Bytes
from sgl_blend.storage.frames import deflate, inflate

COLLECT = "collect"
"""Stands in names of such pages where a level stands in others. No server looks for it."""


class Collector:
    """Takes a Coder's place while pages are collected.

    Args:
        form: Of the pages.
        rotation: Of the model's keys.

    Attributes:
        frames: How many (layer, K/V) each frame of a page holds.
    """

    def __init__(self, form: PageFormat, rotation: Rotation) -> None:
        self._form = form
        self._rotation = rotation
        self.frames = [1] * (2 * form.layers)

    def takes(self, position: int) -> bool:
        """Tell whether keys can be rotated back from the positions of a page."""
        return 0 <= position <= len(self._rotation.table) - self._form.tokens

    def knows(self, position: int) -> bool:
        """Tell that no server reads these pages."""
        return False

    def encode(self, page: torch.Tensor, first: int, count: int, position: int) -> Coded:
        """Return a unit as float32; arguments as for a Coder."""
        layer, kind = divmod(first, 2)
        unit = page[kind, layer].float()
        if kind == 0:
            cos, sin = self._rotation.tables(position, self._form.tokens)
            unit = turn(unit, cos, -sin, neox=self._rotation.neox)
        return deflate(unit.contiguous().numpy().tobytes()), 0

    def decode(
        self, frames: Sequence[memoryview], page: bytearray, first: int, position: int
    ) -> bool:
        """Decode nothing."""
        return False


@dataclass(frozen=True, slots=True)
class CollectedPage:
    """A page that was collected.

    Attributes:
        weights: Digest of the weights.
        dtype: Of the KV that it was.
        units: K and V by layer, keys before their rotation: float32 [2 * layers, tokens, heads, dim].
    """

    weights: str
    dtype: str
    units: torch.Tensor


def read_collected(data: Bytes) -> CollectedPage | None:
    """Read an object that a Collector made; None if it is another."""
    found = read_body(memoryview(data))
    if found is None or found[0].level != COLLECT:
        return None
    header, body = found
    _, layers, tokens, heads, dim = header.shape
    units, offset = [], 0
    for frame in header.frames:
        raw = inflate(body[offset : offset + frame.size], 4 * tokens * heads * dim)
        if raw is None:
            return None
        units.append(torch.from_numpy(np.frombuffer(raw, np.float32).copy()))
        offset += frame.size
    whole = torch.stack(units).view(2 * layers, tokens, heads, dim)
    return CollectedPage(header.weights, header.dtype, whole)
