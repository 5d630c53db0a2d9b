"""A device that is slow now and then, and one that is well again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from smon.ops import OpType
from smon.synth.spec import Scenario
from tests.diagnose.jobs import Slow, causes, named, report_of

STEPS = 40


def _job(*faults: Slow) -> Scenario:
    return Scenario(dp=8, pp=4, microbatches=8, steps=STEPS, faults=faults)


@pytest.mark.parametrize(
    "steps, kind, period",
    [
        (range(0, STEPS, 2), "periodic", 2),
        (range(0, STEPS, 3), "periodic", 3),
        (range(0, STEPS, 8), "periodic", 8),
        ([*range(6, 15), *range(22, 31)], "intermittent", None),
        (range(35, STEPS), "intermittent", None),
        (range(20, STEPS), "onset", None),
    ],
)
def test_how_it_lasts_is_what_the_steps_say(
    steps: Sequence[int], kind: str, period: int | None
) -> None:
    """Neither persistent nor slow in more of the steps than it is; and all of its cost is found."""
    (found,) = report_of(_job(Slow(5, 1.5, (1,), tuple(steps)))).findings
    assert (found.cause, found.where.dp, found.where.stage) == ("slow_gpu", 5, 1)
    assert (found.persistence.kind, found.persistence.period) == (kind, period)
    assert found.persistence.share == pytest.approx(len(steps) / STEPS)
    # A step with it takes 1.26 times as long.
    lost = 0.26 * len(steps) / STEPS
    assert found.excess_share == pytest.approx(lost / (1 + lost), rel=0.15)


@pytest.mark.parametrize("steps", [range(15), range(10, 30)])
def test_a_device_that_is_well_again_is_a_candidate_for_what_it_has_cost(steps: range) -> None:
    """It was slow once, and nobody is to be drained: but where to look is said."""
    (found,) = report_of(_job(Slow(5, 1.5, (1,), tuple(steps)))).findings
    assert (found.verdict, found.cause, found.where.rank) == ("none", "unknown", None)
    assert (found.persistence.kind, found.persistence.share) == ("intermittent", len(steps) / STEPS)
    (candidate,) = found.candidates
    assert (candidate.cause, candidate.where.dp, candidate.where.stage) == ("slow_gpu", 5, 1)
    assert f"slow from step {steps[0]} to {steps[-1]}, and well again" in found.evidence
    assert found.excess_share > 0.07


def test_a_device_that_is_well_again_is_not_persistent_beside_another_accident() -> None:
    """The stage is not its own, so nothing is sure: it is not called slow in all steps."""
    again = Slow(5, 1.5, (1,), tuple(range(10, 30)))
    report = report_of(_job(again, Slow(2, 1.1, (1,), (3, 4))))
    assert not named(report)
    assert causes(report) == ["unknown"]


@pytest.mark.parametrize(
    "fault",
    [
        Slow(5, 1.5, (1,), (3, 9, 22, 30)),
        Slow(5, 1.04, (1,), tuple(range(0, STEPS, 3))),
        Slow(5, 1.5, (1,), tuple(range(0, STEPS, 3)), (OpType.FORWARD_COMPUTE,)),
    ],
)
def test_what_is_rare_or_small_or_only_forward_names_nobody(fault: Slow) -> None:
    """Four accidents; 4 % now and then, as in a healthy trace; a host that stretches forwards."""
    assert not named(report_of(_job(fault)))


def test_a_load_that_two_workers_have_now_and_then_names_nobody() -> None:
    """Data or experts, not a device."""
    report = report_of(
        _job(Slow(5, 1.5, (1,), (0, 3, 9, 16, 22, 30)), Slow(2, 1.5, (1,), (1, 5, 12, 20, 28, 35)))
    )
    assert not named(report)
