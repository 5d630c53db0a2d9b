from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from smon.attribute.ledger import Factor
from smon.collectives.attribute import (
    Study,
    evened,
    ledger_of,
    repaired,
    slowest_share,
    study_of,
)
from smon.collectives.matching import match
from smon.collectives.segments import structures_of
from smon.collectives.simulate import Simulator
from smon.trace.events import ProcessGroup, RankEvents
from tests.collectives.builders import MS, Met, job_of, rank_of

#: (steps, ranks) ms of work.
WORK = arrays.arrays(
    np.float64,
    st.tuples(st.integers(1, 5), st.integers(2, 5)),
    elements=st.floats(1.0, 100.0).map(lambda ms: round(ms, 3)),
)


def study(ranks: list[RankEvents]) -> Study:
    """A job, simulated."""
    return study_of(structures_of(match(ranks)))


def of_work(work: np.ndarray) -> Study:
    """A job of this much work per step and rank."""
    return study(job_of(work.tolist()))


@given(WORK)
@settings(max_examples=40)
def test_recorded_durations_reproduce_the_recorded_steps(work: np.ndarray) -> None:
    """A step takes as long as its slowest rank works, plus the transfer."""
    found = of_work(work)
    assert found.simulated[1:] == pytest.approx((work.max(axis=1)[1:] + 2.0) * MS)
    assert found.recorded == pytest.approx(found.simulated)


@given(WORK)
@settings(max_examples=40)
def test_the_ledger_sums_to_what_is_lost(work: np.ndarray) -> None:
    """Recorded minus ideal step time, to the nanosecond."""
    found = of_work(work)
    total = float((found.recorded - found.ideal).mean())
    assert sum(ledger_of(found).values()) == pytest.approx(total, abs=1e-3)


@given(WORK, st.integers(0, 10**6))
@settings(max_examples=40)
def test_a_longer_segment_never_shortens_a_step(work: np.ndarray, place: int) -> None:
    """Whichever it is."""
    (structure,) = structures_of(match(job_of(work.tolist(), bulk=2)))
    simulator = Simulator(structure)
    longer = structure.segment.copy()
    longer.reshape(-1)[place % longer.size] += 5 * MS
    before = simulator.run(structure.segment, structure.transfer)
    assert (simulator.run(longer, structure.transfer) >= before).all()


@given(WORK)
@settings(max_examples=20)
def test_relabelling_ranks_permutes_the_answer(work: np.ndarray) -> None:
    """No rank is special."""
    found, turned = of_work(work), of_work(work[:, ::-1])
    assert turned.by_rank[::-1] == pytest.approx(found.by_rank)
    assert turned.ideal == pytest.approx(found.ideal)


def test_one_slow_rank_costs_what_it_is_longer() -> None:
    """S of the rank is S of the job; like its peers, the job is as fast as they are."""
    found = of_work(np.array([[10.0, 30.0, 10.0, 10.0]] * 6))
    assert found.ideal == pytest.approx(17.0 * MS)  # the mean of 15 ms, and the transfer
    assert found.by_rank[1] == pytest.approx(found.simulated)
    assert found.by_rank[0] == pytest.approx(found.ideal)
    assert repaired(found, [1]) == pytest.approx(12.0 * MS)
    assert ledger_of(found)[Factor.WORKER] == pytest.approx(15.0 * MS)
    assert slowest_share(found) == pytest.approx(1.0)


def test_another_rank_each_time_is_no_rank() -> None:
    """The same loss, but in the factor of the step; evening the ranks out recovers it."""
    work = np.full((8, 4), 10.0)
    work[np.arange(8), np.arange(8) % 4] = 30.0
    found = of_work(work)
    ledger = ledger_of(found)
    assert ledger[Factor.STEP] == pytest.approx(15.0 * MS, rel=0.01)
    assert ledger[Factor.WORKER] == pytest.approx(0.0, abs=0.2 * MS)
    assert evened(found, []).mean() == pytest.approx(17.0 * MS)


def test_a_single_step_cannot_tell_a_rank_from_a_moment() -> None:
    """What is seen once is not usual."""
    assert ledger_of(of_work(np.array([[10.0, 30.0]])))[Factor.WORKER] == 0.0


def test_transfers_are_compared_with_those_of_their_kind_and_size() -> None:
    """Large ones are no slow small ones."""

    def rank(number: int) -> RankEvents:
        events = []
        for step in range(4):
            at = 100.0 * step
            events += [Met(at, 1, step, size=10), Met(at + 10, 50, step, size=1_000)]
        return rank_of(number, events, world=2)

    found = study([rank(0), rank(1)])
    assert found.simulated == pytest.approx(found.ideal)


def test_groups_that_share_no_rank_run_side_by_side() -> None:
    """Two pairs, then everybody: the slow pair decides, and only its slow member is slow."""
    world = ProcessGroup("0", "world", (0, 1, 2, 3), 4)
    pairs = [ProcessGroup("1", "mesh_tp", (0, 1), 2), ProcessGroup("2", "mesh_tp", (2, 3), 2)]
    ranks = []
    for number in range(4):
        events = []
        for step in range(3):
            at, slow = 100.0 * step, 20.0 if number >= 2 else 0.0
            own = 20.0 if number == 3 else 0.0
            events.append(Met(at + 10 + own, 2 + slow - own, step, group=1))
            events.append(Met(at + 20 + slow, 2 + 20 - slow, step, group=0))
        ranks.append(rank_of(number, events, [world, pairs[number // 2]], world=4))
    found = study(ranks)
    assert found.simulated[1:] == pytest.approx(found.recorded[1:])
    assert np.argmax(found.by_rank.mean(axis=1)) == 3
    assert found.by_rank[0] == pytest.approx(found.by_rank[1])
    assert repaired(found, [3]).mean() < found.simulated.mean() - 15 * MS
