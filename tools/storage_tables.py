"""Tables of chunks behind the device."""

from collections.abc import Callable
from typing import Any

from tools.results_tables import circumstances, interval, load, table


def codec() -> str:
    found = load("codec.json")
    header = (
        "model, level",
        "bits at pages of 16",
        "of 64",
        "smaller than 8 bit",
        "ideal coding, bits",
        "direct, differences",
        "accuracy",
        "lost",
        "KL",
    )
    rows = []
    for name, model in found["models"].items():
        rows.append((f"{name}, lossless", *[""] * 5, f"{model['lossless']:.3f}", "", ""))
        rows += [
            _level_row(name, level, row, model["sizes"]) for level, row in model["levels"].items()
        ]
    shape = [
        (
            level,
            f"{row['bits']:.2f}",
            f"{row['bits'] / row['ideal_bits']:.3f}",
            *(_speed(row["mb_per_s"], what) for what in ("encode", "decode", "decode, numba")),
        )
        for level, row in found["shape"].items()
    ]
    prompts = next(iter(found["models"].values()))["prompts"]
    told = (
        f"Accuracy is of {prompts} held-out prompts, with pages of 16 tokens. Smaller than 8 bit, "
        "ideal coding and both transforms are at pages of 64.\n\n"
    )
    told_shape = (
        "\nMade-up KV in the shape of an 8B model, pages of 64, one core, MB/s of bfloat16 KV:\n\n"
    )
    speeds = ("level", "bits", "of the ideal", "encode", "decode, torch", "decode, numba")
    return (
        circumstances(found, "benchmarks/codec.py")
        + told
        + table(header, rows)
        + told_shape
        + table(speeds, shape)
    )


def _level_row(
    name: str, level: str, row: dict[str, Any], sizes: dict[str, Any]
) -> tuple[str, ...]:
    small, large = sizes["16"][level], sizes["64"][level]
    low, high = row["loss_ci95"]
    direct, differences = large["transforms"]["direct"], large["transforms"]["anchors"]
    return (
        f"{name}, {level}",
        f"{small['bits']:.2f}",
        f"{large['bits']:.2f}",
        f"{8 / large['bits']:.1f}x",
        f"{large['ideal_bits']:.2f}",
        f"{direct:.2f}, {differences:.2f}",
        f"{row['accuracy']:.3f}",
        f"{row['loss']:+.3f} {interval(low, high, 3)}",
        f"{row['kl']:.2g}",
    )


def _speed(speeds: dict[str, float], what: str) -> str:
    return f"{speeds[what]:,.0f}" if what in speeds else ""


BLOCKS: dict[str, Callable[[], str]] = {"codec": codec}
"""By the name of the file, without its ending."""
