"""What wrong clocks, few steps and missing replicas do to a diagnosis, and what they must not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from smon.analysis import Options, analyze
from smon.diagnose.verdict import _severity
from smon.ops import COMPUTE, DP_SYNCED
from smon.report import Finding, JobReport
from smon.synth import causes
from smon.synth.presets import scenario
from smon.synth.sample import random_scenario
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.synth.truth import CauseName
from smon.topology import Layout
from smon.trace.table import OpTable
from tests.builders import public_job, rows_where, without

MS = 1_000_000

#: Workers to which an offset is given.
PLACES = ("first", "last", "middle")


def _shifted(table: OpTable, rows: NDArray[np.bool_], offset_ms: float) -> OpTable:
    """The table as the clock of these rows would have it if it were off by so much."""
    return replace(table, start_ns=table.start_ns + np.int64(offset_ms * MS) * rows)


def _jittered(made: Synthetic, rows: NDArray[np.bool_], size_ms: float) -> OpTable:
    """Ends of these ops, unless they are computes, off by up to so much, each by itself."""
    table = made.table
    late = np.random.default_rng(0).uniform(-size_ms * MS, size_ms * MS, len(table))
    late *= rows & ~np.isin(table.optype, list(COMPUTE))
    return replace(table, duration_ns=np.maximum(table.duration_ns + late.astype(np.int64), 0))


def _report(made: Synthetic, table: OpTable | None = None) -> JobReport:
    return analyze(made.table if table is None else table, made.job, Options(), made.context)


def _said(report: JobReport, text: str) -> bool:
    return any(text in note for note in report.quality.notes)


# --- clocks that can be put right -------------------------------------------------------------


def test_wrong_clocks_are_named_and_are_no_finding() -> None:
    """C11: 200 ms on one host and 0.4 ms on four, each told within 0.1 ms."""
    made = generate(scenario("C11"))
    report = _report(made)
    assert report.verdict == "none"
    assert report.findings == ()
    assert report.quality.clock.aligned
    true = {int(one.where["rank"]): one.details["offset_s"] for one in made.truth.answers}
    found = {int(one["rank"]): float(one["offset_s"]) for one in report.quality.clock.offsets}
    assert found == pytest.approx(true, abs=0.0001)
    hosts = {one["rank"]: one["host"] for one in report.quality.clock.offsets}
    assert hosts == {int(one.where["rank"]): one.where["node"] for one in made.truth.answers}


@cache
def _public(traces: Path, name: str) -> tuple[OpTable, JobReport]:
    table, job = public_job(traces, name)
    return table, analyze(table, job)


def _worker(layout: Layout, place: str) -> tuple[int, int]:
    ends = {"first": (0, 0), "last": (layout.dp - 1, layout.pp - 1), "middle": (1, 1)}
    return ends[place]


def _same_finding(one: Finding, other: Finding) -> bool:
    close = one.excess_s == pytest.approx(other.excess_s, rel=0.002)
    words = [
        (found.severity, found.verdict, found.cause, found.where, found.persistence)
        for found in (one, other)
    ]
    return close and words[0] == words[1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("offset_ms", [1, 20, 200])
@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
def test_a_wrong_clock_does_not_change_what_is_found(
    traces: Path, name: str, offset_ms: int, place: str
) -> None:
    """Verdict and first finding of a real trace; and the rank whose clock it is is named."""
    table, before = _public(traces, name)
    _, job = public_job(traces, name)
    dp, stage = _worker(job.layout, place)
    moved = _shifted(table, rows_where(table, dp=dp, stage=stage), offset_ms)
    after = analyze(moved, job)
    assert after.verdict == before.verdict
    assert _same_finding(after.findings[0], before.findings[0])
    (offset,) = after.quality.clock.offsets
    assert offset["rank"] == job.layout.rank(dp, stage)
    assert float(offset["offset_s"]) == pytest.approx(offset_ms / 1e3, abs=0.0003)


# --- clocks that cannot -----------------------------------------------------------------------


@cache
def _slow_links(name: str) -> Synthetic:
    return generate(scenario(name))


@pytest.mark.parametrize("name", ["C06", "C07a", "C07b"])
def test_ends_that_scatter_withhold_what_is_said_of_links(name: str) -> None:
    """20 ms on all ends of communication: transfer times mean nothing, and the notes say so."""
    made = _slow_links(name)
    assert _report(made).verdict == "link"
    report = _report(made, _jittered(made, np.ones(len(made.table), bool), 20))
    assert report.quality.clock.aligned is False
    assert "link" not in {finding.verdict for finding in report.findings}
    assert _said(report, "clocks are not aligned")
    assert _said(report, "are withheld")
    assert report.groups == ()


def test_replicas_without_a_common_op_withhold_what_is_said_of_links() -> None:
    """Without collectives nothing links the clocks of replicas: a slow node is not named."""
    made = generate(Scenario(microbatches=16, steps=20, causes=(causes.slow_link(2, 1, 20.0),)))
    assert _report(made).verdict == "link"
    report = _report(made, without(made.table, rows_where(made.table, *DP_SYNCED)))
    assert report.quality.clock.aligned is False
    assert "link" not in {finding.verdict for finding in report.findings}
    assert _said(report, "are withheld")


def test_a_stage_without_collectives_has_no_finding_about_links() -> None:
    """DP 4, PP 1, no collective in the trace: nothing can be compared, nothing is claimed."""
    made = generate(Scenario(dp=4, pp=1, steps=20, causes=(causes.slow_group(0, 3.0),)))
    report = _report(made, without(made.table, rows_where(made.table, *DP_SYNCED)))
    assert report.findings == ()
    assert report.quality.clock.aligned is None


def test_one_clock_that_scatters_does_not_make_a_worker_a_suspect() -> None:
    """Collectives of stage 1 are slow; worker (0, 0) has a bad clock: no single rank is named."""
    made = _slow_links("C07a")
    report = _report(made, _jittered(made, rows_where(made.table, dp=0, stage=0), 20))
    assert all(finding.where.rank is None for finding in report.findings)


@pytest.mark.parametrize("dp, pp", [(4, 1), (4, 4), (2, 2)])
def test_a_clock_that_nothing_can_put_right_is_no_late_data(dp: int, pp: int) -> None:
    """Healthy, no collectives, all of replica 1 is 200 ms ahead: nobody is accused of that."""
    made = generate(Scenario(dp=dp, pp=pp, steps=20))
    table = without(made.table, rows_where(made.table, *DP_SYNCED))
    assert _report(made, table).findings == ()
    report = _report(made, _shifted(table, rows_where(table, dp=1), 200))
    assert "host_stall" not in {finding.verdict for finding in report.findings}


# --- severities -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "share, steps, severity",
    [
        (0.099, 100, "info"),
        (0.10, 100, "warning"),
        (0.199, 100, "warning"),
        (0.20, 20, "critical"),
        (0.20, 19, "warning"),
        (0.90, 2, "warning"),
    ],
)
def test_the_severity_follows_from_cost_and_steps(share: float, steps: int, severity: str) -> None:
    """From 10 % a warning, from 20 % critical, but not over fewer than 20 steps."""
    assert _severity(share, steps, "straggler") == severity


@pytest.mark.parametrize("verdict", ["planned_pause", "warmup", "none"])
def test_what_blames_nobody_is_information(verdict: str) -> None:
    """Whatever it costs."""
    assert _severity(0.9, 100, verdict) == "info"


@pytest.mark.parametrize("steps, severity", [(20, "critical"), (19, "warning"), (3, "warning")])
def test_few_steps_are_at_most_a_warning(steps: int, severity: str) -> None:
    """The same slow device over fewer steps, with a note of what cannot be seen."""
    made = generate(Scenario(dp=2, pp=2, steps=steps, causes=(causes.slow_gpu(0, 1, 1.5),)))
    report = _report(made)
    (found,) = report.findings
    assert found.excess_share > 0.2
    assert found.severity == severity
    assert _said(report, f"{steps} steps: a finding is at most a warning") == (steps < 20)


def test_a_hang_is_critical_whatever_it_costs() -> None:
    """It costs no step time at all, over few steps."""
    made = generate(Scenario(dp=4, pp=2, steps=6, causes=(causes.hang(1, 0, 5, 3),)))
    found = _report(made).findings[0]
    assert (found.verdict, found.severity, found.excess_s) == ("hang", "critical", 0.0)


# --- costs ------------------------------------------------------------------------------------


def _shares(scenario: Scenario) -> list[float]:
    return [finding.excess_share for finding in _report(generate(scenario)).findings]


@pytest.mark.parametrize("seed", [106, 118, 136, 258])
def test_no_cause_costs_more_than_the_step(seed: int) -> None:
    """Windows in which it once did, or nearly."""
    assert all(0 <= share <= 1 for share in _shares(random_scenario(seed, max_ops=1_000_000)))


def _small(seeds: range, severity: float) -> list[Scenario]:
    """Random windows that take no time to analyse."""
    drawn = [random_scenario(seed, severity=severity, max_ops=1_000_000) for seed in seeds]
    return [one for one in drawn if one.dp * one.pp * one.steps * one.microbatches < 5_000]


@pytest.mark.parametrize("severity", [0.3, 3.0])
def test_no_cause_of_a_random_window_costs_more_than_the_step(severity: float) -> None:
    """Some three dozen windows, also with causes that take most of the step."""
    drawn = _small(range(100), severity)
    assert len(drawn) >= 30
    for one in drawn:
        assert all(0 <= share <= 1 for share in _shares(one)), one


def test_no_cause_that_another_one_hides_costs_more_than_the_step() -> None:
    """A device 7.5 times slower for a while, in a pipeline whose other stage is 11 times longer."""
    window = random_scenario(5406, severity=3.0, max_ops=1_000_000)
    assert all(0 <= share <= 1 for share in _shares(window))


# --- elastic data parallelism -----------------------------------------------------------------


def _slow_job() -> Synthetic:
    return generate(Scenario(dp=2, pp=2, steps=40, causes=(causes.slow_gpu(0, 1, 1.5),)))


def _is_the_straggler(report: JobReport, excess_s: float) -> None:
    assert report.verdict == "straggler"
    (found,) = report.findings
    assert (found.cause, found.where.dp, found.where.stage) == ("slow_gpu", 0, 1)
    assert found.persistence.kind == "persistent"
    assert found.excess_s == pytest.approx(excess_s, rel=0.02)


def test_a_replica_that_leaves_does_not_hide_the_straggler() -> None:
    """DP rank 1 ends at step 36; worker (0, 1) is slow before and after, at the same cost."""
    made = _slow_job()
    table = without(made.table, (made.table.dp == 1) & (made.table.step >= 36))
    report = _report(made, table)
    assert report.window.steps_used == 40
    _is_the_straggler(report, made.truth.excess_s)
    assert _said(report, "DP rank 1 is left out of 4 of 40 steps")


def test_a_job_that_shrinks_does_not_hide_the_straggler() -> None:
    """The same, of a job that really goes on with one replica."""
    fewer = dict.fromkeys(range(36, 40), 1)
    made = generate(
        Scenario(dp=2, pp=2, steps=40, step_dp=fewer, causes=(causes.slow_gpu(0, 1, 1.5),))
    )
    assert [answer.cause for answer in made.truth.answers] == [CauseName.SLOW_GPU]
    _is_the_straggler(_report(made), made.truth.excess_s)


def test_a_culprit_that_leaves_was_still_there() -> None:
    """Rows of the slow worker's own replica end: it is named for the steps before, and first."""
    made = _slow_job()
    table = without(made.table, (made.table.dp == 0) & (made.table.step >= 36))
    found = _report(made, table).findings[0]
    assert (found.verdict, found.where.dp, found.where.stage) == ("straggler", 0, 1)


def test_a_wait_for_a_replica_that_is_not_traced_is_no_slow_link() -> None:
    """As above: nothing else is wrong with the job."""
    made = _slow_job()
    table = without(made.table, (made.table.dp == 0) & (made.table.step >= 36))
    assert {finding.verdict for finding in _report(made, table).findings} == {"straggler"}
