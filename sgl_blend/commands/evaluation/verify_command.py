"""``sgl-blend verify``: may this model be blended, and with which settings."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sgl_blend.commands.common.arguments import check_limit, check_outputs, check_packages, list_of
from sgl_blend.commands.common.console import output_console, print_line, progress
from sgl_blend.commands.evaluation.flags import add_engine_and_template_flags, read_templates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from sgl_blend.commands.evaluation.cuts import Cut
    from sgl_blend.commands.evaluation.scores import Row
    from sgl_blend.commands.evaluation.verify import Plan, Verdict

REFUSED = 1
"""Exit status for a model that must not be blended."""
NOT_JUDGED = 3
"""Exit status where the prompts cannot tell, or are too few; 2 is argparse's."""


def add_verify(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``verify`` command."""
    parser = commands.add_parser(
        "verify",
        help="find out whether a model may be blended, and how cheaply",
        description="Check the rotation of keys by numbers, that nothing recomputed too little or "
        "dropped rightly changes an answer, and how far cheaper settings are from full prefill; "
        "suggest the cheapest that is confirmed to stay within --max-kl and --min-top1. Exit status "
        "0: it may be blended; 1: it must not be; 3: not judged, the prompts cannot tell or are too "
        "few.",
    )
    parser.set_defaults(run=run_verify)
    parser.add_argument("--model-path", required=True, help="folder or name of the model")
    parser.add_argument(
        "--max-kl",
        type=float,
        default=0.1,
        help="mean KL of the first token from full prefill that is acceptable, in nats; the upper "
        "end of its 95%% interval must be within",
    )
    parser.add_argument(
        "--min-top1",
        type=float,
        default=0.97,
        help="share of prompts whose first token must be that of full prefill, in (0, 1); with 95%% "
        "the true share must be above",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="prompts as for eval, instead of those of the package, by which nothing weaker than the "
        "server's defaults is suggested",
    )
    parser.add_argument("--limit", type=int, help="take the first so many of them only")
    parser.add_argument("--policies", type=list_of(str), default=["hkvd", "funnel", "gradual"])
    parser.add_argument("--ratios", type=list_of(float), default=[0.05, 0.1, 0.15, 0.2, 0.3, 0.5])
    parser.add_argument("--check-layers", type=list_of(int), default=[1, 2])
    parser.add_argument(
        "--cuts",
        action="store_true",
        help="also ask with the chunks cut at random words and halved, as text that --blend-find "
        "learned keeps may be; warn where that loses more than --max-kl. The exit status is that of "
        "the verdict",
    )
    add_engine_and_template_flags(parser)
    parser.add_argument(
        "--profile", type=Path, metavar="OUT", help="write the settings for --blend-preset"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write everything as JSON")


def run_verify(args: argparse.Namespace) -> int:
    """Do what the parsed command line asks for; return 0, REFUSED or NOT_JUDGED.

    Raises:
        BlendError: Something in it cannot be used; the message says what.
    """
    check_packages("verify", ("numpy", "rich", "sglang", "transformers"))
    check_outputs(path for path in (args.json, args.profile) if path is not None)
    from rich.console import Console

    from sgl_blend.commands.evaluation.verify import verify

    plan = _make_plan(args)
    with progress(Console(stderr=True), None) as watch:
        verdict = verify(plan, watch)
    may_be_cut = args.cuts and verdict.judgement.refusal is None
    cuts = _measure_cuts(verdict) if may_be_cut else []
    _print(verdict, cuts, output_console())
    if args.json is not None:
        record = {"model": args.model_path, **_facts(verdict), "cuts": cuts}
        text = msgspec.json.encode({**record, **_warned(cuts, args.max_kl)})
        args.json.write_bytes(msgspec.json.format(text, indent=2) + b"\n")
    if verdict.judgement.refusal is not None:
        return REFUSED
    if args.profile is not None:
        profile = verdict.profile()
        if cuts:
            profile.measured["cuts"] = {cut.kind: cut.kl for cut in cuts}
            profile.measured.update(_warned(cuts, args.max_kl))
        profile.save(args.profile)
    return 0 if verdict.judgement.not_judged is None else NOT_JUDGED


def _make_plan(args: argparse.Namespace) -> Plan:
    from sgl_blend.commands.evaluation.bundled import bundled_digest, bundled_items
    from sgl_blend.commands.evaluation.converters import read_items
    from sgl_blend.commands.evaluation.judge import Bounds
    from sgl_blend.commands.evaluation.verify import Plan
    from sgl_blend.settings.preset import PACKAGE

    check_limit(args.limit)
    if args.data is None:
        items, data, digest = bundled_items()[: args.limit], PACKAGE, bundled_digest()
    else:
        items, data = read_items(args.data, "auto", args.limit), args.data.name
        digest = hashlib.sha256(args.data.read_bytes()).hexdigest()
    return Plan(
        model_path=args.model_path,
        bounds=Bounds(args.max_kl, args.min_top1),
        items=items,
        data=data,
        digest=digest,
        templates=read_templates(args),
        policies=args.policies,
        ratios=args.ratios,
        check_layers=args.check_layers,
        engine_args=dict(args.engine_arg),
    )


def _measure_cuts(verdict: Verdict) -> list[Cut]:
    """Cut the chunks of all prompts in other places, and serve them as the verdict says."""
    from sgl_blend.commands.evaluation.cuts import Way, default_way, measure_cuts
    from sgl_blend.commands.evaluation.evaluate import NUM_TOP, read_shape
    from sgl_blend.commands.evaluation.prompts import load_encoder, make_prompt

    plan, row = verdict.plan, verdict.judgement.chosen
    encode = load_encoder(plan.model_path)
    vocab_size = read_shape(plan.settings()).vocab_size
    way = default_way()
    if row is not None and row.check_layer is not None:
        way = Way(row.policy, row.ratio, row.check_layer)
    return measure_cuts(
        plan.model_path,
        [make_prompt(item, plan.templates, encode) for item in plan.items],
        way,
        plan.engine_args,
        num_top=min(NUM_TOP, vocab_size),
        vocab_size=vocab_size,
    )


def _warned(cuts: Sequence[Cut], max_kl: float) -> dict[str, list[str]]:
    """Return what record and profile say about ways of cutting that lose too much."""
    from sgl_blend.commands.evaluation.cuts import worse

    return {"cuts_beyond_max_kl": [cut.kind for cut in worse(cuts, max_kl)]}


def _facts(verdict: Verdict) -> dict[str, object]:
    plan, exactness, judgement = verdict.plan, verdict.exactness, verdict.judgement
    return {
        "passed": judgement.chosen is not None,
        "refusal": judgement.refusal,
        "not_judged": judgement.not_judged,
        "max_kl": plan.bounds.max_kl,
        "min_top1": plan.bounds.min_top1,
        "data": plan.data,
        "digest": plan.digest,
        "prompts": len(plan.items),
        "rotation_errors": {str(d): error for d, error in exactness.rotation_errors.items()},
        "dtype": exactness.dtype,
        "kv_dtype": exactness.kv_dtype,
        "noise_kl": exactness.noise_kl,
        "ratio_one_kl": exactness.ratio_one_kl,
        "true_kv_kl": exactness.true_kv_kl,
        "moved_kl": exactness.moved_kl,
        "plain": verdict.plain,
        "default": verdict.default,
        "cheapest": judgement.chosen,
        "rows": list(verdict.rows),
    }


def _print(verdict: Verdict, cuts: Sequence[Cut], console: Console) -> None:
    plan, exactness, judgement = verdict.plan, verdict.exactness, verdict.judgement
    errors = ", ".join(f"{d:,}: {error:.0e}" for d, error in exactness.rotation_errors.items())
    lines = [
        f"rotation   relative error by distance in tokens: {errors} ({exactness.dtype})",
        f"ratio 1    KL {exactness.ratio_one_kl:.1e}, bound {exactness.bound:.1e} "
        f"(two full prefills: {exactness.noise_kl:.1e})",
        f"true KV    KL {exactness.true_kv_kl:.1e} with rows dropped whose KV is the true one",
        f"moved      KL {exactness.moved_kl:.1e} on average where their keys were moved away and back, "
        f"rounded to {exactness.kv_dtype} each time",
        f"prompts    {len(plan.items)}, {plan.data}",
    ]
    if verdict.plain is not None:
        lines.append(f"plain      {_describe(verdict.plain)}")
    if verdict.default is not None:
        lines.append(f"default    {_describe(verdict.default)}")
    if judgement.chosen is not None:
        lines.append(
            f"cheapest   {_describe(judgement.chosen)}, within {plan.bounds.max_kl:g} nats and "
            f"{plan.bounds.min_top1:.0%} on {judgement.chosen.n} prompts it was not chosen by"
        )
        if not plan.is_own_data:
            lines.append("judged     by the package's prompts; give --data for your own questions")
    lines += _describe_cuts(cuts, plan.bounds.max_kl, len(plan.items))
    lines.append(f"verdict    {_verdict(verdict)}")
    for line in lines:
        print_line(console, line)


def _describe_cuts(cuts: Sequence[Cut], max_kl: float, num_prompts: int) -> list[str]:
    from sgl_blend.commands.evaluation.cuts import worse

    lines = [
        f"cuts       {cut.kind}, {cut.chunks / num_prompts:.1f} chunks a prompt: KL {cut.kl:.2g} "
        f"[{cut.kl_ci95[0]:.2g}, {cut.kl_ci95[1]:.2g}], {cut.more_than_documents:+.2g} "
        f"[{cut.more_ci95[0]:+.2g}, {cut.more_ci95[1]:+.2g}] beside documents, same first token "
        f"{cut.top1:.1%}"
        for cut in cuts
    ]
    lines += [
        f"warning    chunks cut as {cut.kind} lose {cut.more_than_documents:.2g} nats more than "
        f"documents, beyond {max_kl:g}: text that --blend-find learned keeps may lose as much"
        for cut in worse(cuts, max_kl)
    ]
    return lines


def _verdict(verdict: Verdict) -> str:
    judgement = verdict.judgement
    if judgement.not_judged is not None:
        return f"not judged: {judgement.not_judged}"
    return judgement.refusal or "this model may be blended"


def _describe(row: Row) -> str:
    from sgl_blend.commands.evaluation.judge import describe

    return (
        f"{describe(row)}: KL {row.kl:.2g} [{row.kl_ci95[0]:.2g}, {row.kl_ci95[1]:.2g}], same first "
        f"token {row.top1:.1%}, cost {row.layer_rows_share or 0:.0%} of a full prefill"
    )
