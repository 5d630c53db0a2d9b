"""The whole fleet in a few numbers: how many jobs are slowed down, what it costs, and why.

Flow: `smon.store.queries.jobs`, `hosts`, `losses` → **here** → fleet page, fleet report.
What is lost *now* is a rate, of jobs that are not over; what was lost *in the period* is a sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sqlalchemy.orm import Session

from smon.store.queries.hosts import HostFilter, HostRow, list_hosts
from smon.store.queries.jobs import (
    SLOW,
    JobFilter,
    JobRow,
    JobSort,
    JobState,
    completed,
    newest_jobs,
)
from smon.store.queries.losses import UNKNOWN, Loss, Period, loss_in
from smon.store.queries.paging import Slice

_DAY_S: Final = 86_400.0
_WORST: Final = 10

#: Upper ends of the bins of waste, as parts of the GPU time.
WASTE_BINS: Final = (0.01, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0)


@dataclass(frozen=True, slots=True)
class WasteBin:
    """Jobs that lose more than `above` and at most `up_to` of their GPU time."""

    above: float
    up_to: float
    jobs: int


@dataclass(frozen=True, slots=True)
class CauseRow:
    """What one cause wastes now, over all jobs that are not over whose first finding it is."""

    cause: str
    jobs: int
    gpu_hours_per_day: float
    cost_per_day: float | None


@dataclass(frozen=True, slots=True)
class FleetNow:
    """The jobs with data in the last days, as they are now.

    Attributes
    ----------
    slowed, slowed_share
        Jobs that run at 1.1 times their ideal step time or slower; of those that were analysed.
    gpu_hours_per_day, cost_per_day
        What those that are not over waste.
    states
        How many jobs are in each state that occurs.
    waste
        How the analysed jobs spread.
    """

    days: float
    jobs: int
    running: int
    analysed: int
    slowed: int
    slowed_share: float | None
    gpu_hours_per_day: float
    cost_per_day: float | None
    states: dict[JobState, int]
    waste: tuple[WasteBin, ...]
    causes: tuple[CauseRow, ...]


@dataclass(frozen=True, slots=True)
class FleetReport:
    """The fleet now, its dearest jobs and hosts, and what was lost in the period.

    Attributes
    ----------
    unplaced
        Analysed jobs whose windows all lie outside the period, or have no time.
    """

    now: FleetNow
    worst_jobs: tuple[JobRow, ...]
    worst_hosts: tuple[HostRow, ...]
    period: Loss
    unplaced: int


@dataclass(frozen=True, slots=True)
class FleetFilter:
    """How far back to look from when, and the price of a GPU hour."""

    days: float
    now_ns: int
    price: float | None

    @property
    def since_s(self) -> float:
        """Where the period begins, unix time."""
        return self.now_ns / 1e9 - self.days * _DAY_S


def fleet_now(wanted: FleetFilter, everything: Sequence[JobRow]) -> FleetNow:
    """The fleet as it is now, from all its jobs."""
    jobs = [row for row in everything if row.last_data_s >= wanted.since_s]
    analysed = [row for row in jobs if row.slowdown is not None]
    slowed = sum((row.slowdown or 0.0) >= SLOW for row in analysed)
    hours = sum(row.gpu_hours_per_day or 0.0 for row in analysed if not row.ended)
    states = Counter(row.state for row in jobs)
    return FleetNow(
        days=wanted.days,
        jobs=len(jobs),
        running=sum(row.running for row in jobs),
        analysed=len(analysed),
        slowed=slowed,
        slowed_share=slowed / len(analysed) if analysed else None,
        gpu_hours_per_day=hours,
        cost_per_day=None if wanted.price is None else hours * wanted.price,
        states={state: states[state] for state in JobState if states[state]},
        waste=_bins([row.waste_ratio or 0.0 for row in analysed]),
        causes=_causes([row for row in analysed if not row.ended], wanted.price),
    )


def fleet_report(session: Session, tenant_id: str, wanted: FleetFilter) -> FleetReport:
    """All that the fleet report says."""
    everything = dearest_jobs(session, tenant_id, wanted.price)
    now = fleet_now(wanted, everything)
    begin_ns = round(wanted.since_s * 1e9)
    period = Period(begin_ns, wanted.now_ns, wanted.price)
    loss = loss_in(session, tenant_id, period, _WORST)
    recent = [row for row in everything if row.last_data_s >= wanted.since_s]
    lossy = [row for row in recent if row.gpu_hours_per_day and not row.ended]
    return FleetReport(
        now=now,
        worst_jobs=completed(session, lossy[:_WORST]),
        worst_hosts=suspects(session, tenant_id, wanted, _WORST),
        period=loss,
        unplaced=max(now.analysed - loss.jobs, 0),
    )


def suspects(
    session: Session, tenant_id: str, wanted: FleetFilter, most: int
) -> tuple[HostRow, ...]:
    """Hosts about which there was a finding in the period, those in most jobs first."""
    asked = HostFilter(wanted.now_ns, days=wanted.days)
    return list_hosts(session, tenant_id, asked, Slice(most), wanted.price).items


def dearest_jobs(session: Session, tenant_id: str, price: float | None) -> list[JobRow]:
    """The jobs with the newest data, dearest first."""
    return newest_jobs(session, tenant_id, JobFilter(sort=JobSort.COST), price)


def _bins(wastes: Sequence[float]) -> tuple[WasteBin, ...]:
    bins = []
    above = 0.0
    for number, up_to in enumerate(WASTE_BINS):
        # A job can be faster than its ideal by the error of the simulation.
        low = -1.0 if number == 0 else above
        bins.append(WasteBin(above, up_to, sum(low < waste <= up_to for waste in wastes)))
        above = up_to
    return tuple(bins)


def _causes(jobs: Sequence[JobRow], price: float | None) -> tuple[CauseRow, ...]:
    hours: dict[str, float] = {}
    counts: dict[str, int] = {}
    for row in jobs:
        if not row.gpu_hours_per_day:
            continue
        cause = row.finding.cause if row.finding else UNKNOWN
        hours[cause] = hours.get(cause, 0.0) + row.gpu_hours_per_day
        counts[cause] = counts.get(cause, 0) + 1
    return tuple(
        CauseRow(cause, counts[cause], lost, None if price is None else lost * price)
        for cause, lost in sorted(hours.items(), key=lambda item: (-item[1], item[0]))
    )
