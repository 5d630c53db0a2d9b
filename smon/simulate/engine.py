"""The simulation engine: start and end of every op, for arrays of lanes at once.

Every op starts at the latest end of what it depends on, plus its launch delay if asked for. A
local op ends after its own duration; a grouped one at (latest start in the group) + its own
transfer time (``docs/method.md`` section 4). The loop runs over ops; lanes (step × DP rank ×
what-if) are the elements of numpy arrays.

What is ideal everywhere is simulated once, as plain numbers. A what-if touches only the ops it
changes and those that follow them.

Flow: `smon.simulate.window` → **here** → `smon.attribute`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from smon.graph.program import Member, Phase, Program, Unit
from smon.simulate.ideal import Ideal
from smon.simulate.lanes import Meeting, meeting
from smon.simulate.window import Part, Window

Floats = NDArray[np.float64]

#: Ends of the ops of one run, by op: arrays over lanes, or a number where all lanes are ideal.
Ends = list["Floats | float"]


class Durations(Protocol):
    """Durations of a run, op by op."""

    @property
    def what_ifs(self) -> int:
        """Number of what-ifs; rows are (what_ifs, L), or (L,) where all of them agree."""

    def row(self, part: int, op: int) -> Floats | None:
        """Durations in ns of one op of one structure; None if it is ideal in every lane."""


class Delays(Protocol):
    """Launch delays of a run, op by op."""

    def delay(self, part: int, op: int) -> Floats:
        """(L,) or (what_ifs, L) launch delays in ns of one op of one structure."""


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """What a simulation gave.

    Attributes
    ----------
    step_ns
        (what_ifs, steps) step times in ns.
    ends
        Per structure, ends of the ops that were kept, by op.
    """

    step_ns: Floats
    ends: tuple[Ends, ...]


class Engine:
    """Simulates one window under any durations.

    Parameters
    ----------
    window
        Graphs, lanes and recorded durations.
    ideal
        Ideal duration of each op type.
    like
        An engine of a larger window that this one is a part of: what is known of its graphs, and
        is the same here, is not worked out again.
    """

    def __init__(self, window: Window, ideal: Ideal, *, like: Engine | None = None) -> None:
        self.window = window
        self.reference = ideal
        self.ideal = [ideal.of_ops(part.graph.structure.optype) for part in window.parts]
        self._programs = [part.program for part in window.parts]
        known: dict[Program, _Layouts] = {} if like is None else like.layouts
        self.layouts: dict[Program, _Layouts] = {
            program: known.get(program) or _Layouts.of(program) for program in self._programs
        }
        self._full = [self.layouts[program].full for program in self._programs]
        self._partial = [self.layouts[program].sensitive for program in self._programs]
        self._compositions = _Compositions(window)
        self._base, self.ideal_step_ns = self._ideal_run()
        self._solo_meeting, self._companions = self._compositions.solo(window)

    def run(
        self, durations: Durations, *, delays: Delays | None = None, keep_all: bool = False
    ) -> Run:
        """Simulate every lane; replicas of one step wait for each other.

        Parameters
        ----------
        durations
            What each op takes.
        delays
            Launch delays to add, e.g. the recorded ones for a replay; none by default.
        keep_all
            Keep the ends of all ops, not only of those that `solo` needs.
        """
        states = []
        for index, part in enumerate(self.window.parts):
            inputs = _Inputs(
                rows=partial(durations.row, index),
                ideal=self.ideal[index].tolist(),
                base=self._base_of(index, part.step),
                delays=None if delays is None else partial(delays.delay, index),
            )
            layout = _Layout.all_kept(part.program) if keep_all else self._full[index]
            shape = (durations.what_ifs, part.lanes)
            states.append(_State(part.program.phases, layout, shape, inputs))
        _simulate(states, self.window.meeting)
        step_ns = self._step_times(states, self.window.meeting, durations.what_ifs)
        return Run(step_ns, tuple(state.ends for state in states))

    def solo(self, run: Run, durations: Durations) -> Floats:
        """Step time if one replica alone had these durations and all others were ideal.

        Until replicas first meet, a replica does the same whether the others are ideal or not, so
        that part of `run` is reused; only what follows is simulated again, beside a stand-in for
        the other replicas (``docs/method.md`` section 5.3).

        Parameters
        ----------
        run
            The same durations in all replicas at once, simulated without delays.

        Returns
        -------
        array
            (what_ifs, lanes of the window) in ns; lanes in the order of `window.parts`.
        """
        meet = self._solo_meeting
        states = []
        for index, part in enumerate(self.window.parts):
            others = len(self._companions[index])
            shape = (durations.what_ifs, part.lanes + others)
            inputs = _Inputs(
                rows=_SoloRows(durations, index, part, others, self.ideal[index]).row,
                ideal=self.ideal[index].tolist(),
                base=self._base_of(index, np.concatenate([part.step, self._companions[index]])),
                delays=None,
            )
            state = _State(part.program.sensitive, self._partial[index], shape, inputs)
            state.resume(part.program.frontier, run.ends[index], others)
            states.append(state)
        _simulate(states, meet)
        return self._step_times(states, meet, durations.what_ifs)

    def _ideal_run(self) -> tuple[list[list[Floats | float]], Floats]:
        """Ends of the ideal run per structure and op, and (steps,) ideal step times."""
        compositions = self._compositions
        states = []
        for index, program in enumerate(self._programs):
            inputs = _Inputs(
                rows=_all_ideal, ideal=self.ideal[index].tolist(), base=[], delays=None
            )
            shape = (1, len(compositions.meeting.step[index]))
            states.append(_State(program.phases, _Layout.all_kept(program), shape, inputs))
        _simulate(states, compositions.meeting)
        step_ns = self._step_times(states, compositions.meeting, 1)[0]
        single = len(step_ns) == 1
        base: list[list[Floats | float]] = [
            [float(end[0, 0]) if single else self._spread(index, end) for end in state.arrays()]
            for index, state in enumerate(states)
        ]
        return base, step_ns[compositions.of_step]

    def _spread(self, index: int, end: Floats) -> Floats:
        """(compositions,) ends of one op; NaN where a composition lacks the structure."""
        values = np.full(self._compositions.meeting.steps, np.nan)
        values[self._compositions.meeting.step[index]] = end[0]
        return values

    def _base_of(self, index: int, steps: NDArray[np.intp]) -> list[Floats | float]:
        """Ideal ends of the ops of one structure, for lanes of these steps."""
        base = self._base[index]
        if not base or isinstance(base[0], float):
            return base
        composition = self._compositions.of_step[steps]
        return [ends[composition] for ends in base if not isinstance(ends, float)]

    def _step_times(self, states: Sequence[_State], meet: Meeting, what_ifs: int) -> Floats:
        ends = [
            _last(program.finals, state)
            for program, state in zip(self._programs, states, strict=True)
        ]
        latest = meet.latest(ends)
        return np.broadcast_to(latest, (what_ifs, meet.steps))


def _last(finals: Sequence[int], state: _State) -> Floats:
    """(what_ifs, L) end of the step in each lane."""
    latest = np.zeros(state.shape)
    for op in finals:
        np.maximum(latest, state.ends[op], out=latest)
    return latest


class _Compositions:
    """Which structures occur together in a step: the ideal run needs each combination once."""

    def __init__(self, window: Window) -> None:
        present = np.zeros((len(window.parts), len(window.steps)), np.int64)
        for index, part in enumerate(window.parts):
            np.add.at(present[index], part.step, 1)
        self._counts = present
        kinds, of_step = np.unique(present > 0, axis=1, return_inverse=True)
        self.of_step: NDArray[np.intp] = of_step.reshape(-1)
        lanes = [np.flatnonzero(row) for row in kinds]
        self.meeting = meeting(lanes, kinds.shape[1])

    def solo(self, window: Window) -> tuple[Meeting, list[NDArray[np.intp]]]:
        """Virtual steps of one replica and ideal stand-ins for the other replicas of its step.

        Returns
        -------
        meeting, companions
            Per structure the lanes are its own, then the stand-ins; `companions` gives the real
            step of each stand-in.
        """
        first_virtual = np.cumsum([0, *(part.lanes for part in window.parts)])
        own = [
            first_virtual[index] + np.arange(part.lanes) for index, part in enumerate(window.parts)
        ]
        virtual: list[NDArray[np.intp]] = []
        companions: list[NDArray[np.intp]] = []
        for stand_in in range(len(window.parts)):
            steps, meets = [], []
            for index, part in enumerate(window.parts):
                # A structure stands in if the step has another replica of it.
                others = self._counts[stand_in][part.step] - (stand_in == index)
                steps.append(part.step[others > 0])
                meets.append(own[index][others > 0])
            companions.append(np.concatenate(steps))
            virtual.append(np.concatenate([own[stand_in], *meets]))
        return meeting(virtual, int(first_virtual[-1])), companions


@dataclass(frozen=True, slots=True, eq=False)
class _SoloRows:
    """Durations of own lanes, then of ideal stand-ins."""

    durations: Durations
    index: int
    part: Part
    others: int
    ideal: Floats

    def row(self, op: int) -> Floats | None:
        own = self.durations.row(self.index, op)
        if own is None or self.others == 0:
            return own
        row = np.empty((*own.shape[:-1], self.part.lanes + self.others))
        row[..., : self.part.lanes] = own
        row[..., self.part.lanes :] = self.ideal[op]
        return row


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the ends of ops are stored: buffers are used again once nothing needs them."""

    buffer: list[int]
    buffers: int

    @staticmethod
    def of(program: Program, phases: Sequence[Phase]) -> _Layout:
        kept = program.frontier | set(program.finals)
        last_use = _last_uses(phases)
        buffer = [-1] * len(program.graph)
        free: list[int] = []
        count = 0
        for unit in _units(phases):
            for op, _ in unit.members:
                if not free:
                    free.append(count)
                    count += 1
                buffer[op] = free.pop()
            # Only now: an op never writes where an input of its unit still is.
            dead = _dead_after(unit, last_use) - kept
            free.extend(buffer[op] for op in dead if buffer[op] >= 0)
        return _Layout(buffer, count)

    @staticmethod
    def all_kept(program: Program) -> _Layout:
        count = len(program.graph)
        return _Layout(list(range(count)), count)


