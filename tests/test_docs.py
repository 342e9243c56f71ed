"""The documentation is current: tables, links, and how long the README is."""

import re
import statistics
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from sgl_blend.engine.compatibility import MODELS
from sgl_blend.engine.served import SERVED
from sgl_blend.engine.versions import TESTED_VERSIONS
from sgl_blend.settings.config import BlendConfig
from tools.compatibility import NOT_SHOWN, laws_by_class, laws_of, passed_of
from tools.docs_pages import BLOCKS, blocks_of, pages, stale_pages, with_tables

ROOT = Path(__file__).parents[1]

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "*/README.md",
        "examples/*/README.md",
        "benchmarks/*.md",
    )
    for path in ROOT.glob(pattern)
)


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """Return what links may name on a page, as GitHub and mkdocs make it of headings."""
    titles = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    plain = (
        re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title)).strip().lower() for title in titles
    )
    return {title.replace(" ", "-") for title in plain}


def test_tables_are_what_the_code_and_the_results_say() -> None:
    stale = [str(path.relative_to(ROOT)) for path in stale_pages()]
    assert stale == [], "run python -m tools.docs_pages"


def test_flags_are_shown_with_their_defaults() -> None:
    rows = [[cell.strip() for cell in row.split("|")] for row in BLOCKS["flags"]().splitlines()]
    shown = {row[1]: row[2] for row in rows[2:]}
    assert shown["`--enable-blend`"] == "off"
    assert shown["`--blend-learn-share`"] == "`0.15`"
    assert len(shown) == len(BlendConfig.__struct_fields__)


def test_every_table_is_on_one_page() -> None:
    found = [name for path in pages() for name in blocks_of(path.read_text())]
    assert sorted(found) == sorted(BLOCKS)


def test_every_model_and_feature_was_shown_on_every_version() -> None:
    # A missing one: python -m tools.compatibility.
    for version in TESTED_VERSIONS:
        assert {laws_of(name, version) for name in MODELS} <= {"L1 to L5", "refused"}
        assert NOT_SHOWN not in {passed_of(feature, version) for feature in SERVED}


def test_laws_are_counted_by_the_class_of_their_model() -> None:
    kinds = {"llama": "Llama", "llama-llama3": "Llama", "qwen3-moe": "Moe", "glm4": "Glm"}

    def case(name: str, mark: str = "") -> ET.Element:
        inner = f"<{mark}/>" if mark else ""
        return ET.fromstring(f'<testcase classname="t" name="{name}">{inner}</testcase>')

    cases = [
        case("test_l1_a[llama]"),
        case("test_l1_b[llama-llama3]"),
        case("test_l2_c[llama+fp8_e4m3]", "failure"),
        case("test_l5_d[qwen3-moe-_abort]"),
        case("test_l5_d[_abort-qwen3-moe]", "skipped"),
        case("test_l3_e[_abort-qwen3-moe]"),
        case("test_reuse[glm4]"),
    ]
    assert laws_by_class(cases, kinds) == {"Glm": [], "Llama": ["L1"], "Moe": ["L3"]}


def test_every_file_of_results_has_a_table() -> None:
    files = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    files.remove("compatibility")  # it has several
    assert files <= {name for path in pages() for name in blocks_of(path.read_text())}


def test_a_changed_table_is_seen() -> None:
    page = "# A page\n\n<!-- generated: versions -->\n\n- 0.0.0\n\n<!-- end of generated -->\n"
    assert with_tables(page) != page
    assert with_tables(with_tables(page)) == with_tables(page)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), link


def test_every_test_that_the_features_name_exists() -> None:
    named = {path for one in SERVED for path in one.test.split(", ") if path.startswith("tests/")}
    assert named
    for path in named:
        assert (ROOT / path).is_file(), path


def test_every_model_that_is_served_is_to_be_shown_on_a_gpu() -> None:
    lines = (ROOT / "benchmarks" / "gpu_todo.md").read_text().splitlines()
    for name in MODELS:
        commands = [line for line in lines if f"| `{name}` |" in line]
        assert commands, name
        for line in commands:
            verified, timed = re.findall(
                r"sgl-blend (?:verify|bench ttft) --model-path (\S+?)[` ]", line
            )
            assert verified == timed


def test_the_readme_is_short_and_its_sentences_are_too() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text().splitlines()) <= 100
    lines = [
        line for line in prose(readme).splitlines() if line[:1] not in ("#", "|", "!", "<", "-")
    ]
    text = LINK.sub("]", " ".join(lines))
    sentences = [part for part in re.split(r"(?<=[.?:])\s", text) if part.strip()]
    assert statistics.median(len(sentence.split()) for sentence in sentences) <= 14
