"""Totals of the scheduler process, for /server_info and Prometheus."""

from collections import Counter
from typing import Any

from sgl_blend.fallback import FallbackReason

_COUNTED = (
    "prompt_tokens",
    "prefix_tokens",
    "reused_tokens",
    "recomputed_tokens",
    "computed_tokens",
    "chunk_hits",
    "chunk_misses",
)


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

    def add(self, report: dict[str, Any]) -> None:
        """Count one request whose prefill is done."""
        counts = {name: int(report[name]) for name in _COUNTED}
        counts["requests"] = 1
        counts["blended"] = int(report["fallback"] is None)
        self.totals.update(counts)
        if report["fallback"] is not None:
            self.fallbacks[report["fallback"]] += 1
        if self._prometheus is not None:
            self._prometheus.add(counts, report["fallback"])


class _PrometheusCounters:
    def __init__(self, labels: dict[str, str]) -> None:
        from prometheus_client import Counter as PrometheusCounter

        self._labels = labels
        names = list(labels)
        self._counters = {
            name: PrometheusCounter(f"sgl_blend:{name}_total", text, names)
            for name, text in {
                "requests": "Requests whose prefill is done.",
                "blended": "Requests that reused chunk KV.",
                "prompt_tokens": "Prompt tokens, separators not counted.",
                "prefix_tokens": "Prompt tokens whose exact KV was in the cache.",
                "reused_tokens": "Prompt tokens whose chunk KV was taken as it was.",
                "recomputed_tokens": "Prompt tokens of reused chunks that were recomputed.",
                "computed_tokens": "Prompt tokens that were prefilled as usual.",
                "chunk_hits": "Chunks of which KV was reused.",
                "chunk_misses": "Chunks that were not stored.",
            }.items()
        }
        self._fallback = PrometheusCounter(
            "sgl_blend:fallback_total", "Requests not blended, by reason.", [*names, "reason"]
        )

    def add(self, counts: dict[str, int], fallback: str | None) -> None:
        for name, counter in self._counters.items():
            counter.labels(**self._labels).inc(counts[name])
        if fallback is not None:
            reason = FallbackReason(fallback).name.lower()
            self._fallback.labels(**self._labels, reason=reason).inc()
