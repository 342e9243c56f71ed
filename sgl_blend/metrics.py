"""Totals of the scheduler process, for /server_info and Prometheus."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from sgl_blend.fallback import FallbackReason
from sgl_blend.report import BlendReport
from sgl_blend.storage.counters import TOTALS, StorageCounters

_COUNTED = (
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
COUNTERS = {
    "requests": "Requests whose prefill is done.",
    "blended": "Requests that took chunk KV as it was.",
    "prompt_tokens": "Prompt tokens, separators not counted.",
    "prefix_tokens": "Prompt tokens whose exact KV was in the cache.",
    "reused_tokens": "Prompt tokens whose chunk KV was taken as it was.",
    "recomputed_tokens": "Prompt tokens of reused chunks that were recomputed.",
    "computed_tokens": "Prompt tokens that were prefilled as usual.",
    "found_tokens": "Prompt tokens of chunks that were found without a mark and used.",
    "chunk_hits": "Chunks of which KV was reused.",
    "chunk_misses": "Chunks that were not stored as a whole.",
    "host_tokens": "Tokens of chunks and exact prefixes that were brought back from host memory.",
    "storage_tokens": "Tokens that came from storage to host memory.",
}
"""Prometheus counters of all requests; each is named ``sgl_blend:NAME_total``."""
FALLBACK_COUNTER = "Requests not blended, by reason."
CANARY_COUNTERS = {
    "compared": "Blended requests compared to full prefill.",
    "agreed": "Of those, first tokens that agreed.",
    "skipped": "Requests picked and not compared.",
}
"""Prometheus counters of the canary; each is named ``sgl_blend:canary_NAME_total``."""
CANARY_KL = "KL of the first token's distribution to full prefill's, in nats."
CANARY_TRIPPED = "1 once the canary has switched blending off."
STORAGE_COUNTERS = TOTALS
"""Prometheus counters of the storage backend; each is named ``sgl_blend:storage_NAME_total``."""
STORAGE_FAULTS = (
    "Calls of the storage backend that failed, and pages that were not used, by reason."
)
STORAGE_LEVELS = "Pages that were read from the storage backend, by the level they were coded at."
FINDING_COUNTERS = {
    "learned_chunks": "Chunks that were made of text that came again.",
    "learned_tokens": "Their tokens.",
    "learned_hits": "Pieces of such chunks that were found in a prompt and used.",
    "learned_hit_tokens": "Their tokens. Those of chunks that a client had marked are in found_tokens.",
    "unpaid_chunks": "Chunks that were not made, because the prompts since were too short.",
    "starts_forgotten": "Beginnings of chunks that had to make room in the index.",
    "heads_forgotten": "Build prefixes of prompts without marks that had to make room.",
    "prompts_forgotten": "Past prompts that had to make room in the log.",
    "find_failures": "Errors while something was looked for; after the first, finding is off.",
    "learn_failures": "Errors while something was learned; after the first, learning is off.",
}
"""Prometheus counters of finding and learning; each is named ``sgl_blend:NAME_total``."""
FINDING_GAUGES = {
    "starts": "Chunks whose beginning is known.",
    "start_bytes": "Bytes of the index of beginnings.",
    "prompts_remembered": "Past prompts in the log.",
    "prompt_log_bytes": "Bytes of the log.",
}
"""Prometheus gauges of finding and learning; each is named ``sgl_blend:NAME``."""
_KL_BUCKETS = (1e-4, 1e-3, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0)


class BlendMetrics:
    """Adds up request reports; owned by the scheduler thread.

    Args:
        publish: Whether to keep Prometheus counters too. The scheduler must have set up the
            multi-process directory before; SGLang's /metrics endpoint merges what lies there.
        labels: Prometheus labels of this server.
    """

    def __init__(self, *, publish: bool, labels: dict[str, str]) -> None:
        self.totals: Counter[str] = Counter(dict.fromkeys(("requests", "blended", *_COUNTED), 0))
        self.fallbacks: Counter[str] = Counter()
        self._prometheus = _PrometheusCounters(labels) if publish else None

    def add(self, report: BlendReport) -> None:
        """Count one request whose prefill is done."""
        counts = {name: int(getattr(report, name)) for name in _COUNTED}
        counts["requests"] = 1
        counts["blended"] = int(counts["reused_tokens"] > 0)
        self.totals.update(counts)
        if report.fallback is not None:
            self.fallbacks[report.fallback.value] += 1
        if self._prometheus is not None:
            self._prometheus.add(counts, report.fallback)


class CanaryMetrics:
    """Counts what the canary compares; owned by the scheduler thread.

    Args:
        publish: As in BlendMetrics.
        labels: As in BlendMetrics.

    Attributes:
        compared: Blended requests compared with full prefill.
        agreed: Those of them whose likeliest first token was the same.
        skipped: Requests that were picked and not compared.
    """

    def __init__(self, *, publish: bool, labels: dict[str, str]) -> None:
        self.compared = 0
        self.agreed = 0
        self.skipped = 0
        self._prometheus = _PrometheusCanary(labels) if publish else None

    def add(self, *, kl: float, agrees: bool) -> None:
        """Count one comparison; kl is in nats."""
        self.compared += 1
        self.agreed += agrees
        if self._prometheus is not None:
            self._prometheus.compared.inc()
            self._prometheus.agreed.inc(int(agrees))
            self._prometheus.kl.observe(kl)

    def skip(self) -> None:
        """Count one request that was picked and will not be compared."""
        self.skipped += 1
        if self._prometheus is not None:
            self._prometheus.skipped.inc()

    def trip(self) -> None:
        """Show that blending was switched off."""
        if self._prometheus is not None:
            self._prometheus.tripped.set(1)


class StorageMetrics:
    """Publishes what happened between the server and its storage backend; owned by one thread.

    Args:
        publish: As in BlendMetrics.
        labels: As in BlendMetrics.
    """

    def __init__(self, *, publish: bool, labels: dict[str, str]) -> None:
        self._prometheus = _PrometheusStorage(labels) if publish else None
        self._seen: dict[str, float] = {}

    def update(self, counters: StorageCounters) -> None:
        """Publish what came since the last call; another backend begins at 0 again."""
        if self._prometheus is None:
            return
        found = counters.snapshot()
        faults, levels = found.pop("faults"), found.pop("levels")
        assert isinstance(faults, dict), "faults are by reason"
        assert isinstance(levels, dict), "pages are by level"
        for name, total in found.items():
            assert not isinstance(total, dict), f"{name} is one number"
            self._prometheus.totals[name].inc(_growth(self._seen, name, total))
        for reason, count in faults.items():
            self._prometheus.fault(reason).inc(_growth(self._seen, f"fault {reason}", count))
        for level, count in levels.items():
            self._prometheus.level(level).inc(_growth(self._seen, f"level {level}", count))


class FindingMetrics:
    """Publishes what was learned and how large its tables are; owned by the scheduler thread.

    Args:
        publish: As in BlendMetrics.
        labels: As in BlendMetrics.
    """

    def __init__(self, *, publish: bool, labels: dict[str, str]) -> None:
        self._prometheus = _PrometheusFinding(labels) if publish else None
        self._seen: dict[str, float] = {}

    def update(self, describe: Callable[[], Mapping[str, int]]) -> None:
        """Publish sizes, and what came since the last call.

        Args:
            describe: Returns numbers by the names of FINDING_COUNTERS and FINDING_GAUGES; called
                only if they are published. A server that learns nothing has only some of them.
        """
        if self._prometheus is None:
            return
        for name, value in describe().items():
            if name in FINDING_GAUGES:
                self._prometheus.gauges[name].set(value)
            else:
                self._prometheus.counters[name].inc(_growth(self._seen, name, value))


def _growth(seen: dict[str, float], name: str, total: float) -> float:
    """Return what a total grew by since the last call; one that fell began at 0 again."""
    before = seen.get(name, 0)
    seen[name] = total
    return total - before if total >= before else total


class _PrometheusFinding:
    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter as PrometheusCounter
        from prometheus_client import Gauge

        names = list(labels)
        self.counters = {
            name: PrometheusCounter(f"sgl_blend:{name}_total", text, names).labels(**labels)
            for name, text in FINDING_COUNTERS.items()
        }
        self.gauges = {
            name: Gauge(f"sgl_blend:{name}", text, names, multiprocess_mode="mostrecent").labels(
                **labels
            )
            for name, text in FINDING_GAUGES.items()
        }


class _PrometheusStorage:
    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter as PrometheusCounter

        self._labels, names = labels, list(labels)
        self.totals = {
            name: PrometheusCounter(f"sgl_blend:storage_{name}_total", text, names).labels(**labels)
            for name, text in STORAGE_COUNTERS.items()
        }
        self._faults = PrometheusCounter(
            "sgl_blend:storage_faults_total", STORAGE_FAULTS, [*names, "reason"]
        )

        self._levels = PrometheusCounter(
            "sgl_blend:storage_level_hits_total", STORAGE_LEVELS, [*names, "level"]
        )

    def fault(self, reason: str) -> Any:
        return self._faults.labels(**self._labels, reason=reason)

    def level(self, level: str) -> Any:
        return self._levels.labels(**self._labels, level=level)


class _PrometheusCanary:
    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter as PrometheusCounter
        from prometheus_client import Gauge, Histogram

        names = list(labels)
        self.compared, self.agreed, self.skipped = (
            PrometheusCounter(f"sgl_blend:canary_{name}_total", text, names).labels(**labels)
            for name, text in CANARY_COUNTERS.items()
        )
        self.kl = Histogram(
            "sgl_blend:canary_kl",
            CANARY_KL,
            names,
            buckets=_KL_BUCKETS,
        ).labels(**labels)
        self.tripped = Gauge(
            "sgl_blend:canary_tripped",
            CANARY_TRIPPED,
            names,
            multiprocess_mode="mostrecent",
        ).labels(**labels)
        self.tripped.set(0)


class _PrometheusCounters:
    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter as PrometheusCounter

        self._labels = labels
        names = list(labels)
        self._counters = {
            name: PrometheusCounter(f"sgl_blend:{name}_total", text, names)
            for name, text in COUNTERS.items()
        }
        self._fallback = PrometheusCounter(
            "sgl_blend:fallback_total", FALLBACK_COUNTER, [*names, "reason"]
        )

    def add(self, counts: dict[str, int], fallback: FallbackReason | None) -> None:
        for name, counter in self._counters.items():
            counter.labels(**self._labels).inc(max(0, counts[name]))  # a negative one would raise
        if fallback is not None:
            self._fallback.labels(**self._labels, reason=fallback.value).inc()
