"""Tables of chunks behind the device, for the documentation: tiers, coding, deadlines."""

import statistics
from collections.abc import Callable

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
        f"{_ms(load_s)} ms, as the controller measured. Times are medians of {rounds} rounds; all "
        f"engines were started {found['starts']} times meanwhile.\n\n"
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


def codec_models() -> str:
    """Return how small the chunks of the test models become, and what coding them costs."""
    models = load("codec.json")["models"]
    costs: list[tuple[str, ...]] = []
    sizes: list[tuple[str, ...]] = []
    for model, found in models.items():
        costs.append((model, "`lossless`", f"{found['lossless']:.3f}", "", ""))
        for level, cost in found["levels"].items():
            lost = f"{cost['loss']:.3f} {interval(*cost['loss_ci95'])}"
            costs.append(
                (model, f"`{level}`", f"{cost['accuracy']:.3f}", lost, f"{cost['kl']:.3f}")
            )
            small, large = (found["sizes"][page][level] for page in ("16", "64"))
            ways = large["transforms"]
            sizes.append(
                (
                    model,
                    f"`{level}`",
                    *(f"{8 / page['bits']:.2f}x" for page in (small, large)),
                    f"{large['bits'] / large['ideal_bits']:.2f}",
                    f"{large['bits'] / large['arithmetic_bits']:.2f}",
                    f"{ways['anchors'] / ways['direct']:.2f}",
                )
            )
    smaller = (
        "model",
        "level",
        "smaller than 8 bit, pages of 16",
        "pages of 64",
        "of the ideal",
        "of arithmetic coding",
        "differences / direct",
    )
    runs = [
        f"{model}, {found['prompts']} held-out prompts:\n\n"
        + circumstances(found["origin"], "benchmarks/codec.py")
        for model, found in models.items()
    ]
    return (
        "".join(runs)
        + table(("model", "level", "accuracy", "lost", "KL"), costs)
        + "\nThe last three columns are at pages of 64:\n\n"
        + table(smaller, sizes)
    )


def codec_entropy() -> str:
    """Return what arithmetic coding takes beside zstd, in the shape of an 8B model."""
    found = load("codec.json")
    rows = []
    for level, ways in found["entropy"].items():
        zstd, arithmetic = ways["zstd"], ways["arithmetic"]
        fastest = max(
            speed for what, speed in zstd["mb_per_s"].items() if what.startswith("decode")
        )
        slow = arithmetic["mb_per_s"]
        rows.append(
            (
                f"`{level}`",
                *(f"{way['bits']:.2f}" for way in (zstd, arithmetic)),
                f"{zstd['bits'] / arithmetic['bits']:.2f}",
                f"{zstd['mb_per_s']['encode'] / slow['encode']:.0f}x",
                f"{fastest / slow['decode']:.0f}x",
            )
        )
    header = (
        *("level", "zstd, bits a value", "arithmetic coding", "zstd / arithmetic"),
        *("zstd encodes as fast", "and decodes"),
    )
    return circumstances(found["entropy_origin"], "benchmarks/codec.py") + table(header, rows)


def coded_score() -> str:
    """Return what it is worth that deviation is measured against KV as coding left it."""
    found = load("coded-score.json")
    rows = []
    for model, levels in found["models"].items():
        for level, row in levels.items():
            kl, (low, high) = row["kl"], row["kl_saved_ci95"]
            beyond_low, beyond_high = row["kl_saved_beyond_ci95"]
            rows.append(
                (
                    model,
                    f"`{level}`",
                    *(f"{kl[way]:.3f}" for way in ("none", "clean", "as it came")),
                    interval(low, high, 3),
                    f"{kl['beyond']:.3f}",
                    interval(beyond_low, beyond_high, 3),
                )
            )
    header = (
        "model",
        "level",
        "KL, nothing recomputed",
        "clean",
        "as it came",
        "saved",
        "beyond half a bin",
        "saved",
    )
    told = f"{found['prompts']} held-out prompts for each model:\n\n"
    return circumstances(found, "benchmarks/coded_score.py") + told + table(header, rows)


def streaming() -> str:
    """Return how many requests missed their deadline, by trace, deadline and level."""
    found = load("streaming.json")
    names = list(found["mean"])
    rows = [
        (case, *(percent(told["rows"][name]["violations"], 0) for name in names))
        for case, told in found["cases"].items()
    ]
    rows.append(("mean", *(percent(found["mean"][name]) for name in names)))
    header = ("trace, time beyond the least", *(f"`{name}`" for name in names))
    prompts = len(next(iter(found["cases"].values()))["rows"][names[0]]["ttft_s"])
    told = f"Of {prompts} prompts for each cell:\n\n"
    return circumstances(found, "benchmarks/streaming.py") + told + table(header, rows)


WHATS = ("load_ms", "ttft_s")


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.0f}"


BLOCKS: dict[str, Callable[[], str]] = {
    "tiers": tiers,
    "tiers-levels": tiers_levels,
    "codec-entropy": codec_entropy,
    "codec-models": codec_models,
    "coded-score": coded_score,
    "streaming": streaming,
}
"""By the name in the page's comment."""
