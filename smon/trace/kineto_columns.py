"""Rows of a Kineto trace as columns: steps by launch, phases, messages of collectives.

Flow: `smon.trace.kineto_rows` → **here** → `smon.trace.formats.kineto`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from smon.trace.events import Collective, Kind, Phase, ProcessGroup, StepSpan
from smon.trace.kineto_rows import Message, Rows, Span
from smon.trace.schema import INVALID_NS
from smon.trace.spans import Times, enclosing
from smon.trace.words import phase_of

#: Unix times of this century are above 10¹⁸ ns; half of that is no unix time.
_UNIX_NS: Final = 10**18 // 2


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose trace it is, and what the file says beside its events."""

    rank: int
    world_size: int
    backend: str | None
    host: str | None
    groups: tuple[ProcessGroup, ...]
    notes: tuple[str, ...]


def times_of(spans: Sequence[Span], base_ns: int) -> Times:
    """Rows of a file whose times count from `base_ns`."""
    count = len(spans)
    start = np.fromiter((span[0] for span in spans), np.float64, count)
    duration = np.fromiter((span[1] for span in spans), np.float64, count)
    return Times(
        _nanoseconds(start, base_ns),
        _nanoseconds(duration, 0),
        np.fromiter((span[2] for span in spans), np.int64, count),
        np.fromiter((span[3] for span in spans), np.int64, count),
    )


def _nanoseconds(us: NDArray[np.float64], base_ns: int) -> NDArray[np.int64]:
    """µs as ns after a base; whole and broken µs apart, since unix time in ns exceeds float64."""
    with np.errstate(invalid="ignore"):
        bad = ~(np.abs(us) < (2.0**52 if base_ns else 2.0**53))
    whole = np.floor(np.where(bad, 0.0, us))
    part = np.rint((np.where(bad, 0.0, us) - whole) * 1000.0)
    ns = whole.astype(np.int64) * 1000 + part.astype(np.int64) + base_ns
    ns[bad] = INVALID_NS
    return ns


