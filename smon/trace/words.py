"""What names in a trace mean: collectives, phases of a step, sizes of data types.

Every producer has its own spelling: NCCL kernels, arguments of `record_param_comms`, annotations
of torch, of Megatron-LM, of torch's pipelining. They are read here and nowhere else.

Flow: names → **here** → `smon.trace.formats`, `smon.trace.annotated`.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from smon.trace.events import Collective, Phase

#: NCCL's kernels and, on AMD GPUs, RCCL's (where the type may be "Generic").
NCCL_KERNEL: Final = re.compile(r"[nr]ccl(?:Dev)?Kernel_?([A-Za-z]*)")

#: By letters and digits only, in lower case.
_COLLECTIVES: Final = {
    "allreduce": Collective.ALL_REDUCE,
    "allreducecoalesced": Collective.ALL_REDUCE,
    "allgather": Collective.ALL_GATHER,
    "allgatherbase": Collective.ALL_GATHER,
    "allgatherv": Collective.ALL_GATHER,
    "allgatherintotensor": Collective.ALL_GATHER,
    "allgatherintotensorcoalesced": Collective.ALL_GATHER,
    "allgathercoalesced": Collective.ALL_GATHER,
    "reducescatter": Collective.REDUCE_SCATTER,
    "reducescatterbase": Collective.REDUCE_SCATTER,
    "reducescattertensor": Collective.REDUCE_SCATTER,
    "reducescattertensorcoalesced": Collective.REDUCE_SCATTER,
    "alltoall": Collective.ALL_TO_ALL,
    "alltoallv": Collective.ALL_TO_ALL,
    "alltoallbase": Collective.ALL_TO_ALL,
    "barrier": Collective.BARRIER,
    "broadcast": Collective.BROADCAST,
    "broadcastoop": Collective.BROADCAST,
    "reduce": Collective.REDUCE,
    "reduceoop": Collective.REDUCE,
    "gather": Collective.GATHER,
    "scatter": Collective.SCATTER,
    "send": Collective.SEND,
    "recv": Collective.RECV,
    "recvanysource": Collective.RECV,
    "sendrecv": Collective.SEND_RECV,
}

_DTYPE_BYTES: Final = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "c10::bfloat16": 2, "c10::half": 2,
    "int": 4, "long": 8, "long int": 8, "short": 2, "char": 1, "byte": 1, "bool": 1,
    "signed char": 1, "unsigned char": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "c10::float8_e4m3fn": 1, "c10::float8_e5m2": 1, "complexfloat": 8, "complexdouble": 16,
}  # fmt: skip

#: Annotations that surround a part of the step, whole or for one microbatch. A send or receive is
#: no part of it: it waits.
_PHASES: Final = (
    (Phase.DATA, re.compile(r"(?i)enumerate\(DataLoader\)|data[-_ ]?load|^next[-_ ]?batch")),
    (Phase.OPTIMIZER, re.compile(r"(?i)^Optimizer\.step|^(smon::)?optimizer(?![-_]clip)")),
    (Phase.BACKWARD, re.compile(r"(?i)^(smon::)?backward(?!.?(send|recv))|^PP:\d+[BIW]\d*$")),
    (
        Phase.FORWARD,
        re.compile(r"(?i)^(smon::)?forward(?!.?(send|recv))|^PP:\d+F\d*$|Parallel\.forward"),
    ),
)

#: What autograd calls the work of one node of the backward graph.
AUTOGRAD: Final = "autograd::engine::evaluate_function"


@lru_cache(maxsize=4096)
def collective_of(name: str) -> Collective | None:
    """The collective of a name such as ``_allgather_base``, ``nccl:all_reduce`` or ``AllReduce``.

    None if it is none that SMon knows.
    """
    plain = name.rpartition(":")[2].split(" ")[0]
    return _COLLECTIVES.get(re.sub(r"[^a-z0-9]", "", plain.lower()))


@lru_cache(maxsize=4096)
def collective_of_kernel(name: str) -> Collective | None:
    """The collective that an NCCL kernel runs; None if its name does not say."""
    match = NCCL_KERNEL.search(name)
    return None if match is None else _COLLECTIVES.get(match[1].lower())


@lru_cache(maxsize=4096)
def phase_of(name: str) -> Phase | None:
    """The phase that an annotation surrounds; None if it is none that SMon knows."""
    return next((phase for phase, pattern in _PHASES if pattern.search(name)), None)


def dtype_bytes(name: str) -> int:
    """Size of one element of a data type; 0 if it is unknown."""
    return _DTYPE_BYTES.get(name.lower(), 0)
