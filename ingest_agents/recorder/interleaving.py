"""Which microbatch and model chunk comes when on a stage of Megatron-LM, and who it talks to.

Flow: sizes of the job → **here** → `ingest_agents.recorder.megatron`. Arithmetic only: timers tell
that a stage computes and that it talks to its neighbours, but not what about. Timers of combined
sends and receives run also where one half, or both, have nobody at the other end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple


class Way(Enum):
    """The direction in which microbatches go through the model."""

    FORWARD = 0
    BACKWARD = 1


class Turn(NamedTuple):
    """What a compute is about; chunk -1 if the stage has only one."""

    microbatch: int
    chunk: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The computes of one stage in one step, in their order.

    Attributes
    ----------
    stage, stages
        This stage, and how many there are.
    chunks
        Model chunks per stage.
    microbatches
        Of the step; counts only with several chunks.
    group
        Microbatches that go through one chunk before the next has its turn
        (``microbatch_group_size_per_vp_stage``; the number of stages, if not set).
    """

    stage: int
    stages: int
    chunks: int = 1
    microbatches: int = 0
    group: int = 0

    @property
    def interleaved(self) -> bool:
        """Whether stages have several chunks."""
        return self.chunks > 1

    @property
    def total(self) -> int:
        """Computes of one direction."""
        return self.microbatches * self.chunks

    @property
    def warmup(self) -> int:
        """Forwards before the first backward, if chunks are interleaved."""
        wanted = (self.stages - self.stage - 1) * 2 + (self.chunks - 1) * self._group
        return min(wanted, self.total)

    @property
    def _group(self) -> int:
        return self.group or self.stages

    def turn(self, way: Way, number: int) -> Turn:
        """What the compute of this number is about."""
        if not self.interleaved or number >= self.total:
            return Turn(number, -1)
        microbatch, chunk = _table(self.microbatches, self.chunks, self._group)[number]
        return Turn(microbatch, chunk if way is Way.FORWARD else self.chunks - 1 - chunk)

    def leads(self, way: Way) -> bool:
        """Whether microbatches enter the pipeline at this stage."""
        return self.stage == (0 if way is Way.FORWARD else self.stages - 1)

    def ends(self, way: Way) -> bool:
        """Whether microbatches leave the pipeline at this stage."""
        return self.stage == (self.stages - 1 if way is Way.FORWARD else 0)

    def sends(self, way: Way, number: int) -> bool:
        """Whether another stage waits for what this compute makes."""
        return not (self.ends(way) and self.turn(way, number).chunk == self._last(way))

    def needs(self, way: Way, number: int) -> bool:
        """Whether this compute waits for what another stage makes."""
        first = 0 if way is Way.FORWARD else self.chunks - 1
        return not (self.leads(way) and self.turn(way, number).chunk == first)

    def receives_after(self, way: Way, number: int) -> bool:
        """Whether the stage receives something after this compute, for one of the next."""
        if number >= self.total - 1:
            return False
        if not self.leads(way):
            return True
        # The last stage is behind the first one by so many computes.
        behind = number - (self.stages - 1)
        return behind >= 0 and self.turn(way, behind).chunk != self._last(way)

    def receiver(self, way: Way, number: int) -> Turn:
        """What the receive of this number is about: the compute that waits for it."""
        if not self.interleaved:
            return Turn(number, -1)
        receivers = _receivers(self, way)
        return self.turn(way, receivers[number]) if number < len(receivers) else _UNKNOWN

    def _last(self, way: Way) -> int:
        return self.chunks - 1 if way is Way.FORWARD else 0


_UNKNOWN: Final = Turn(-1, -1)


@lru_cache(maxsize=8)
def _table(microbatches: int, chunks: int, group: int) -> tuple[Turn, ...]:
    """Forwards in order: groups of microbatches, each through one chunk after the other."""
    return tuple(
        Turn(microbatch, chunk)
        for first in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(first, min(first + group, microbatches))
    )


@lru_cache(maxsize=8)
def _receivers(plan: Plan, way: Way) -> tuple[int, ...]:
    return tuple(number for number in range(plan.total) if plan.needs(way, number))
