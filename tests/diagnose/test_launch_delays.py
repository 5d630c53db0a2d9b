"""Launch delays that no cause explains: said, but nobody is blamed for them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from smon.analysis import analyze
from smon.diagnose.thresholds import LATE_SHARE
from smon.ops import OpType
from smon.render.words import LAUNCH_THRESHOLD, verdict_lines
from smon.report import JobReport
from smon.synth.presets import scenario
from smon.synth.spec import Scenario
from smon.trace.load import load
from tests.builders import known, public_job
from tests.diagnose.jobs import Late, causes, report_of

LATE = (
    OpType.PARAMS_ALL_GATHER,
    OpType.GRADS_REDUCE_SCATTER,
    OpType.GC,
    OpType.OPTIMIZER,
)


def _report(fault: Late) -> JobReport:
    return report_of(Scenario(dp=8, pp=4, microbatches=8, steps=16, faults=(fault,)))


@pytest.mark.parametrize("seconds, every", [(0.3, 1), (1.5, 8)])
@pytest.mark.parametrize("optype", LATE)
def test_late_launches_of_one_worker_are_a_finding(
    optype: OpType, seconds: float, every: int
) -> None:
    """They cost 7 to 12 %; the worker is a candidate, and the finding blames nobody."""
    (found,) = _report(Late(optype, seconds, every)).findings
    assert (found.verdict, found.cause, found.scope) == ("none", "unknown", "job")
    assert (found.phase, found.severity, found.where.rank) == ("launch", "info", None)
    assert 0.06 < found.excess_share < 0.14
    assert any("launch delays" in line for line in found.evidence)
    (candidate,) = found.candidates
    assert (candidate.where.dp, candidate.where.stage) == (2, 1)
    assert optype.label in candidate.tell_apart


def test_late_launches_on_all_ranks_have_no_candidate() -> None:
    """Nobody stands out."""
    (found,) = _report(Late(OpType.OPTIMIZER, 0.3, everybody=True)).findings
    assert found.cause == "unknown"
    assert found.candidates == ()


def test_smaller_launch_delays_are_not_called_no_straggler() -> None:
    """4 % is no finding, but somebody wants to know."""
    report = _report(Late(OpType.OPTIMIZER, 0.09))
    assert report.findings == ()
    assert 1.03 < known(report.slowdown.launch) < 1.05
    (line,) = verdict_lines(report)
    assert "No straggler" not in line
    assert "late launches add" in line


def test_without_launch_delays_there_is_no_straggler() -> None:
    """A healthy job is one."""
    (line,) = verdict_lines(report_of(scenario("N-launch")))
    assert line.startswith("No straggler.")


def test_the_sentence_begins_where_the_diagnosis_does() -> None:
    """The renderer does not know the thresholds of the diagnosis."""
    assert pytest.approx(1 + LATE_SHARE) == LAUNCH_THRESHOLD
    report = report_of(scenario("N-small"))
    for launch, said in ((LAUNCH_THRESHOLD, False), (1.029, True), (None, True)):
        slowdown = replace(report.slowdown, launch=launch)
        (line,) = verdict_lines(replace(report, slowdown=slowdown))
        assert line.startswith("No straggler") == said


def test_stalls_that_are_explained_are_no_launch_delays_without_a_cause() -> None:
    """The data loader costs 6 % of C08, and nothing else is said."""
    assert causes(report_of(scenario("C08"))) == ["dataloader"]


@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
def test_waits_in_the_public_traces_are_no_late_launches(traces: Path, name: str) -> None:
    """Receives and layernorm reductions look late by up to 65 % of the step, and only wait."""
    report = analyze(*public_job(traces, name))
    assert "unknown" not in causes(report)
    assert known(report.slowdown.launch) < 1.02


@pytest.mark.parametrize("name", ["healthy", "slow_rank3", "long_last_stage", "gc_pause_rank1"])
def test_waits_in_the_gloo_runs_are_no_late_launches(traces: Path, name: str) -> None:
    """Four real processes on one host."""
    trace = load([traces / "torch-gloo-2pp2dp" / name / "trace.parquet"])
    report = analyze(trace.table, trace.job)
    assert "unknown" not in causes(report)
    assert known(report.slowdown.launch) < 1.02
