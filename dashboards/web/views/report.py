"""What the page of the fleet report shows: the document of ``GET fleet/summary`` in words and bars.

Flow: REST document → **here** → `dashboards.web.pages`. The numbers are those of the document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlencode

from smon.api.words import cause_words
from smon.render.amounts import dollars, gpu_hours, gpu_time, share
from smon.render.fleet import bin_words, now_words, period_words
from smon.store.queries.jobs import SLOW

#: Periods that the page offers, in days.
PERIODS: Final = (1.0, 7.0, 30.0, 90.0)

_COLUMN: Final = 76
_DRAWN: Final = 112
_TOP: Final = 20

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fact:
    """One number above the page."""

    value: str
    words: str


@dataclass(frozen=True, slots=True)
class Bin:
    """One column of the distribution, in pixels of the figure."""

    name: str
    jobs: int
    x: float
    y: float
    height: float
    slowed: bool


@dataclass(frozen=True, slots=True)
class Lost:
    """A line with a bar: `part` of the longest; `href` of a job."""

    name: str
    href: str | None
    words: str
    jobs: int | None
    amount: str
    money: str | None
    share: str | None
    part: float
    value: float


@dataclass(frozen=True, slots=True)
class HostLine:
    """A host that was a suspect."""

    name: str
    jobs: int
    open_findings: int
    causes: str
    wasted: str
    last_s: float | None


@dataclass(frozen=True, slots=True)
class Choice:
    """A period that can be chosen."""

    words: str
    href: str
    current: bool


@dataclass(frozen=True, slots=True)
class ReportView:
    """The page of the fleet report."""

    days: float
    begin_s: float
    end_s: float
    choices: tuple[Choice, ...]
    csv: str
    json: str
    facts: tuple[Fact, ...]
    period: tuple[str, ...]
    period_causes: tuple[Lost, ...]
    period_jobs: tuple[Lost, ...]
    now: tuple[str, ...]
    now_causes: tuple[Lost, ...]
    now_jobs: tuple[Lost, ...]
    bins: tuple[Bin, ...]
    bins_words: str
    width: int
    hosts: tuple[HostLine, ...]


def report_view(document: Document) -> ReportView:
    """The page of the fleet report."""
    period, days = document["period"], document["days"]
    asked = urlencode({"days": f"{days:g}"})
    return ReportView(
        days=days,
        begin_s=period["begin_s"],
        end_s=period["end_s"],
        choices=tuple(
            Choice(f"{each:g} day{'' if each == 1 else 's'}", f"/fleet?days={each:g}", each == days)
            for each in PERIODS
        ),
        csv=f"/fleet.csv?{asked}",
        json=f"/api/v1/fleet/summary?{asked}",
        facts=_facts(document),
        period=tuple(period_words(document)),
        period_causes=_causes(period["causes"], "lost_gpu_hours", "lost_cost"),
        period_jobs=_period_jobs(period["worst"]),
        now=tuple(now_words(document)),
        now_causes=_causes(document["causes"], "gpu_hours_per_day", "cost_per_day"),
        now_jobs=_now_jobs(document["worst_jobs"]),
        bins=_bins(document["waste"]),
        bins_words=_bins_words(document),
        width=_COLUMN * len(document["waste"]),
        hosts=tuple(_host(host) for host in document["worst_hosts"]),
    )


def _facts(document: Document) -> tuple[Fact, ...]:
    period = document["period"]
    money = period["lost_cost"]
    lost = "lost in the period" if money is None else f"lost in the period, {dollars(money)}"
    if not period["jobs"]:
        lost = "lost in the period: no window of it has been analysed"
    slowed = f"of analysed jobs slowed by 10 % or more: {document['slowed']}"
    rate = document["cost_per_day"]
    return (
        Fact(gpu_time(period["lost_gpu_hours"] if period["jobs"] else None), lost),
        Fact(share(period["lost_share"]), "of the analysed GPU time was lost"),
        Fact(share(document["slowed_share"]), f"{slowed} of {document['analysed']}"),
        Fact(
            gpu_time(document["gpu_hours_per_day"]),
            f"lost per day at the present rate{'' if rate is None else f', {dollars(rate)}'}",
        ),
    )


def _causes(rows: Sequence[Document], hours: str, money: str) -> tuple[Lost, ...]:
    most = max((row[hours] for row in rows), default=0.0) or 1.0
    whole = sum(row[hours] for row in rows) or 1.0
    return tuple(
        Lost(
            name=cause_words(row["cause"]),
            href=None,
            words="",
            jobs=row["jobs"],
            amount=gpu_hours(row[hours]),
            money=None if row[money] is None else dollars(row[money]),
            share=share(row[hours] / whole),
            part=row[hours] / most,
            value=row[hours],
        )
        for row in rows
    )


def _period_jobs(rows: Sequence[Document]) -> tuple[Lost, ...]:
    most = max((row["lost_gpu_hours"] for row in rows), default=0.0) or 1.0
    return tuple(
        Lost(
            name=row["name"],
            href=f"/jobs/{row['job_id']}",
            words=cause_words(row["cause"]),
            jobs=None,
            amount=gpu_hours(row["lost_gpu_hours"]),
            money=None if row["lost_cost"] is None else dollars(row["lost_cost"]),
            share=share(row["lost_share"]),
            part=row["lost_gpu_hours"] / most,
            value=row["lost_gpu_hours"],
        )
        for row in rows
    )


def _now_jobs(rows: Sequence[Document]) -> tuple[Lost, ...]:
    most = max((row["gpu_hours_per_day"] for row in rows), default=0.0) or 1.0
    return tuple(
        Lost(
            name=row["name"],
            href=f"/jobs/{row['id']}",
            words=cause_words(row["finding"]["cause"] if row["finding"] else "unknown"),
            jobs=None,
            amount=gpu_hours(row["gpu_hours_per_day"]),
            money=None if row["cost_per_day"] is None else dollars(row["cost_per_day"]),
            share=share(row["waste_ratio"]),
            part=row["gpu_hours_per_day"] / most,
            value=row["gpu_hours_per_day"],
        )
        for row in rows
    )


def _bins(rows: Sequence[Document]) -> tuple[Bin, ...]:
    most = max((row["jobs"] for row in rows), default=0) or 1
    # A job at `SLOW` times its ideal step time loses this part of its GPU time.
    slow = 1.0 - 1.0 / SLOW
    return tuple(
        Bin(
            name=bin_words(row["above"], row["up_to"]),
            jobs=row["jobs"],
            x=_COLUMN * place,
            y=round(_TOP + _DRAWN * (1 - row["jobs"] / most), 1),
            height=round(_DRAWN * row["jobs"] / most, 1),
            slowed=row["above"] >= slow,
        )
        for place, row in enumerate(rows)
    )


def _bins_words(document: Document) -> str:
    bins = document["waste"]
    known = sum(one["jobs"] for one in bins)
    if not known:
        return "No job of the period has been analysed."
    fullest = max(bins, key=lambda one: one["jobs"])
    name = bin_words(fullest["above"], fullest["up_to"])
    return (
        f"{fullest['jobs']:,} of {known:,} analysed jobs lose {name} of their GPU time: "
        "no bin holds more."
    )


def _host(host: Document) -> HostLine:
    return HostLine(
        name=host["id"],
        jobs=host["jobs"],
        open_findings=host["open_findings"],
        causes=", ".join(cause_words(cause) for cause in host["causes"]),
        wasted=gpu_hours(host["lost_gpu_hours"]),
        last_s=host["last_s"],
    )
