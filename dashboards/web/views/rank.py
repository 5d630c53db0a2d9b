"""What the page of a rank shows, ready for its template.

Flow: `smon.store.queries.rank` → **here** → `dashboards.web.pages`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from dashboards.web.figures.rank import Onset, Panel, rank_figure
from dashboards.web.links import rank_link
from dashboards.web.text import duration, times
from dashboards.web.views.common import script_json
from smon.api.words import cause_words, headline_of
from smon.render.tables import Cell
from smon.store.queries.evidence import CounterSeries, Happening
from smon.store.queries.findings import FindingRow
from smon.store.queries.rank import Neighbour, RankDetail, WindowSlowdown, names
from smon.store.queries.series import WorkerStep

#: Steps that the page draws, and those of its table; the CSV file has all that are kept.
MAX_SHOWN: Final = 400
_MAX_TABLE: Final = 60
_MAX_HISTORY: Final = 20
_MAX_HAPPENINGS: Final = 30

#: Counters in words, with their unit, in the order in which they tell most.
_COUNTERS: Final = {
    "gpu_clock_mhz": ("SM clock", "MHz"),
    "gpu_throttle_thermal": ("throttled by heat", "1: yes"),
    "gpu_throttle_power": ("throttled by power", "1: yes"),
    "gpu_throttle_hw": ("throttled by the hardware", "1: yes"),
    "gpu_throttle_setting": ("clock held by a setting", "1: yes"),
    "gpu_temperature_c": ("GPU temperature", "°C"),
    "gpu_power_w": ("GPU power", "W"),
    "gpu_lost": ("GPU lost", "1: yes"),
    "gpu_busy_ratio": ("GPU in use", "of 1"),
    "ecc_errors": ("ECC errors", "per step"),
    "gpu_ecc_uncorrected": ("uncorrected ECC errors", "per step"),
    "gpu_ecc_corrected": ("corrected ECC errors", "per step"),
    "tp_wait_s": ("wait in TP collectives", "s"),
    "tp_comm_s": ("transfer in TP collectives", "s"),
    "pcie_width": ("PCIe lanes", ""),
    "pcie_gen": ("PCIe generation", ""),
    "pcie_replays": ("PCIe replays", "per step"),
    "nvlink_crc": ("NVLink CRC errors", "per step"),
    "nvlink_replays": ("NVLink replays", "per step"),
    "nvlink_down": ("NVLinks down", ""),
    "nic_errors": ("NIC errors", "per step"),
    "nic_retransmits": ("NIC retransmits", "per step"),
    "nic_link_downs": ("NIC links that went down", "per step"),
    "nic_down": ("NIC ports down", ""),
    "nic_rate_gbps": ("slowest NIC port", "Gbit/s"),
    "nic_congestion": ("congestion notices", "per step"),
    "nic_sent_bytes": ("sent by the host", "bytes per step"),
    "nic_received_bytes": ("received by the host", "bytes per step"),
    "nic_wait_ticks": ("NIC ticks of waiting", "per step"),
    "alloc_retries": ("allocator retries", "per step"),
    "host_cpu_ratio": ("host CPU in use", "of 1"),
    "host_pressure_cpu_ratio": ("tasks wait for a CPU", "of 1"),
    "host_throttled_ratio": ("held back by a CPU limit", "of 1"),
    "host_steal_ratio": ("CPU taken by the hypervisor", "of 1"),
    "host_pressure_memory_ratio": ("tasks wait for memory", "of 1"),
    "host_pressure_io_ratio": ("tasks wait for disks", "of 1"),
    "host_memory_ratio": ("host memory in use", "of 1"),
    "host_swap_bytes": ("swap in use", "bytes"),
    "host_major_faults": ("page faults from disk", "per step"),
    "host_load_ratio": ("load per CPU", ""),
}

#: Counters that are drawn: more make a figure that nobody scrolls through.
_MAX_PANELS: Final = 16


#: Units of counters that are either yes or no.
_FLAGS: Final = frozenset({"1: yes"})


class Role(StrEnum):
    """What the newest report makes of a rank."""

    CULPRIT = "culprit"
    VICTIM = "victim"
    UNNAMED = "unnamed"
    ABSENT = "absent"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class HistoryLine:
    """A finding that named this rank, in words."""

    row: FindingRow
    words: str
    first_step: int


@dataclass(frozen=True, slots=True)
class NeighbourLine:
    """Another rank of the host, and its page."""

    one: Neighbour
    link: str


@dataclass(frozen=True, slots=True)
class RankView:
    """The page of a rank.

    Attributes
    ----------
    sentence, lines, next
        Its role, what it rests on, and what to type if it is the culprit.
    span
        First and last step that are shown.
    table
        The latest steps, newest first, with the readings of `columns`.
    """

    detail: RankDetail
    role: Role
    sentence: str
    lines: tuple[str, ...]
    next: tuple[str, ...]
    figure: str
    figure_words: str
    span: tuple[int, int] | None
    columns: tuple[str, ...]
    table: tuple[tuple[WorkerStep, tuple[float | None, ...]], ...]
    counters: tuple[str, ...]
    happenings: tuple[Happening, ...]
    history: tuple[HistoryLine, ...]
    neighbours: tuple[NeighbourLine, ...]
    windows: tuple[WindowSlowdown, ...]
    tp_ranks: tuple[tuple[int, str], ...]
    job_link: str
    csv: str
    rest: str


def rank_view(detail: RankDetail) -> RankView:
    """The page of a rank."""
    rows = detail.rows
    role, sentence, lines = _role(detail)
    counters = _ordered(detail.evidence.counters)
    readings = [dict(zip(one.steps, one.values, strict=True)) for one in counters]
    steps = detail.series.steps
    group = rows.layout.tp * rows.layout.cp
    ranks = [detail.worker_rank + each for each in range(min(group, 64))]
    link = rank_link(rows.job_id, rows.rank, rows.attempt)
    return RankView(
        detail=detail,
        role=role,
        sentence=sentence,
        lines=lines,
        next=_next(detail) if role is Role.CULPRIT else (),
        figure=script_json(_figure(detail, counters, role)) if steps else "",
        figure_words=_figure_words(detail),
        span=(steps[0].step, steps[-1].step) if steps else None,
        columns=tuple(counter_words(one.name) for one in counters),
        table=tuple(
            (one, tuple(each.get(one.step) for each in readings))
            for one in reversed(steps[-_MAX_TABLE:])
        ),
        counters=tuple(_counter_line(one) for one in counters),
        happenings=detail.evidence.happenings[:_MAX_HAPPENINGS],
        history=tuple(_history_line(detail, each) for each in detail.history[:_MAX_HISTORY]),
        neighbours=tuple(
            NeighbourLine(each, rank_link(rows.job_id, each.rank, rows.attempt))
            for each in detail.neighbours
        ),
        windows=rows.by_window,
        tp_ranks=tuple(
            (rank, rank_link(rows.job_id, rank, rows.attempt)) for rank in ranks if group > 1
        ),
        job_link=f"/jobs/{rows.job_id}",
        csv=f"{link}&as=csv",
        rest=f"/api/v1/jobs/{rows.job_id}/ranks/{rows.rank}?attempt={rows.attempt}",
    )


# --- who it is in the newest report -----------------------------------------------------------


def _role(detail: RankDetail) -> tuple[Role, str, tuple[str, ...]]:
    rows = detail.rows
    if rows.document is None:
        return Role.UNKNOWN, "Nothing has been analysed yet.", ()
    lines = _slowdown_lines(detail)
    blamed = [each for each in detail.findings if names(rows, detail.host, each)]
    if blamed:
        return Role.CULPRIT, _culprit_words(detail, blamed[0]), lines
    if detail.slowdown is None:
        sentence = "Absent: its worker was in no step that could be analysed."
        return Role.ABSENT, sentence, lines
    waits_for = next((each for each in detail.findings if _is_victim(detail, each)), None)
    if waits_for is not None:
        return Role.VICTIM, _victim_words(waits_for), lines
    if detail.findings:
        sentence = "Not named: the findings of this job are about others, or about all ranks."
        return Role.UNNAMED, sentence, (*lines, *_about(detail))
    return Role.UNNAMED, "Not named: this job has no finding.", lines


def _culprit_words(detail: RankDetail, finding: Mapping[str, Any]) -> str:
    rows = detail.rows
    said = headline_of(finding, rows.layout)
    group = finding["scope"] == "tp_group" and finding["where"]["tp"] is None
    if group and rows.layout.tp > 1:
        return f"One of {rows.layout.tp} ranks that cannot be told apart. {said}."
    return f"Culprit. {said}."


def _next(detail: RankDetail) -> tuple[str, ...]:
    blamed = next(each for each in detail.findings if names(detail.rows, detail.host, each))
    return tuple(str(command) for command in blamed["next"])


def _is_victim(detail: RankDetail, finding: Mapping[str, Any]) -> bool:
    """Victims are all workers but the suspect; of many only the first are listed."""
    victims, workers = finding["victims"], detail.rows.document or {"workers": ()}
    if victims is None:
        return False
    present = sum(each["slowdown"] is not None for each in workers["workers"])
    return detail.worker_rank in victims["ranks"] or victims["count"] >= present - 1


def _victim_words(finding: Mapping[str, Any]) -> str:
    where, wait_s = finding["where"], finding["victims"]["wait_s"]
    cause = cause_words(finding["cause"])
    typical = "" if wait_s is None else f", as the others do, typically {duration(wait_s)} a step"
    return f"Victim. It waits for rank {where['rank']} ({cause}){typical}."


def _about(detail: RankDetail) -> tuple[str, ...]:
    layout = detail.rows.layout
    return tuple(f"{headline_of(each, layout)}." for each in detail.findings[:2])


def _slowdown_lines(detail: RankDetail) -> tuple[str, ...]:
    if detail.slowdown is None:
        return ()
    shared = detail.rows.layout.tp * detail.rows.layout.cp > 1
    who = "its worker" if shared else "this rank"
    exact = f"S_w {times(detail.slowdown)}: with only {who} as recorded and all else ideal, the "
    exact += "job would run that much longer than its ideal."
    approx = detail.approx_slowdown
    paper = () if approx is None else (f"The published approximation says {times(approx)}.",)
    return (exact, *paper)


# --- figure and tables ------------------------------------------------------------------------


def counter_words(name: str) -> str:
    """A counter in words, with its unit."""
    words, unit = _COUNTERS.get(name, (name.replace("_", " "), ""))
    return f"{words}, {unit}" if unit else words


def _ordered(counters: Sequence[CounterSeries]) -> list[CounterSeries]:
    order = {name: number for number, name in enumerate(_COUNTERS)}
    return sorted(counters, key=lambda one: (order.get(one.name, len(order)), one.name))


def _drawn(counters: Sequence[CounterSeries]) -> list[CounterSeries]:
    """As many as fit: first those that move, or are not as elsewhere; all are in the list."""
    if len(counters) <= _MAX_PANELS:
        return list(counters)
    told = [one for one in counters if len({*one.values, *one.median} - {None}) > 1]
    rest = [one for one in counters if one not in told]
    return [*told, *rest][:_MAX_PANELS]


def _figure(detail: RankDetail, counters: Sequence[CounterSeries], role: Role) -> dict[str, Any]:
    steps = detail.series.steps
    numbers = [one.step for one in steps]
    compute = ([one.compute_s for one in steps], [one.peers_compute_s for one in steps])
    wait = ([one.wait_s for one in steps], [one.peers_wait_s for one in steps])
    panels = [
        _durations("computes", numbers, *compute),
        _durations("waits for others", numbers, *wait),
        Panel("S_w of each step, × ideal", "×", numbers, [one.slowdown for one in steps]),
        *(_counter(one) for one in _drawn(counters)),
    ]
    onsets = [
        Onset(_first_step(row), cause_words(row.cause))
        for row in detail.history
        if numbers[0] < _first_step(row) <= numbers[-1]
    ]
    return rank_figure(panels, onsets[:4], culprit=role is Role.CULPRIT)


def _durations(
    what: str,
    steps: Sequence[int],
    values: Sequence[float | None],
    peers: Sequence[float | None],
) -> Panel:
    longest = max((value for value in (*values, *peers) if value is not None), default=0.0)
    scale, unit = (1e3, "ms") if longest < 1.0 else (1.0, "s")
    return Panel(
        f"{what}, {unit} per step", unit, steps, _scaled(values, scale), _scaled(peers, scale)
    )


def _scaled(values: Sequence[float | None], scale: float) -> list[float | None]:
    return [None if value is None else round(value * scale, 6) for value in values]


def _counter(one: CounterSeries) -> Panel:
    unit = _COUNTERS.get(one.name, ("", ""))[1]
    return Panel(counter_words(one.name), unit, one.steps, one.values, one.median, is_counter=True)


def _counter_line(one: CounterSeries) -> str:
    """The last reading beside the others: what a figure says, in words."""
    words, unit = _COUNTERS.get(one.name, (one.name.replace("_", " "), ""))
    last, others = one.values[-1], one.median[-1]
    said = f"{words}: {_reading(last, unit)} in step {one.steps[-1]}"
    if others is None:
        return f"{said}; nobody else reports it."
    apart = ""
    if others and last != others and unit not in _FLAGS:
        apart = f" ({signed_percent(last / others - 1)})"
    return f"{said}; median of {one.others:,} other ranks {_reading(others, unit)}{apart}."


def signed_percent(value: float) -> str:
    """A difference as a part of a whole, with its sign."""
    return f"{value:+.1%}".replace("-", "−").replace("%", " %")


def _reading(value: float, unit: str) -> str:
    if unit in _FLAGS:
        return "yes" if value else "no"
    return f"{value:,.4g} {unit}".strip()


def _figure_words(detail: RankDetail) -> str:
    steps = detail.series.steps
    if not steps:
        return "What each worker did in single steps is not kept for this attempt."
    last = steps[-1]
    peers = ""
    if last.peers_compute_s is not None:
        peers = (
            f" (the median of the other DP ranks of its stage: {duration(last.peers_compute_s)} "
            f"and {duration(last.peers_wait_s)})"
        )
    return (
        f"Steps {steps[0].step} to {last.step}, of which {len(steps):,} were analysed. In the last "
        f"one it computed for {duration(last.compute_s)} and waited for "
        f"{duration(last.wait_s)}{peers}."
    )


def _first_step(row: FindingRow) -> int:
    return row.opened_step if row.onset_step is None else row.onset_step


def _history_line(detail: RankDetail, row: FindingRow) -> HistoryLine:
    return HistoryLine(row, headline_of(row.document, detail.rows.layout), _first_step(row))


# --- CSV --------------------------------------------------------------------------------------

_STEP_COLUMNS: Final = (
    *("step", "slowdown", "compute_s", "wait_s", "peers_compute_s", "peers_wait_s"),
)


def rank_table(detail: RankDetail) -> tuple[tuple[str, ...], Iterator[dict[str, Cell]]]:
    """Names of the columns of the CSV file, and its rows: steps, with the counters beside."""
    counters = _ordered(detail.evidence.counters)
    columns = [name for one in counters for name in (one.name, f"{one.name} (peers)")]
    return (*_STEP_COLUMNS, *columns), _table_rows(detail, counters)


def _table_rows(detail: RankDetail, counters: Sequence[CounterSeries]) -> Iterator[dict[str, Cell]]:
    readings: dict[int, dict[str, Cell]] = {}
    for one in counters:
        for step, value, peers in zip(one.steps, one.values, one.median, strict=True):
            readings.setdefault(step, {}).update({one.name: value, f"{one.name} (peers)": peers})
    by_step = {one.step: one for one in detail.series.steps}
    for step in sorted({*by_step, *readings}):
        known = by_step.get(step)
        row: dict[str, Cell] = {"step": step}
        if known is not None:
            row |= {name: getattr(known, name) for name in _STEP_COLUMNS}
        yield row | readings.get(step, {})
