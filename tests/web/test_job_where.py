"""The heat map, its slider and switches, and who is outlined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dashboards.web.figures.heat import MAX_COLUMNS, Grid, Scale, heat_figure
from dashboards.web.views.where import Heat, HeatAsked, Show, heat_of
from smon.errors import MissingError
from tests.web.documents import rotating, slow_document, wide_document


def hottest(heat: Heat) -> list[int]:
    """Rank, DP rank and stage of the cell with the highest number."""
    (data,) = heat.figure["data"]
    cells = np.array(
        [[np.nan if cell is None else cell for cell in row] for row in data["z"]], dtype=float
    )
    row, column = np.unravel_index(np.nanargmax(cells), cells.shape)
    place: list[int] = data["customdata"][row][column]
    return place


def frames(heat: Heat, colour: str) -> list[tuple[float, float]]:
    """Middles (DP rank, stage) of the outlines of a colour."""
    return [
        ((shape["x0"] + shape["x1"]) / 2, (shape["y0"] + shape["y1"]) / 2)
        for shape in heat.figure["layout"]["shapes"]
        if shape["line"]["color"] == f"var({colour})"
    ]


def test_the_hottest_cell_is_the_slow_worker() -> None:
    """In the figure, in the words, in the table behind it, with the number of the report."""
    document = slow_document()
    heat = heat_of(document, None, HeatAsked())
    worst = max(document["workers"], key=lambda worker: worker["slowdown"])
    assert hottest(heat) == [6, 2, 1]
    assert (worst["rank"], worst["dp"], worst["stage"]) == (6, 2, 1)
    assert heat.lines[0].rank == 6
    assert heat.lines[0].value == worst["slowdown"]
    assert "only rank 6 (DP rank 2, stage 1) were as recorded" in heat.words


def test_culprit_and_victims_are_outlined_in_their_own_colours() -> None:
    """The finding's worker in one, those that wait for it in the other, nobody in both."""
    heat = heat_of(slow_document(), None, HeatAsked())
    assert frames(heat, "--culprit") == [(2.0, 1.0)]
    assert len(frames(heat, "--victim")) == 15
    assert (2.0, 1.0) not in frames(heat, "--victim")
    assert [words for _, words in heat.legend] == ["named by a finding (1)", "only waits (15)"]


def test_victims_beyond_those_that_are_named_are_outlined_too() -> None:
    """All others, if all others wait; very many have one frame around them."""
    for dp, wanted in ((8, 63), (300, 1)):
        document = wide_document(dp, 8, (3, 0))
        finding = slow_document()["findings"][0]
        where = {**finding["where"], "rank": 3, "dp": 3, "stage": 0}
        victims = {"count": dp * 8 - 1, "ranks": [0, 1], "wait_s": 0.1}
        finding = {**finding, "where": where, "victims": victims}
        heat = heat_of({**document, "findings": [finding]}, None, HeatAsked())
        assert len(frames(heat, "--culprit")) == 1
        assert len(frames(heat, "--victim")) == wanted


def test_a_planned_pause_outlines_nobody() -> None:
    """What blames nobody marks nobody."""
    document = slow_document()
    finding = {**document["findings"][0], "verdict": "planned_pause"}
    heat = heat_of({**document, "findings": [finding]}, None, HeatAsked())
    assert heat.figure["layout"]["shapes"] == []
    assert heat.legend == ()


def test_the_slider_shows_another_worker_in_another_step() -> None:
    """Each step has its own numbers, from the file of the workers."""
    matrix = rotating(4, 4, [(0, 0), (3, 2), (1, 3)])
    document = slow_document()
    found = [hottest(heat_of(document, matrix, HeatAsked(step=step)))[1:] for step in range(3)]
    assert found == [[0, 0], [3, 2], [1, 3]]
    assert heat_of(document, matrix, HeatAsked(step=1)).words.startswith("In step 1: if only")


@pytest.mark.parametrize(
    "show, step, value, unit",
    [
        (Show.COMPUTE, 2, 700.0, "ms"),
        (Show.COMPUTE, None, 600.0, "ms"),
        (Show.WAIT, 0, 250.0, "ms"),
        (Show.EXACT, 0, 1.5, "×"),
    ],
)
def test_the_switch_shows_what_it_says(
    show: Show, step: int | None, value: float, unit: str
) -> None:
    """One step, or the mean over the steps; times in ms below one second."""
    matrix = rotating(4, 4, [(0, 0), (3, 2), (1, 3)])
    heat = heat_of(slow_document(), matrix, HeatAsked(show, step))
    (data,) = heat.figure["data"]
    assert max(map(max, data["z"])) == pytest.approx(value)
    assert data["colorbar"]["title"]["text"].endswith(f", {unit}")


