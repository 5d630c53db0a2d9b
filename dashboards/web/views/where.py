"""Which workers: the heat map, over the steps of a report or in one of them, and its words.

Flow: a stored report and `smon.store.queries.matrix` → **here** → `smon.api.pages.heat`, the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np

from dashboards.web.figures.common import Figure
from dashboards.web.figures.heat import (
    MAX_COLUMNS,
    Floats,
    Grid,
    Ints,
    Scale,
    heat_figure,
    known_of,
    members_of,
)
from dashboards.web.text import duration, times
from dashboards.web.views.verdict import CALM
from smon.errors import MissingError
from smon.store.queries.matrix import Column, Matrix, Shape

_MAX_WORKERS: Final = 8

#: Findings about these name one worker, or the list in `where.ranks`.
_OF_WORKERS: Final = frozenset({"rank", "tp_group", "node"})


class Show(StrEnum):
    """What the heat map shows of each worker."""

    EXACT = "exact"
    PAPER = "paper"
    COMPUTE = "compute"
    WAIT = "wait"


#: The switch, in words.
SHOWS: Final = {
    Show.EXACT: "exact slowdown S_w",
    Show.PAPER: "the paper's min(S_dp, S_stage)",
    Show.COMPUTE: "computing",
    Show.WAIT: "waiting for peers",
}

_SCALES: Final = {
    Show.EXACT: Scale("S_w", 1.0, "heat", in_seconds=False),
    Show.PAPER: Scale("approximate S_w", 1.0, "heat", in_seconds=False),
    Show.COMPUTE: Scale("computing", None, "heat", in_seconds=True),
    Show.WAIT: Scale("waiting", 0.0, "wait", in_seconds=True),
}

_COLUMNS: Final = {Show.COMPUTE: Column.COMPUTE_S, Show.WAIT: Column.WAIT_S}


@dataclass(frozen=True, slots=True)
class HeatAsked:
    """What of the heat map is asked for.

    Attributes
    ----------
    step
        None: over all steps of the report.
    group
        First DP rank of the group of columns that is opened; None: all columns.
    """

    show: Show = Show.EXACT
    step: int | None = None
    group: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerLine:
    """One worker of the table behind the heat map; `value` as shown, with its unit."""

    rank: int
    dp: int
    stage: int
    host: str | None
    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Heat:
    """The heat map, its sentence, and the workers with the highest numbers."""

    asked: HeatAsked
    figure: Figure
    words: str
    title: str
    lines: tuple[WorkerLine, ...]
    legend: tuple[tuple[str, str], ...]
    groups: tuple[tuple[int, str], ...]


def shape_of(document: Mapping[str, Any]) -> Shape:
    """Workers of the layout of a report."""
    sizes = document["job"]["layout"]
    return Shape(sizes["dp"], sizes["pp"])


def heat_of(document: Mapping[str, Any], matrix: Matrix | None, asked: HeatAsked) -> Heat:
    """The heat map that was asked for.

    Raises
    ------
    MissingError
        What each worker did in single steps is not kept, or not of this step.
    StoreError
        The file cannot be read.
    """
    shape = shape_of(document)
    ranks = np.zeros((shape.pp, shape.dp), dtype=np.int64)
    for worker in document["workers"]:
        ranks[worker["stage"], worker["dp"]] = worker["rank"]
    values = _values(document, matrix, asked, shape)
    marked = _marked(document, ranks)
    grid = _opened(Grid(values, ranks, marked.culprits, marked.victims), asked.group)
    lines = _lines(document, values, ranks, asked.show)
    return Heat(
        asked=asked,
        figure=heat_figure(grid, _SCALES[asked.show]),
        words=_words(lines, asked, int(np.count_nonzero(~np.isnan(values)))),
        title=_title(grid, asked),
        lines=lines,
        legend=_legend(marked),
        groups=groups_of(shape.dp),
    )


def groups_of(dp: int) -> tuple[tuple[int, str], ...]:
    """First DP rank and name of each group of columns; empty if every DP rank has its own."""
    members = members_of(dp)
    if members == 1:
        return ()
    firsts = range(0, dp, members)
    return tuple((first, f"DP ranks {first}–{min(first + members, dp) - 1}") for first in firsts)


def _values(
    document: Mapping[str, Any], matrix: Matrix | None, asked: HeatAsked, shape: Shape
) -> Floats:
    column = _COLUMNS.get(asked.show)
    if asked.show is Show.PAPER and asked.step is not None:
        return _paper_in_step(document, asked.step, shape)
    if column is None and asked.step is None:
        return _over_window(document, asked.show, shape)
    if matrix is None:
        raise MissingError("what each worker did in single steps is not kept for this window")
    wanted = column or Column.SLOWDOWN
    return matrix.mean(wanted) if asked.step is None else matrix.of_step(wanted, asked.step)


def _over_window(document: Mapping[str, Any], show: Show, shape: Shape) -> Floats:
    name = "slowdown" if show is Show.EXACT else "approx_slowdown"
    grid = np.full((shape.pp, shape.dp), np.nan)
    for worker in document["workers"]:
        value = worker[name]
        grid[worker["stage"], worker["dp"]] = np.nan if value is None else value
    return grid


def _paper_in_step(document: Mapping[str, Any], step: int, shape: Shape) -> Floats:
    """min(S_dp, S_stage) of one step, as the published method approximates S_w."""
    found = next((each for each in document["per_step"] if each["step"] == step), None)
    if found is None:
        raise MissingError("expected a step of this window that was analysed")
    of_dp = known_of([found["by_dp_rank"].get(str(dp)) for dp in range(shape.dp)])
    of_stage = known_of([found["by_stage"].get(str(stage)) for stage in range(shape.pp)])
    return np.minimum(of_dp[None, :], of_stage[:, None])


# --- who is marked ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Marked:
    """Workers that findings name; `waiting`: how many wait, of whom `victims` are named."""

    culprits: frozenset[tuple[int, int]]
    victims: frozenset[tuple[int, int]]
    waiting: int


def _marked(document: Mapping[str, Any], ranks: Ints) -> _Marked:
    place = {
        int(rank): (dp, stage) for stage, row in enumerate(ranks) for dp, rank in enumerate(row)
    }
    culprits: set[tuple[int, int]] = set()
    victims: set[tuple[int, int]] = set()
    waiting = 0
    for finding in _blaming(document["findings"]):
        culprits |= _places_of(finding, place, ranks.shape[1])
        known = finding["victims"]
        if known is not None:
            waiting = max(waiting, known["count"])
            victims |= {place[rank] for rank in known["ranks"] if rank in place}
    if waiting >= ranks.size - 1:  # the report names the first of them only
        victims = set(place.values())
    return _Marked(frozenset(culprits), frozenset(victims - culprits), waiting)


def _blaming(findings: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The dearest finding and all others of weight, without those that blame nobody."""
    return [
        finding
        for number, finding in enumerate(findings)
        if finding["verdict"] not in CALM and (number == 0 or finding["severity"] != "info")
    ]


