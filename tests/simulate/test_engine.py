from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from smon.graph.build import Graph
from smon.graph.program import Program, compile_programs
from smon.ops import OP_TYPES, P2P, OpType
from smon.prepare import prepare
from smon.simulate.engine import Durations, Engine, Run
from smon.simulate.ideal import Ideal
from smon.simulate.lanes import meeting
from smon.simulate.whatif import MadeIdeal, OnlySome, Recorded
from smon.simulate.window import Part, Window
from smon.synth.scenario import Scenario, generate
from tests.builders import Floats, Lane, bare_structure, changed, reference_steps, rows_where

_SOME_TYPES = (OpType.FORWARD_COMPUTE, OpType.OPTIMIZER, OpType.FORWARD_SEND, OpType.GC)


class Reference:
    """The reference simulator beside an engine, for the same window."""

    def __init__(self, window: Window, ideal: Ideal) -> None:
        self.window = window
        self.engine = Engine(window, ideal)
        self.works = [part.work for part in window.parts]
        self.ideals = [
            np.repeat(ideal.of_ops(part.graph.structure.optype)[:, None], part.lanes, axis=1)
            for part in window.parts
        ]

    def steps(self, works: Sequence[Floats], *, delays: bool = False) -> list[float]:
        """Step times by the reference."""
        lanes = []
        for part, work in zip(self.window.parts, works, strict=True):
            delay = part.delay if delays else np.zeros_like(part.delay)
            lanes += [
                Lane(
                    part.graph,
                    int(part.step[lane]),
                    work[:, lane].tolist(),
                    delay[:, lane].tolist(),
                )
                for lane in range(part.lanes)
            ]
        return reference_steps(lanes, len(self.window.steps))

    def alone(self, works: Sequence[Floats]) -> list[float]:
        """Per lane, the time of its step if it alone takes these durations: one run each."""
        times = []
        for index, part in enumerate(self.window.parts):
            for lane in range(part.lanes):
                mixed = [ideal.copy() for ideal in self.ideals]
                mixed[index][:, lane] = works[index][:, lane]
                times.append(self.steps(mixed)[part.step[lane]])
        return times

    def some(self, keep: Sequence[NDArray[np.bool_]], what_if: int) -> list[Floats]:
        """Durations in which only the kept ops are as recorded."""
        return [
            np.where(mask[what_if][:, None], work, ideal)
            for mask, work, ideal in zip(keep, self.works, self.ideals, strict=True)
        ]

    def check(self, keep: Sequence[NDArray[np.bool_]], ideal: Ideal) -> None:
        """Everything that the engine can do equals the reference, to the last bit."""
        engine, recorded = self.engine, Recorded(self.window)
        assert engine.ideal_step_ns.tolist() == self.steps(self.ideals)
        assert engine.run(recorded, delays=recorded).step_ns[0].tolist() == self.steps(
            self.works, delays=True
        )
        full = engine.run(recorded)
        assert full.step_ns[0].tolist() == self.steps(self.works)
        assert engine.solo(full, recorded)[0].tolist() == self.alone(self.works)
        only = OnlySome(self.window, ideal, keep)
        self._check_only(only, engine.run(only), keep)

    def _check_only(self, only: Durations, run: Run, keep: Sequence[NDArray[np.bool_]]) -> None:
        alone = self.engine.solo(run, only)
        for what_if in range(only.what_ifs):
            works = self.some(keep, what_if)
            assert run.step_ns[what_if].tolist() == self.steps(works)
            assert alone[what_if].tolist() == self.alone(works)


# --- random graphs ----------------------------------------------------------------------------


def _random_graph(rng: np.random.Generator, keys: int) -> Graph:
    """A graph without cycles: random groups, edges and DP-synchronised ops, in random op order."""
    units = int(rng.integers(1, 14))
    synced = sorted(
        rng.choice(keys, int(rng.integers(0, min(keys, units) + 1)), replace=False).tolist()
    )
    places = sorted(rng.choice(units, len(synced), replace=False).tolist())
    key_of = dict(zip(places, synced, strict=True))
    unit_of: list[int] = []
    edges: set[tuple[int, int]] = set()
    for unit in range(units):
        earlier = len(unit_of)
        for _ in range(int(rng.integers(1, 4)) if rng.random() < 0.5 else 1):
            op = len(unit_of)
            unit_of.append(unit)
            near = [other for other in range(earlier) if rng.random() < 2.0 / earlier]
            edges.update((op, other) for other in near)
    return _shuffled_graph(rng, np.array(unit_of), key_of, edges)


