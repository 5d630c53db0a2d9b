"""What a timeline consists of: two runs, streams of each stage, and the workers that are chosen.

Flow: `smon.ops` → **here** → `smon.timeline.spans`, `smon.timeline.events`, `smon.timeline.marks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from smon.ops import OpType


class Stream(IntEnum):
    """Threads of a stage, from top to bottom."""

    COMPUTE = 0
    FORWARD_RECV = 1
    FORWARD_SEND = 2
    BACKWARD_RECV = 3
    BACKWARD_SEND = 4
    DP_COLLECTIVES = 5
    END_OF_STEP = 6

    @property
    def label(self) -> str:
        """The name on the thread."""
        return _LABEL.get(self, self.name.lower().replace("_", "-"))


_LABEL: Final = {Stream.DP_COLLECTIVES: "DP collectives", Stream.END_OF_STEP: "end of step"}

#: Every stream is one chain of the dependency graph (``docs/method.md`` section 2); all other types
#: belong to the chain at the end of the step.
STREAM_OF: Final = {
    OpType.FORWARD_COMPUTE: Stream.COMPUTE,
    OpType.BACKWARD_COMPUTE: Stream.COMPUTE,
    OpType.WEIGHT_GRAD_COMPUTE: Stream.COMPUTE,
    OpType.FORWARD_RECV: Stream.FORWARD_RECV,
    OpType.FORWARD_SEND: Stream.FORWARD_SEND,
    OpType.BACKWARD_RECV: Stream.BACKWARD_RECV,
    OpType.BACKWARD_SEND: Stream.BACKWARD_SEND,
    OpType.PARAMS_ALL_GATHER: Stream.DP_COLLECTIVES,
    OpType.GRADS_REDUCE_SCATTER: Stream.DP_COLLECTIVES,
}


class Kind(IntEnum):
    """The two runs: as it was, and as it could have been."""

    ACTUAL = 0
    IDEAL = 1

    @property
    def label(self) -> str:
        """The name on the process."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Choice:
    """Which part is drawn; `dp` and `stage` empty: all of them."""

    kinds: frozenset[Kind] = frozenset(Kind)
    dp: frozenset[int] = frozenset()
    stage: frozenset[int] = frozenset()

    def has_dp(self, dp: int) -> bool:
        """Whether this DP rank is drawn."""
        return not self.dp or dp in self.dp

    def share(self, dp_ranks: int, stages: int) -> float:
        """Which part of all ops is drawn, about; 1 if everything is, in both runs."""
        places = 1.0
        for chosen, size in ((self.dp, dp_ranks), (self.stage, stages)):
            if chosen:
                places *= sum(one < size for one in chosen) / size
        return places * len(self.kinds) / len(Kind)