class Builder:
    """Puts the rows of a file together."""

    def __init__(
        self, rows: Rows, identity: Identity, base: int, steps: tuple[StepSpan, ...]
    ) -> None:
        self.rows = rows
        self.identity = identity
        self.base = base
        self.steps = steps
        self.groups = dict.fromkeys(identity.groups)
        self._numbers = {group: number for number, group in enumerate(identity.groups)}
        self._phases = self._phase_spans()
        self._unlaunched = 0

    def columns(self) -> dict[str, NDArray[Any]]:
        """All events, in any order."""
        parts = [self._kernels(), self._transfers(), self._host_transfers(), self._annotations()]
        if not self.rows.kernels:
            parts.append(self._host_phases())
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: np.concatenate([_column(part, name) for part in parts]) for name in names}

    def notes(self) -> list[str]:
        """What this file cannot tell."""
        rank, found = self.identity.rank, []
        if self._unlaunched:
            found.append(
                f"rank {rank}: {self._unlaunched:,} GPU events have no launch in the trace: they "
                "were given to the step that ran at their own time"
            )
        if self.base == 0 and self.identity.world_size > 1 and not self._looks_absolute():
            found.append(
                f"rank {rank}: times count from an unknown origin: only what is measured inside "
                "this rank is used"
            )
        return found

    def _looks_absolute(self) -> bool:
        """Unix times of this century are above 10¹⁸ ns, or this is no unix time."""
        return self.steps[0].start_ns > 10**18 // 2

    def _all(self, spans: Sequence[Span]) -> Times:
        return times_of(spans, self.base)

    # --- GPU

    def _kernels(self) -> dict[str, NDArray[Any]]:
        times = self._all(self.rows.kernels)
        launch, lane = self._launches(self.rows.kernel_launch, times)
        return {
            **_plain(times, Kind.COMPUTE),
            "step": self._step_of(launch),
            "phase": self._phase_of(launch, lane),
            "launch_ns": launch,
        }

    def _transfers(self) -> dict[str, NDArray[Any]]:
        rows, times = self.rows, self._all(self.rows.transfers)
        launch, lane = self._launches(rows.transfer_launch, times)
        spans = self._all(rows.nccl_spans)
        around = enclosing(launch, lane, spans)
        messages = [
            self._complete(message, recorded, int(span))
            for message, recorded, span in zip(rows.messages, rows.recorded_of, around, strict=True)
        ]
        return {
            **_plain(times, Kind.COLLECTIVE),
            **self._message_columns(messages),
            "step": self._step_of(launch),
            "phase": self._phase_of(launch, lane),
            "launch_ns": launch,
        }

    def _complete(self, message: Message, recorded: object, span: int) -> Message:
        """A kernel's message, filled from the call that launched it."""
        if message.group is None and recorded in self.rows.recorded:
            return self.rows.recorded[recorded]
        vague = message.collective in (None, Collective.SEND_RECV)
        if span < 0 or not (vague or message.size_bytes < 0):
            return message
        call = self.rows.nccl_messages[span]
        return Message(
            call.collective or message.collective,
            message.group,
            message.size_bytes if message.size_bytes >= 0 else call.size_bytes,
            message.seq,
            message.peer,
        )

    def _launches(
        self, ids: Sequence[object], times: Times
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """When, and on which thread, each event was launched; its own start where unknown."""
        nowhere = (math.nan, -1)
        found = [self.rows.launches.get(number, nowhere) for number in ids]
        start = _nanoseconds(np.array([ts for ts, _ in found], np.float64), self.base)
        lane = np.array([number for _, number in found], np.int64)
        unknown = start == INVALID_NS
        self._unlaunched += int(np.count_nonzero(unknown))
        return np.where(unknown, times.start, start), lane

    # --- host

    def _host_transfers(self) -> dict[str, NDArray[Any]]:
        """Collectives of a backend that works on the host: their spans are the transfers."""
        spans, messages = self.rows.host_spans, self.rows.host_messages
        times = self._all(spans)
        return {
            **_plain(times, Kind.COLLECTIVE),
            **self._message_columns(self._with_peers(times, messages)),
            "step": self._step_of(times.start),
        }

    def _with_peers(self, times: Times, messages: Sequence[Message]) -> list[Message]:
        """Sends and receives with the rank inside the group that the call before them names."""
        calls = sorted(self.rows.peers)
        starts = _nanoseconds(np.array([call[0] for call in calls], np.float64), self.base)
        before = np.searchsorted(starts, times.start, side="right") - 1
        done = []
        for message, call in zip(messages, before.tolist(), strict=True):
            p2p = message.collective in (Collective.SEND, Collective.RECV)
            peer = calls[call][2] if p2p and call >= 0 else -1
            done.append(Message(message.collective, size_bytes=message.size_bytes, peer=peer))
        return done

    def _host_phases(self) -> dict[str, NDArray[Any]]:
        """Compute of a trace without kernels: the phases that annotations and autograd show."""
        spans = [span for _, of_phase in self._phases for span in of_phase]
        phase = [int(number) for number, of_phase in self._phases for _ in of_phase]
        times = self._all(spans)
        return {
            **_plain(times, Kind.COMPUTE),
            "step": self._step_of(times.start),
            "phase": np.array(phase, np.int8),
        }

    def _annotations(self) -> dict[str, NDArray[Any]]:
        times = self._all([*self.rows.annotations, *self.rows.gpu_annotations])
        return {**_plain(times, Kind.ANNOTATION), "step": self._step_of(times.start)}

    def _phase_spans(self) -> list[tuple[Phase, list[Span]]]:
        names = list(self.rows.names)
        spans: dict[Phase, list[Span]] = {phase: [] for phase in Phase}
        for span in self.rows.annotations:
            phase = phase_of(names[span[3]])
            if phase is not None:
                spans[phase].append(span)
        spans[Phase.BACKWARD] += self.rows.autograd
        return list(spans.items())

    # --- columns

    def _step_of(self, when: NDArray[np.int64]) -> NDArray[np.int64]:
        starts = np.array([step.start_ns for step in self.steps], np.int64)
        ends = np.array([step.end_ns for step in self.steps], np.int64)
        numbers = np.array([step.number for step in self.steps], np.int64)
        index = np.searchsorted(starts, when, side="right") - 1
        inside = (index >= 0) & (when <= ends[np.maximum(index, 0)])
        return np.where(inside, numbers[np.maximum(index, 0)], -1)

    def _phase_of(self, launch: NDArray[np.int64], lane: NDArray[np.int64]) -> NDArray[np.int8]:
        phase = np.full(len(launch), -1, np.int8)
        for number, spans in self._phases:
            inside = enclosing(launch, lane, self._all(spans)) >= 0
            phase[inside & (phase < 0)] = number
        return phase

    def _message_columns(self, messages: Sequence[Message]) -> dict[str, NDArray[Any]]:
        types = [-1 if each.collective is None else int(each.collective) for each in messages]
        p2p = np.isin(types, [Collective.SEND, Collective.RECV, Collective.SEND_RECV])
        return {
            "kind": np.where(p2p, Kind.P2P, Kind.COLLECTIVE).astype(np.int8),
            "collective": np.array(types, np.int8),
            "group": np.array([self._group_number(each.group) for each in messages], np.int32),
            "seq": np.array([each.seq for each in messages], np.int64),
            "size_bytes": np.array([each.size_bytes for each in messages], np.int64),
            "peer": np.array([each.peer for each in messages], np.int32),
        }

    def _group_number(self, group: ProcessGroup | None) -> int:
        """Index of a group; the listed one of the same name where the kernel has no members."""
        if group is None:
            return -1
        if group not in self._numbers:
            same = [
                known
                for known in self.groups
                if known.name == group.name and group.ranks in ((), known.ranks)
            ]
            if same:
                self._numbers[group] = self._numbers[same[0]]
            else:
                self._numbers[group] = len(self.groups)
                self.groups[group] = None
        return self._numbers[group]


def _plain(times: Times, kind: Kind) -> dict[str, NDArray[Any]]:
    return {
        "start_ns": times.start,
        "duration_ns": times.duration,
        "lane": times.lane.astype(np.int32),
        "kind": np.full(len(times), kind, np.int8),
        "name": times.name.astype(np.int32),
    }


def _column(part: Mapping[str, NDArray[Any]], name: str) -> NDArray[Any]:
    return part[name] if name in part else np.full(len(part["start_ns"]), -1, np.int64)
