import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from sgl_blend.fallback import FallbackReason
from sgl_blend.metrics import BlendMetrics, FindingMetrics
from sgl_blend.report import BlendReport

COUNTS = (
    "prompt_tokens",
    "prefix_tokens",
    "reused_tokens",
    "recomputed_tokens",
    "computed_tokens",
    "found_tokens",
    "chunk_hits",
    "chunk_misses",
    "host_tokens",
    "storage_tokens",
)


def report(*counts: int, fallback: FallbackReason | None = None) -> BlendReport:
    """Write the report of one request."""
    named: dict[str, Any] = dict(zip(COUNTS, counts, strict=True))
    return BlendReport(**named, policy="hkvd", ratio=0.15, fallback=fallback)


reports = st.builds(
    report,
    *[st.integers(0, 10_000) | st.just(0)] * len(COUNTS),
    fallback=st.one_of(st.none(), st.sampled_from(FallbackReason)),
)


def unpublished() -> BlendMetrics:
    return BlendMetrics(publish=False, labels={})


def test_totals_are_there_before_the_first_request() -> None:
    assert unpublished().totals == dict.fromkeys(("requests", "blended", *COUNTS), 0)


@given(st.lists(reports, max_size=10))
def test_totals_are_the_sums_of_the_reports(all_reports: list[BlendReport]) -> None:
    metrics = unpublished()

    for one in all_reports:
        metrics.add(one)

    for name in COUNTS:
        assert metrics.totals[name] == sum(getattr(one, name) for one in all_reports)
    assert metrics.totals["requests"] == len(all_reports)


@given(st.lists(reports, max_size=10))
def test_blended_is_what_took_chunk_kv(all_reports: list[BlendReport]) -> None:
    metrics = unpublished()

    for one in all_reports:
        metrics.add(one)

    assert metrics.totals["blended"] == sum(one.reused_tokens > 0 for one in all_reports)
    for reason in FallbackReason:
        assert metrics.fallbacks[reason] == [one.fallback for one in all_reports].count(reason)


_PUBLISH = """
import sys
from sgl_blend.fallback import FallbackReason
from sgl_blend.metrics import BlendMetrics, FindingMetrics
from sgl_blend.report import BlendReport
metrics = BlendMetrics(publish=True, labels={"model_name": "m"})
counts = dict(prompt_tokens=100, prefix_tokens=10, recomputed_tokens=20, computed_tokens=10,
              chunk_hits=3, chunk_misses=1, policy="hkvd", ratio=0.15)
metrics.add(BlendReport(**counts, reused_tokens=60))
metrics.add(BlendReport(**counts, fallback=FallbackReason.NO_HIT))
"""


def _collected(publish: str, folder: Path) -> CollectorRegistry:
    """Run code that publishes, and collect: as in SGLang, one process writes files, another reads."""
    subprocess.run(
        [sys.executable, "-c", publish],
        env={"PROMETHEUS_MULTIPROC_DIR": str(folder), "PYTHONPATH": ":".join(sys.path)},
        check=True,
    )
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder))  # type: ignore[no-untyped-call]
    return registry


def test_what_the_scheduler_counts_appears_in_the_servers_metrics(tmp_path: Path) -> None:
    registry = _collected(_PUBLISH, tmp_path)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", **labels})

    assert value("sgl_blend:requests_total") == 2
    assert value("sgl_blend:blended_total") == 1
    assert value("sgl_blend:prompt_tokens_total") == 200
    assert value("sgl_blend:prefix_tokens_total") == 20
    assert value("sgl_blend:reused_tokens_total") == 60
    assert value("sgl_blend:recomputed_tokens_total") == 40
    assert value("sgl_blend:computed_tokens_total") == 20
    assert value("sgl_blend:chunk_hits_total") == 6
    assert value("sgl_blend:chunk_misses_total") == 2
    assert value("sgl_blend:fallback_total", reason="no_hit") == 1
    assert value("sgl_blend:fallback_total", reason="disabled") is None


