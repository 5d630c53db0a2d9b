"""The whole fleet in a few numbers: how many jobs are slowed down, what it costs, and why."""

from __future__ import annotations

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
    newest_jobs,
    with_clocks,
)
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
    """What one cause wastes, over all jobs whose dearest finding it is."""

    cause: str
    jobs: int
    gpu_hours_per_day: float
    cost_per_day: float | None


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """The jobs with data in the last days.

    Attributes
    ----------
    slowed, slowed_share
        Jobs that run at 1.1 times their ideal step time or slower; of those that were analysed.
    gpu_hours_per_day, cost_per_day
        What all of them waste as of now.
    """

    days: float
    jobs: int
    running: int
    analysed: int
    slowed: int
    slowed_share: float | None
    gpu_hours_per_day: float
    cost_per_day: float | None
    waste: tuple[WasteBin, ...]
    causes: tuple[CauseRow, ...]
    worst_jobs: tuple[JobRow, ...]
    worst_hosts: tuple[HostRow, ...]


@dataclass(frozen=True, slots=True)
class FleetFilter:
    """How far back to look from when, and the price of a GPU hour."""

    days: float
    now_ns: int
    price: float | None


def fleet_summary(
    session: Session, tenant_id: str, wanted: FleetFilter, everything: Sequence[JobRow]
) -> FleetSummary:
    """The fleet as of its last days.

    Parameters
    ----------
    everything
        All jobs, dearest first (`dearest_jobs`).
    """
    days, now_ns, price = wanted.days, wanted.now_ns, wanted.price
    since_s = now_ns / 1e9 - days * _DAY_S
    jobs = [row for row in everything if row.last_data_s >= since_s]
    analysed = [row for row in jobs if row.slowdown is not None]
    slowed = [row for row in analysed if (row.slowdown or 0.0) >= SLOW]
    hosts = list_hosts(session, tenant_id, HostFilter(now_ns, days=days), Slice(_WORST), price)
    hours = sum(row.gpu_hours_per_day or 0.0 for row in analysed)
    return FleetSummary(
        days=days,
        jobs=len(jobs),
        running=sum(row.running for row in jobs),
        analysed=len(analysed),
        slowed=len(slowed),
        slowed_share=len(slowed) / len(analysed) if analysed else None,
        gpu_hours_per_day=hours,
        cost_per_day=None if price is None else hours * price,
        waste=_bins([row.waste_ratio or 0.0 for row in analysed]),
        causes=_causes(analysed, price),
        worst_jobs=with_clocks(session, [row for row in jobs if row.gpu_hours_per_day][:_WORST]),
        worst_hosts=hosts.items,
    )


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
        cause = row.finding.cause if row.finding else "unknown"
        hours[cause] = hours.get(cause, 0.0) + row.gpu_hours_per_day
        counts[cause] = counts.get(cause, 0) + 1
    return tuple(
        CauseRow(cause, counts[cause], lost, None if price is None else lost * price)
        for cause, lost in sorted(hours.items(), key=lambda item: (-item[1], item[0]))
    )
