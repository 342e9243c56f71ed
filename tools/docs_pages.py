"""Write the tables of the documentation from the code and from the results of benchmarks.

A page says where a table goes, with two comments around it:

    <!-- generated: flags -->
    ...
    <!-- end of generated -->

    .venv/bin/python -m tools.docs_pages            # write all tables anew
    .venv/bin/python -m tools.docs_pages --check    # name the pages that are not current; status 1
"""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from sgl_blend import metrics, policies
from sgl_blend.engine.compatibility import MODELS, REFUSALS, STORAGE_REFUSALS
from sgl_blend.engine.served import SERVED
from sgl_blend.engine.versions import TESTED_VERSIONS
from sgl_blend.fallback import FallbackReason
from sgl_blend.protocol.request import PARAMS
from sgl_blend.report import BlendReport
from sgl_blend.settings.config import BlendConfig, add_flags
from tools import (
    answer_tables,
    compatibility,
    find_tables,
    results_tables,
    storage_tables,
    time_model,
)

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end of generated -->\n)", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def flags() -> str:
    """Return the server flags with their defaults and meanings."""
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    rows = []
    defaults = BlendConfig()
    for action in parser._actions:
        value = getattr(defaults, action.dest)
        default = "" if value is None else f"`{value}`"
        default = "off" if value is False else default
        rows.append((f"`{action.option_strings[0]}`", default, str(action.help)))
    return table(("flag", "default", "meaning"), rows)


def parameters() -> str:
    """Return what a request may put into custom_params."""
    rows = [(f"`{name}`", meaning) for name, meaning in PARAMS.items()]
    return table(("name", "meaning"), rows)


def report_fields() -> str:
    """Return the fields of a report, with the meanings that its docstring gives."""
    meanings = dict(_attributes(BlendReport))
    names = list(BlendReport.__struct_fields__)
    assert list(meanings) == names, "the docstring of BlendReport does not name its fields"
    rows = [(f"`{name}`", meanings[name]) for name in names]
    rows.append(("`fallback_message`", "The same reason as a sentence."))
    return table(("field", "meaning"), rows)


def _attributes(kind: type) -> Iterator[tuple[str, str]]:
    """Yield the names and texts below "Attributes:" in a docstring of Google's style."""
    section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2]
    for entry in re.split(r"\n(?=    \w)", section.rstrip()):
        name, _, text = entry.partition(":")
        yield name.strip(), " ".join(text.split())


def fallbacks() -> str:
    """Return the codes of the reasons why a request is not blended."""
    return table(
        ("`fallback`", "`fallback_message`"),
        [(f"`{reason}`", reason.message) for reason in FallbackReason],
    )


def prometheus() -> str:
    """Return the metrics of the server."""
    rows = [(f"{name}_total", "counter", text) for name, text in metrics.COUNTERS.items()]
    rows += [
        (f"storage_{name}_total", "counter", text)
        for name, text in metrics.STORAGE_COUNTERS.items()
    ]
    rows += [(f"{name}_total", "counter", text) for name, text in metrics.FINDING_COUNTERS.items()]
    rows += [(name, "gauge", text) for name, text in metrics.FINDING_GAUGES.items()]
    rows.append(("storage_faults_total", "counter by `reason`", metrics.STORAGE_FAULTS))
    rows.append(("storage_level_hits_total", "counter by `level`", metrics.STORAGE_LEVELS))
    rows.append(("fallback_total", "counter by `reason`", metrics.FALLBACK_COUNTER))
    rows += [
        (f"canary_{name}_total", "counter", text) for name, text in metrics.CANARY_COUNTERS.items()
    ]
    rows.append(("canary_kl", "histogram", metrics.CANARY_KL))
    rows.append(("canary_tripped", "gauge", metrics.CANARY_TRIPPED))
    return table(
        ("name", "kind", "meaning"), [(f"`sgl_blend:{name}`", *rest) for name, *rest in rows]
    )


def policy_list() -> str:
    """Return the policies that users choose among."""
    rows = []
    for name in policies.NAMED:
        policy = policies.POLICIES[name]
        only = "evaluations" if policy.evaluation_only else ""
        rows.append((f"`{name}`", policy.summary, policy.sees.value, policy.source or "", only))
    return table(("policy", "recomputes first", "must see", "source", "only for"), rows)


def served() -> str:
    """Return the features of SGLang that are served, with the tests that show it."""
    rows = [
        (
            feature.name,
            feature.how,
            feature.test,
            *(compatibility.passed_of(feature, name) for name in TESTED_VERSIONS),
        )
        for feature in SERVED
    ]
    return table(("feature", "how", "shown by", *TESTED_VERSIONS), rows)


def refused() -> str:
    """Return the settings that are refused at start."""
    rows = [(f"`{refusal.flag}`", refusal.why) for refusal in (*REFUSALS, *STORAGE_REFUSALS)]
    return table(("setting to change", "why"), rows)


def models() -> str:
    """Return the model classes that are served, and the laws that hold for them in each version."""
    rows = [
        (f"`{name}`", serves, *(compatibility.laws_of(name, number) for number in TESTED_VERSIONS))
        for name, serves in MODELS.items()
    ]
    return table(("class of SGLang", "models", *TESTED_VERSIONS), rows)


def versions() -> str:
    """Return the versions of SGLang that are tested, and when and with what that was done last."""
    rows = []
    for name in TESTED_VERSIONS:
        found = compatibility.kept()[name]
        rows.append((name, found["date"][:10], f"`{found['command']}`", str(found["commit"])[:12]))
    return table(("SGLang", "tested on", "by", "commit"), rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "flags": flags,
    "parameters": parameters,
    "report": report_fields,
    "fallbacks": fallbacks,
    "metrics": prometheus,
    "policies": policy_list,
    "served": served,
    "refused": refused,
    "models": models,
    "versions": versions,
    "time-model": time_model.time_model,
    **results_tables.BLOCKS,
    **find_tables.BLOCKS,
    **answer_tables.BLOCKS,
    **storage_tables.BLOCKS,
}


def pages() -> list[Path]:
    """Return the pages that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks_of(page: str) -> list[str]:
    """Return the names of the tables on a page."""
    return [found.group(2) for found in BLOCK.finditer(page)]


def with_tables(page: str) -> str:
    """Return a page with fresh tables."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{BLOCKS[found[2]]()}\n{found[3]}", page)


def stale_pages() -> dict[Path, str]:
    """Return the pages that are not current, and what they should be."""
    texts = {path: path.read_text() for path in pages()}
    return {path: fresh for path, text in texts.items() if (fresh := with_tables(text)) != text}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; name stale pages")
    check = parser.parse_args().check
    stale = stale_pages()
    for path, text in stale.items():
        print(
            f"{path.relative_to(ROOT)}: {'run python -m tools.docs_pages' if check else 'written'}"
        )
        if not check:
            path.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
