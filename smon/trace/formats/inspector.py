"""NCCL Inspector: JSON records of NCCL's own profiler plug-in (``docs/sources.md``).

Version 4.0 repeats header and metadata in every record, 4.3 writes them once. Only verbose records
have a start time. The rank of a record is that inside its communicator; the global one is taken
from the largest communicator of the file. Some NCCL versions write values without quotes.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from smon.errors import TraceError
from smon.trace.events import (
    Collective,
    Kind,
    ProcessGroup,
    RankEvents,
    event_columns,
)
from smon.trace.formats.reading import (
    GZIP_MAGIC,
    Reading,
    inflated,
    printable,
    reading_from,
)
from smon.trace.periods import period_of
from smon.trace.words import collective_of

NAME: Final = "nccl-inspector"
LOOKS_FOR: Final = 'JSON records of NCCL Inspector with "coll_perf" and "header"'
SELF_DESCRIBED: Final = True

_SEARCHED_BYTES: Final = 1 << 16
_MAX_BYTES: Final = 1 << 28
_MAX_FAILURES: Final = 1000
_MAX_RANKS: Final = 1 << 24
_MAX_US: Final = 2**63 // 2000
#: Numbers that are so much sparser than the records are damage.
_MAX_GAPS: Final = 8

#: A value without quotes, e.g. ``"datatype": ncclFloat32``.
_BARE: Final = re.compile(r'(":\s*)(?!true\b|false\b|null\b)([A-Za-z_][A-Za-z0-9_]*)(?=\s*[,}\]])')

#: A note that does not hold for who knows the global rank from elsewhere.
LOCAL_RANKS: Final = (
    "global ranks are those of the largest communicator: NCCL Inspector records ranks inside "
    "communicators only"
)

_NOT_JSON: Final = "record that is not JSON, or is cut off"


def recognises(head: bytes, path: Path) -> bool:  # noqa: ARG001  # the signature of all readers
    """Whether the file, unpacked if need be, begins with records of Inspector."""
    text = inflated(head, _SEARCHED_BYTES)
    marks = (b'"inspector_output_format_version"', b'"coll_perf"', b'"p2p_perf"')
    return b"\0" not in text and any(mark in text for mark in marks)


def read(path: Path) -> Reading:
    """Read what one process wrote.

    Raises
    ------
    TraceError
        The file cannot be read, or has no usable record of a collective.
    """
    dropped: Counter[str] = Counter()
    with reading_from(path):
        text = _text(path)
    records = list(_records(text, dropped))
    if not records:
        found = ", ".join(f"{count} × {reason}" for reason, count in sorted(dropped.items()))
        raise TraceError(
            f"{printable(path)}: no collective: looked for {LOOKS_FOR}; found {found or 'none'}"
        )
    return Reading(events=(_rank(records, dropped),))


def _text(path: Path) -> str:
    with path.open("rb") as raw:
        packed = raw.peek(2)[:2] == GZIP_MAGIC
        file = gzip.GzipFile(fileobj=raw) if packed else raw
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise TraceError(
            f"{printable(path)}: more than {_MAX_BYTES >> 20} MiB: rotate the logs of Inspector"
        )
    return data.decode("utf-8", "replace")


# --- text to records ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Record:
    """One collective of one process."""

    group: ProcessGroup
    local_rank: int
    host: str | None
    collective: Collective | None
    seq: int
    size_bytes: int
    start_us: int | None
    duration_us: float
    written_us: int


def _records(text: str, dropped: Counter[str]) -> Iterator[_Record]:
    """Usable records; header and metadata hold until the next ones."""
    header: Mapping[str, Any] = {}
    metadata: Mapping[str, Any] = {}
    for value in _objects(text, dropped):
        header = value["header"] if isinstance(value.get("header"), dict) else header
        metadata = value["metadata"] if isinstance(value.get("metadata"), dict) else metadata
        perf = value.get("coll_perf")
        if isinstance(perf, dict):
            record = _record(header, metadata, perf)
            if record is None:
                dropped["record without communicator, rank, number or time"] += 1
            else:
                yield record
        elif isinstance(value.get("p2p_perf"), dict):
            dropped["send or receive: its number differs at the two ends"] += 1


def _objects(text: str, dropped: Counter[str]) -> Iterator[dict[str, Any]]:
    """JSON objects, whatever stands between them."""
    decoder = json.JSONDecoder(strict=False)
    text = _BARE.sub(r'\1"\2"', text)
    failures, at = 0, text.find("{")
    while at >= 0 and failures < _MAX_FAILURES:
        try:
            value, end = decoder.raw_decode(text, at)
            at = text.find("{", end)
            if isinstance(value, dict):
                yield value
        except (ValueError, RecursionError):
            dropped[_NOT_JSON] += 1
            failures += 1
            line = text.find("\n", at)
            at = -1 if line < 0 else text.find("{", line)
    if at >= 0:
        dropped[f"rest of a file after {_MAX_FAILURES} records that are not JSON"] += 1


def _record(
    header: Mapping[str, Any], metadata: Mapping[str, Any], perf: Mapping[str, Any]
) -> _Record | None:
    rank, size = _whole(header.get("rank"), _MAX_RANKS), _whole(header.get("n_ranks"), _MAX_RANKS)
    seq = _whole(perf.get("coll_sn"), _MAX_US)
    duration = perf.get("coll_exec_time_us")
    name = header.get("id")
    usable = isinstance(duration, int | float) and 0 <= duration < _MAX_US
    if rank is None or not size or seq is None or not usable or not isinstance(name, str | int):
        return None
    host = metadata.get("hostname")
    description = header.get("comm_name")
    return _Record(
        group=ProcessGroup(
            str(name), description if isinstance(description, str) else "", (), size
        ),
        local_rank=rank,
        host=printable(host) if isinstance(host, str) else None,
        collective=collective_of(str(perf.get("coll", ""))),
        seq=seq,
        size_bytes=_whole(perf.get("coll_msg_size_bytes"), _MAX_US) or -1,
        start_us=_start(perf),
        duration_us=float(duration) if isinstance(duration, int | float) else 0.0,
        written_us=_whole(metadata.get("dump_timestamp_us"), _MAX_US) or 0,
    )


def _start(perf: Mapping[str, Any]) -> int | None:
    """When the first channel's kernel started; else when the host began; None without traces."""
    trace = perf.get("event_trace_ts")
    if not isinstance(trace, dict):
        return None
    channels = trace.get("kernel_events")
    starts = [
        _whole(channel.get("kernel_start_ts"), _MAX_US)
        for channel in (channels if isinstance(channels, list) else [])
        if isinstance(channel, dict)
    ]
    known = [start for start in starts if start]
    return min(known) if known else _whole(trace.get("coll_start_ts"), _MAX_US)


