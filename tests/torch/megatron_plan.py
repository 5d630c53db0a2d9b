"""What the trainer with megatron-core is told to do; as JSON on the way to it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class MegatronPlan:
    """What a run does.

    Attributes
    ----------
    chunks
        Model chunks of each stage.
    group
        Microbatches that go through one chunk before the next has its turn; 0: as many as stages.
    overlap
        Of transfers and computes: empty, ``steady`` or ``everywhere``.
    forward_s
        Forwards of one microbatch in all chunks of a stage; their backwards take twice as long.
    first
        Number of the first step.
    slow_rank, slow_ratio
        This rank works so much longer on each compute.
    loader_rank, loader_s
        This rank waits so long for each microbatch.
    log_level
        Of Megatron-LM's timers.
    by_itself
        Whether the attached timers make the recorder, once the layout is known.
    """

    steps: int = 20
    microbatches: int = 4
    dp: int = 2
    pp: int = 2
    chunks: int = 1
    group: int = 0
    overlap: str = ""
    forward_s: float = 0.02
    first: int = 0
    slow_rank: int = -1
    slow_ratio: float = 0.2
    loader_rank: int = -1
    loader_s: float = 0.02
    log_level: int = 0
    by_itself: bool = True

    def document(self) -> dict[str, object]:
        """As JSON carries it."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan of a document."""
        return cls(**json.loads(text))
