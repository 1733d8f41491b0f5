"""Metrics of the monitor and the batcher for Prometheus, computed at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from neuralmean.monitor.counters import P_VALUE_EDGES
from neuralmean.monitor.monitor import Monitor
from neuralmean.service.batching import Batcher


class MonitorCollector:
    """A Prometheus collector of one monitor: `registry.register(MonitorCollector(monitor))`, with or without HTTP."""

    def __init__(self, monitor: Monitor | Callable[[], Monitor]) -> None:
        self._monitor = monitor

    def collect(self) -> Iterator[Any]:
        """Yield the current metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        monitor = self._monitor if isinstance(self._monitor, Monitor) else self._monitor()
        status = monitor.status()
        yield CounterMetricFamily("nmd_inputs", "Inputs of the stream that were scored.", value=status.n_seen)
        flagged = CounterMetricFamily("nmd_ood", "Inputs that were flagged as out of distribution.", labels=["kind"])
        for kind, count in status.n_by_kind.items():
            flagged.add_metric([kind], count)
        yield flagged
        total, buckets = 0, []
        for edge, count in zip(P_VALUE_EDGES, status.p_value_counts, strict=True):
            total += count
            buckets.append((f"{edge:g}", float(total)))
        buckets.append(("+Inf", float(total)))
        yield HistogramMetricFamily("nmd_p_value", "P-values.", buckets=buckets, sum_value=status.p_value_sum)
        gauges = {
            "nmd_window_ood_rate": ("Share of the window that was flagged.", status.window_ood_rate),
            "nmd_expected_ood_rate": ("Share that is flagged while all is well.", status.expected_ood_rate),
            "nmd_window_discrepancy": ("Batch-level mean discrepancy of the window.", status.discrepancy),
            "nmd_drift": ("1 from a drift alarm until it is reset.", float(status.drift)),
            "nmd_drift_log10_evidence": ("Evidence of drift, as a power of ten.", status.log10_evidence),
            "nmd_drift_log10_needed": ("Evidence at which the alarm goes off.", status.log10_needed),
        }
        for name, (text, value) in gauges.items():
            if value is not None:
                yield GaugeMetricFamily(name, text, value=value)
        layers = GaugeMetricFamily(
            "nmd_layer_shift", "Move of a layer over the window, in standard deviations.", labels=["layer"]
        )
        for layer in status.layers:
            layers.add_metric([layer.layer], layer.shift)
        yield layers


class BatcherCollector:
    """A Prometheus collector of one batcher."""

    def __init__(self, batcher: Callable[[], Batcher | None]) -> None:
        self._batcher = batcher

    def collect(self) -> Iterator[Any]:
        """Yield the current metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        batcher = self._batcher()
        if batcher is None:
            return
        yield GaugeMetricFamily("nmd_queue_inputs", "Inputs that wait.", value=batcher.n_waiting)
        yield CounterMetricFamily("nmd_passes", "Forward passes.", value=batcher.n_passes)
        yield CounterMetricFamily("nmd_pass_inputs", "Inputs in forward passes.", value=batcher.n_rows)
        yield CounterMetricFamily("nmd_refused", "Requests refused as the queue was full.", value=batcher.n_refused)
        yield CounterMetricFamily("nmd_given_up", "Requests given up before they ran.", value=batcher.n_given_up)


class RequestMetrics:
    """Counts requests and their time by route and status."""

    def __init__(self, registry: Any) -> None:
        from prometheus_client import Counter, Histogram

        self._known: dict[tuple[str, int], tuple[Any, Any]] = {}
        self._requests = Counter("nmd_http_requests", "Requests.", ["route", "status"], registry=registry)
        buckets = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30)
        self._seconds = Histogram("nmd_http_seconds", "Time to answer.", ["route"], registry=registry, buckets=buckets)

    def count(self, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        known = self._known.get((route, status))
        if known is None:  # looking up labels takes longer than counting
            known = self._known[route, status] = (
                self._requests.labels(route, str(status)),
                self._seconds.labels(route),
            )
        known[0].inc()
        known[1].observe(seconds)
