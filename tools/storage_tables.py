"""Tables of chunks behind the device, for the documentation: tiers, coding, deadlines."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from tools.results_tables import circumstances, interval, load, percent, table


def tiers() -> str:
    """Return times to first token by where the chunks lie."""
    found = load("tiers.json")
    fixed, chosen = found["medians_s"]["fixed"], found["medians_s"]["controller"]
    rows = [(place, _ms(fixed[place]), _ms(chosen[place])) for place in fixed]
    host = found["host"]
    load_s = host["host_latency_s"] + found["num_bytes"] / host["host_bytes_per_s"]
    rounds = len(found["seconds"]["fixed"]["text"])
    told = (
        f"A prompt reuses {found['num_bytes'] / 1e6:,.0f} MB of KV. Host memory loads them in "
        f"{_ms(load_s)} ms, as the controller measured. Times are medians of {rounds} rounds.\n\n"
    )
    bars = [
        (name, f"{value:.3f} {interval(low, high, 3)}", f"{bar:.2f}")
        for name, (value, low, high, bar) in found["bars"].items()
    ]
    return (
        circumstances(found, "benchmarks/tiers.py")
        + told
        + table(("where chunks lie", "TTFT, loads all, ms", "TTFT, controller, ms"), rows)
        + "\n"
        + table(("ratio of pairs", "measured", "at most"), bars)
    )


def tiers_levels() -> str:
    """Return how much faster coded chunks load than raw ones."""
    found = load("tiers-levels.json")
    rows = []
    for place, measured in found["rates"].items():
        raw, coded = measured["raw"], measured["coded"]
        times = [statistics.median(kind[what]) for what in WHATS for kind in (raw, coded)]
        load_raw, load_coded, ttft_raw, ttft_coded = times
        rows.append(
            (
                f"{place.split()[1]} MB/s",
                f"{load_raw:,.0f}",
                f"{load_coded:,.0f}",
                f"{load_raw / load_coded:.1f}x",
                _ms(ttft_raw),
                _ms(ttft_coded),
            )
        )
    header = (
        "files, read at",
        "raw loads, ms",
        "coded loads, ms",
        "faster",
        "TTFT raw, ms",
        "TTFT coded, ms",
    )
    return circumstances(found, "benchmarks/tiers.py") + table(header, rows)


WHATS = ("load_ms", "ttft_s")


def streaming() -> str:
    """Return how often deadlines are missed, by the level that chunks come at."""
    found = load("streaming.json")
    levels = list(found["mean"])
    rows: list[Sequence[str]] = [
        (
            name,
            _ms(case["slo_s"]),
            *(percent(case["rows"][level]["violations"], 0) for level in levels),
        )
        for name, case in found["cases"].items()
    ]
    rows.append(("mean", "", *(percent(found["mean"][level]) for level in levels)))
    header = ("trace, time beyond the device's", "deadline, ms", *levels)
    return circumstances(found, "benchmarks/streaming.py") + table(header, rows)


def codec_models() -> str:
    """Return what the levels take and cost on the test models."""
    found = load("codec.json")
    rows: list[Sequence[str]] = []
    for name, model in found["models"].items():
        rows.append((f"{name}, lossless", *[""] * 5, f"{model['lossless']:.3f}", "", ""))
        rows += [
            _level_row(name, level, row, model["sizes"]) for level, row in model["levels"].items()
        ]
    prompts = sorted({model["prompts"] for model in found["models"].values()})
    told = (
        f"Accuracy is of {' or '.join(map(str, prompts))} held-out prompts, with pages of 16 "
        "tokens. Columns from the third to the sixth are at pages of 64.\n\n"
    )
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
    origin = next(iter(found["models"].values())).get("origin", found)
    return circumstances(origin, "benchmarks/codec.py") + told + table(header, rows)


def _level_row(
    name: str, level: str, row: dict[str, Any], sizes: dict[str, Any]
) -> tuple[str, ...]:
    small, large = sizes["16"][level], sizes["64"][level]
    low, high = row["loss_ci95"]
    direct, differences = large["transforms"]["direct"], large["transforms"]["anchors"]
    return (
        f"{name}, `{level}`",
        f"{small['bits']:.2f}",
        f"{large['bits']:.2f}",
        f"{8 / large['bits']:.1f}x",
        f"{large['ideal_bits']:.2f}",
        f"{direct:.2f}, {differences:.2f}",
        f"{row['accuracy']:.3f}",
        f"{row['loss']:+.3f} {interval(low, high, 3)}",
        f"{row['kl']:.2g}",
    )


def coded_score() -> str:
    """Return what it is worth that deviation is measured against KV as coding left it."""
    found = load("coded-score.json")
    rows = []
    for name, levels in found["models"].items():
        for level, row in levels.items():
            low, high = row["kl_saved_ci95"]
            kl, right = row["kl"], row["right"]
            rows.append(
                (
                    f"{name}, `{level}`",
                    *(f"{kl[way]:.3f}" for way in ("as it came", "clean", "none")),
                    interval(low, high, 3),
                    *(f"{right[way]:.3f}" for way in ("as it came", "clean")),
                )
            )
    header = (
        "model, level",
        "KL, as it came",
        "KL, clean",
        "KL, nothing recomputed",
        "KL saved, 95 %",
        "right, as it came",
        "right, clean",
    )
    told = f"{found['prompts']} held-out prompts for each model.\n\n"
    return circumstances(found, "benchmarks/coded_score.py") + told + table(header, rows)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}"


BLOCKS: dict[str, Callable[[], str]] = {
    "tiers": tiers,
    "tiers-levels": tiers_levels,
    "streaming": streaming,
    "codec-models": codec_models,
    "coded-score": coded_score,
}
"""By the name in the page's comment."""
