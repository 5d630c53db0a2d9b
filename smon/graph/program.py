"""Graphs compiled into the order in which they are simulated.

A *unit* is a local op, or a communication group whose members end together. Units are sorted
topologically, and cut into phases at the collectives that are synchronised over DP ranks, so that
replicas of different structure can run side by side and meet there.

Flow: `smon.graph.build` → **here** → `smon.simulate.engine`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from smon.errors import CycleError
from smon.graph.build import Graph
from smon.ops import OpType

#: So many ops are named in an error.
_MAX_NAMED = 6

#: One op of a unit: its index, and the ops it depends on.
Member = tuple[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Unit:
    """Ops that are simulated together.

    Attributes
    ----------
    members
        A single op, or all ops of a communication group.
    grouped
        Whether members end at (latest start among them) + their own transfer time.
    """

    members: tuple[Member, ...]
    grouped: bool


@dataclass(frozen=True, slots=True)
class Phase:
    """Units to run, then the synchronised groups that end the phase, with and by their keys."""

    units: tuple[Unit, ...]
    synced: tuple[tuple[int, Unit], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """How to simulate one graph.

    Attributes
    ----------
    graph
        The graph.
    phases
        In order; all programs of a job have the same number.
    finals
        Ops whose end is the end of the step: the optimizers, or every op if there are none.
    sensitive
        `phases` reduced to the ops that can feel another replica when no launch delay is
        simulated: all that follows a DP-synchronised op that is not at the start of the step.
    frontier
        Ops outside `sensitive` that it depends on.
    """

    graph: Graph
    phases: tuple[Phase, ...]
    finals: tuple[int, ...]
    sensitive: tuple[Phase, ...]
    frontier: frozenset[int]


def compile_programs(graphs: Sequence[Graph]) -> list[Program]:
    """Compile the graphs of one job; synchronised ops with the same key meet in one phase.

    Raises
    ------
    CycleError
        Ops of one graph, or collectives of replicas with different structure, wait for each other.
    """
    keys = sorted({key for graph in graphs for key in graph.sync.values()})
    number = {key: index for index, key in enumerate(keys)}
    drafts = [_Draft(graph, number) for graph in graphs]
    phase_of_key = _meeting_phases(drafts, len(keys))
    sensitive_keys = _sensitive_keys(drafts)
    phases = max(phase_of_key, default=-1) + 2
    return [draft.program(phases, sensitive_keys) for draft in drafts]


class _Draft:
    """Units of one graph in topological order, with their phases as far as known."""

    def __init__(self, graph: Graph, key_number: dict[tuple[OpType, int, int], int]) -> None:
        self.graph = graph
        count = len(graph)
        groups = int(graph.group.max(initial=-1)) + 1
        unit_of = np.where(graph.group >= 0, graph.group, groups + np.arange(count))
        self.unit_of: list[int] = np.unique(unit_of, return_inverse=True)[1].tolist()
        self.count = max(self.unit_of, default=-1) + 1
        self.members: list[list[int]] = [[] for _ in range(self.count)]
        for op, unit in enumerate(self.unit_of):
            self.members[unit].append(op)
        self.deps: list[list[int]] = [[] for _ in range(count)]
        for before, after in zip(graph.before.tolist(), graph.after.tolist(), strict=True):
            self.deps[after].append(before)
        self.before = [
            {self.unit_of[dep] for op in ops for dep in self.deps[op]} for ops in self.members
        ]
        self.key = [-1] * self.count
        for op, key in graph.sync.items():
            self.key[self.unit_of[op]] = key_number[key]
        self.order = self._topological_order()
        self.phase = [0] * self.count

    def _topological_order(self) -> list[int]:
        """Kahn's algorithm, breadth first."""
        after: list[list[int]] = [[] for _ in range(self.count)]
        waiting = [0] * self.count
        for unit, before in enumerate(self.before):
            waiting[unit] = len(before)
            for other in before:
                after[other].append(unit)
        order = [unit for unit in range(self.count) if waiting[unit] == 0]
        for unit in order:
            for other in after[unit]:
                waiting[other] -= 1
                if waiting[other] == 0:
                    order.append(other)
        if len(order) < self.count:
            raise self._cycle([unit for unit in range(self.count) if waiting[unit] > 0])
        return order

    def _cycle(self, stuck: list[int]) -> CycleError:
        """Walk backwards among the stuck units until one repeats: that is the cycle."""
        left = set(stuck)
        path = [stuck[0]]
        while path[-1] not in path[:-1]:
            path.append(min(self.before[path[-1]] & left))
        cycle = path[path.index(path[-1]) : -1][::-1]
        names = [self.graph.structure.name(op) for unit in cycle for op in self.members[unit]]
        shown = " ← ".join(names[:_MAX_NAMED]) + (" …" if len(names) > _MAX_NAMED else "")
        return CycleError(f"{len(names)} ops wait for each other: {shown}", names)

    def update_phases(self, phase_of_key: list[int]) -> bool:
        """Recompute phases from the keys' ones, push the keys' on; whether any key changed."""
        changed = False
        for unit in self.order:
            phase = 0
            for other in self.before[unit]:
                done = self.phase[other] + (self.key[other] >= 0)
                phase = max(phase, done)
            key = self.key[unit]
            if key >= 0:
                if phase > phase_of_key[key]:
                    phase_of_key[key] = phase
                    changed = True
                phase = phase_of_key[key]
            self.phase[unit] = phase
        return changed

    def feels(self, keys: set[int]) -> list[bool]:
        """Per unit, whether it is or follows a unit with one of these keys."""
        felt = [False] * self.count
        for unit in self.order:
            felt[unit] = self.key[unit] in keys or any(felt[other] for other in self.before[unit])
        return felt

    def program(self, phases: int, sensitive_keys: set[int]) -> Program:
        felt = self.feels(sensitive_keys)
        everything = self._phases(phases, [True] * self.count)
        sensitive = self._phases(phases, felt)
        inside = {op for unit, yes in enumerate(felt) if yes for op in self.members[unit]}
        frontier = {dep for op in inside for dep in self.deps[op]} - inside
        optimizer = np.flatnonzero(self.graph.structure.optype == OpType.OPTIMIZER).tolist()
        finals = tuple(optimizer or range(len(self.graph)))
        frontier.update(op for op in finals if op not in inside)
        return Program(self.graph, everything, finals, sensitive, frozenset(frontier))

    def _phases(self, count: int, wanted: list[bool]) -> tuple[Phase, ...]:
        units: list[list[Unit]] = [[] for _ in range(count)]
        synced: list[list[tuple[int, Unit]]] = [[] for _ in range(count)]
        for number in self.order:
            if not wanted[number]:
                continue
            ops = self.members[number]
            members = tuple((op, tuple(self.deps[op])) for op in ops)
            unit = Unit(members, grouped=int(self.graph.group[ops[0]]) >= 0)
            if self.key[number] >= 0:
                synced[self.phase[number]].append((self.key[number], unit))
            else:
                units[self.phase[number]].append(unit)
        # By key: the engine goes through them in one order, whatever the structure.
        return tuple(
            Phase(tuple(part), tuple(sorted(meet, key=itemgetter(0))))
            for part, meet in zip(units, synced, strict=True)
        )


def _meeting_phases(drafts: list[_Draft], keys: int) -> list[int]:
    """Phase in which the ops of each key meet, over all graphs."""
    phase_of_key = [0] * keys
    # Each round settles at least one key, unless the graphs contradict each other.
    for _ in range(keys + 2):
        changed = [draft.update_phases(phase_of_key) for draft in drafts]
        if not any(changed):
            return phase_of_key
    names = sorted({draft.graph.structure.name(op) for draft in drafts for op in draft.graph.sync})
    raise CycleError(
        "replicas run their DP collectives in different orders, so that each waits for another: "
        + ", ".join(names[:_MAX_NAMED]),
        names,
    )


def _sensitive_keys(drafts: list[_Draft]) -> set[int]:
    """Keys whose ops do not all start with the step: they can come late in one replica only."""
    sensitive: set[int] = set()
    for draft in drafts:
        sensitive |= {key for unit, key in enumerate(draft.key) if key >= 0 and draft.before[unit]}
    return sensitive
