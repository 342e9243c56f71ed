"""Tables of what the test models answer, from the files in benchmarks/results."""

from collections.abc import Callable

from sgl_blend.settings.config import BlendConfig
from tools.results_tables import circumstances, interval, load, percent, table

EVALUATED = {"seed1": "6 layers", "seed2": "6 layers, seed 2", "shallow": "4 layers"}
"""Committed models that `make eval` asks, as the tables call them."""


def answers(name: str) -> str:
    found = load(name)
    rows = [
        (
            row["policy"],
            f"{row['ratio']:g}",
            row["check_layer"] or "",
            f"{row['accuracy']:.3f} {interval(*row['ci95'])}",
            f"{row['kl']:.2g}",
            percent(row["recomputed_share"], 0),
            percent(row["layer_rows_share"], 0),
        )
        for row in found["rows"]
    ]
    header = ("policy", "ratio", "check layer", "accuracy, 95 %", "KL, nats", "recomputed", "cost")
    told = f"Model `{found['model']}`, {found['rows'][0]['n']} prompts.\n\n"
    return circumstances(found, "make eval") + told + table(header, rows)


def defaults() -> str:
    """Set all policies of `make eval` side by side, for each committed model that was asked."""
    found = [load(f"eval-{name}.json") for name in EVALUATED]
    by_key = [{(row["policy"], row["ratio"]): row for row in one["rows"]} for one in found]
    default = BlendConfig()
    rows = []
    for policy, ratio in by_key[0]:
        cells = [f"{policy}, {ratio:g}" if policy != "full" else "full prefill"]
        for of_model in by_key:
            row = of_model[policy, ratio]
            accuracy = f"{row['accuracy']:.3f} {interval(*row['ci95'])}"
            cells += [accuracy, f"{row['kl']:.2g}", percent(row["layer_rows_share"], 0)]
        if (policy, ratio) == (default.blend_policy, default.blend_recompute_ratio):
            cells[0] = f"**{cells[0]}**"
        rows.append(cells)
    names = [name for model in EVALUATED.values() for name in (f"{model}: accuracy", "KL", "cost")]
    told = f"{found[0]['rows'][0]['n']} prompts. Check layer {default.blend_check_layer}.\n\n"
    return circumstances(found[0], "make eval") + told + table(("policy, ratio", *names), rows)


def qualities(name: str) -> str:
    found = load(name)
    titles = {
        "check1": "check layer 1",
        "check2": "check layer 2",
        "check3": "check layer 3",
        "prefixes": "build prefixes",
        "gaps": "the latest of two statements",
    }
    chosen = {
        part: [row["accuracy"] for row in run["rows"] if row["policy"] not in ("full", "oracle")]
        for part, run in found.items()
    }
    rows = [
        (
            titles[part],
            run["rows"][0]["n"],
            len(run["rows"]),
            f"{run['rows'][0]['accuracy']:.3f}",
            f"{max(chosen[part]):.3f}",
            f"{min(chosen[part]):.3f}",
        )
        for part, run in found.items()
    ]
    header = (
        "run",
        "prompts",
        "settings",
        "accuracy, full prefill",
        "best blended",
        "worst blended",
    )
    first = found["check1"]
    told = (
        f"Model `{first['model']}`. The command is that of the first run. Best and worst are over all "
        "settings but those of the oracle.\n\n"
    )
    return circumstances(first, "make quality") + told + table(header, rows)


def probes() -> str:
    found = load("probes.json")
    kinds = {
        "words": "random tokens",
        "model": "written by the model",
        "chunks": "chunks of other prompts",
    }
    shares = [name for name in found["rows"][0] if name.startswith("covered_")]
    rows = [
        (
            kinds[row["text"]],
            row["tokens"],
            row["probes"],
            row["joined"] if row["probes"] > 1 else "",
            *(f"{row[share]:.3f}" for share in shares),
        )
        for row in found["rows"]
    ]
    tops = [f"top {percent(float(share.removeprefix('covered_')), 0)}" for share in shares]
    header = ("text before the chunk", "tokens", "probes", "joined by", *tops)
    told = circumstances(found, "benchmarks/probes.py") + f"{found['prompts']} prompts.\n\n"
    return told + table(header, rows)


def budget() -> str:
    rows = [
        (
            f"{name}: {row['policy']}, {row['ratio']:g}",
            f"{row['p5']:.2f} to {row['p95']:.2f}",
            *(
                f"{row[kind]['accuracy']:.3f} ({row[kind]['kl']:.2g})"
                for kind in ("fixed", "remembered")
            ),
            f"{row['gain']:+.3f} {interval(*row['gain_ci95'])}",
        )
        for name, found in load("budget.json").items()
        for row in found["rows"]
    ]
    first = next(iter(load("budget.json").values()))
    header = ("model, policy, ratio", "ratios given", "fixed", "remembered", "gain in accuracy")
    told = f"{first['prompts']} prompts. Accuracy, and KL in brackets.\n\n"
    return circumstances(first, "benchmarks/budget.py") + told + table(header, rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "probes": probes,
    "defaults": defaults,
    "budget": budget,
    "eval-seed1": lambda: answers("eval-seed1.json"),
    "eval-shallow": lambda: answers("eval-shallow.json"),
    "eval-seed2": lambda: answers("eval-seed2.json"),
    "quality-seed1": lambda: qualities("quality-seed1.json"),
    "quality-seed2": lambda: qualities("quality-seed2.json"),
}
"""By the name of the table; most are those of files, without their ending."""