@dataclass(frozen=True, slots=True)
class _Layouts:
    """Of all of a program, and of what can feel another replica."""

    full: _Layout
    sensitive: _Layout

    @staticmethod
    def of(program: Program) -> _Layouts:
        return _Layouts(_Layout.of(program, program.phases), _Layout.of(program, program.sensitive))


def _units(phases: Sequence[Phase]) -> Iterable[Unit]:
    for phase in phases:
        yield from phase.units
        yield from (unit for _, unit in phase.synced)


def _last_uses(phases: Sequence[Phase]) -> dict[int, Unit]:
    """Of each op, the last unit that reads or makes it."""
    last: dict[int, Unit] = {}
    for unit in _units(phases):
        for op, deps in unit.members:
            last[op] = unit
            for dep in deps:
                last[dep] = unit
    return last


def _dead_after(unit: Unit, last_use: dict[int, Unit]) -> set[int]:
    ops = {op for op, _ in unit.members}
    ops.update(dep for _, deps in unit.members for dep in deps)
    return {op for op in ops if last_use[op] is unit}


@dataclass(frozen=True, slots=True, eq=False)
class _Inputs:
    """What one structure runs with.

    Attributes
    ----------
    rows
        Durations of each op, None where it is ideal in all lanes.
    ideal
        (N,) ideal durations.
    base
        Ends of the ideal run, by op; empty if every op is to be computed.
    delays
        Launch delays of each op; None for none at all.
    """

    rows: Callable[[int], Floats | None]
    ideal: list[float]
    base: list[Floats | float]
    delays: Callable[[int], Floats] | None


