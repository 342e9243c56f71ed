"""Evaluate the committed model on held-out prompts, and check what docs/quality.md claims.

    make eval          # 500 prompts, a seed that no choice of settings has seen

The last line is `full F reuse R default D@r random N first-k K`: accuracies as fractions, r the share
of the reused tokens that the default recomputes. Exit status 1 if a bound does not hold.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from examples.tinyrag.held_out import write_items
from examples.tinyrag.world import make_held_out
from sgl_blend.settings.config import BlendConfig

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
FINAL_SEED = 20261121
"""Of the prompts that figures are claimed on; defaults were chosen on other seeds."""

OTHERS = ("none", "all", "random", "first-k")
"""Policies that hkvd and those that trust a memory are compared with."""

Row = dict[str, Any]


def run_eval(
    model: Path, prompts: Iterable[dict[str, object]], *flags: str, json_file: Path | None = None
) -> dict[str, Any]:
    """Run ``sgl-blend eval`` and return what it wrote.

    Paths are relative to the repository, so that a kept result says nothing of this machine.

    Args:
        model: Folder of the model.
        prompts: Items.
        flags: Further flags.
        json_file: Keep the result there.
    """
    (ROOT / "build").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as name:
        folder = Path(name).relative_to(ROOT)
        items, out = folder / "held_out.jsonl", folder / "out.json"
        write_items(ROOT / items, prompts)
        command = [sys.executable, "-m", "sgl_blend", "eval"]
        command += ["--model-path", os.path.relpath(model, ROOT), "--data", str(items)]
        subprocess.run([*command, "--json", str(out), *flags], check=True, cwd=ROOT)
        text = (ROOT / out).read_text().replace(f"{folder}/", "build/")
    if json_file is not None:
        json_file.write_text(text)
    report: dict[str, Any] = json.loads(text)
    return report


def find(rows: list[Row], policy: str, ratio: float, check_layer: int | None) -> Row:
    """Return the row of one way."""
    for row in rows:
        if (row["policy"], row["ratio"], row["check_layer"]) == (policy, ratio, check_layer):
            return row
    raise LookupError(f"no row for {policy} at {ratio} and check layer {check_layer}")


def check(rows: list[Row], hkvd_two: Row) -> tuple[list[str], str]:
    """Compare rows with the bounds.

    Returns:
        Sentences about bounds that do not hold, and the summary line.
    """
    default = BlendConfig()
    ratio, layer = default.blend_recompute_ratio, default.blend_check_layer
    full = find(rows, "full", 1.0, None)
    reuse = find(rows, "none", 0.0, layer)
    chosen = find(rows, default.blend_policy, ratio, layer)
    exact = find(rows, "all", 1.0, layer)
    others = {name: find(rows, name, ratio, layer) for name in ("random", "first-k")}
    top = full["accuracy"]
    bounds = {
        "full prefill answers at least 0.97": top >= 0.97,
        "full reuse loses at least 0.4": reuse["accuracy"] <= top - 0.4,
        "the default recomputes at most 15 %": chosen["recomputed_share"] <= 0.15 + 0.005,
        "the default is within 0.01 of full prefill": chosen["accuracy"] >= top - 0.01 - 1e-9,
        "hkvd 0.2 at check layer 2 is within 0.02": hkvd_two["accuracy"] >= top - 0.02 - 1e-9,
        "funnel is within 0.005 of hkvd": all(
            find(rows, "funnel", ratio, layer)["accuracy"]
            >= find(rows, "hkvd", ratio, layer)["accuracy"] - 0.005 - 1e-9
            for ratio in (0.1, 0.15, 0.2)
        ),
        "ratio 1 is full prefill": exact["kl"] <= 1e-6 and exact["top1"] == 1.0,
    }
    for name, row in others.items():
        bounds[f"{name} loses at least 0.3"] = row["accuracy"] <= chosen["accuracy"] - 0.3
    line = (
        f"full {top:.3f} reuse {reuse['accuracy']:.3f} "
        f"default {chosen['accuracy']:.3f}@{chosen['recomputed_share']:.2f} "
        f"random {others['random']['accuracy']:.3f} first-k {others['first-k']['accuracy']:.3f}"
    )
    return [sentence for sentence, holds in bounds.items() if not holds], line


def main() -> int:
    parser = argparse.ArgumentParser(description="Evaluate the test model on held-out prompts.")
    parser.add_argument("--model", type=Path, default=FOLDER / "model")
    parser.add_argument("--seed", type=int, default=FINAL_SEED, help="of the prompts")
    parser.add_argument("--count", type=int, default=500, help="prompts")
    parser.add_argument("--json", type=Path, help="keep the table")
    args = parser.parse_args()
    default = BlendConfig()
    names = dict.fromkeys([*OTHERS, "hkvd", "funnel", "remembered", default.blend_policy])
    ratios = sorted({default.blend_recompute_ratio, 0.1, 0.15, 0.2})
    layers = sorted({default.blend_check_layer, 2})
    rows = run_eval(
        args.model,
        make_held_out(args.seed, args.count),
        *("--policies", ",".join(names), "--ratios", ",".join(map(str, ratios))),
        *("--check-layers", ",".join(map(str, layers)), "--max-new-tokens", "4"),
        json_file=args.json,
    )["rows"]
    missed, line = check(rows, find(rows, "hkvd", 0.2, 2))
    for sentence in missed:
        print(f"does not hold: {sentence}")
    print(line)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
