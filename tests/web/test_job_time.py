"""Step times over the steps, what lies below them, and the chosen range."""

from __future__ import annotations

from typing import Any

import pytest

from dashboards.web.figures.steps import Chart, Lane, LaneKind, step_time_figure
from dashboards.web.views.time import Range, TimeParts, TimeView, time_view
from smon.store.queries.findings import FindingRow
from smon.store.queries.history import History, StepPoint
from smon.store.queries.spans import AttemptSpan, IncompleteSpan


def point(step: int, recorded_s: float | None = 0.5, skipped: str | None = None) -> StepPoint:
    """A step, with an ideal of 400 ms."""
    slowdown = None if recorded_s is None else recorded_s / 0.4
    return StepPoint(step, recorded_s, recorded_s, 0.4, slowdown, skipped, None)


def finding(first: int, last: int, **fields: Any) -> FindingRow:  # noqa: ANN401  # of the row
    """A finding of attempt 1 that held in some steps."""
    given = {
        "id": "1", "attempt": 1, "state": "open", "severity": "critical", "verdict": "straggler",
        "cause": "slow_gpu", "scope": "rank", "rank": 6, "dp": 2, "stage": 1, "host": None,
        "gpu_uuid": None, "excess_s": 0.1, "excess_share": 0.2, "onset_step": first,
        "opened_step": first, "opened_s": 0.0, "last_step": last, "last_s": 0.0,
        "cleared_step": None, "cleared_s": None, "document": {"cause": "slow_gpu"}, "events": (),
    }  # fmt: skip
    return FindingRow(**{**given, **fields})


def view(chosen: Range = Range(), **fields: Any) -> TimeView:  # noqa: ANN401, B008  # of the parts
    """The section of a job of forty steps in its second attempt."""
    steps = [point(step) for step in range(20, 60) if chosen.holds(step, step)]
    given = {
        "history": History(1, len(steps), tuple(steps)), "earlier": (), "spans": (),
        "incomplete": (), "findings": (), "chosen": chosen,
    }  # fmt: skip
    return time_view(TimeParts(**{**given, **fields}))


def test_steps_that_were_left_out_are_gaps_with_a_mark() -> None:
    """Not zeros; the reason stands beside the mark."""
    chart = Chart([point(1), point(2, None, "no <ops>")])
    data = {trace["name"]: trace for trace in step_time_figure(chart)["data"]}
    assert data["recorded"]["y"] == [500.0, None]
    assert data["left out"]["x"] == [2]
    assert data["left out"]["text"] == ["no &lt;ops&gt;"]


def test_times_are_in_ms_below_one_second() -> None:
    """And in seconds above, on the axis too."""
    short, long = (step_time_figure(Chart([point(1, value)])) for value in (0.5, 2.0))
    assert short["layout"]["yaxis"]["title"]["text"] == "step time, ms"
    assert long["layout"]["yaxis"]["title"]["text"] == "step time, s"
    assert long["data"][1]["y"] == [2.0]


def test_findings_are_bars_from_onset_to_clearing() -> None:
    """One lane each, with words, in the colour of its severity; planned pauses are dashed."""
    lanes = [
        Lane(LaneKind.CRITICAL, 30, 45, "critical: slow GPU"),
        Lane(LaneKind.PLANNED, 20, 59, "planned"),
    ]
    figure = step_time_figure(Chart([point(step) for step in range(20, 60)], lanes=lanes))
    first, second = figure["data"][-2:]
    assert first["x"] == [30, 45]
    assert first["line"]["color"] == "var(--culprit)"
    assert "dash" not in first["line"]
    assert second["line"]["dash"]
    words = [each["text"] for each in figure["layout"]["annotations"]]
    assert words == ["critical: slow GPU", "planned"]


def test_a_bar_says_what_where_and_whether_it_is_over() -> None:
    """A planned pause says how often."""
    found = finding(30, 45, cleared_step=46)
    pause = finding(
        20, 59, verdict="planned_pause", cause="checkpoint",
        document={"persistence": {"period": 20}},
    )  # fmt: skip
    shown = view(findings=(found, pause)).figure
    assert '"critical: slow GPU, rank 6, cleared"' in shown
    assert '"planned: pauses between steps, every 20 steps"' in shown


def test_words_in_a_figure_are_literal() -> None:
    """The library that draws reads some HTML in its texts."""
    lane = Lane(LaneKind.INFO, 1, 1, "<b>&x</b>")
    (words,) = step_time_figure(Chart([point(1)], lanes=[lane]))["layout"]["annotations"]
    assert words["text"] == "&lt;b&gt;&amp;x&lt;/b&gt;"


def test_restarts_and_earlier_attempts_are_marked() -> None:
    """A line where an attempt began, and what the one before had recorded."""
    spans = (AttemptSpan(0, 0, 30), AttemptSpan(1, 20, 59))
    earlier = (History(0, 2, (point(0), point(1))),)
    shown = view(earlier=earlier, spans=spans)
    assert '"attempt 1"' in shown.figure.replace(" attempt", "attempt")
    kinds = [kind for kind, _ in shown.legend]
    assert "line-start" in kinds
    assert "line-earlier" in kinds


def test_missing_ranks_have_a_lane() -> None:
    """Of the windows that lacked them."""
    shown = view(incomplete=(IncompleteSpan("w", 40, 49, 12),))
    assert "12 ranks missing" in shown.figure
    assert ("bar-missing", "ranks missing") in shown.legend


def test_a_healthy_job_has_a_short_legend() -> None:
    """Only what is on the chart is explained."""
    assert [words for _, words in view().legend] == ["recorded", "ideal", "lost between them"]


def test_the_range_drives_points_findings_and_words() -> None:
    """What lies outside is not shown, and counted."""
    rows = (finding(20, 25), finding(30, 59), finding(41, 41, id="2"))
    shown = view(Range(40, 50), findings=rows)
    assert (shown.first, shown.last) == (40, 50)
    assert [row.id for row in shown.findings] == ["1", "2"]
    assert shown.hidden == 1
    assert shown.words.startswith("Steps 40 to 50 of attempt 1")
    assert '"range":[39.5,50.5]' in shown.figure


@pytest.mark.parametrize(
    "chosen, ends, inside",
    [
        (Range(), (5, 6), True),
        (Range(10, None), (5, 9), False),
        (Range(10, None), (5, 10), True),
        (Range(None, 10), (11, 12), False),
        (Range(10, 20), (0, 99), True),
    ],
)
def test_a_range_holds_what_overlaps_it(
    chosen: Range, ends: tuple[int, int], *, inside: bool
) -> None:
    """Its ends included."""
    assert chosen.holds(*ends) is inside


def test_the_worst_step_is_named_with_its_loss() -> None:
    """By slowdown; the loss is recorded minus ideal."""
    points = (point(1), point(2, 0.8), point(3))
    shown = view(history=History(1, 3, points))
    assert shown.worst == "Slowed down most: step 2, 2.000 × its ideal, +400 ms."


def test_no_step_is_said_and_not_drawn() -> None:
    """In the range, or at all."""
    nothing = History(1, 0, ())
    assert view(history=nothing).words == "No step has been analysed yet."
    shown = view(Range(1, 2), history=nothing)
    assert shown.words == "No step in this range has been analysed yet."
    assert shown.figure == ""
