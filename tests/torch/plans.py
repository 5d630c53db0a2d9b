"""What trainers are told to do; as JSON on the way to them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Self

#: Holds the plan of a run for its trainers.
PLAN = "SMON_TEST_PLAN"

#: Where a trainer leaves what it has measured itself, as JSON.
RESULT = "SMON_TEST_RESULT"


class Batches(StrEnum):
    """How long the microbatches are."""

    EVEN = "even"
    PACKED = "packed"
    BALANCED = "balanced"


class Collect(StrEnum):
    """When garbage is collected."""

    NEVER = "never"
    ALONE = "alone"
    TOGETHER = "together"


#: Schedules whose second stages go back from the last rank to the first.
_V_SHAPED = frozenset({"ScheduleZBVZeroBubble", "ScheduleDualPipeV"})


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """What a run of the pipeline trainer does.

    Attributes
    ----------
    schedule
        Name of its class in torch.
    layers
        Of each stage of the model, dealt to the `pp` pipeline ranks.
    layer_s
        Forward of one layer; its backward takes twice as long.
    slow_rank, slow_ratio, slow_from
        This rank works so much longer on each compute, from this step on.
    loader_rank, loader_s
        This rank waits so long for its data in each step.
    order
        In which balanced microbatches are run.
    collect_every
        Steps between two collections of a rank.
    heap
        Objects that a collection looks at.
    every_other
        Record every other step only.
    """

    steps: int = 30
    microbatches: int = 4
    dp: int = 2
    pp: int = 2
    schedule: str = "Schedule1F1B"
    layers: tuple[int, ...] = (4, 4)
    layer_s: float = 0.005
    slow_rank: int = -1
    slow_ratio: float = 0.2
    slow_from: int = 0
    loader_rank: int = -1
    loader_s: float = 0.06
    batches: Batches = Batches.EVEN
    order: str = ""
    collect: Collect = Collect.NEVER
    collect_every: int = 6
    heap: int = 150_000
    every_other: bool = False

    def pipeline_rank(self, stage: int) -> int:
        """Who holds a stage of the model: round robin, or there and back again."""
        turn, place = divmod(stage, self.pp)
        return self.pp - 1 - place if turn % 2 and self.schedule in _V_SHAPED else place

    def document(self) -> dict[str, object]:
        """As JSON carries it."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan of a document."""
        return cls(**json.loads(text))
