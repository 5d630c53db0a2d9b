"""What the plain trainer is told to do; as JSON on the way to it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Self


class Wrapped(StrEnum):
    """How gradients of replicas come together."""

    DDP = "ddp"
    FSDP = "fsdp"


@dataclass(frozen=True, slots=True)
class PlainPlan:
    """What a run of the plain trainer does.

    Attributes
    ----------
    microbatches
        Of a step; all but the last are not synchronised.
    layers, layer_s
        Of the model; forward of one, its backward takes twice as long.
    slow_rank, forward_s, backward_s
        What this rank takes longer in each forward and backward.
    loader_rank, loader_s
        This rank waits so long for each batch.
    every_other
        Attach for blocks of so many steps, and detach for as many; 0: always attached.
    """

    wrapped: Wrapped = Wrapped.DDP
    steps: int = 30
    microbatches: int = 1
    layers: int = 4
    layer_s: float = 0.011
    slow_rank: int = -1
    forward_s: float = 0.0
    backward_s: float = 0.0
    loader_rank: int = -1
    loader_s: float = 0.2
    every_other: int = 0

    def document(self) -> dict[str, object]:
        """As JSON carries it."""
        return asdict(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The plan of a document."""
        return cls(**json.loads(text))
