"""Tables of the files in benchmarks/results, for docs/benchmarks.md."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from sgl_blend.settings.config import BlendConfig

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
UNKNOWN = "not recorded"


def load(name: str) -> dict[str, Any]:
    """Return a file of results."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table of Markdown, with figures to the right of the first column."""
    marks = ["---", *["---:"] * (len(header) - 1)]
    lines = [header, marks, *rows]
    return "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines)


def circumstances(found: dict[str, Any], script: str, command_of: str = "command") -> str:
    """Return under which circumstances a result was measured, as far as the file holds them."""
    machine = found.get("machine", UNKNOWN)
    if isinstance(machine, dict):
        machine = f"{_processor(machine)}, GPU: {machine['gpu'] or 'none'}"
    versions = found.get("versions")
    told = (
        ", ".join(f"{name} {number}" for name, number in versions.items()) if versions else UNKNOWN
    )
    command = None if "command" not in found else runnable(found["command"])
    if "server" in found:  # else an older file, whose command is the server's
        command_of = "command"
    date = str(found.get("date", UNKNOWN))
    lines = [
        f"- measured by: `{script}`",
        f"- {command_of}: {UNKNOWN if command is None else f'`{command}`'}",
        f"- machine: {machine}",
        f"- date: {date.partition('T')[0]}",
        f"- versions: {told}",
    ]
    if "server" in found:
        lines.append(f"- server: `{found['server']}`")
    return "\n".join(lines) + "\n\n"


def runnable(command: str) -> str:
    """Return a recorded command as it runs from the root of a clone.

    Older files name the script in place of its module. Modules that use the tests' engine need
    tests/ on the path, which a record does not hold.
    """
    command = re.sub(r"^benchmarks/(\w+)\.py\b", r"python -m benchmarks.\1", command)
    named = re.match(r"python -m (benchmarks\.\w+)", command)
    return f"PYTHONPATH=tests {command}" if named and _needs_tests(named[1]) else command


def _needs_tests(module: str) -> bool:
    """Tell whether a benchmark imports a module of tests/, itself or through another benchmark."""
    text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    imported = re.findall(r"^(?:from|import) (\w+(?:\.\w+)?)", text, re.MULTILINE)
    if any((ROOT / "tests" / f"{name}.py").is_file() for name in imported):
        return True
    return any(_needs_tests(name) for name in imported if name.startswith("benchmarks."))


def _processor(machine: dict[str, Any]) -> str:
    return f"{machine['processor']}, {machine['cores']} cores"


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def signed(share: float) -> str:
    return f"{100 * share:+.1f} %"


def interval(low: float, high: float, digits: int = 3) -> str:
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


def demo() -> str:
    found = load("demo.json")
    kinds = ("prefix_tokens", "reused_tokens", "recomputed_tokens", "computed_tokens")
    prompts = len(found["prompt_tokens"])
    rows = [
        (
            _promised(f"{row['policy']}, {row['ratio']:g}", row),
            *(f"{row[kind] / prompts:.0f}" for kind in kinds),
            f"{row['median_ttft_s']:.2f} s",
            _promised(f"{row['speedup']:.1f}x", row),
            f"{row['kl']:.2g}",
        )
        for row in found["ratios"]
    ]
    full = found["full_prefill"]["median_ttft_s"]
    rows.append(("stock", "", "", "", "", f"{full:.2f} s", "1.0x", ""))
    names = ("exact prefix", "reused", "recomputed", "computed")
    header = ("policy, ratio", *names, "TTFT", "speed-up", "KL of the first token")
    told = (
        f"The command was `{found['command']}` on {_processor(found['machine'])}, in float32, with "
        f"SGLang {found['versions']['sglang']}, on {found['date'].partition('T')[0]}.\n"
    )
    return table(header, rows) + "\n" + told


def _promised(cell: str, row: dict[str, Any]) -> str:
    is_default = row["ratio"] == 0.15 and row["policy"] == BlendConfig().blend_policy
    return f"**{cell}**" if is_default else cell


def cold(name: str = "cold.json") -> str:
    found = load(name)
    rows = [
        (
            case,
            sum(len(of_a_round) for of_a_round in found[case]["pairs"]),
            f"{found[case]['stock_ttft_s']:.3f}",
            f"{found[case]['blend_ttft_s']:.3f}",
            signed(found[case]["overhead"]),
            ", ".join(signed(part) for part in found[case]["overhead_by_round"]),
        )
        for case in ("cold", "plain", "short")
    ]
    header = ("requests", "pairs", "stock TTFT, s", "blending TTFT, s", "difference", "by round")
    environment = f"- environment: `{' '.join(found['environment'])}`\n"
    told = circumstances(found, "benchmarks/cold.py")
    return told.rstrip("\n") + f"\n{environment}\n" + table(header, rows)


