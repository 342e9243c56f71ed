"""The codec on made-up KV in the shape of an 8B model: sizes beside the ideal, and one core timed.

Gaussian KV stands in for weights that are not here, with a scale and a mean for each channel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from sgl_blend.commands.codec.profile import measure_size
from sgl_blend.storage.codec import fast
from sgl_blend.storage.codec.coded_pages import pack_coded, unpack_coded
from sgl_blend.storage.codec.coder import Coder, Rotation
from sgl_blend.storage.codec.collector import CollectedPage
from sgl_blend.storage.codec.levels import (
    LEVELS,
    PROFILE_VERSION,
    CodecProfile,
    Entropy,
    LevelFigures,
    Transform,
)
from sgl_blend.storage.codec.quantiser import make_unit_code, turn
from sgl_blend.storage.codec.statistics import (
    count_bins,
    ideal_bits,
    measure_scales,
    probabilities,
)
from sgl_blend.storage.container import PageFormat, PageLabel

SHAPE = PageFormat("bfloat16", 8, 64, 8, 128)
"""Eight of the layers of Llama 3.1 8B."""
MAX_LOSS = 0.01
LEAST_REPEATS, LEAST_S = 5, 2.0


def ideal_of(
    profile: CodecProfile, level: str, figures: LevelFigures, pages: list[CollectedPage]
) -> float:
    """Return the bits per element of ideal arithmetic coding, anchors at 8 bits."""
    learned, held_out = pages[::2], pages[1::2]
    bits = elements = 0.0
    for index, transform in enumerate(figures.transforms):
        code = make_unit_code(profile, LEVELS[level], index, Transform(transform), slice(None))
        trained, _ = count_bins(code, [page.units[index] for page in learned])
        counts, _ = count_bins(code, [page.units[index] for page in held_out])
        anchors = sum(code.num_anchor_bytes(len(page.units[index])) for page in held_out)
        bits += ideal_bits(counts, trained) + 8 * anchors
        elements += sum(page.units[index].numel() for page in held_out)
    return bits / elements


def _table(positions: int, dim: int) -> torch.Tensor:
    rates = 1 / 500_000 ** (torch.arange(0, dim, 2) / dim)
    angles = torch.arange(positions)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


def made_up_pages(count: int) -> list[CollectedPage]:
    """Return Gaussian pages whose channels differ in scale and mean."""
    draw = torch.Generator().manual_seed(0)
    _, layers, tokens, heads, dim = SHAPE.shape
    shape = (2 * layers, 1, heads, dim)
    sigma = torch.exp(0.3 * torch.randn(shape, generator=draw))
    mean = torch.randn(shape, generator=draw)
    return [
        CollectedPage(
            "0" * 32,
            SHAPE.dtype,
            torch.randn(2 * layers, tokens, heads, dim, generator=draw) * sigma + mean,
        )
        for _ in range(count)
    ]


def _made_up_profile(pages: list[CollectedPage]) -> tuple[CodecProfile, list[list[torch.Tensor]]]:
    """Return a profile without levels of made-up pages, and what it rests on, [unit][page]."""
    units = [[page.units[index] for page in pages[::2]] for index in range(2 * SHAPE.layers)]
    profile = CodecProfile(
        PROFILE_VERSION,
        pages[0].weights,
        SHAPE.layers,
        SHAPE.heads,
        SHAPE.dim,
        "Gaussian",
        len(pages),
        MAX_LOSS,
        0,
        [measure_scales(unit) for unit in units],
        {},
    )
    return profile, units


def _direct(profile: CodecProfile, level: str) -> CodecProfile:
    """Return a profile of one level that codes every unit directly."""
    figures = LevelFigures([int(Transform.DIRECT)] * len(profile.units), 0.0, 0.0, 0.0, 0.0)
    return msgspec.structs.replace(profile, levels={level: figures})


def measure_shape() -> dict[str, Any]:
    """Compare sizes with the ideal, and time one core."""
    torch.set_num_threads(1)
    pages = made_up_pages(16)
    profile, _ = _made_up_profile(pages)
    found = {}
    for level in LEVELS:
        made = _direct(profile, level)
        bits, _ = measure_size(made, level, pages[1::2])
        found[level] = {
            "bits": bits,
            "ideal_bits": ideal_of(made, level, made.levels[level], pages),
            "mb_per_s": time_level(made, level, pages[0]),
        }
    return found


def measure_entropy() -> dict[str, Any]:
    """Compare zstd with arithmetic coding: bits per element, and MB/s of one core, by level."""
    torch.set_num_threads(1)
    pages = made_up_pages(16)
    profile, units = _made_up_profile(pages)
    found = {}
    for level in LEVELS:
        made = _direct(profile, level)
        both = {"zstd": made, "arithmetic": _with_arithmetic(made, level, units)}
        found[level] = {
            name: {
                "bits": measure_size(one, level, pages[1:4:2])[0],
                "mb_per_s": time_level(one, level, pages[0]),
            }
            for name, one in both.items()
        }
    return found


def _with_arithmetic(
    profile: CodecProfile, level: str, units: Sequence[Sequence[torch.Tensor]]
) -> CodecProfile:
    """Return a profile of one direct level with the distributions of units, [unit][page]."""
    tables = []
    for index, unit in enumerate(units):
        code = make_unit_code(profile, LEVELS[level], index, Transform.DIRECT, slice(None))
        tables.append(probabilities(count_bins(code, unit)[0]))
    figures = msgspec.structs.replace(profile.levels[level], probabilities=b"".join(tables))
    return msgspec.structs.replace(
        profile, entropy=int(Entropy.ARITHMETIC), levels={level: figures}
    )


def time_level(profile: CodecProfile, level: str, page: CollectedPage) -> dict[str, float]:
    """Return MB of bfloat16 KV a second, on one core, whole objects made and read."""
    rotation = Rotation(_table(1024, SHAPE.dim), neox=True)
    coder = Coder(profile, level, SHAPE, rotation)
    values = page.units.view(SHAPE.layers, 2, *page.units.shape[1:]).transpose(0, 1).clone()
    cos, sin = rotation.tables(320, SHAPE.tokens)
    values[0] = turn(values[0], cos, sin, neox=True)
    octets = values.bfloat16().reshape(-1).view(torch.uint8).numpy()
    label = PageLabel("sgb2-0", SHAPE, profile.weights, "0", level, profile.digest())
    data, _ = pack_coded(octets.data, label, coder, 320)
    with patch.object(fast, "is_available", lambda: False):
        seconds = {
            "encode": _best(lambda: pack_coded(octets.data, label, coder, 320)),
            "decode": _best(lambda: unpack_coded(data, label, coder)),
        }
    if fast.is_available() and profile.entropy == Entropy.ZSTD:
        seconds["encode, numba"] = _best(lambda: pack_coded(octets.data, label, coder, 320))
        if LEVELS[level].bits == 4:
            seconds["decode, numba"] = _best(lambda: unpack_coded(data, label, coder))
    return {name: SHAPE.page_bytes / 1e6 / value for name, value in seconds.items()}


def _best(job: Callable[[], object]) -> float:
    """Return the least seconds of many: other work on the machine only adds, for seconds at a time."""
    job()
    times: list[float] = []
    until = time.perf_counter() + LEAST_S
    while len(times) < LEAST_REPEATS or time.perf_counter() < until:
        begun = time.perf_counter()
        job()
        times.append(time.perf_counter() - begun)
    return min(times)
