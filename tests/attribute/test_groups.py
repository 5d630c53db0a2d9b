"""Communicators: transfer times beside those of peers, and who comes last."""

from __future__ import annotations

from typing import Any

import pytest

from smon.analysis import analyze
from smon.attribute.groups import MAX_GROUPS, MAX_RANKS
from smon.report import GroupPart, JobReport
from smon.synth.faults import SlowCompute
from smon.synth.faults.network import SlowCollective, SlowP2P
from smon.synth.scenario import Scenario, generate


def report_of(**fields: Any) -> JobReport:  # noqa: ANN401  # of Scenario
    """Of a small job without noise."""
    made = generate(Scenario(**{"dp": 4, "pp": 2, "microbatches": 4, "steps": 6, **fields}))
    return analyze(made.table, made.job)


def of_kind(report: JobReport, kind: str) -> list[GroupPart]:
    """Its groups of one kind."""
    return [group for group in report.groups if group.kind == kind]


def test_a_stage_has_its_collectives_and_a_replica_its_links() -> None:
    """A reduce-scatter in each stage, a link each way in each replica; all are in the report."""
    report = report_of()
    assert [group.members for group in of_kind(report, "grads-reduce-scatter")] == [4, 4]
    for kind in ("forward-pp-comm", "backward-pp-comm"):
        assert sorted(group.dp or 0 for group in of_kind(report, kind)) == [0, 1, 2, 3]
    assert report.groups_count == len(report.groups)


def test_links_lead_from_the_sender_to_the_receiver() -> None:
    """Forward from stage 0 to 1, backward from 1 to 0, each within its DP rank."""
    report = report_of()
    for kind, stages in (("forward-pp-comm", (0, 1)), ("backward-pp-comm", (1, 0))):
        for group in of_kind(report, kind):
            assert group.dp is not None
            assert group.stage == stages[1]
            assert group.ranks == tuple(stage * 4 + group.dp for stage in stages)


def test_a_slow_collective_comes_first_and_takes_longer_than_its_peers() -> None:
    """Twice the transfer time in stage 1: twice that of stage 0, but for noise."""
    report = report_of(faults=(SlowCollective(1, factor=2.0),))
    first = report.groups[0]
    assert (first.dp, first.stage) == (None, 1)
    assert first.peers_p50_s is not None
    assert first.transfer_p50_s == pytest.approx(2 * first.peers_p50_s, rel=0.03)


def test_a_slow_link_comes_first_with_its_tail() -> None:
    """Messages of one worker that take 50 ms longer: its links lead the list, others do not."""
    report = report_of(faults=(SlowP2P(1, 2, extra_s=0.05),))
    links = [group for group in report.groups if group.dp is not None]
    slow = [group for group in links if group.dp == 2]
    assert links[: len(slow)] == slow
    for group in slow:
        assert group.peers_p50_s is not None
        assert group.transfer_p50_s - group.peers_p50_s == pytest.approx(0.05, rel=0.01)
        assert group.transfer_p99_s >= group.transfer_p50_s


def test_who_comes_last_is_the_slow_worker() -> None:
    """Of the gradient reduction of its stage the slow worker; elsewhere nobody stands out."""
    report = report_of(faults=(SlowCompute(1, 2, 1.5, 1.5),))
    (stage_1,) = [group for group in of_kind(report, "grads-reduce-scatter") if group.stage == 1]
    assert stage_1.last_rank == 4 + 2
    assert stage_1.last_share == 1.0


def test_where_all_start_together_nobody_comes_last() -> None:
    """The all-gather begins with the step: without noise all members start at one time."""
    groups = of_kind(report_of(), "params-all-gather")
    assert groups
    assert {(group.last_rank, group.last_share) for group in groups} == {(None, None)}


def test_large_jobs_name_the_slowest_groups_and_count_all() -> None:
    """At most 64 groups and 16 of their members, most excess first."""
    report = report_of(dp=40, pp=4, microbatches=4, faults=(SlowCollective(2, factor=2.0),))
    assert len(report.groups) == MAX_GROUPS < report.groups_count
    assert report.groups[0].members == 40
    assert len(report.groups[0].ranks) == MAX_RANKS
    excess = [g.transfer_p50_s - (g.peers_p50_s or g.transfer_p50_s) for g in report.groups]
    assert excess == sorted(excess, reverse=True)


def test_the_worst_worker_of_each_step_is_in_the_report() -> None:
    """The slow worker, with its S_w of the step: that of the highest value of all."""
    report = report_of(faults=(SlowCompute(1, 2, 1.5, 1.5),))
    for step in report.per_step:
        assert step.worst is not None
        assert (step.worst.dp, step.worst.stage, step.worst.rank) == (2, 1, 6)
        assert step.worst.slowdown == pytest.approx(step.slowdown, rel=0.05)
