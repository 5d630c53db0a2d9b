"""What every part of the worker works with, and what it counts.

Flow: `smon.worker.loop` makes it once → `smon.worker.windows`, `smon.worker.live`,
`smon.worker.imports`, `smon.worker.tasks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram

from smon.config import Settings
from smon.store.database import Database
from smon.store.objects import Objects
from smon.store.work import Terms

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


@dataclass(frozen=True, slots=True)
class Counts:
    """What one analysis adds to the metrics of a worker, from wherever it was made.

    Attributes
    ----------
    skipped
        Steps that were left out, by reason.
    seconds
        What it took, by kind.
    """

    rows: float
    steps: float
    skipped: Mapping[str, float]
    seconds: Mapping[str, float]


class Metrics:
    """Counters of one worker.

    Parameters
    ----------
    registry
        Where they are collected.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.steps = Counter(
            "smon_steps_analyzed_total", "Steps that the analysis used.", registry=registry
        )
        self.skipped = Counter(
            "smon_steps_skipped_total",
            "Steps that were left out.",
            ["reason"],
            registry=registry,
        )
        self.windows = Counter(
            "smon_windows_total",
            "Windows by what became of them: done, failed, retried, fenced.",
            ["state"],
            registry=registry,
        )
        self.seconds = Histogram(
            "smon_analysis_seconds",
            "Time that one analysis took: of a window, or of the running diagnosis.",
            ["kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.rows = Counter(
            "smon_analysis_rows_read_total", "Ops read from files for analysis.", registry=registry
        )
        self.files_dropped = Counter(
            "smon_captures_files_dropped_total",
            "Files of ranks that had come and are in no capture, by reason.",
            ["reason"],
            registry=registry,
        )
        self.errors = Counter(
            "smon_worker_errors_total",
            "Failures that nobody expected, by what was being done.",
            ["work"],
            registry=registry,
        )

    def count_steps(self, used: int, reasons: Iterable[str]) -> None:
        """Count the steps of one analysis, used and left out."""
        self.steps.inc(used)
        for reason in reasons:
            self.skipped.labels(category(reason)).inc()

    def counts(self) -> Counts:
        """What has been counted; of metrics that served a single analysis."""
        return Counts(
            rows=sum(_values(self.rows, "_total").values()),
            steps=sum(_values(self.steps, "_total").values()),
            skipped=_values(self.skipped, "_total"),
            seconds=_values(self.seconds, "_sum"),
        )

    def add(self, counts: Counts) -> None:
        """Count what an analysis elsewhere has counted."""
        self.rows.inc(counts.rows)
        self.steps.inc(counts.steps)
        for reason, steps in counts.skipped.items():
            self.skipped.labels(reason).inc(steps)
        for kind, seconds in counts.seconds.items():
            self.seconds.labels(kind).observe(seconds)


def _values(metric: Counter | Histogram, suffix: str) -> dict[str, float]:
    """Samples of a metric by its label; without one, by an empty word."""
    return {
        next(iter(sample.labels.values()), ""): sample.value
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith(suffix)
    }


def category(reason: str) -> str:
    """Why a step was left out, in one of a few words."""
    for sign, word in _CATEGORIES.items():
        if sign in reason:
            return word
    return "incomplete"


_CATEGORIES = {"warm-up": "warmup", "take no time": "no_time", "wait for each other": "broken"}


@dataclass(frozen=True, slots=True)
class Service:
    """One worker's surroundings.

    Attributes
    ----------
    name
        Of the worker: the owner of what it claims.
    clock
        Unix time, ns.
    """

    settings: Settings
    database: Database
    objects: Objects
    name: str
    clock: Callable[[], int]
    metrics: Metrics

    @property
    def terms(self) -> Terms:
        """On which terms it claims work."""
        return Terms(self.settings.lease_s, self.settings.max_tries)
