"""All stages of a replica slow alike, and slow neighbours that would hide each other."""

from __future__ import annotations

import pytest

from smon.ops import OpType
from smon.synth.faults import SlowCompute
from smon.synth.spec import Scenario
from tests.diagnose.jobs import Slow, UnevenData, candidates, causes, lengths, named, report_of

LONG = Slow(3, 1.2)


def _job(pp: int, *faults: Slow) -> Scenario:
    return Scenario(dp=8, pp=pp, microbatches=8, steps=12, faults=faults)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
def test_a_replica_that_is_slow_as_a_whole_is_no_set_of_slow_devices(pp: int) -> None:
    """Its data, or its host: both are candidates, and no rank is named."""
    (found,) = report_of(_job(pp, LONG)).findings
    assert (found.verdict, found.cause, found.scope) == ("none", "unknown", "pp_group")
    assert (found.where.rank, found.where.dp, found.where.stage) == (None, 3, None)
    assert candidates(found) == {"sequence_length", "slow_gpu"}
    assert 0.10 < found.excess_share < 0.18
    assert not any("drain" in line.lower() for line in found.next)


@pytest.mark.parametrize("pp", [1, 2, 4])
def test_lengths_that_explain_a_slow_replica_are_its_cause(pp: int) -> None:
    """Twice the squares are more than enough for 1.2 times the time."""
    job = _job(pp, LONG)
    (found,) = report_of(job, lengths(job, {3: 2.0})).findings
    assert (found.verdict, found.cause, found.scope) == ("imbalance", "sequence_length", "pp_group")
    assert (found.where.rank, found.where.dp) == (None, 3)
    assert found.candidates == ()


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_lengths_as_elsewhere_acquit_the_data(factor: float) -> None:
    """Without a pipeline it is the device; of a whole replica its host."""
    alone, whole = _job(1, LONG), _job(2, LONG)
    (found,) = report_of(alone, lengths(alone, {3: factor})).findings
    assert (found.cause, found.where.dp, found.candidates) == ("slow_gpu", 3, ())
    assert found.confidence > 0.9
    (found,) = report_of(whole, lengths(whole, {3: factor})).findings
    assert (found.cause, candidates(found)) == ("unknown", {"slow_gpu"})


def test_without_a_pipeline_a_slow_device_may_be_long_data() -> None:
    """It is named, less surely, with the data beside it."""
    (found,) = report_of(_job(1, LONG)).findings
    assert (found.cause, found.where.dp) == ("slow_gpu", 3)
    assert found.confidence <= 0.6
    assert candidates(found) == {"slow_gpu", "sequence_length"}
    assert any("no sequence lengths" in line for line in found.evidence)


def test_with_a_pipeline_the_other_stages_acquit_the_data() -> None:
    """One stage of the replica only."""
    (found,) = report_of(_job(2, Slow(3, 1.2, (1,)))).findings
    assert (found.cause, found.where.dp, found.where.stage) == ("slow_gpu", 3, 1)
    assert found.candidates == ()


def test_only_a_slow_backward_is_no_data() -> None:
    """Long data makes both long."""
    (found,) = report_of(_job(1, Slow(3, 1.2, optypes=(OpType.BACKWARD_COMPUTE,)))).findings
    assert (found.cause, found.candidates) == ("slow_backward", ())


@pytest.mark.parametrize("factor", [1.03, 1.1])
@pytest.mark.parametrize("stages", [(0, 1), (0, 1, 2)])
def test_slow_stages_of_one_replica_do_not_hide_each_other(
    factor: float, stages: tuple[int, ...]
) -> None:
    """Each is as slow as it is: two of four used to show half of it, and three nothing."""
    report = report_of(_job(4, Slow(3, factor, stages)))
    assert named(report) == {(3, stage) for stage in stages}
    for found in report.findings:
        forward = float(found.evidence[0].split()[1])
        assert forward == pytest.approx(factor, abs=0.005)


@pytest.mark.parametrize("seed, factor", [(2, 1.06), (3, 1.07), (0, 1.08), (0, 1.3)])
def test_among_three_replicas_with_uneven_data_the_slow_device_alone_is_named(
    seed: int, factor: float
) -> None:
    """Medians of two make its neighbours suspect as well, until it is undone."""
    slow = SlowCompute(0, 0, factor, factor)
    job = Scenario(
        dp=3, pp=3, microbatches=8, steps=20, seed=seed, faults=(UnevenData(0.3, seed), slow)
    )
    report = report_of(job)
    assert named(report) == {(0, 0)}
    assert causes(report)[0] == "sequence_length"