def test_the_paper_s_number_is_the_smaller_of_two() -> None:
    """Over all steps as the report has it, in one step from that step's own maps."""
    document = slow_document()
    step = document["per_step"][3]
    whole = heat_of(document, None, HeatAsked(Show.PAPER))
    assert whole.lines[0].value == max(one["approx_slowdown"] for one in document["workers"])
    one = heat_of(document, None, HeatAsked(Show.PAPER, step["step"]))
    (data,) = one.figure["data"]
    wanted = min(step["by_dp_rank"]["2"], step["by_stage"]["1"])
    assert data["z"][1][2] == pytest.approx(wanted, abs=1e-5)


def test_wide_jobs_are_grouped_and_a_group_opens() -> None:
    """Above 64 columns a cell is the worst of its DP ranks; opened, each has its own."""
    document = wide_document(200, 2, (130, 1))
    closed = heat_of(document, None, HeatAsked())
    (data,) = closed.figure["data"]
    assert len(data["z"][0]) == 50 <= MAX_COLUMNS
    assert hottest(closed) == [330, 130, 1]
    assert "worst of 4 DP ranks" in closed.title
    assert (128, "DP ranks 128–131") in closed.groups
    opened = heat_of(document, None, HeatAsked(group=130))
    (data,) = opened.figure["data"]
    assert data["x"] == [128, 129, 130, 131]
    assert hottest(opened) == [330, 130, 1]
    assert len(heat_of(document, None, HeatAsked(group=10**9)).figure["data"][0]["x"]) == 4


def test_tall_jobs_are_grouped_too() -> None:
    """Above 64 stages."""
    assert hottest(heat_of(wide_document(2, 100, (1, 77)), None, HeatAsked())) == [155, 1, 77]


@pytest.mark.parametrize("asked", [HeatAsked(step=99), HeatAsked(Show.WAIT, 99)])
def test_a_step_that_is_not_there_is_missing(asked: HeatAsked) -> None:
    """Neither with the file nor without it are numbers made up."""
    for matrix in (None, rotating(4, 4, [(0, 0)])):
        with pytest.raises(MissingError):
            heat_of(slow_document(), matrix, asked)
    with pytest.raises(MissingError):
        heat_of(slow_document(), None, HeatAsked(Show.PAPER, 99))


def test_absent_workers_are_gaps() -> None:
    """NaN is null in the figure, and nobody's highest number."""
    values = np.array([[1.0, np.nan], [1.2, 1.1]])
    grid = Grid(values, np.arange(4).reshape(2, 2))
    (data,) = heat_figure(grid, Scale("S_w", 1.0, "heat", in_seconds=False))["data"]
    assert data["z"] == [[1.0, None], [1.2, 1.1]]
    document = slow_document()
    workers = [{**worker, "slowdown": None} for worker in document["workers"]]
    empty = heat_of({**document, "workers": workers}, None, HeatAsked())
    assert empty.lines == ()
    assert empty.words == "No worker was there in any step that could be analysed."


def test_noise_does_not_glow() -> None:
    """The scale of a healthy job is not stretched to its noise."""
    grid = Grid(np.full((1, 2), 1.001), np.zeros((1, 2), dtype=np.int64))
    (data,) = heat_figure(grid, Scale("S_w", 1.0, "heat", in_seconds=False))["data"]
    assert data["zmax"] == pytest.approx(1.05)


def test_side_findings_outline_nobody_and_heavy_ones_do() -> None:
    """The dearest is outlined whatever its weight; of the others, warnings and critical ones."""
    document = slow_document()
    first = {**document["findings"][0], "severity": "info", "victims": None}
    for severity, count in (("info", 1), ("warning", 2)):
        where = {**first["where"], "dp": 0, "stage": 3}
        both = [first, {**first, "severity": severity, "where": where}]
        heat = heat_of({**document, "findings": both}, None, HeatAsked())
        assert len(frames(heat, "--culprit")) == count


@pytest.mark.parametrize(
    "scope, where, count",
    [
        ("stage", {"stage": 1, "dp": None, "ranks": []}, 4),
        ("dp_group", {"stage": 1, "dp": None, "ranks": [4, 5]}, 2),
        ("job", {"stage": None, "dp": None, "ranks": []}, 0),
    ],
)
def test_what_a_finding_names_is_outlined(scope: str, where: dict[str, Any], count: int) -> None:
    """A stage on every DP rank, a group by its ranks, nobody for the whole job."""
    document = slow_document()
    finding = {**document["findings"][0], "scope": scope, "where": where, "victims": None}
    heat = heat_of({**document, "findings": [finding]}, None, HeatAsked())
    assert len(frames(heat, "--culprit")) == count
