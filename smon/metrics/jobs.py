"""The collector of running jobs: families are built at each scrape, so that none outlives its job.

Flow: ``/metrics`` (`smon.api.ops`) → **here** → `smon.store.queries.running`,
`smon.metrics.samples`. Every server that shares a database publishes the same jobs with the same
numbers: rules take the maximum without ``instance``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from smon.config import Settings
from smon.metrics.labels import job_labels
from smon.metrics.latest import Latest, Patience
from smon.metrics.links import pages_url
from smon.metrics.samples import HELP, Name, Sample, importance, samples_of
from smon.store.database import Database
from smon.store.queries.running import SILENT_NS, Asked, RunningJob, running_jobs

_NS: Final = 10**9

#: A job that has ended is published for so long, so that its last numbers are scraped.
LINGER_S: Final = 30.0

#: Of the series that one scrape may have, so many are for everything that is not a job.
RESERVED: Final = 1_000

_UP: Final = "smon_job_metrics_up"
_FAILURES: Final = "smon_job_metrics_failures"
_SECONDS: Final = "smon_job_metrics_query_seconds"
_SERIES: Final = "smon_job_metrics_series"
_DROPPED: Final = "smon_job_metrics_dropped_series"

#: What the collector says of itself, in a line.
OWN_HELP: Final = {
    _UP: "1 if the numbers of the jobs are fresh, 0 if the database did not answer in time.",
    _FAILURES: "Scrapes without fresh numbers of the jobs.",
    _SECONDS: "Time that the last question to the database took.",
    _SERIES: "Series of running jobs that are published.",
    _DROPPED: "Series of running jobs that are left out, because there are too many.",
}


@dataclass(frozen=True, slots=True, eq=False)
class _Scene:
    """What there is to publish."""

    samples: Sequence[Sample]
    dropped: int
    seconds: float


class JobCollector(Collector):
    """Metrics of running jobs.

    Parameters
    ----------
    clock
        Unix time, ns.
    """

    def __init__(
        self,
        database: Database,
        settings: Settings,
        clock: Callable[[], int] = time.time_ns,
        patience: Patience | None = None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._clock = clock
        self._latest = Latest(self._look, patience)
        self._failures = 0

    def describe(self) -> Iterable[Metric]:
        """The families, without samples: asking for their names must not ask the database."""
        return [*_families(()), *_own(_Scene((), 0, 0.0), up=True, failures=0)]

    def collect(self) -> Iterable[Metric]:
        """The families of this moment."""
        answer = self._latest.get()
        self._failures += answer.failed
        scene = answer.value or _Scene((), 0, 0.0)
        yield from _families(scene.samples)
        yield from _own(scene, up=not answer.failed, failures=self._failures)

    def _look(self) -> _Scene:
        begin = time.monotonic()
        now = self._clock()
        with self._database.read() as session:
            jobs = running_jobs(session, self._asked(now))
        room = max(self._settings.metrics_max_series - RESERVED, 0)
        samples, dropped = fitted(self._by_job(jobs, now), room)
        return _Scene(samples, dropped, time.monotonic() - begin)

    def _asked(self, now: int) -> Asked:
        return Asked(
            ended_ns=now - round(LINGER_S * _NS),
            heard_ns=now - round(self._settings.metrics_silent_s * _NS),
            down_ns=now - round(self._settings.agent_down_s * _NS),
            silent_ns=now - SILENT_NS,
        )

    def _by_job(self, jobs: Sequence[RunningJob], now: int) -> list[list[Sample]]:
        """Samples of each job, the one that loses most first."""
        named = job_labels(jobs)
        base = pages_url(self._settings)
        ordered = sorted(jobs, key=lambda one: (-importance(one), one.job_id))
        return [
            samples_of(one, named[one.job_id], f"{base}/jobs/{one.job_id}", now) for one in ordered
        ]


def fitted(by_job: Sequence[Sequence[Sample]], room: int) -> tuple[list[Sample], int]:
    """Samples of the first jobs that fit, and how many are left out.

    A job is published whole or not at all: half of one would look like a job without findings.
    """
    kept: list[Sample] = []
    for number, samples in enumerate(by_job):
        if len(kept) + len(samples) > room:
            return kept, sum(map(len, by_job[number:]))
        kept += samples
    return kept, 0


def _families(samples: Sequence[Sample]) -> list[Metric]:
    families: dict[Name, Metric] = {name: GaugeMetricFamily(name, HELP[name]) for name in Name}
    for sample in samples:
        families[sample.name].add_sample(sample.name, sample.labels, sample.value)
    return list(families.values())


def _own(scene: _Scene, *, up: bool, failures: int) -> list[Metric]:
    return [
        GaugeMetricFamily(_UP, OWN_HELP[_UP], float(up)),
        CounterMetricFamily(_FAILURES, OWN_HELP[_FAILURES], float(failures)),
        GaugeMetricFamily(_SECONDS, OWN_HELP[_SECONDS], scene.seconds),
        GaugeMetricFamily(_SERIES, OWN_HELP[_SERIES], float(len(scene.samples))),
        GaugeMetricFamily(_DROPPED, OWN_HELP[_DROPPED], float(scene.dropped)),
    ]