def _shuffled_graph(
    rng: np.random.Generator,
    unit_of: NDArray[np.intp],
    key_of: dict[int, int],
    edges: set[tuple[int, int]],
) -> Graph:
    count = len(unit_of)
    place = rng.permutation(count)
    sizes = np.bincount(unit_of)
    group = np.full(count, -1, np.intp)
    numbers: dict[int, int] = {}
    for op, unit in enumerate(unit_of.tolist()):
        if sizes[unit] > 1 or unit in key_of:
            group[place[op]] = numbers.setdefault(unit, len(numbers))
    placed = sorted((int(place[after]), int(place[before])) for after, before in edges)
    optype = rng.choice([int(op) for op in _SOME_TYPES], count)
    return Graph(
        structure=bare_structure(optype),
        before=np.array([before for _, before in placed], np.intp),
        after=np.array([after for after, _ in placed], np.intp),
        group=group,
        sync={
            int(place[op]): (OpType.GRADS_REDUCE_SCATTER, 0, key_of[unit])
            for op, unit in enumerate(unit_of.tolist())
            if unit in key_of
        },
    )


def _random_window(rng: np.random.Generator) -> tuple[Window, Ideal]:
    """Up to 3 structures over up to 3 steps of up to 3 replicas, some of them absent."""
    keys, structures, steps, dp = (int(rng.integers(1, high)) for high in (5, 4, 4, 4))
    which = rng.integers(0, structures, (steps, dp))
    there = rng.random((steps, dp)) < 0.85
    there[:, 0] = True
    lanes = [np.argwhere((which == number) & there) for number in range(structures)]
    lanes = [one for one in lanes if len(one)]
    programs = compile_programs([_random_graph(rng, keys) for _ in lanes])
    parts = [_part(rng, program, one) for program, one in zip(programs, lanes, strict=True)]
    meet = meeting([part.step for part in parts], steps)
    ideal = Ideal(rng.integers(1, 20, len(OP_TYPES)).astype(float))
    return Window(np.arange(steps), 1, dp, tuple(parts), meet, 0, 0), ideal


def _part(rng: np.random.Generator, program: Program, lanes: NDArray[np.intp]) -> Part:
    shape = (len(program.graph.group), len(lanes))
    zero = np.zeros(shape)
    return Part(
        program=program,
        step=lanes[:, 0],
        dp=lanes[:, 1].astype(np.int32),
        row=np.zeros(shape, np.int32),
        start=zero,
        end=zero,
        work=rng.integers(0, 20, shape).astype(float),
        delay=rng.integers(0, 3, shape).astype(float),
    )


def _keep(rng: np.random.Generator, window: Window, what_ifs: int) -> list[NDArray[np.bool_]]:
    return [rng.random((what_ifs, len(part.graph.group))) < 0.4 for part in window.parts]


SEEDS = st.integers(0, 2**32 - 1)


@settings(max_examples=150)
@given(SEEDS)
def test_the_engine_equals_one_op_at_a_time_on_random_graphs(seed: int) -> None:
    """Ideal, replay, T, what-ifs and solo, for several structures that meet, to the last bit."""
    rng = np.random.default_rng(seed)
    window, ideal = _random_window(rng)
    Reference(window, ideal).check(_keep(rng, window, 2), ideal)


@pytest.mark.parametrize("seed", [41, 124, 193])
def test_replicas_meet_in_one_order_whatever_their_structure(seed: int) -> None:
    """Two groups of one phase, in another order in two structures: buffers were mixed up."""
    rng = np.random.default_rng(seed)
    window, ideal = _random_window(rng)
    Reference(window, ideal).check(_keep(rng, window, 2), ideal)


@settings(max_examples=100)
@given(SEEDS, st.integers(1, 1000))
def test_a_longer_op_never_shortens_a_step(seed: int, longer: int) -> None:
    """Any op of any lane, longer by any amount: no step gets shorter, and other steps stay."""
    rng = np.random.default_rng(seed)
    window, ideal = _random_window(rng)
    engine = Engine(window, ideal)
    before = engine.run(Recorded(window)).step_ns[0].copy()
    part = window.parts[int(rng.integers(len(window.parts)))]
    op, lane = (int(rng.integers(size)) for size in part.work.shape)
    part.work[op, lane] += longer
    after = engine.run(Recorded(window)).step_ns[0]
    assert (after >= before).all()
    others = np.arange(len(before)) != part.step[lane]
    assert (after == before)[others].all()


# --- real graphs ------------------------------------------------------------------------------

