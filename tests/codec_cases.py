"""Pages of KV and profiles for tests of the codec."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from sgl_blend.storage.codec.coder import Coder, Rotation
from sgl_blend.storage.codec.levels import (
    LEVELS,
    PROFILE_VERSION,
    CodecProfile,
    Entropy,
    LevelFigures,
    Transform,
)
from sgl_blend.storage.codec.quantiser import make_unit_code, turn
from sgl_blend.storage.codec.statistics import count_bins, measure_scales, probabilities
from sgl_blend.storage.container import PageFormat, PageLabel

WEIGHTS = "w" * 32


def table(positions: int = 256, rotary_dim: int = 16) -> torch.Tensor:
    """Return cosines, then sines: [positions, rotary_dim]."""
    rates = 1 / 10_000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    angles = torch.arange(positions)[:, None] * rates
    return torch.cat([angles.cos(), angles.sin()], -1)


def rotation(form: PageFormat, *, neox: bool = True) -> Rotation:
    return Rotation(table(rotary_dim=form.dim), neox)


def unrotated(form: PageFormat, seed: int) -> torch.Tensor:
    """Return KV whose channels differ, keys before their rotation: float32 [2, layers, ...]."""
    draw = torch.Generator().manual_seed(seed)
    fixed = torch.Generator().manual_seed(99)  # of the model, not of the page
    shape = (2, form.layers, 1, form.heads, form.dim)
    sigma = torch.exp(0.5 * torch.randn(shape, generator=fixed))
    mean = torch.randn(shape, generator=fixed)
    return torch.randn(form.shape, generator=draw) * sigma + mean


def page_at(
    form: PageFormat, turned: Rotation, position: int, seed: int
) -> tuple[bytes, torch.Tensor]:
    """Return a page as the pool holds it, and its values."""
    values = unrotated(form, seed)
    cos, sin = turned.tables(position, form.tokens)
    for layer in range(form.layers):
        values[0, layer] = turn(values[0, layer], cos, sin, neox=turned.neox)
    held = values.to(getattr(torch, form.dtype))
    return held.view(torch.uint8).numpy().tobytes(), held.float()


def profile_of(
    form: PageFormat,
    *,
    transform: Transform = Transform.DIRECT,
    entropy: Entropy = Entropy.ZSTD,
    weights: str = WEIGHTS,
    pages: list[torch.Tensor] | None = None,
) -> CodecProfile:
    """Return a profile with every level, from pages whose keys are not rotated."""
    pages = pages or [unrotated(replace(form, tokens=64), seed) for seed in range(1000, 1008)]
    units = [
        [page[kind, layer] for page in pages] for layer in range(form.layers) for kind in (0, 1)
    ]
    bare = CodecProfile(
        PROFILE_VERSION,
        weights,
        form.layers,
        form.heads,
        form.dim,
        "test",
        len(pages),
        0.01,
        int(entropy),
        [measure_scales(unit) for unit in units],
        {},
    )
    levels = {}
    for name, level in LEVELS.items():
        tables = b""
        if entropy is Entropy.ARITHMETIC:
            codes = [
                make_unit_code(bare, level, index, transform, slice(None))
                for index in range(len(units))
            ]
            tables = b"".join(
                probabilities(count_bins(code, unit)[0])
                for code, unit in zip(codes, units, strict=True)
            )
        levels[name] = LevelFigures(
            [int(transform)] * len(units), float(level.bits) / 2, 0.0, 0.0, 0.0, tables
        )
    return CodecProfile(
        bare.v,
        bare.weights,
        bare.layers,
        bare.heads,
        bare.dim,
        bare.data,
        bare.prompts,
        bare.max_loss,
        bare.entropy,
        bare.units,
        levels,
    )


def label_of(form: PageFormat, profile: CodecProfile, level: str) -> PageLabel:
    return PageLabel("sgb2-test-00", form, WEIGHTS, "rotary", level, profile.digest())


def coder_of(form: PageFormat, level: str, **more: Any) -> tuple[Coder, CodecProfile]:
    profile = profile_of(form, **more)
    return Coder(profile, level, form, rotation(form)), profile
