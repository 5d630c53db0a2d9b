"""The waterfall, the fixes, the groups, and the comparison with the published method."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dashboards.web.views.compare import compare_view
from dashboards.web.views.groups import FIRST_GROUPS, MAX_GROUPS, groups_view
from dashboards.web.views.why import why_view
from smon.report import LedgerEntry, StepTime
from tests.api.filled import report_of
from tests.web.documents import slow_document


def test_the_waterfall_sums_up_from_ideal_to_recorded() -> None:
    """Every bar begins where the one before it ended, and the parts are all of the loss."""
    report = report_of("slow")
    times = report.step_time
    assert times.ideal_s is not None
    assert times.recorded_s is not None
    ideal, *parts, recorded = why_view(report).bars
    assert (ideal.name, ideal.value_s) == ("ideal", times.ideal_s)
    assert (recorded.name, recorded.value_s) == ("recorded", times.recorded_s)
    total = sum(bar.value_s for bar in parts)
    assert total == pytest.approx(times.recorded_s - times.ideal_s, rel=1e-9)
    assert parts[-1].end == pytest.approx(recorded.end, abs=1e-3)
    end = ideal.end
    for bar in parts:
        near = min(abs(bar.begin - end), abs(bar.begin + bar.width - end))
        assert near <= 0.9, bar.name
        end = bar.end


def test_the_largest_part_stands_out_and_negative_ones_are_hollow() -> None:
    """Exactly one bar has the colour of the culprit."""
    kinds = {bar.name: bar.kind for bar in why_view(report_of("slow")).bars}
    assert kinds["slow workers"] == "most"
    assert list(kinds.values()).count("most") == 1
    ledger = (LedgerEntry("stage", -0.2, -0.5), LedgerEntry("worker", 0.6, 1.5))
    report = replace(report_of("slow"), ledger=ledger, step_time=StepTime(1.4, 1.4, 1.0))
    assert [bar.kind for bar in why_view(report).bars] == ["total", "saves", "most", "total"]


def test_a_small_loss_is_shown_on_an_axis_that_says_where_it_begins() -> None:
    """Of a step of 33 s with 0.9 s of loss nothing would be seen from zero."""
    ledger = (LedgerEntry("worker", 0.9, 1.0),)
    report = replace(report_of("slow"), ledger=ledger, step_time=StepTime(33.9, 33.9, 33.0))
    why = why_view(report)
    assert why.axis == "The bars begin at 32.9 s, not at zero."
    assert why.bars[1].width > 50
    large = replace(report, ledger=(LedgerEntry("worker", 23.0, 1.0),))
    large = replace(large, step_time=StepTime(46.0, 46.0, 23.0))
    assert why_view(large).axis == ""


def test_a_job_without_usable_steps_has_no_waterfall() -> None:
    """Neither bars nor words nor fixes."""
    why = why_view(report_of("empty"))
    assert (why.bars, why.words, why.fixes) == ((), "", ())


def test_fixes_say_time_gain_and_savings_of_the_report() -> None:
    """In its order; the gain in seconds is against the step without launch delays."""
    report = report_of("slow")
    lines = why_view(report).fixes
    assert len(lines) == len(report.fixes) > 0
    for line, fix in zip(lines, report.fixes, strict=True):
        assert line.step_time_s == fix.step_time_s
        assert line.gain == fix.speedup - 1
        assert line.gain_s is not None
        assert line.gain_s + fix.step_time_s == pytest.approx(report.step_time.simulated_s)
        assert line.gpu_hours_per_day == fix.gpu_hours_per_day


def group(stage: int, p50: float, peers: float | None = 0.1) -> dict[str, Any]:
    """A collective of a stage."""
    return {
        "kind": "grads-reduce-scatter", "dp": None, "stage": stage, "members": 4,
        "ranks": [0, 1, 2, 3], "transfer_p50_s": p50, "transfer_p99_s": p50 * 2,
        "peers_p50_s": peers, "last_rank": 2, "last_share": 0.75,
    }  # fmt: skip


def test_groups_are_in_the_order_of_how_slow_they_are_beside_their_peers() -> None:
    """Without peers last; the first is named."""
    groups = [group(0, 0.1), group(1, 0.3), group(2, 5.0, None)]
    view = groups_view({"groups": groups, "groups_count": 500})
    assert view is not None
    assert [line.against for line in view.lines] == [pytest.approx(3.0), pytest.approx(1.0), None]
    assert view.count == 500
    assert view.words.startswith("Slowest: grads-reduce-scatter, stage 1: its transfers take 3.000")
    assert (view.first[0].last_rank, view.first[0].last_share) == (2, 0.75)


def test_a_normal_network_is_called_normal() -> None:
    """When the slowest group is about as fast as its peers."""
    view = groups_view({"groups": [group(0, 0.1), group(1, 0.11)], "groups_count": 2})
    assert view is not None
    assert "network is normal" in view.words


def test_groups_are_bounded_and_may_be_unknown() -> None:
    """Some at once, some behind; a report of an older version has none."""
    view = groups_view({"groups": [group(stage, 0.1) for stage in range(200)]})
    assert view is not None
    assert (len(view.first), len(view.lines)) == (FIRST_GROUPS, MAX_GROUPS)
    assert groups_view({}) is None


def test_a_link_says_where_it_leads() -> None:
    """A collective is within a stage."""
    link = {**group(3, 0.1), "kind": "forward-pp-comm", "dp": 2}
    view = groups_view({"groups": [link]})
    assert view is not None
    assert view.lines[0].name == "forward-pp-comm, DP rank 2, into stage 3"


def worker(rank: int, exact: float, approximate: float) -> dict[str, Any]:
    """A worker with both of its numbers."""
    return {
        "rank": rank, "dp": rank, "stage": 0, "host": None, "slowdown": exact,
        "approx_slowdown": approximate,
    }  # fmt: skip


def test_both_methods_that_agree_say_so() -> None:
    """The same worker first, by numbers of the report."""
    view = compare_view(slow_document())
    assert view is not None
    assert view.words[0].startswith("Both name rank 6 first: exact ")
    assert view.workers[0].rank == 6
    assert (view.workers[0].exact_place, view.workers[0].approximate_place) == (1, 1)
    assert view.slowdown == report_of("slow").slowdown.paper


def test_where_the_methods_differ_both_workers_are_named_with_both_numbers() -> None:
    """And both stand in the table, with their places."""
    workers = [worker(n, 1.0, 1.0) for n in range(10)]
    workers[3] = worker(3, 1.4, 1.1)
    workers[8] = worker(8, 1.05, 1.3)
    view = compare_view(slow_document(workers=workers))
    assert view is not None
    assert "highest for rank 3 (1.400 ×; approximated, 1.100 ×)" in view.words[0]
    assert "for rank 8 (1.300 ×; exactly, 1.050 ×)" in view.words[0]
    places = {line.rank: (line.exact_place, line.approximate_place) for line in view.workers}
    assert places[3] == (1, 2)
    assert places[8] == (2, 1)
    assert view.largest_difference == pytest.approx(0.3)


@pytest.mark.parametrize(
    "shares, words",
    [
        ((0.9, 0.1), "the slowest 3 % of the workers"),
        ((0.1, 0.6), "the last stage"),
        ((0.1, 0.1), "neither the slowest workers nor the last stage"),
        ((None, None), "not defined"),
    ],
)
def test_what_the_two_shares_would_blame_is_said(
    shares: tuple[float | None, float | None], words: str
) -> None:
    """Beside what was found."""
    worker_share, stage_share = shares
    document = slow_document(worker_share=worker_share, last_stage_share=stage_share)
    view = compare_view(document)
    assert view is not None
    assert words in view.words[1]


def test_without_usable_steps_there_is_nothing_to_compare() -> None:
    """No numbers, no words."""
    assert compare_view(report_of("empty").to_dict()) is None
