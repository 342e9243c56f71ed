"""What came out: JSON for programs, a table for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from sgl_blend.commands.bench.client_speed import client_warning
from sgl_blend.commands.bench.kernel_speed import Speeds
from sgl_blend.commands.bench.knees import Load, Outcome
from sgl_blend.commands.bench.pair import NAMES, Pair
from sgl_blend.commands.bench.ttft import TtftRow
from sgl_blend.commands.common.records import (
    Origin,
    command_line,
    find_origin,
    without_folders,
)
from sgl_blend.fallback import message_of

if TYPE_CHECKING:
    from rich.table import Table

    from sgl_blend.commands.common.server import Server


class Circumstances(Origin, frozen=True, kw_only=True):
    """Where figures of servers come from.

    Attributes:
        model: Name of the shape, or of the model's folder.
        servers: What started each, without this machine's paths.
        num_tokens: KV that each server held.
        attention: By which backend of SGLang each server attends.
        hopper: Whether they ran on a GPU for which SGLang itself would choose fa3.
    """

    model: str
    servers: dict[str, str]
    num_tokens: int
    attention: dict[str, str] = msgspec.field(default_factory=dict)
    hopper: bool = False


class TtftReport(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of ``bench ttft``."""

    circumstances: Circumstances
    repeats: int
    seed: int
    rows: list[TtftRow]


class ThroughputReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``bench throughput`` found; settings as its flags name them.

    Attributes:
        client_rate: Requests per second that the client sends to and reads from a server without a
            model, measured before the servers started.
    """

    circumstances: Circumstances
    settings: dict[str, float | int | str | list[float] | None]
    client_rate: float
    outcome: Outcome


class ProfileReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``bench profile`` found; times in seconds per request or batch.

    Attributes:
        tokens: What one request reported.
        phases: By where the time went, host or device, and phase.
    """

    circumstances: Circumstances
    case: str
    batch: int
    ttft_s: float
    traced_ttft_s: float
    tokens: dict[str, Any]
    phases: dict[str, dict[str, float]]


class KernelsReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``bench kernels`` found."""

    circumstances: Origin
    speeds: Speeds


def describe(argv: Sequence[str], model: str, pair: Pair) -> Circumstances:
    """Put together what a benchmark of two servers runs on and with.

    Args:
        argv: After ``sgl-blend``.
        model: Name or folder.
        pair: The servers.
    """
    return describe_servers(argv, model, {name: pair[name] for name in NAMES}, pair.num_tokens)


def describe_servers(
    argv: Sequence[str], model: str, servers: Mapping[str, Server], num_tokens: int
) -> Circumstances:
    """Put together what a benchmark of some servers runs on and with."""
    import torch

    return Circumstances(
        **msgspec.structs.asdict(find_origin(command_line(argv))),
        model=without_folders(model),
        servers={
            name: " ".join(map(without_folders, server.command.split()))
            for name, server in servers.items()
        },
        num_tokens=num_tokens,
        attention={name: server.attention_backend() for name, server in servers.items()},
        hopper=torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9,
    )


def caveats(found: Circumstances) -> list[str]:
    """Return sentences that belong beside every figure of these servers."""
    stock = found.attention.get("stock")
    if not found.hopper or stock in (None, "fa3"):
        return []
    return [
        f"stock attends by {stock}; by default SGLang takes fa3 on this GPU, which is faster. So the "
        "speed-up is overstated, more so with long prompts (docs/speed.md has an estimate)"
    ]


def make_ttft_table(report: TtftReport) -> Table:
    """Lay the rows out, cases apart."""
    table = _make_table(
        f"{_describe(report.circumstances)}: TTFT, medians of {report.repeats} repeats; [] 95 % "
        "bootstrap interval; --blend-when always: every prompt is blended, also where the server "
        "would by default leave it alone"
    )
    table.add_column("prompt", no_wrap=True)
    for name in ("chunks", "batch", "policy", "ratio", "stock", "blended", "speed-up"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("ceiling", "reached", "reused"):
        table.add_column(name, justify="right", no_wrap=True)
    for row, following in zip(report.rows, [*report.rows[1:], None], strict=True):
        last = following is None or _case_of(following) != _case_of(row)
        table.add_row(*_ttft_cells(row), end_section=last)
    return table


def _case_of(row: TtftRow) -> tuple[str, int, int]:
    return row.case, row.nominal_chunk_tokens, row.batch


def _ttft_cells(row: TtftRow) -> list[str]:
    cells = [row.case, f"{row.num_chunks} x {row.chunk_tokens}", str(row.batch)]
    cells += [row.policy, f"{row.ratio:g}"]
    found = row.figures
    if found is None:
        return [*cells, "error", "", "", "", "", ""]
    low, high = found.speedup_ci95
    return [
        *cells,
        _seconds(found.stock_ttft_s),
        _seconds(found.blended_ttft_s),
        f"{found.speedup:.2f} \\[{low:.2f}, {high:.2f}]",
        f"{found.ceiling:.2f}",
        f"{found.ceiling_share:.0%}",
        f"{found.reused_share:.0%}",
    ]


def errors(report: TtftReport) -> list[str]:
    """Return one sentence for every row without figures."""
    return [
        f"{row.case}, {row.num_chunks} x {row.chunk_tokens}, batch {row.batch}, {row.policy}, ratio "
        f"{row.ratio:g}: {row.error}"
        for row in report.rows
        if row.error is not None
    ]


def make_throughput_table(report: ThroughputReport) -> Table:
    """Lay the rates out, both servers side by side."""
    outcome = report.outcome
    table = _make_table(
        f"{_describe(report.circumstances)}: Poisson arrivals, TTFT p50 within "
        f"{_seconds(outcome.bound_s)} is fast enough; --blend-when always"
    )
    table.add_column("requests/s", justify="right", no_wrap=True)
    for name in NAMES:
        for quantity in ("p50", "p90", "completed/s"):
            table.add_column(f"{name} {quantity}", justify="right", no_wrap=True)
    table.add_column("reused", justify="right", no_wrap=True)
    for point in outcome.points:
        loads = [point.load(name) for name in NAMES]
        cells = [cell for load in loads for cell in _load_cells(load)]
        reused = "" if point.blend is None else f"{point.blend.reused_share:.0%}"
        table.add_row(f"{point.rate:.3g}", *cells, reused)
    return table


def _load_cells(load: Load | None) -> list[str]:
    if load is None:
        return ["", "", ""]
    return [_seconds(load.ttft_p50_s), _seconds(load.ttft_p90_s), f"{load.completed_rate:.3g}"]


def summary(outcome: Outcome) -> str:
    """Return the knees and the gain in a sentence."""
    knees = ", ".join(f"{name} {_knee(outcome, name)}" for name in NAMES)
    idle = ", ".join(f"{name} {_seconds(outcome.idle_ttft_s[name])}" for name in NAMES)
    crossings = ", ".join(f"{name} {_rate(outcome.rates_at_bound[name])}" for name in NAMES)
    gain = "not known" if outcome.gain is None else f"{outcome.gain:.2f}"
    return (
        f"Idle TTFT: {idle}. Knee: {knees}. Rate at a TTFT p50 of {_seconds(outcome.bound_s)}: "
        f"{crossings}; gain in throughput at equal TTFT {gain}{_ceiling(outcome)}."
    )


def _ceiling(outcome: Outcome) -> str:
    if outcome.ceiling is None:
        return ""
    return f", and {outcome.ceiling:.2f} if only linear work took time"


def client_line(report: ThroughputReport) -> str:
    """Say what the client alone can do, and up to which share of it it was asked."""
    highest = max((point.rate for point in report.outcome.points), default=0.0)
    return (
        f"The client alone sends and reads {report.client_rate:.3g} requests/s; the highest rate "
        f"offered is {highest / report.client_rate:.0%} of that."
    )


def warnings(report: ThroughputReport) -> list[str]:
    """Return one sentence for every rate at which requests were not blended, or the client busy."""
    outcome = report.outcome
    busy = client_warning(report.client_rate, [point.rate for point in outcome.points])
    return [*filter(None, [busy])] + [
        f"{point.rate:.3g} requests/s: {count} of {load.requests} requests were not blended: "
        f"{message_of(reason)}"
        for point in outcome.points
        if (load := point.blend) is not None
        for reason, count in load.fallbacks.items()
    ]


def _knee(outcome: Outcome, name: str) -> str:
    knee = outcome.knees[name]
    if knee is None:
        return "below every rate tried"
    return f"{knee:.3g}/s" if outcome.rates_at_bound[name] else f"at least {knee:.3g}/s"


def _rate(value: float | None) -> str:
    return "not found" if value is None else f"{value:.3g}/s"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _describe(found: Circumstances) -> str:
    where = found.machine.gpu or f"{found.machine.cores} cores of {found.machine.processor}"
    return f"{found.model} on {where}, SGLang {found.versions.get('sglang', 'unknown')}"


def _make_table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
