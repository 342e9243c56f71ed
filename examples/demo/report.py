"""What the demo found: the table, build/demo.json, the last line, and whether it is good enough."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from examples.demo.material import Material
from examples.demo.measure import TOKEN_KINDS, Run, kl_divergence, top1_agreement
from sgl_blend.commands.common.records import origin_of_script
from sgl_blend.settings.config import BlendConfig

RATIO = 0.15
"""The default recompute ratio, the one the speed-up is promised for."""


class Variant(NamedTuple):
    """One variant of blending.

    Attributes:
        policy: Which reused tokens are recomputed.
        ratio: Share of them.
    """

    policy: str
    ratio: float

    def __str__(self) -> str:
        return f"{self.policy} {self.ratio:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One variant against full prefill.

    Attributes:
        variant: Policy and ratio.
        counts: Tokens by kind, summed over the prompts.
        median_ttft_s: Median time to first token.
        ttft_s: Each prompt's.
        speedup: Median of full prefill over this one's.
        top1: Share of prompts with the same most likely first token.
        kl: Mean KL(full || blended) of the first token, in nats.
    """

    variant: Variant
    counts: dict[str, int]
    median_ttft_s: float
    ttft_s: tuple[float, ...]
    speedup: float
    top1: float
    kl: float

    @property
    def reused_share(self) -> float:
        """Share of the prompt tokens whose chunk KV was taken as it was."""
        return self.counts["reused_tokens"] / self.counts["prompt_tokens"]


def compare(blended: Mapping[Variant, Run], full: Run) -> list[Row]:
    """Set every variant against full prefill."""
    return [
        Row(
            variant=variant,
            counts=run.counts,
            median_ttft_s=run.median_s,
            ttft_s=run.ttft_s,
            speedup=full.median_s / run.median_s,
            top1=top1_agreement(full.logprobs, run.logprobs),
            kl=kl_divergence(full.logprobs, run.logprobs),
        )
        for variant, run in blended.items()
    ]


def make_table(rows: list[Row], full: Run, num_prompts: int) -> Table:
    """Lay the rows out, mean tokens per prompt, full prefill last."""
    table = Table(
        title=f"{num_prompts} prompts: tokens (mean), TTFT in s (median), KL in nats (mean)",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    kinds = [kind.removesuffix("_tokens") for kind in TOKEN_KINDS]
    table.add_column("variant", no_wrap=True)
    for name in (*kinds, "TTFT", "speed-up", "top-1", "KL"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row.variant),
            *(f"{row.counts[kind] / num_prompts:.0f}" for kind in TOKEN_KINDS),
            f"{row.median_ttft_s:.2f}",
            f"{row.speedup:.2f}x",
            f"{row.top1:.0%}",
            f"{row.kl:.2g}",
        )
    table.add_section()
    table.add_row("stock", *("" for _ in TOKEN_KINDS), f"{full.median_s:.2f}", "1.00x", "", "")
    return table


def figures(rows: list[Row]) -> dict[str, float]:
    """Return the figures that the demo is judged by."""
    default = BlendConfig().blend_policy
    by_ratio = {row.variant.ratio: row for row in rows if row.variant.policy == default}
    return {
        "speedup_ttft_r015": by_ratio[RATIO].speedup,
        "kl_r0": by_ratio[0.0].kl,
        "kl_r015": by_ratio[RATIO].kl,
        "kl_r05": by_ratio[0.5].kl,
        "kl_r1": by_ratio[1.0].kl,
        "top1_r1": by_ratio[1.0].top1,
        "reused_share": by_ratio[RATIO].reused_share,
    }


def shortfalls(found: Mapping[str, float]) -> list[str]:
    """Return one sentence for every bound that was missed."""
    bounds = [
        (found["speedup_ttft_r015"] >= 3.0, "speedup_ttft_r015 must be at least 3.0"),
        (found["kl_r1"] <= 1e-6, "kl_r1 must be at most 1e-6"),
        (found["kl_r05"] < found["kl_r0"], "kl_r05 must be below kl_r0"),
        (found["reused_share"] >= 0.5, "reused_share must be at least 0.5"),
    ]
    return [
        f"{bound}, got {', '.join(f'{name} {found[name]:.3g}' for name in found if name in bound)}"
        for holds, bound in bounds
        if not holds
    ]


def summary(found: Mapping[str, float]) -> str:
    """Return the demo's last line."""
    return (
        f"speed-up {found['speedup_ttft_r015']:.1f}x at ratio {RATIO}, "
        f"KL {found['kl_r015']:.2g} "
        f"(0: {found['kl_r0']:.2g}, 0.5: {found['kl_r05']:.2g}, 1: {found['kl_r1']:.1g}), "
        f"reused {found['reused_share']:.0%} of the prompt tokens"
    )


def to_json(
    rows: list[Row], full: Run, material: Material, commands: Mapping[str, str], wall_s: float
) -> str:
    """Return everything as JSON: figures first, then how they came about.

    Args:
        rows: From compare.
        full: The stock server's run.
        material: What was sent.
        commands: What started the servers.
        wall_s: How long the demo took.
    """
    report: dict[str, Any] = {
        **figures(rows),
        "ratios": [
            {
                **row.variant._asdict(),
                **row.counts,
                "median_ttft_s": row.median_ttft_s,
                "speedup": row.speedup,
                "top1": row.top1,
                "kl": row.kl,
                "ttft_s": row.ttft_s,
            }
            for row in rows
        ],
        "full_prefill": {"median_ttft_s": full.median_s, "ttft_s": full.ttft_s},
        "prompt_tokens": material.prompt_tokens,
        "chunk_tokens": material.chunk_tokens,
        "model_parameters": material.num_parameters,
        "vocab_size": material.vocab_size,
        "wall_s": round(wall_s, 1),
        **origin_of_script(),
        "server_commands": dict(commands),
    }
    return json.dumps(report, indent=2) + "\n"
