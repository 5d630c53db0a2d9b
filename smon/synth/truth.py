"""The true answer of a synthetic job: what was put into it, where, and what it costs.

Flow: `smon.synth.spec` (causes) and `smon.synth.twin` (costs) → **here** → ``truth.json``, for
tests and studies of accuracy. The words are those of a diagnosis; nothing here makes one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.synth.evidence import Machines
from smon.synth.faults.base import Extent, Fault
from smon.topology import Layout


class Verdict(StrEnum):
    """What kind of answer is right."""

    STRAGGLER = "straggler"
    IMBALANCE = "imbalance"
    LINK = "link"
    HOST_STALL = "host_stall"
    JOB_WIDE = "job_wide"
    PLANNED_PAUSE = "planned_pause"
    WARMUP = "warmup"
    HANG = "hang"
    DATA_QUALITY = "data_quality"
    NONE = "none"


class CauseName(StrEnum):
    """What can be put into a job."""

    SLOW_GPU = "slow_gpu"
    THERMAL = "thermal"
    SLOW_FORWARD = "slow_forward"
    SLOW_BACKWARD = "slow_backward"
    HOST_CONTENTION = "host_contention"
    GC = "gc"
    DATALOADER = "dataloader"
    SEQUENCE_LENGTH = "sequence_length"
    MOE_LOAD = "moe_load"
    STAGE_PARTITION = "stage_partition"
    SLOW_LINK = "slow_link"
    FLAPPING_LINK = "flapping_link"
    CHECKPOINT = "checkpoint"
    WARMUP = "warmup"
    JOB_WIDE = "job_wide"
    HANG = "hang"
    CLOCK = "clock"
    LOST_DATA = "lost_data"


class Scope(StrEnum):
    """How much of the job it is."""

    RANK = "rank"
    NODE = "node"
    STAGE = "stage"
    DP_GROUP = "dp_group"
    EP_GROUP = "ep_group"
    JOB = "job"


class Pattern(StrEnum):
    """How it goes in time."""

    PERSISTENT = "persistent"
    ONSET = "onset"
    RAMP = "ramp"
    INTERMITTENT = "intermittent"
    PERIODIC = "periodic"
    ROTATING = "rotating"
    ONE_OFF = "one_off"


#: Scopes that name one place, so that all other ranks are its victims.
_NAMES_A_PLACE: Final = frozenset({Scope.RANK, Scope.NODE})

#: Scopes of which every data-parallel rank of a stage is a member.
_WHOLE_STAGE: Final = frozenset({Scope.STAGE, Scope.DP_GROUP, Scope.EP_GROUP})

#: Nothing is wrong with a job that has only these.
_UNREPORTED: Final = frozenset({Verdict.DATA_QUALITY, Verdict.NONE})

#: What a file says of the main cause, besides its costs.
_MAIN: Final = ("cause", "scope", "where", "persistence", "candidates", "victims")

_NOTHING: Final[Mapping[str, float]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Cause:
    """One thing that is put into a job, and how a diagnosis should call it.

    Attributes
    ----------
    verdict, name, scope, pattern
        The right answer.
    faults
        What does it.
    dp, stage
        The place, as far as `scope` has one.
    period
        Steps from one occurrence to the next, if they are regular.
    grows
        It also gets worse from step to step.
    details
        Numbers that belong to the answer, such as ``offset_s`` of a clock.
    """

    verdict: Verdict
    name: CauseName
    scope: Scope
    pattern: Pattern
    faults: tuple[Fault, ...]
    dp: int | None = None
    stage: int | None = None
    period: int | None = None
    grows: bool = False
    details: Mapping[str, float] = field(default_factory=lambda: _NOTHING)

    def answer(
        self, job: Extent, layout: Layout, machines: Machines, excess_s: float, gain_s: float
    ) -> Answer:
        """The answer for this job."""
        workers = self._workers(job.dp, machines, layout)
        candidates = sorted(layout.rank(dp, stage) for dp, stage in workers)
        return Answer(
            verdict=self.verdict,
            cause=self.name,
            scope=self.scope,
            where=self._where(layout, machines),
            persistence=self._persistence(job),
            candidates=tuple(candidates),
            victims=self._victims(candidates, layout),
            excess_s=excess_s,
            gain_s=gain_s,
            details=dict(self.details),
        )

    def active(self, job: Extent) -> NDArray[np.bool_]:
        """Steps that any of its faults touches; shape ``(steps,)``."""
        touched = [fault.active(job) for fault in self.faults]
        active: NDArray[np.bool_] = np.logical_or.reduce([np.zeros(len(job.steps), bool), *touched])
        return active

    def _workers(self, dp_size: int, machines: Machines, layout: Layout) -> list[tuple[int, int]]:
        """(dp, stage) of all equal suspects."""
        if self.stage is None:
            return []
        if self.scope in _WHOLE_STAGE:
            return [(dp, self.stage) for dp in range(dp_size)]
        if self.dp is None:
            return []
        host = machines.host(layout.rank(self.dp, self.stage))
        if self.scope is not Scope.NODE or host is None:
            return [(self.dp, self.stage)]
        return [
            (dp, stage)
            for dp in range(dp_size)
            for stage in range(layout.pp)
            if machines.host(layout.rank(dp, stage)) == host
        ]

    def _where(self, layout: Layout, machines: Machines) -> dict[str, int | str]:
        where: dict[str, int | str] = {}
        if self.dp is not None:
            where["dp"] = self.dp
        if self.stage is not None:
            where["stage"] = self.stage
        if self.dp is not None and self.stage is not None:
            rank = layout.rank(self.dp, self.stage)
            host = machines.host(rank)
            where["rank"] = rank
            if host is not None:
                where["node"] = host
        return where

    def _persistence(self, job: Extent) -> Persistence:
        active = self.active(job)
        begins = self.pattern in (Pattern.ONSET, Pattern.RAMP)
        return Persistence(
            kind=self.pattern,
            share=float(active.mean()),
            onset_step=int(job.steps[np.argmax(active)]) if begins and active.any() else None,
            period=self.period,
            grows=self.grows,
        )

    def _victims(self, candidates: Sequence[int], layout: Layout) -> tuple[int, ...]:
        """Workers, by their first rank, that only wait."""
        if self.scope not in _NAMES_A_PLACE or self.verdict is Verdict.DATA_QUALITY:
            return ()
        ranks = {layout.rank(dp, stage) for dp in range(layout.dp) for stage in range(layout.pp)}
        return tuple(sorted(ranks - set(candidates)))


@dataclass(frozen=True, slots=True)
class Persistence:
    """How it goes in time.

    Attributes
    ----------
    share
        Share of the steps of the window that it touches.
    onset_step
        First of these, if it begins within the window.
    """

    kind: Pattern
    share: float
    onset_step: int | None = None
    period: int | None = None
    grows: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The right answer about one cause.

    Attributes
    ----------
    where
        Those of ``rank``, ``dp``, ``stage``, ``node`` that apply.
    candidates
        Ranks of all workers that look alike; one if the place is certain.
    victims
        Ranks of workers that wait for it.
    excess_s
        Mean step time with this cause alone, minus that with none, the same draws both times.
    gain_s
        Mean step time as it is, minus that without this cause: less than `excess_s` where another
        cause hides it.
    """

    verdict: Verdict
    cause: CauseName
    scope: Scope
    where: Mapping[str, int | str]
    persistence: Persistence
    candidates: tuple[int, ...]
    victims: tuple[int, ...]
    excess_s: float
    gain_s: float
    details: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Truth:
    """The true answer of a job.

    Attributes
    ----------
    verdict
        That of the costliest cause, `Verdict.NONE` if there is nothing to report; None if faults
        were put in without saying what they stand for.
    answers
        All causes, the costliest first; wrong clocks and lost data come last.
    healthy_step_s
        Mean step time with the same draws and no fault, pauses between steps included. Of an
        imbalance the same total work is left, spread evenly.
    faulty_step_s
        Mean step time with all faults. Steps that never end are left out of both.
    """

    verdict: Verdict | None
    answers: tuple[Answer, ...]
    healthy_step_s: float
    faulty_step_s: float

    @property
    def excess_s(self) -> float:
        """What all faults together cost, s per step."""
        return self.faulty_step_s - self.healthy_step_s

    @property
    def main(self) -> Answer | None:
        """The costliest cause that a diagnosis should report; None if there is none."""
        return next((answer for answer in self.answers if _is_reported(answer)), None)

    def to_json(self) -> str:
        """JSON: the main cause, the costs of all, and the list ``causes``."""
        main = {} if self.main is None else asdict(self.main)
        document = {
            "schema": "smon.truth/1",
            "verdict": self.verdict,
            **{name: main.get(name) for name in _MAIN},
            "excess_s": self.excess_s,
            "healthy_step_s": self.healthy_step_s,
            "faulty_step_s": self.faulty_step_s,
            "causes": [asdict(answer) for answer in self.answers],
        }
        return json.dumps(document, indent=1)


def truth_of(
    answers: Sequence[Answer], healthy_step_s: float, faulty_step_s: float, *, stated: bool
) -> Truth:
    """Put the causes in order.

    Parameters
    ----------
    stated
        Every fault belongs to a cause.
    """
    ordered = sorted(answers, key=lambda answer: (not _is_reported(answer), -abs(answer.excess_s)))
    reported = [answer.verdict for answer in ordered if _is_reported(answer)]
    verdict = reported[0] if reported else Verdict.NONE
    return Truth(verdict if stated else None, tuple(ordered), healthy_step_s, faulty_step_s)


def _is_reported(answer: Answer) -> bool:
    """Whether it is about the job; wrong clocks and lost data are about the table."""
    return answer.verdict not in _UNREPORTED