def off(name: str = "off.json") -> str:
    found = load(name)
    names = {"plugin": "with the plugin, off", "control": "a second stock server (control)"}
    rows = [
        (
            kind,
            told,
            len(found[kind][name]["pairs"]),
            f"{found[kind][name]['ratio']:.3f}",
            interval(*found[kind][name]["ci95"]),
        )
        for kind in ("ttft", "throughput")
        for name, told in names.items()
    ]
    header = ("what", "server", "pairs", "speed beside stock, median", "95 % interval")
    return circumstances(found, "benchmarks/off.py") + table(header, rows)


def fair() -> str:
    found = load("fair.json")
    stock, blend = found["ttft_p50_s"]["stock"], found["ttft_p50_s"]["blend"]
    rows = [
        (
            kind,
            found["requests"][kind],
            f"{stock[kind]:.2f}",
            f"{blend[kind]:.2f}",
            f"{blend[kind] / stock[kind]:.2f}",
        )
        for kind in ("plain", "rag")
    ]
    header = ("requests", "number", "stock TTFT p50, s", "blending TTFT p50, s", "ratio")
    return circumstances(found, "benchmarks/fair.py") + table(header, rows)


def match() -> str:
    found = load("match.json")
    kinds = {
        "intake_ms": "read the prompt",
        "new_ms": "first lookup",
        "unchanged_ms": "again, cache unchanged",
        "changed_ms": "again, after an eviction",
        "tree_ms": "SGLang's tree alone",
        "fixed_ms": "fixed arithmetic",
    }
    rows = [
        (
            f"{case['prompt_tokens']:,} in chunks of {case['chunk_tokens']}",
            f"{case['chunks_hit_per_prompt']:,.0f}",
            *(f"{case[kind]['p50']:.2f} / {case[kind]['p99']:.2f}" for kind in kinds),
        )
        for case in found["cases"]
    ]
    told = (
        f"{found['chunks']:,} chunks are stored. {found['prompts']} prompts a case. "
        "Times are p50 / p99 in milliseconds.\n\n"
    )
    header = ("prompt tokens", "chunks found", *kinds.values())
    return circumstances(found, "benchmarks/match.py") + told + table(header, rows)


def closed_loop() -> str:
    found = load("closed-loop.json")
    rows = []
    for figure in ("decode share", "gap share", "end to end", "ttft"):
        for server, name in (("blend", "blending"), ("null", "a second stock server")):
            shares = found[server][figure]
            cells = []
            for quantile in ("p50", "p90", "max"):
                value, low, high = (signed(shares[quantile][k]) for k in ("value", "low", "high"))
                cells.append(f"{value} [{low}, {high}]")
            rows.append((f"{figure}, {name}", shares["pairs"], *cells))
    header = ("against stock", "pairs", "p50", "p90", "largest")
    told = circumstances(found, "benchmarks/closed_loop.py", "command of the blending server")
    return told + table(header, rows)


def soak(name: str = "soak.json") -> str:
    found = load(name)
    rows: list[tuple[str, object]] = [
        ("requests", f"{found['requests']:,}"),
        ("requests per second", f"{found['requests_per_s']:.2f}"),
        ("answers compared with a stock server", found["counts"]["compared"]),
        ("violations", len(found["violations"])),
        ("orders of an operator", sum(found["operations"].values())),
        ("malformed requests", found["counts"]["malformed"]),
        ("clients that hung up", found["counts"]["hung up"]),
        ("requests retracted by SGLang", found["retracted"]),
        ("chunks built", f"{found['chunks_built']:,}"),
        ("growth of memory", percent(found["rss_growth"], 2)),
    ]
    if damages := found.get("damages"):
        rows.append(("objects of the store damaged", f"{sum(damages.values()):,}"))
        rows.append(("pages that came from the store", f"{found['storage']['hits']:,}"))
    for kind, times in found["ttft_ms"].items():
        told = f"{times['p50']:.0f} and {times['p99']:.0f}"
        rows.append((f"TTFT of {kind} requests, p50 and p99, ms", told))
    known = circumstances(found, "make soak", "command of the server")
    return known + table(("what", "figure"), rows)


