"""Tables of what is found in prompts without marks, for the documentation."""

import re
from collections.abc import Callable
from typing import Any

from tools.results_tables import circumstances, interval, load, runnable, table


def find() -> str:
    """Return what is found in prompts without marks."""
    found = load("find.json")
    streams = found["streams"]
    rows = [
        (
            name,
            f"{streams['marked'][name]['hit']:.3f}",
            *(f"{row[share]:.3f}" for share in ("hit", "of_marked", "recall", "built")),
            f"{row['piece']:.0f}",
        )
        for name, row in streams["rag"].items()
    ]
    for name, row in streams["others"].items():
        shares = (f"{row['hit']:.3f}", "", f"{row['recall']:.3f}", f"{row['built']:.3f}")
        rows.append((name, "", *shares, f"{row['piece']:.0f}"))
    header = ("prompts", "marked", "learned", "of marked", "recall", "built", "tokens of a piece")
    return circumstances(found, "benchmarks/find.py") + table(header, rows) + _times(found)


def _times(found: dict[str, Any]) -> str:
    told = ""
    if lookup := found.get("lookup"):
        both, fixed = lookup["both_ms"], lookup["fixed_ms"]
        told += (
            f"\nIntake and lookup of a prompt of {lookup['prompt_tokens']:,} tokens, of which "
            f"{lookup['found_tokens']:,.0f} are found, with {lookup['chunks']:,} chunks in the tree "
            f"and {lookup['starts']:,} starts in the index: {both['p50']:.2f} ms at the median and "
            f"{both['p99']:.2f} at p99; the fixed arithmetic beside it {fixed['p50']:.2f} and "
            f"{fixed['p99']:.2f}. A start takes {lookup['bytes_of_a_start']:.0f} bytes. "
            f"{_measured(lookup)}\n"
        )
    if ttft := found.get("ttft"):
        told += (
            f"\nThe TTFT of prompts that never repeat is {1 + ttft['overhead']:.3f} of that with "
            f"`marks`. {_measured(ttft)}\n"
        )
    return told


def _measured(part: dict[str, Any]) -> str:
    command = re.sub(r" --json \S+", "", runnable(part["command"]))
    return f"Measured by `{command}` on {part['date'].partition('T')[0]}."


def find_quality() -> str:
    """Return what learned chunks cost in quality."""
    found = load("find_quality.json")
    rows = [
        (
            name,
            f"{found[name]['accuracy']:.3f} {interval(*found[name]['accuracy_ci95'])}",
            f"{found[name]['kl']:.3f} {interval(*found[name]['kl_ci95'])}",
            found[name]["chunks"],
        )
        for name in ("full", "marked", "learned")
    ]
    more = found["learned_minus_marked"]
    told = (
        f"\nLearned minus marked, in pairs: KL {more['kl']:+.3f} {interval(*more['kl_ci95'])}. "
        f"Of the documents' tokens {found['found_of_documents']:.3f} were found.\n"
    )
    header = ("chunks", "accuracy", "KL to full prefill, nats", "chunks used")
    return circumstances(found, "benchmarks/find_quality.py") + table(header, rows) + told


def own_history() -> str:
    """Return how a conversation's own KV compares with chunks."""
    found = load("own_history.json")
    rows = []
    for kind, told in found["kinds"].items():
        for way, row in told["ways"].items():
            old = "" if row["old_answer"] is None else f"{row['old_answer']:.3f}"
            rows.append(
                (
                    f"{kind}; {way}",
                    f"{row['kl']:.3f} {interval(*row['kl_ci95'])}",
                    f"{row['same_answer']:.3f} {interval(*row['same_answer_ci95'])}",
                    f"{old} of {row['changed_answers']}" if old else "",
                )
            )
    header = ("the line that changes; KV behind it", "KL, nats", "same answer", "old answer")
    return circumstances(found, "benchmarks/own_history.py") + table(header, rows)


def agent() -> str:
    """Return what became of the tokens of an agent with a clock, turn by turn."""
    found = load("agent.json")
    kinds = ("prompt", "prefix", "reused", "recomputed", "computed")
    rows = [
        (
            number,
            *(f"{turn[f'{kind}_tokens']:,}" for kind in kinds),
            f"{turn['found'] / turn['repeated']:.0%}" if turn["repeated"] else "",
            f"{turn['ttft_s']:.2f}",
            f"{turn['stock_ttft_s']:.2f}",
            f"{turn['stock_ttft_s'] / turn['ttft_s']:.1f}x",
        )
        for number, turn in enumerate(found["turns"], start=1)
    ]
    told = (
        f"\nFrom turn {found['first_turn']} on {found['found_of_repeated']:.0%} of what repeats is "
        f"found, and the first token comes {found['faster_than_stock']:.1f} times as soon as from "
        "stock (median).\n"
    )
    header = ("turn", *kinds, "repeated, found", "TTFT, s", "stock, s", "faster")
    return circumstances(found, "python -m examples.agent") + table(header, rows) + told


BLOCKS: dict[str, Callable[[], str]] = {
    "agent": agent,
    "find": find,
    "find_quality": find_quality,
    "own_history": own_history,
}
"""By the name of the file, without its ending."""
