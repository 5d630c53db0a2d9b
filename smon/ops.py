"""Operation types: the closed set of what one trace row can be (``docs/method.md`` section 1).

Every later part (graph, simulation, attribution, report) refers to an op type by this enum and
to its printed name by `OpType.label`; nothing splits or joins strings.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class OpType(IntEnum):
    """What an op does. The integer is the code inside tables and graphs, never on the wire."""

    FORWARD_COMPUTE = 0
    BACKWARD_COMPUTE = 1
    WEIGHT_GRAD_COMPUTE = 2
    OPTIMIZER = 3
    GC = 4
    FORWARD_SEND = 5
    FORWARD_RECV = 6
    BACKWARD_SEND = 7
    BACKWARD_RECV = 8
    PARAMS_ALL_GATHER = 9
    GRADS_REDUCE_SCATTER = 10
    SEPARATE_GRADS_ALL_REDUCE = 11
    LAYERNORM_GRADS_ALL_REDUCE = 12
    EMBEDDING_GRADS_ALL_REDUCE = 13
    OPTIMIZER_CLIP_MAIN_GRAD = 14

    @property
    def label(self) -> str:
        """The name in traces and reports, e.g. ``forward-compute``."""
        return self.name.lower().replace("_", "-")


OP_TYPES: Final = tuple(OpType)

#: Names by code.
LABELS: Final = tuple(op.label for op in OP_TYPES)

BY_LABEL: Final = {op.label: op for op in OpType}

#: Ops of the compute stream of a stage. ``weight-grad-compute`` is the weight-gradient half of a
#: backward that zero-bubble schedules run separately (torch pipelining: ``W``).
STREAM_COMPUTE: Final = frozenset(
    {OpType.FORWARD_COMPUTE, OpType.BACKWARD_COMPUTE, OpType.WEIGHT_GRAD_COMPUTE}
)

#: Compute types take the mean as their ideal; all others the median (``docs/method.md`` section 4).
COMPUTE: Final = STREAM_COMPUTE | {OpType.OPTIMIZER, OpType.GC}

FORWARD_P2P: Final = frozenset({OpType.FORWARD_SEND, OpType.FORWARD_RECV})
BACKWARD_P2P: Final = frozenset({OpType.BACKWARD_SEND, OpType.BACKWARD_RECV})
P2P: Final = FORWARD_P2P | BACKWARD_P2P

#: Collectives over the data-parallel group of one stage.
DP_COLLECTIVES: Final = frozenset(
    {
        OpType.PARAMS_ALL_GATHER,
        OpType.GRADS_REDUCE_SCATTER,
        OpType.SEPARATE_GRADS_ALL_REDUCE,
    }
)

#: Synchronised over every DP rank: the DP collectives of a stage, and the gradient clip of the job.
DP_SYNCED: Final = DP_COLLECTIVES | {OpType.OPTIMIZER_CLIP_MAIN_GRAD}

#: Ops that happen once per microbatch and model chunk; all other types a fixed number of times.
PER_MICROBATCH: Final = STREAM_COMPUTE | P2P

#: Local ops: no peer takes part, the recorded duration is the work.
LOCAL: Final = COMPUTE | {OpType.LAYERNORM_GRADS_ALL_REDUCE}


def metric_key(op: OpType) -> str:
    """The key of an op type in ``by_optype``: send and receive of one direction count as one.

    Source: the published analyser reports ``forward-pp-comm`` and ``backward-pp-comm``.
    """
    if op in FORWARD_P2P:
        return "forward-pp-comm"
    if op in BACKWARD_P2P:
        return "backward-pp-comm"
    return op.label