SCHEDULES = st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble"])


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small jobs of any schedule and layout; steps of other length, and with fewer replicas."""
    schedule = draw(SCHEDULES)
    interleaved = schedule == "interleaved"
    pp = draw(st.integers(2, 4) if interleaved else st.integers(1, 4))
    dp = draw(st.integers(1, 4))
    steps = draw(st.integers(1, 3))
    unit = pp if interleaved else 1
    microbatches = st.integers(1, max(6 // unit, 1)).map(lambda number: number * unit)
    numbers = st.integers(0, steps - 1)
    return Scenario(
        schedule=schedule,
        dp=dp,
        pp=pp,
        vpp=2 if interleaved else 1,
        microbatches=draw(microbatches),
        steps=steps,
        seed=draw(st.integers(0, 1000)),
        overlap=draw(st.booleans()),
        record_noops=interleaved and draw(st.booleans()),
        step_microbatches=draw(st.dictionaries(numbers, microbatches, max_size=2)),
        step_dp=draw(st.dictionaries(numbers, st.integers(1, dp), max_size=1)),
        step_relative=True,
    )


def _window_of(scenario: Scenario, rng: np.random.Generator) -> tuple[Window, Ideal]:
    """The graphs of a job, with random durations; one replica may run in another order."""
    made = generate(scenario)
    table = made.table
    if rng.random() < 0.5:
        # Its last two forwards change places, so that it has a structure of its own.
        mine = rows_where(table, OpType.FORWARD_COMPUTE, step=0, dp=0, stage=scenario.pp - 1)
        start = table.start_ns.copy()
        last = np.flatnonzero(mine)[-1]
        start[last] += 10**9
        table = changed(table, start_ns=start)
    prepared = prepare(table, made.job)
    for part in prepared.window.parts:
        part.work[:] = rng.integers(0, 20, part.work.shape)
        part.delay[:] = rng.integers(0, 3, part.delay.shape)
    return prepared.window, Ideal(rng.integers(1, 20, len(OP_TYPES)).astype(float))


@settings(max_examples=40)
@given(scenarios(), SEEDS)
def test_the_engine_equals_one_op_at_a_time_on_jobs(scenario: Scenario, seed: int) -> None:
    """All schedules, layouts, elastic steps, and durations that have nothing to do with them."""
    rng = np.random.default_rng(seed)
    window, ideal = _window_of(scenario, rng)
    Reference(window, ideal).check(_keep(rng, window, 2), ideal)


@settings(max_examples=20)
@given(scenarios(), SEEDS)
def test_made_ideal_workers_take_the_ideal_and_all_others_what_was_recorded(
    scenario: Scenario, seed: int
) -> None:
    """The what-if of Eq. 5 by the reference."""
    rng = np.random.default_rng(seed)
    window, ideal = _window_of(scenario, rng)
    reference = Reference(window, ideal)
    chosen = {(int(rng.integers(scenario.dp)), int(rng.integers(scenario.pp))) for _ in range(2)}
    works = [work.copy() for work in reference.works]
    for part, work, ideals in zip(window.parts, works, reference.ideals, strict=True):
        for dp, stage in chosen:
            mine = np.ix_(part.graph.structure.stage == stage, part.dp == dp)
            work[mine] = ideals[mine]
    run = reference.engine.run(MadeIdeal(window, ideal, chosen))
    assert run.step_ns[0].tolist() == reference.steps(works)


def test_kept_ends_of_a_replay_are_the_recorded_ones() -> None:
    """`keep_all` gives the end of every op, and the replay reproduces each of them."""
    made = generate(Scenario(dp=2, pp=3, microbatches=4, steps=2, step_relative=True))
    prepared = prepare(made.table, made.job)
    run = prepared.engine.run(
        Recorded(prepared.window), delays=Recorded(prepared.window), keep_all=True
    )
    (part,) = prepared.window.parts
    for op, end in enumerate(run.ends[0]):
        assert np.array_equal(np.broadcast_to(end, (1, part.lanes))[0], part.end[op])


def test_every_point_to_point_op_is_in_a_group() -> None:
    """Section 2, rule 10: pairs and no-ops are groups, so that their transfer time counts."""
    made = generate(
        Scenario(schedule="interleaved", dp=1, pp=2, vpp=2, microbatches=4, record_noops=True)
    )
    (part,) = prepare(made.table, made.job).window.parts
    p2p = np.isin(part.graph.structure.optype, [int(op) for op in P2P])
    assert (part.graph.group[p2p] >= 0).all()