def _whole(value: object, limit: int) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if 0 <= value < limit else None


# --- records to events --------------------------------------------------------------------------


def _rank(records: list[_Record], dropped: Counter[str]) -> RankEvents:
    largest = max(records, key=lambda record: record.group.size)
    groups = tuple(dict.fromkeys(record.group for record in records))
    timed = all(record.start_us for record in records)
    # Without start times, records are in the order in which they were written.
    starts = [
        (record.start_us or 0) if timed else record.written_us + at
        for at, record in enumerate(records)
    ]
    steps, note = _steps(records, largest.group)
    columns: dict[str, Any] = event_columns(
        {
            "start_ns": np.array([start * 1000 for start in starts], np.int64),
            "duration_ns": np.array(
                [round(record.duration_us * 1000) for record in records], np.int64
            ),
            "step": steps,
            "lane": np.array([groups.index(record.group) for record in records]),
            "kind": np.full(len(records), Kind.COLLECTIVE),
            "collective": np.array(
                [-1 if record.collective is None else record.collective for record in records]
            ),
            "group": np.array([groups.index(record.group) for record in records]),
            "seq": np.array([record.seq for record in records], np.int64),
            "size_bytes": np.array([record.size_bytes for record in records], np.int64),
        },
        dropped,
    )
    return RankEvents(
        rank=largest.local_rank,
        world_size=largest.group.size,
        **columns,
        groups=groups,
        host=next((record.host for record in records if record.host), None),
        backend="nccl",
        timed=timed,
        dropped=tuple(sorted(dropped.items())),
        notes=(
            LOCAL_RANKS,
            "NCCL Inspector leaves out collectives below 8 KiB, and records that were overwritten "
            "before they were dumped, without a word",
            note,
        ),
    )


def _codes(records: list[_Record]) -> NDArray[np.int64]:
    """One number per kind and payload, in order of the sequence numbers; -1 where one is lost."""
    number: dict[tuple[object, int], int] = {}
    kinds = {
        record.seq: number.setdefault((record.collective, record.size_bytes), len(number))
        for record in records
    }
    first, last = min(kinds), max(kinds)
    if last - first > _MAX_GAPS * len(kinds):
        return np.empty(0, np.int64)
    return np.array([kinds.get(seq, -1) for seq in range(first, last + 1)], np.int64)


def _steps(records: list[_Record], group: ProcessGroup) -> tuple[NDArray[np.int64], str]:
    """Step of each record, and how it was found out.

    The collectives of the largest communicator repeat from step to step; their numbers are the
    same on all its members, so all of them find the same steps. Records of other communicators
    belong to the step of the one before them.
    """
    seqs = np.array([record.seq for record in records], np.int64)
    mine = np.array([record.group == group for record in records])
    period = period_of(_codes([record for record in records if record.group == group]))
    if period is None:
        return np.zeros(len(records), np.int64), (
            "NCCL Inspector has no steps, and the collectives of the largest communicator do not "
            "repeat: the whole file counts as one step"
        )
    last = np.maximum.accumulate(np.where(mine, np.arange(len(records)), -1))
    steps = np.where(last >= 0, seqs[np.maximum(last, 0)] // period, -1)
    return steps, (
        f"NCCL Inspector has no steps: every {period} collectives of the largest communicator, "
        "after which they repeat, count as one; where in a step it begins is unknown"
    )
