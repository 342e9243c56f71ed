"""Pages of several frames, some of which cannot be coded and are kept as they are."""

from __future__ import annotations

import pytest
import torch
from codec_cases import coder_of, label_of, page_at, rotation

from sgl_blend.storage.codec import fast
from sgl_blend.storage.codec.coded_pages import pack_coded, unpack_coded
from sgl_blend.storage.codec.levels import Transform
from sgl_blend.storage.container import PageFormat

FORM = PageFormat("bfloat16", 8, 16, 8, 128)
PER_FRAME, FRAMES, POSITION = 4, 4, 37


def _by_units(page: bytes | bytearray) -> torch.Tensor:
    """Return bits of K and V by layer."""
    bits = torch.frombuffer(bytearray(page), dtype=torch.int16).view(FORM.shape)
    return bits.transpose(0, 1).flatten(0, 1)


@pytest.mark.parametrize("has_numba", [True, False], ids=["numba", "torch"])
@pytest.mark.parametrize("transform", Transform)
@pytest.mark.parametrize("raw", [(), (1,), (1, 2), (0, 3), (0, 1, 2, 3)], ids=str)
def test_frames_that_are_not_coded_stand_among_those_that_are(
    raw: tuple[int, ...], transform: Transform, has_numba: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_numba:
        pytest.importorskip("numba")
    monkeypatch.setattr(fast, "is_available", lambda: has_numba)
    coder, profile = coder_of(FORM, "q4", transform=transform)
    if transform is Transform.DIRECT:
        assert coder.frames == [PER_FRAME] * FRAMES
    firsts = [sum(coder.frames[:index]) for index in raw if index < len(coder.frames)]
    page, _ = page_at(FORM, rotation(FORM), POSITION, 5)
    label = label_of(FORM, profile, "q4")
    clean = unpack_coded(pack_coded(page, label, coder, POSITION)[0], label, coder)
    assert isinstance(clean, bytearray)

    values = torch.frombuffer(bytearray(page), dtype=torch.bfloat16).view(FORM.shape).clone()
    for first in firsts:
        values[first % 2, first // 2, 3, 2, 1] = float("nan")
    written = values.view(torch.uint8).numpy().tobytes()
    back = unpack_coded(pack_coded(written, label, coder, POSITION)[0], label, coder)
    assert isinstance(back, bytearray)

    found, exact, coded = _by_units(back), _by_units(written), _by_units(clean)
    unit = 0
    for index, count in enumerate(coder.frames):
        wanted = exact if index in raw else coded
        assert torch.equal(found[unit : unit + count], wanted[unit : unit + count]), index
        unit += count
