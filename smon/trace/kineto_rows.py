"""Events of a Kineto trace sorted into rows, one list per kind of event.

Only what later steps need is kept: of hundreds of thousands of events, most are CPU ops, flows and
names of threads.

Flow: `smon.trace.formats.chrome` → **here** → `smon.trace.kineto_columns`.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from smon.trace.events import Collective, ProcessGroup
from smon.trace.words import (
    AUTOGRAD,
    NCCL_KERNEL,
    collective_of,
    collective_of_kernel,
    dtype_bytes,
)

_STEP: Final = re.compile(r"^ProfilerStep\s*#\s*(\d{1,18})$")
_MAX_WORLD: Final = 1 << 24
_MAX_INT64: Final = 2**63 - 1

#: Host spans of a backend without kernels; of NCCL they only say what the kernel inside will do.
_HOST_BACKENDS: Final = ("gloo:", "mpi:", "ucc:")
_NCCL_SPAN: Final = ("nccl:", "rccl:", "ncclx:")

#: Start and duration in µs, number of the lane, and of the name.
Span = tuple[float, float, int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """What a communication event carries; None, 0 or -1 where it says nothing."""

    collective: Collective | None = None
    group: ProcessGroup | None = None
    size_bytes: int = -1
    seq: int = -1
    peer: int = -1


_NO_MESSAGE: Final = Message()


@dataclass(slots=True)
class Rows:
    """Rows of one file, by what they are; times in µs as in the file."""

    dropped: Counter[str] = field(default_factory=Counter)
    lanes: dict[tuple[object, object], int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    #: GPU work with its correlation id; NCCL's apart, with what their arguments say.
    kernels: list[Span] = field(default_factory=list)
    kernel_launch: list[object] = field(default_factory=list)
    transfers: list[Span] = field(default_factory=list)
    transfer_launch: list[object] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    #: Correlation id → (start, lane) of the launch.
    launches: dict[object, tuple[float, int]] = field(default_factory=dict)
    #: External id → message, of `record_param_comms`.
    recorded: dict[object, Message] = field(default_factory=dict)
    recorded_of: list[object] = field(default_factory=list)
    host_spans: list[Span] = field(default_factory=list)
    host_messages: list[Message] = field(default_factory=list)
    nccl_spans: list[Span] = field(default_factory=list)
    nccl_messages: list[Message] = field(default_factory=list)
    annotations: list[Span] = field(default_factory=list)
    gpu_annotations: list[Span] = field(default_factory=list)
    autograd: list[Span] = field(default_factory=list)
    peers: list[tuple[float, int, int]] = field(default_factory=list)
    steps: list[tuple[float, float, int]] = field(default_factory=list)

    def take(self, events: list[Any]) -> None:
        """Sort events into rows."""
        for event in events:
            if type(event) is not dict:
                self.dropped["event that is no object"] += 1
            elif event.get("ph") == "X":
                kind = event.get("cat")
                handler = _HANDLERS.get(kind) if type(kind) is str else None
                if handler is not None:
                    handler(self, event)

    def span(self, event: dict[str, Any], name: str) -> Span:
        """Times (NaN where they are none), lane and name of an event."""
        ts, dur = event.get("ts"), event.get("dur")
        key = (event.get("pid"), event.get("tid"))
        try:
            lane = self.lanes.setdefault(key, len(self.lanes))
        except TypeError:  # a list or an object instead of a number
            lane = -1
        number = self.names.setdefault(name, len(self.names))
        return (
            ts if type(ts) is float else _microseconds(ts),
            dur if type(dur) is float else _microseconds(dur),
            lane,
            number,
        )


def _microseconds(value: object) -> float:
    """A number, also one in a string, perhaps with a decimal comma; NaN for anything else."""
    if type(value) is int:
        return float(value) if abs(value) <= _MAX_INT64 else math.nan
    if not isinstance(value, str):
        return math.nan
    try:
        return float(value.replace(",", "."))
    except ValueError:
        return math.nan


def _args(event: Mapping[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if type(args) is dict else {}


def _hashable(value: object) -> object:
    return value if isinstance(value, int | str | float) else None


def _name(event: Mapping[str, Any]) -> str:
    name = event.get("name")
    return name if type(name) is str else str(name)


def _take_kernel(rows: Rows, event: dict[str, Any]) -> None:
    name, args = _name(event), _args(event)
    launch = _hashable(args.get("correlation"))
    if "ccl" in name and NCCL_KERNEL.search(name):
        span = rows.span(event, name)
        rows.transfers.append(span)
        rows.transfer_launch.append(launch)
        rows.recorded_of.append(_hashable(args.get("External id")))
        message = _message(args) if "Collective name" in args else _NO_MESSAGE
        rows.messages.append(message if message.collective else _of_kernel(name, message))
    else:
        rows.kernels.append(rows.span(event, "kernel"))
        rows.kernel_launch.append(launch)


def _of_kernel(name: str, message: Message) -> Message:
    return Message(
        collective_of_kernel(name), message.group, message.size_bytes, message.seq, message.peer
    )


def _message(args: Mapping[str, Any]) -> Message:
    """What the arguments of a kernel, or of `record_param_comms`, say."""
    elements = [number_of(args.get(key)) for key in ("In msg nelems", "Out msg nelems")]
    count = max((number for number in elements if number is not None), default=-1)
    width = dtype_bytes(str(args.get("dtype", "")))
    ends = [size_of(args.get(key)) for key in ("Dst Rank", "Src Rank")]
    peer = next((end for end in ends if end is not None), -1)
    seq = number_of(args.get("Seq"))
    return Message(
        collective=collective_of(str(args.get("Collective name", ""))),
        group=_group_of(args),
        size_bytes=count * width if count >= 0 and width and count < _MAX_INT64 // 64 else -1,
        seq=seq if seq is not None and seq >= 0 else -1,
        peer=peer,
    )


def _group_of(args: Mapping[str, Any]) -> ProcessGroup | None:
    if "Process Group Name" not in args:
        return None
    ranks = ranks_of(args.get("Process Group Ranks"))
    return ProcessGroup(
        name=str(args["Process Group Name"]),
        description=str(args.get("Process Group Description", "")),
        ranks=ranks,
        size=size_of(args.get("Group size")) or len(ranks),
    )


def _take_launch(rows: Rows, event: dict[str, Any]) -> None:
    launch = _hashable(_args(event).get("correlation"))
    if launch is not None:
        start, _, lane, _ = rows.span(event, "launch")
        rows.launches[launch] = (start, lane)


def _take_annotation(rows: Rows, event: dict[str, Any]) -> None:
    name = _name(event)
    step = _STEP.match(name)
    if step:
        span = rows.span(event, "step")
        rows.steps.append((span[0], span[1], int(step[1])))
    elif name.startswith(_HOST_BACKENDS):
        rows.host_spans.append(rows.span(event, name))
        rows.host_messages.append(_of_span(name, _args(event)))
    elif name.startswith(_NCCL_SPAN):
        rows.nccl_spans.append(rows.span(event, name))
        rows.nccl_messages.append(_of_span(name, _args(event)))
    else:
        rows.annotations.append(rows.span(event, name))


def _of_span(name: str, args: Mapping[str, Any]) -> Message:
    """Type and size of the first tensor; nothing else is told."""
    dims, types = args.get("Input Dims"), args.get("Input type")
    count = -1
    if isinstance(dims, list) and dims and isinstance(dims[0], list):
        sizes = [number_of(size) for size in dims[0]]
        if all(size is not None and size >= 0 for size in sizes):
            count = math.prod(size for size in sizes if size is not None)
    width = dtype_bytes(str(types[0])) if isinstance(types, list) and types else 0
    size_bytes = count * width if 0 <= count < _MAX_INT64 // 64 and width else -1
    return Message(collective_of(name), size_bytes=size_bytes)


def _take_gpu_annotation(rows: Rows, event: dict[str, Any]) -> None:
    name = _name(event)
    if not (name.startswith((*_NCCL_SPAN, *_HOST_BACKENDS)) or _STEP.match(name)):
        rows.gpu_annotations.append(rows.span(event, name))


def _take_cpu_op(rows: Rows, event: dict[str, Any]) -> None:
    name = event.get("name")
    # Most events of a trace end here.
    if type(name) is not str or not name.startswith(_CPU_OPS):
        return
    if name.startswith(AUTOGRAD):
        rows.autograd.append(rows.span(event, AUTOGRAD))
    elif name == "record_param_comms":
        args = _args(event)
        if "Collective name" in args:
            rows.recorded[_hashable(args.get("External id"))] = _message(args)
    elif name.startswith(("c10d::send", "c10d::recv")):
        peer, span = _peer(_args(event)), rows.span(event, name)
        if peer is not None:
            rows.peers.append((span[0], span[2], peer))


def _peer(args: Mapping[str, Any]) -> int | None:
    """Rank inside the group at the other end of a send or receive: the third input."""
    inputs = args.get("Concrete Inputs")
    return size_of(inputs[2]) if isinstance(inputs, list) and len(inputs) > 2 else None  # noqa: PLR2004


_CPU_OPS: Final = (AUTOGRAD, "record_param_comms", "c10d::send", "c10d::recv")

_Handler = Callable[[Rows, dict[str, Any]], None]

#: By category; the second spelling of each is that of old files.
_HANDLERS: Final[Mapping[str, _Handler]] = {
    "kernel": _take_kernel,
    "Kernel": _take_kernel,
    "gpu_memcpy": _take_kernel,
    "Memcpy": _take_kernel,
    "gpu_memset": _take_kernel,
    "Memset": _take_kernel,
    "cuda_runtime": _take_launch,
    "Runtime": _take_launch,
    "cuda_driver": _take_launch,
    "hip_runtime": _take_launch,
    "user_annotation": _take_annotation,
    "gpu_user_annotation": _take_gpu_annotation,
    "cpu_op": _take_cpu_op,
    "Operator": _take_cpu_op,
}


# --- numbers and lists, whatever they are written as ---------------------------------------


def ranks_of(value: object) -> tuple[int, ...]:
    """Global ranks of a list, or of a string that holds one; empty where it is cut short."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return ()
    if not isinstance(value, list):
        return ()
    ranks = [size_of(item) for item in value]
    known = [rank for rank in ranks if rank is not None]
    return tuple(sorted(set(known))) if len(known) == len(ranks) else ()


def size_of(value: object) -> int | None:
    """A whole number from 0 to a sane size; None for anything else."""
    number = number_of(value)
    return number if number is not None and 0 <= number <= _MAX_WORLD else None


def number_of(value: object) -> int | None:
    """A whole number of 64 bits, also out of a string; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = int(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) <= _MAX_INT64 else None