def profile() -> str:
    found = load("profile-demo-cpu.json")
    phases, total = found["phases"]["host"], found["traced_ttft_s"]
    measured = sorted(phases.items(), key=lambda item: -item[1])
    rows = [(name, ms(seconds), percent(seconds / total)) for name, seconds in measured]
    rest = total - sum(phases.values())
    rows.append(("everything else: scheduler, sampling, HTTP", ms(rest), percent(rest / total)))
    tokens = found["tokens"]
    told = (
        f"A prompt of {tokens['prompt_tokens']:,} tokens: {tokens['prefix_tokens']} exact from the "
        f"cache, {tokens['reused_tokens']:,} reused, {tokens['recomputed_tokens']} recomputed, "
        f"{tokens['computed_tokens']} computed. TTFT is {1000 * total:,.0f} ms under the profiler "
        f"and {1000 * found['ttft_s']:,.0f} ms without it.\n\n"
    )
    known = circumstances(found["circumstances"], "sgl-blend bench profile")
    return known + told + table(("phase", "ms", "share"), rows)


def novel(name: str = "novel.json") -> str:
    found = load(name)
    rows = []
    for case in found["cases"].values():
        name = f"{case['library_in_pools']:g} pools, tenants: {case['tenants']}"
        for mode, told in case["found"].items():
            rows.append(
                (
                    f"{name}, {mode}{' (slim)' if case['slim'] else ''}",
                    f"{case['requests']:,}",
                    f"{case['ideal']['second_half']:.3f}",
                    f"{told['second_half']:.3f}",
                    _with_interval(told["of_ideal"]),
                    _with_interval(told["ttft_of_stock"]),
                    f"{told['pool'][-1]['chunks']:.2f}" if told["pool"] else "",
                )
            )
        ideal = case["ideal"]
        if limited := ideal.get("as_large_as_host"):
            share = f"{limited / ideal['second_half']:.2f}"
            rows.append(
                (
                    f"{name}, ideal cache as large as host memory",
                    f"{case['requests']:,}",
                    f"{ideal['second_half']:.3f}",
                    f"{limited:.3f}",
                    *(share, "", ""),
                )
            )
    told_of = "Figures are of the second half of the requests."
    shapes = [case["model"] for case in found["cases"].values() if "model" in case]
    for layers, size in sorted({(one["layers"], one["hidden_size"]) for one in shapes}):
        told_of += f" The model has {layers} layers and a hidden size of {size}."
    told_of += "\n\n"
    header = (
        "library, server",
        "requests",
        "ideal share",
        "share found",
        "of the ideal",
        "TTFT of stock's",
        "chunks in the pool at the end",
    )
    return circumstances(found, "benchmarks/novel.py") + told_of + table(header, rows)


def _with_interval(ratio: dict[str, float]) -> str:
    return f"{ratio['value']:.2f} {interval(ratio['low'], ratio['high'], 2)}"


def codec() -> str:
    """Return what coding takes in the shape of an 8B model."""
    found = load("codec.json")
    known = {what for row in found["shape"].values() for what in row["mb_per_s"]}
    ways = [what for what in CODEC_SPEEDS if what in known]
    rows = []
    for level, row in found["shape"].items():
        speeds = row["mb_per_s"]
        told = [f"{speeds[w]:,.0f}" if w in speeds else "" for w in ways]
        rows.append(
            (f"`{level}`", f"{row['bits']:.2f}", f"{row['bits'] / row['ideal_bits']:.2f}", *told)
        )
    header = ("level", "bits a value", "of the ideal", *ways)
    return circumstances(found["shape_origin"], "benchmarks/codec.py") + table(header, rows)


CODEC_SPEEDS = ("encode", "encode, numba", "decode", "decode, numba")

BLOCKS: dict[str, Callable[[], str]] = {
    "demo": demo,
    "cold": cold,
    "cold-host": lambda: cold("cold-host.json"),
    "off": off,
    "off-host": lambda: off("off-host.json"),
    "fair": fair,
    "match": match,
    "closed-loop": closed_loop,
    "soak": soak,
    "soak-storage": lambda: soak("soak-storage.json"),
    "soak-experts": lambda: soak("soak-experts.json"),
    "soak-adapters": lambda: soak("soak-adapters.json"),
    "novel": novel,
    "novel-host": lambda: novel("novel-host.json"),
    "codec": codec,
    "profile-demo-cpu": profile,
}
"""By the name of the file, without its ending."""
