"""``sgl-blend plan-storage``: the cheapest tier that adds no delay."""

from __future__ import annotations

import argparse
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sgl_blend.commands.bench.shapes import SHAPES
from sgl_blend.commands.common.arguments import check_outputs, check_packages
from sgl_blend.commands.common.console import output_console, print_line
from sgl_blend.commands.common.records import Origin, command_line, find_origin, to_json
from sgl_blend.commands.planning.plan_inputs import (
    DTYPE_BYTES,
    ModelKV,
    kv_of_model,
    kv_of_shape,
    prefill_speed_of,
    read_tiers,
)
from sgl_blend.commands.planning.tier_trial import time_file_reads, time_host_copy
from sgl_blend.errors import CommandError
from sgl_blend.settings.config import BlendConfig, check_ratio
from sgl_blend.tuning.storage_plan import Demand, StoragePlan, Tier, TierPlan, Verdict, plan_storage

if TYPE_CHECKING:
    from rich.table import Table


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``plan-storage --json`` writes; bytes, seconds and US dollars.

    Attributes:
        recompute_s: How long a load may take.
        tiers: Judged, the fastest first.
        chosen: Name of the chosen tier, or null.
        summary: The same as a sentence.
    """

    circumstances: Origin
    demand: Demand
    recompute_s: float
    tiers: tuple[TierPlan, ...]
    chosen: str | None
    summary: str


def add_plan_storage(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``plan-storage`` command."""
    parser = commands.add_parser(
        "plan-storage",
        help="find the cheapest place for chunks that adds no delay",
        description="Compare how long each tier loads the chunks of a request with how long "
        "recomputing a part of them takes anyway (CacheBlend, section 5.1). Without --tiers this "
        "machine's memory and --store-dir are measured.",
    )
    parser.set_defaults(run=run_plan_storage)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", choices=tuple(SHAPES), help="of a model without weights")
    model.add_argument("--model-path", type=Path, help="folder with the model's config.json")
    model.add_argument(
        "--kv-bytes-per-token", type=_positive_int, help="of all layers, keys and values"
    )
    parser.add_argument(
        "--dtype", choices=tuple(DTYPE_BYTES), help="of the KV; by default the config's"
    )
    speed = parser.add_mutually_exclusive_group(required=True)
    speed.add_argument(
        "--prefill-tokens-per-s", type=_positive, help="speed of a full prefill, measured by you"
    )
    speed.add_argument(
        "--profile", type=Path, metavar="FILE", help="what sgl-blend bench profile --json wrote"
    )
    parser.add_argument(
        "--library-tokens", type=_positive_int, required=True, help="of all chunks to keep"
    )
    parser.add_argument(
        "--request-tokens", type=_positive_int, default=8192, help="reused tokens of a request"
    )
    parser.add_argument(
        "--request-chunks", type=_positive_int, default=8, help="into how many chunks they fall"
    )
    parser.add_argument(
        "--ratio", type=float, default=BlendConfig().blend_recompute_ratio, help="recomputed share"
    )
    parser.add_argument("--servers", type=_positive_int, default=1, help="size of the fleet")
    parser.add_argument("--tiers", type=Path, metavar="FILE", help="JSON list of tiers and prices")
    parser.add_argument("--store-dir", type=Path, metavar="FOLDER", help="measure its file system")
    parser.add_argument(
        "--trial-mb", type=_positive_int, default=256, help="size of the copy that is measured"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON")


def _positive(text: str) -> float:
    """Read a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


def _positive_int(text: str) -> int:
    """Read a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def run_plan_storage(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks for; return 0, or 1 if no tier suits.

    Raises:
        BlendError: Something in it cannot be used; the message says what.
    """
    check_packages("plan-storage", ["rich", *([] if args.tiers else ["numpy"])], extra="bench")
    check_outputs(path for path in (args.json,) if path is not None)
    if args.tiers is not None and args.store_dir is not None:
        raise CommandError("--store-dir is measured where there are no --tiers; give one of them")
    demand = _read_demand(args)
    tiers = _measure(args) if args.tiers is None else read_tiers(args.tiers)
    plan = plan_storage(demand, tiers)
    console = output_console()
    console.print(_make_table(demand, plan))
    summary = summarise(demand, plan)
    print_line(console, summary, "" if plan.chosen else "red")
    if args.json is not None:
        report = PlanReport(
            circumstances=find_origin(command_line(args.argv)),
            demand=demand,
            recompute_s=demand.recompute_s,
            tiers=plan.tiers,
            chosen=plan.chosen.tier.name if plan.chosen else None,
            summary=summary,
        )
        args.json.write_bytes(to_json(report))
    return 0 if plan.chosen else 1


def _read_demand(args: argparse.Namespace) -> Demand:
    check_ratio("--ratio", args.ratio, CommandError)
    model = _read_model(args)
    speed = args.prefill_tokens_per_s
    if args.profile is not None:
        speed = prefill_speed_of(args.profile, model.num_layers)
    return Demand(
        kv_bytes_per_token=model.bytes_per_token,
        library_tokens=args.library_tokens,
        request_tokens=args.request_tokens,
        request_chunks=args.request_chunks,
        ratio=args.ratio,
        prefill_tokens_per_s=speed,
        servers=args.servers,
    )


def _read_model(args: argparse.Namespace) -> ModelKV:
    if args.kv_bytes_per_token is not None:
        if args.dtype is not None:
            raise CommandError("--dtype says nothing beside --kv-bytes-per-token; leave it out")
        return ModelKV(args.kv_bytes_per_token)
    if args.shape is not None:
        return kv_of_shape(args.shape, args.dtype)
    return kv_of_model(args.model_path, args.dtype)


def _measure(args: argparse.Namespace) -> list[Tier]:
    """Return the tiers of this machine, without prices."""
    num_bytes = args.trial_mb * 1_000_000
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    host = time_host_copy(num_bytes)
    tiers = [Tier("host memory", host.bytes_per_s, host.latency_s, capacity_bytes=memory)]
    folder: Path | None = args.store_dir
    if folder is not None:
        store = time_file_reads(folder, num_bytes)
        free = shutil.disk_usage(folder).free
        name = f"files in {folder.name or folder}"
        tiers.append(Tier(name, store.bytes_per_s, store.latency_s, capacity_bytes=free))
    return tiers


def summarise(demand: Demand, plan: StoragePlan) -> str:
    """Say in a sentence what to take, or what comes nearest and what it lacks."""
    hides = f"the {demand.recompute_s * 1e3:.4g} ms that recomputing takes anyway"
    chosen, nearest = plan.chosen, plan.nearest
    if chosen is not None:
        load = f"loads a request in {chosen.load_s * 1e3:.4g} ms, within {hides}"
        if chosen.usd_per_month is None:
            return f"Slowest that adds no delay: {chosen.tier.name}. It {load}. No price is known."
        price = f"{chosen.usd_per_month:.2f} USD a month"
        return f"Cheapest that adds no delay: {chosen.tier.name}, {price}. It {load}."
    assert nearest is not None, "either a tier suits or one comes nearest"
    near = f"No tier suits. {nearest.tier.name} comes nearest"
    if nearest.verdict is Verdict.TOO_SMALL:
        assert nearest.tier.capacity_bytes is not None
        return (
            f"{near}: it is fast enough, but holds {nearest.tier.capacity_bytes / 1e9:.4g} GB of "
            f"{demand.library_bytes / 1e9:.4g} GB."
        )
    load = f"it loads a request in {nearest.load_s * 1e3:.4g} ms, longer than {hides}"
    if nearest.needed_bytes_per_s is None:
        return f"{near}: {load}. No bandwidth would do: its latency alone takes that long."
    has, needs = nearest.tier.bytes_per_s / 1e9, nearest.needed_bytes_per_s / 1e9
    return f"{near}: {load}. It would need {needs:.4g} GB/s, and has {has:.4g}."


def _make_table(demand: Demand, plan: StoragePlan) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"{demand.library_tokens} tokens of {demand.kv_bytes_per_token} bytes, "
        f"{demand.library_bytes / 1e9:.4g} GB a copy; a request loads {demand.request_tokens} tokens "
        f"and recomputes {demand.ratio:g} of them at {demand.prefill_tokens_per_s:.0f} tokens/s",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    table.add_column("tier")
    for name in ("GB/s", "needed GB/s", "load ms", "hidden ms", "copies", "GB", "USD/month"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in plan.tiers:
        needed, price = row.needed_bytes_per_s, row.usd_per_month
        table.add_row(
            row.tier.name.replace("[", "\\["),
            f"{row.tier.bytes_per_s / 1e9:.4g}",
            "" if needed is None else f"{needed / 1e9:.4g}",
            f"{row.load_s * 1e3:.4g}",
            f"{demand.recompute_s * 1e3:.4g}",
            str(row.copies),
            f"{row.stored_bytes / 1e9:.4g}",
            "not known" if price is None else f"{price:.2f}",
            "chosen" if row is plan.chosen else str(row.verdict),
        )
    return table