def _places_of(
    finding: Mapping[str, Any], place: Mapping[int, tuple[int, int]], dp_ranks: int
) -> set[tuple[int, int]]:
    where = finding["where"]
    if finding["scope"] in _OF_WORKERS and where["dp"] is not None and where["stage"] is not None:
        return {(where["dp"], where["stage"])}
    if finding["scope"] == "stage" and where["stage"] is not None:
        return {(dp, where["stage"]) for dp in range(dp_ranks)}
    return {place[rank] for rank in where["ranks"] if rank in place}


def _legend(marked: _Marked) -> tuple[tuple[str, str], ...]:
    """Class and words of what outlines mean."""
    lines = []
    if marked.culprits:
        lines.append(("culprit", f"named by a finding ({len(marked.culprits):,})"))
    if marked.waiting:
        named = len(marked.victims)
        some = "" if named >= marked.waiting else f", {named} outlined"
        lines.append(("victim", f"only waits ({marked.waiting:,}{some})"))
    return tuple(lines)


def _opened(grid: Grid, group: int | None) -> Grid:
    """The grid, or one of its groups of columns."""
    if group is None:
        return grid
    columns = grid.values.shape[1]
    members = members_of(columns)
    first = min(max(group, 0), columns - 1) // members * members
    part = slice(first, first + members)
    return Grid(grid.values[:, part], grid.ranks[:, part], grid.culprits, grid.victims, first=first)


# --- words ------------------------------------------------------------------------------------


def _lines(
    document: Mapping[str, Any], values: Floats, ranks: Ints, show: Show
) -> tuple[WorkerLine, ...]:
    flat = values.ravel()
    order = np.argsort(-np.nan_to_num(flat, nan=-np.inf), kind="stable")[:_MAX_WORKERS]
    hosts = {(worker["dp"], worker["stage"]): worker["host"] for worker in document["workers"]}
    lines = []
    for index in order.tolist():
        if np.isnan(flat[index]):
            continue
        stage, dp = divmod(index, values.shape[1])
        value = float(flat[index])
        text = duration(value) if _SCALES[show].in_seconds else times(value)
        rank = int(ranks[stage, dp])
        lines.append(WorkerLine(rank, dp, stage, hosts.get((dp, stage)), value, text))
    return tuple(lines)


def _words(lines: Sequence[WorkerLine], asked: HeatAsked, workers: int) -> str:
    if not lines:
        return "No worker was there in any step that could be analysed."
    worst = lines[0]
    who = f"rank {worst.rank} (DP rank {worst.dp}, stage {worst.stage})"
    when = "" if asked.step is None else f"In step {asked.step}: "
    of_all = f"the most of all {workers:,} workers"
    said = {
        Show.EXACT: f"if only {who} were as recorded, the job would run at {worst.text} its ideal "
        f"step time, {of_all}.",
        Show.PAPER: f"the published approximation is highest for {who}: {worst.text}.",
        Show.COMPUTE: f"{who} computes {worst.text} a step, {of_all}.",
        Show.WAIT: f"{who} waits {worst.text} a step for its peers, {of_all}. Who waits least is "
        "the one the others wait for.",
    }[asked.show]
    return when + said if when else said[0].upper() + said[1:]


def _title(grid: Grid, asked: HeatAsked) -> str:
    when = "over all steps" if asked.step is None else f"step {asked.step}"
    title = f"Stages × DP ranks: {SHOWS[asked.show]}, {when}"
    members = members_of(grid.values.shape[1], MAX_COLUMNS)
    return title + (f"; each cell is the worst of {members} DP ranks" if members > 1 else "")