_WRONG = """
from sgl_blend.metrics import BlendMetrics
from sgl_blend.report import BlendReport
metrics = BlendMetrics(publish=True, labels={"model_name": "m"})
metrics.add(BlendReport(prompt_tokens=100, prefix_tokens=-64, policy="hkvd", ratio=0.15))
"""


def test_a_wrong_count_does_not_end_the_scheduler(tmp_path: Path) -> None:
    registry = _collected(_WRONG, tmp_path)
    labels = {"model_name": "m"}
    assert registry.get_sample_value("sgl_blend:prompt_tokens_total", labels) == 100
    assert registry.get_sample_value("sgl_blend:prefix_tokens_total", labels) == 0


_PUBLISH_CANARY = """
import sys
from sgl_blend.metrics import CanaryMetrics
metrics = CanaryMetrics(publish=True, labels={"model_name": "m"})
for number in range(int(sys.argv[1])):
    metrics.add(kl=0.25, agrees=number % 2 == 0)
    metrics.skip()
if len(sys.argv) > 2:
    metrics.trip()
"""


@pytest.mark.parametrize(
    ("arguments", "want"), [(("0",), (0, 0, 0, 0, 0)), (("3", "trip"), (3, 2, 3, 0.75, 1))]
)
def test_what_the_canary_counts_appears_in_the_servers_metrics(
    tmp_path: Path, arguments: tuple[str, ...], want: tuple[float, ...]
) -> None:
    subprocess.run(
        [sys.executable, "-c", _PUBLISH_CANARY, *arguments],
        env={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
        check=True,
    )
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))  # type: ignore[no-untyped-call]

    names = ("compared_total", "agreed_total", "skipped_total", "kl_sum", "tripped")
    got = [
        registry.get_sample_value(f"sgl_blend:canary_{name}", {"model_name": "m"}) for name in names
    ]

    assert tuple(got) == want


_PUBLISH_STORAGE = """
from sgl_blend.metrics import StorageMetrics
from sgl_blend.storage.counters import StorageCounters
metrics = StorageMetrics(publish=True, labels={"model_name": "m"})
counters = StorageCounters()
for _ in range(2):
    counters.add("hits", 3)
    counters.add_moved("read", 1000, 0.5)
    counters.fault("corrupt")
    metrics.update(counters)
metrics.update(counters)  # nothing new
other = StorageCounters()  # an operator attached another backend
other.add("hits", 2)
metrics.update(other)
"""


def test_what_storage_counts_appears_in_the_servers_metrics(tmp_path: Path) -> None:
    registry = _collected(_PUBLISH_STORAGE, tmp_path)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(
            f"sgl_blend:storage_{name}_total", {"model_name": "m", **labels}
        )

    assert value("hits") == 8
    assert value("read_bytes") == 2000
    assert value("read_seconds") == 1.0
    assert value("faults", reason="corrupt") == 2


_PUBLISH_FINDING = """
from sgl_blend.metrics import FindingMetrics
metrics = FindingMetrics(publish=True, labels={"model_name": "m"})
metrics.update(lambda: {"learned_chunks": 2, "learned_tokens": 700, "starts": 2, "start_bytes": 2048})
metrics.update(lambda: {"learned_chunks": 3, "learned_tokens": 900, "starts": 1, "start_bytes": 2048})
metrics.update(lambda: {"learned_chunks": 1})  # it began anew
"""


def test_what_is_learned_appears_in_the_servers_metrics(tmp_path: Path) -> None:
    registry = _collected(_PUBLISH_FINDING, tmp_path)

    def value(name: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m"})

    assert value("sgl_blend:learned_chunks_total") == 4
    assert value("sgl_blend:learned_tokens_total") == 900
    assert value("sgl_blend:starts") == 1
    assert value("sgl_blend:start_bytes") == 2048
    assert value("sgl_blend:learn_failures_total") == 0


def test_nothing_of_finding_is_published_unless_asked_for() -> None:
    def fail() -> dict[str, int]:
        raise AssertionError("nobody asks for it")

    FindingMetrics(publish=False, labels={}).update(fail)
