"""What SMon says of real traces; their true answers are known from how they were published."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

from smon.analysis import analyze
from smon.ops import OpType
from smon.report import Finding, JobReport
from smon.trace.load import load
from tests.builders import known, public_job, rows_where

COMPUTES = ("forward-compute", "backward-compute")


@cache
def _public(traces: Path, name: str) -> JobReport:
    return analyze(*public_job(traces, name))


@cache
def _gloo(traces: Path, fault: str) -> JobReport:
    trace = load([traces / "torch-gloo-2pp2dp" / fault / "trace.parquet"])
    return analyze(trace.table, trace.job)


def _causes(report: JobReport) -> list[str]:
    return [finding.cause for finding in report.findings]


def _names_a_rank(finding: Finding) -> bool:
    where = finding.where
    return where.rank is not None or where.dp is not None or bool(where.ranks)


# --- AR: one slow worker ----------------------------------------------------------------------


def test_ar_has_one_slow_worker_and_nothing_else(traces: Path) -> None:
    """Worker (0, 0) is slow in every step, and takes half of it (measured 50.15 %)."""
    report = _public(traces, "AR")
    assert report.verdict == "straggler"
    (found,) = report.findings
    assert (found.verdict, found.cause, found.severity) == ("straggler", "slow_gpu", "critical")
    assert (found.where.rank, found.where.dp, found.where.stage) == (0, 0, 0)
    assert found.persistence.kind == "persistent"
    assert found.persistence.share == 1.0
    assert found.excess_share == pytest.approx(0.50, abs=0.02)
    assert found.phase == "compute"
    assert found.optypes == COMPUTES


def test_ar_does_not_say_which_rank_of_the_tp_group_it_is(traces: Path) -> None:
    """A row of the trace is a whole TP group of four: none of them is named."""
    (found,) = _public(traces, "AR").findings
    assert found.scope == "tp_group"
    assert found.where.tp is None
    assert any("which of its 4 ranks" in line for line in found.evidence)


def test_the_slow_worker_of_ar_is_no_long_data(traces: Path) -> None:
    """Its own forwards and backwards are long together, and yet nothing is said of the data."""
    assert "sequence_length" not in _causes(_public(traces, "AR"))


def test_without_its_slow_worker_ar_would_be_twice_as_fast(traces: Path) -> None:
    """The repaired slowdown is 2.021, above the 1.973 of a mean over all workers."""
    slowdown = _public(traces, "AR").slowdown
    assert slowdown.repaired == pytest.approx(2.021, abs=0.005)
    assert known(slowdown.repaired) > known(slowdown.paper)


def test_all_other_workers_of_ar_are_victims(traces: Path) -> None:
    """Fifteen workers wait most of the step for the one, and none of them is a suspect."""
    report = _public(traces, "AR")
    (found,) = report.findings
    assert found.victims is not None
    others = {worker.rank for worker in report.workers} - {0}
    assert found.victims.count == len(others) == 15
    assert set(found.victims.ranks) == others
    assert known(found.victims.wait_s) > 0.5 * known(report.step_time.recorded_s)


# --- SE: uneven data --------------------------------------------------------------------------


def test_se_has_uneven_data_first_and_a_long_stage_second(traces: Path) -> None:
    """Data costs a third of the step and rotates; stage 1 has the loss."""
    report = _public(traces, "SE")
    assert report.verdict == "imbalance"
    data, stage = report.findings
    assert (data.cause, data.scope, data.persistence.kind) == ("sequence_length", "job", "rotating")
    assert data.excess_share == pytest.approx(0.3255, abs=0.01)
    assert (stage.cause, stage.where.stage) == ("stage_partition", 1)
    assert stage.persistence.kind == "persistent"
    assert stage.excess_s < data.excess_s


def test_nothing_that_is_found_in_se_names_a_rank(traces: Path) -> None:
    """In every step another replica is late: no machine is to blame, nobody is a victim."""
    report = _public(traces, "SE")
    assert report.findings
    for found in report.findings:
        assert not _names_a_rank(found)
        assert found.victims is None


# --- ST: a long stage, and a job that got slower ----------------------------------------------


def test_st_has_a_long_last_stage_first(traces: Path) -> None:
    """Forward takes 2.1 times, backward 1.4 times as long on stage 3: a loss layer."""
    report = _public(traces, "ST")
    assert report.verdict == "imbalance"
    stage = report.findings[0]
    assert (stage.cause, stage.where.stage) == ("stage_partition", 3)
    assert not _names_a_rank(stage)
    assert any("loss layer" in line for line in stage.evidence)


def test_the_computes_of_st_really_are_longer_from_step_259_on(traces: Path) -> None:
    """By hand, from the raw rows: each of 16 kinds of compute by 3.7 to 7.4 %."""
    table, job = public_job(traces, "ST")
    for optype in (OpType.FORWARD_COMPUTE, OpType.BACKWARD_COMPUTE):
        for dp, stage in np.ndindex(job.layout.dp, job.layout.pp):
            mine = rows_where(table, optype, dp=dp, stage=stage)
            late = table.step >= 259
            before, after = (
                float(np.median(table.duration_ns[mine & when])) for when in (~late, late)
            )
            assert 1.035 < after / before < 1.08


def test_st_got_slower_as_a_whole_at_step_259(traces: Path) -> None:
    """A change of all ranks alike is found, since when, and blames nobody."""
    (found,) = _public(traces, "ST").findings[1:]
    assert (found.verdict, found.cause, found.scope) == ("job_wide", "job_wide", "job")
    assert found.persistence.kind == "onset"
    assert found.persistence.onset_step == 259
    assert found.optypes == COMPUTES
    assert not _names_a_rank(found)


# --- gloo: four processes with a fault that was put in ----------------------------------------


def test_a_healthy_real_job_has_no_finding(traces: Path) -> None:
    """Four processes on one machine, no fault: nothing is said."""
    report = _gloo(traces, "healthy")
    assert report.verdict == "none"
    assert report.findings == ()


def test_the_process_that_sleeps_longer_is_found(traces: Path) -> None:
    """Every compute of rank 3 takes 1.6 times as long: the step went from 329.5 to 476.5 ms."""
    report = _gloo(traces, "slow_rank3")
    assert report.verdict == "straggler"
    (found,) = report.findings
    assert (found.cause, found.scope, found.where.rank) == ("slow_gpu", "rank", 3)
    assert found.persistence.kind == "persistent"
    assert found.excess_s == pytest.approx(0.147, rel=0.1)
    assert found.victims is not None
    assert set(found.victims.ranks) == {0, 1, 2}


def test_the_longer_stage_is_found(traces: Path) -> None:
    """Computes of stage 1 take 1.4 times as long on both replicas."""
    report = _gloo(traces, "long_last_stage")
    assert report.verdict == "imbalance"
    (found,) = report.findings
    assert (found.cause, found.scope, found.where.stage) == ("stage_partition", "stage", 1)
    assert not _names_a_rank(found)


def test_a_real_collection_of_garbage_is_found(traces: Path) -> None:
    """Rank 1, step 4, in a forward, 223 ms: once. What it was, gc or a busy host, is left open."""
    report = _gloo(traces, "gc_pause_rank1")
    assert report.verdict == "host_stall"
    (found,) = report.findings
    assert (found.verdict, found.where.rank) == ("host_stall", 1)
    assert found.phase == "forward compute"
    assert (found.persistence.kind, found.persistence.onset_step) == ("one_off", 4)
    assert found.persistence.share == 0.25
    assert found.excess_s == pytest.approx(0.223 / 4, rel=0.1)
    assert {candidate.cause for candidate in found.candidates} == {"gc", "host_contention"}


@pytest.mark.parametrize("fault", ["slow_rank3", "long_last_stage", "gc_pause_rank1"])
def test_four_steps_are_never_critical(traces: Path, fault: str) -> None:
    """Whatever it costs; and the report says that the window is short."""
    report = _gloo(traces, fault)
    assert {found.severity for found in report.findings} <= {"info", "warning"}
    assert any(note.startswith("4 steps") for note in report.quality.notes)