def _all_ideal(_op: int) -> None:
    """Rows of the ideal run."""


class _State:
    """One structure during one run."""

    def __init__(
        self, phases: Sequence[Phase], layout: _Layout, shape: tuple[int, int], inputs: _Inputs
    ) -> None:
        self.phases = phases
        self.shape = shape
        self.inputs = inputs
        count = len(inputs.ideal)
        buffers = list(np.empty((max(layout.buffers, 1), *shape)))
        # Ops that this run does not compute have no buffer (−1), and are never written.
        self._out = [buffers[index] for index in layout.buffer]
        self._scratch = np.empty((2, *shape))
        self.ends: Ends = list(inputs.base) or [0.0] * count
        self.touched = bytearray(count)
        # Launch delays are nowhere ideal, and without a base nothing is known yet.
        self._force = not inputs.base or inputs.delays is not None

    def arrays(self) -> list[Floats]:
        return [end for end in self.ends if not isinstance(end, float)]

    def resume(self, ops: Iterable[int], ends: Ends, others: int) -> None:
        """Take over the ends of ops from another run; stand-ins are ideal there."""
        own = self.shape[1] - others
        for op in ops:
            end = ends[op]
            if isinstance(end, float):
                continue
            joined = np.empty(self.shape)
            joined[:, :own] = end
            ideal = self.inputs.base[op]
            joined[:, own:] = ideal if isinstance(ideal, float) else ideal[own:]
            self.ends[op] = joined
            self.touched[op] = 1

    def run_units(self, units: Sequence[Unit]) -> None:
        """Simulate the units of one phase."""
        rows = self.inputs.rows
        for unit in units:
            durations = [rows(op) for op, _ in unit.members]
            if not self._force and self._untouched(unit.members, durations):
                continue
            if unit.grouped:
                self._finish(unit, self.latest_start(unit), durations)
            else:
                self._run_local(unit.members[0], durations[0])

    def _run_local(self, member: Member, duration: Floats | None) -> None:
        op, deps = member
        out = self._out[op]
        work = self.inputs.ideal[op] if duration is None else duration
        np.add(self._start(op, deps, out), work, out=out)
        self.ends[op] = out
        self.touched[op] = 1

    def _untouched(self, members: Sequence[Member], durations: Sequence[Floats | None]) -> bool:
        touched = self.touched
        for duration in durations:
            if duration is not None:
                return False
        for _, deps in members:
            for dep in deps:
                if touched[dep]:
                    return False
        return True

    def _start(self, op: int, deps: tuple[int, ...], out: Floats) -> Floats | float:
        """Start of an op; written to `out` unless it is the end of its only dependency."""
        ends = self.ends
        if len(deps) == 1:
            start = ends[deps[0]]
        elif len(deps) == 0:
            start = 0.0
        else:
            start = np.maximum(ends[deps[0]], ends[deps[1]], out=out)
            for dep in deps[2:]:
                start = np.maximum(start, ends[dep], out=out)
        if self.inputs.delays is None:
            return start
        delayed: Floats = np.add(start, self.inputs.delays(op), out=out)
        return delayed

    def latest_start(self, unit: Unit) -> Floats:
        """(what_ifs, L) latest start in a group, within each lane; overwritten by the next call."""
        latest, scratch = self._scratch
        op, deps = unit.members[0]
        start = self._start(op, deps, latest)
        for op, deps in unit.members[1:]:
            start = np.maximum(start, self._start(op, deps, scratch), out=latest)
        if start is not latest:
            np.copyto(latest, start)
        return latest

    def _finish(self, unit: Unit, latest: Floats, durations: Sequence[Floats | None]) -> None:
        for (op, _), duration in zip(unit.members, durations, strict=True):
            out = self._out[op]
            np.add(latest, self.inputs.ideal[op] if duration is None else duration, out=out)
            self.ends[op] = out
            self.touched[op] = 1

    def finish(self, unit: Unit, latest: Floats) -> None:
        """End of a synchronised group, given the latest start over everyone who takes part."""
        self._finish(unit, latest, [self.inputs.rows(op) for op, _ in unit.members])

    def wants(self, unit: Unit) -> bool:
        """Whether a synchronised unit differs from the ideal run in this structure."""
        durations = [self.inputs.rows(op) for op, _ in unit.members]
        return self._force or not self._untouched(unit.members, durations)


def _simulate(states: Sequence[_State], meet: Meeting) -> None:
    """Run all phases; at the end of each, replicas meet."""
    for number in range(len(states[0].phases) if states else 0):
        for state in states:
            state.run_units(state.phases[number].units)
        _synchronise(states, number, meet)


def _synchronise(states: Sequence[_State], number: int, meet: Meeting) -> None:
    units: dict[int, list[Unit | None]] = {}
    for index, state in enumerate(states):
        for key, unit in state.phases[number].synced:
            units.setdefault(key, [None] * len(states))[index] = unit
    # In the order in which `_Layout` handed out the buffers.
    for _, parts in sorted(units.items(), key=itemgetter(0)):
        present = [
            (state, unit) for state, unit in zip(states, parts, strict=True) if unit is not None
        ]
        if not any(state.wants(unit) for state, unit in present):
            continue
        # Copied: the next call writes where the last one returned.
        starts = [
            None if unit is None else state.latest_start(unit).copy()
            for state, unit in zip(states, parts, strict=True)
        ]
        latest = meet.latest(starts)
        for state, own, step in zip(states, parts, meet.step, strict=True):
            if own is not None:
                state.finish(own, latest[..., step])
