from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smon.analysis import analyze
from smon.report import JobReport
from smon.simulate.warmup import WARMUP_STEPS, warmup_steps
from smon.synth.faults import SlowCompute, Warmup
from smon.synth.scenario import Scenario, generate


def counted(ratios: list[float], pace: list[float] | None = None) -> int:
    """Warm-up steps of a window with these recorded over ideal times; everybody at that pace."""
    recorded = np.array(ratios, float)
    return warmup_steps(
        recorded, np.ones(len(ratios)), recorded if pace is None else np.array(pace)
    )


def report_of(*faults: Any, **fields: Any) -> JobReport:  # noqa: ANN401  # of Scenario
    """The report of a job of 4 × 2 workers with 12 steps."""
    made = generate(Scenario(**{"dp": 4, "pp": 2, "steps": 12, **fields}, faults=faults))
    return analyze(made.table, made.job)


def causes(report: JobReport) -> list[str]:
    """What it found, in order."""
    return [finding.cause for finding in report.findings]


@pytest.mark.parametrize(
    "ratios, count",
    [
        ([1.0] * 8, 0),
        ([3.0, *[1.0] * 7], 1),
        ([3.0, 2.0, 1.5, *[1.0] * 7], 3),
        ([1.29, *[1.0] * 7], 0),
        ([1.0, 3.0, *[1.0] * 6], 0),
        ([3.0, 1.0, 3.0, *[1.0] * 5], 1),
        ([3.0] * 8, 0),
    ],
)
def test_the_leading_steps_that_take_longer_are_warm_up(ratios: list[float], count: int) -> None:
    """Up to the first normal step; what is slow later, or a little, is not."""
    assert counted(ratios) == count


def test_more_than_three_steps_and_a_fifth_are_no_warm_up() -> None:
    """A job that is slow for so long has something else."""
    assert counted([2.0] * 4 + [1.0] * 16) == 4
    assert counted([2.0] * 4 + [1.0] * 15) == 0
    assert counted([2.0] * WARMUP_STEPS + [1.0] * 5) == WARMUP_STEPS


def test_three_steps_are_too_few_to_tell() -> None:
    """There is no typical step."""
    assert counted([3.0, 1.0, 1.0]) == 0
    assert counted([3.0, 1.0, 1.0, 1.0]) == 1


def test_a_longer_step_at_the_usual_pace_is_no_warm_up() -> None:
    """If only one worker is slow, the typical one computes as always."""
    assert counted([3.0, 1.0, 1.0, 1.0], pace=[1.1, 1.0, 1.0, 1.0]) == 0


def test_the_first_step_is_left_out_with_a_reason_and_a_finding() -> None:
    """All other numbers are those of a window without it."""
    report = report_of(Warmup())
    assert [(part.step, part.reason) for part in report.window.skipped] == [
        (0, "warm-up of the job")
    ]
    assert report.window.steps_used == 11
    assert report.verdict == "warmup"
    (finding,) = report.findings
    assert (finding.severity, finding.scope, finding.where.rank) == ("info", "job", None)
    assert (finding.persistence.kind, finding.persistence.onset_step) == ("one_off", 0)
    assert finding.persistence.share == pytest.approx(1 / 12)
    assert report.slowdown.paper == pytest.approx(1.0, abs=0.02)


def test_warm_up_costs_what_its_steps_take_longer() -> None:
    """Spread over all steps of the window."""
    warm = generate(Scenario(dp=4, pp=2, steps=12, faults=(Warmup(steps=2),)))
    extra = warm.step_seconds[:2].sum() - 2 * np.median(warm.step_seconds)
    (finding,) = analyze(warm.table, warm.job).findings
    assert finding.excess_s == pytest.approx(extra / 12, rel=0.05)


def test_warm_up_hides_no_slow_device() -> None:
    """It comes last, and the suspect is the same as without."""
    slow = SlowCompute(stage=1, dp=2, forward=1.5, backward=1.5)
    warm, plain = report_of(slow, Warmup(steps=2)), report_of(slow)
    assert causes(warm) == ["slow_gpu", "warmup"]
    assert warm.verdict == "straggler"
    assert warm.findings[0].where == plain.findings[0].where
    assert warm.findings[0].excess_share == pytest.approx(plain.findings[0].excess_share, rel=0.02)


def test_one_slow_worker_in_the_first_steps_is_no_warm_up() -> None:
    """Everybody waits for it, but nobody else computes for longer."""
    slow = SlowCompute(stage=1, dp=2, forward=4.0, backward=4.0, until_step=1)
    report = report_of(slow)
    assert not report.window.skipped
    assert "warmup" not in causes(report)


def test_a_first_step_with_more_microbatches_is_no_warm_up() -> None:
    """It has more to do, and its ideal time is longer as well."""
    report = report_of(step_microbatches={0: 32}, microbatches=8)
    assert not report.window.skipped
    assert "warmup" not in causes(report)


def test_a_slow_step_in_the_middle_is_used() -> None:
    """The job had started long before."""
    report = report_of(Warmup(first=6))
    assert not report.window.skipped
    assert "warmup" not in causes(report)


def test_a_window_that_begins_later_in_the_job_can_warm_up_too() -> None:
    """After a restart step numbers go on."""
    made = generate(Scenario(dp=4, pp=2, steps=12, faults=(Warmup(first=4),)))
    report = analyze(made.table.take(made.table.step >= 4), made.job)
    assert [part.step for part in report.window.skipped] == [4]
