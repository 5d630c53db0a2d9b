"""Rank events: what SMon's readers made of one rank's profile, in a form that is small and exact.

An agent reduces what a profiler wrote on its host to this, so that a profile of hundreds of MiB
travels as a few. ``SMONRANK 1`` | u32 length of the head | head, JSON | the columns of
`smon.trace.events.RankEvents` that the head names, one after the other, little endian; all of it
gzipped. There is nothing in it that a reader could be made to believe: columns are as long as the
file is, and every number is looked at. A column that a later version adds is unknown in earlier
files.

Flow: `smon.trace.formats` → **`packed`** → agent → server → **`read`** → `smon.trace.load`.
"""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from smon.errors import TraceError
from smon.topology import MAX_SIZE
from smon.trace.events import (
    EVENT_COLUMNS,
    Collective,
    Kind,
    Phase,
    ProcessGroup,
    RankEvents,
    StepSpan,
)
from smon.trace.formats.reading import GZIP_MAGIC, Reading, inflated, printable, reading_from
from smon.trace.schema import MAX_DURATION_NS

NAME: Final = "rank-events"
LOOKS_FOR: Final = "the events of one rank, as an agent of SMon makes them of a profile"
SELF_DESCRIBED: Final = True

_MAGIC: Final = b"SMONRANK 1\n"
_LENGTH: Final = struct.Struct("<I")

#: Of a file, unpacked: four million events.
_MAX_BYTES: Final = 1 << 28
_MAX_HEAD_BYTES: Final = 1 << 24
#: Of a number in the head: twice such a time fits into 64 bits.
_MAX_NUMBER: Final = 2**62

#: Level 1 takes a quarter of the time of the usual one, and a tenth more space.
_LEVEL: Final = 1

#: -1, unknown, or any number.
_NUMBERS: Final = ("step", "seq", "size_bytes")

#: Codes go from -1, unknown, to one below these.
_CODES: Final = {"kind": len(Kind), "collective": len(Collective), "phase": len(Phase)}


def recognises(head: bytes, path: Path) -> bool:  # noqa: ARG001  # the signature of all readers
    """Whether the file, unpacked if need be, begins like one of these."""
    return inflated(head, len(_MAGIC)).startswith(_MAGIC)


def read(path: Path) -> Reading:
    """Read the events of one rank.

    Raises
    ------
    TraceError
        The file cannot be read, or is damaged.
    """
    name = printable(path)
    with reading_from(path):
        data = _unpacked(path)
    try:
        return Reading(events=(_events(data),))
    except (ValueError, TypeError, KeyError, RecursionError, struct.error) as error:
        raise TraceError(f"{name}: damaged: expected {LOOKS_FOR}") from error


def packed(events: RankEvents, source: str) -> bytes:
    """The content of a file of these events; the same events give the same bytes.

    Parameters
    ----------
    source
        Name of the format that they come from.
    """
    head = json.dumps(_head(events, source), separators=(",", ":")).encode()
    columns = (
        np.ascontiguousarray(getattr(events, name), np.dtype(dtype).newbyteorder("<")).tobytes()
        for name, (dtype, _) in EVENT_COLUMNS.items()
    )
    whole = b"".join((_MAGIC, _LENGTH.pack(len(head)), head, *columns))
    return gzip.compress(whole, compresslevel=_LEVEL, mtime=0)


# --- writing ------------------------------------------------------------------------------------


def _head(events: RankEvents, source: str) -> dict[str, Any]:
    return {
        "source": source,
        "events": len(events),
        "columns": list(EVENT_COLUMNS),
        "rank": events.rank,
        "world_size": events.world_size,
        "host": events.host,
        "backend": events.backend,
        "on_gpu": events.on_gpu,
        "timed": events.timed,
        "steps": [[step.number, step.start_ns, step.duration_ns] for step in events.steps],
        "groups": [
            [group.name, group.description, list(group.ranks), group.size]
            for group in events.groups
        ],
        "names": list(events.names),
        "dropped": [[reason, count] for reason, count in events.dropped],
        "notes": list(events.notes),
    }


# --- reading ------------------------------------------------------------------------------------


def _unpacked(path: Path) -> bytes:
    with path.open("rb") as raw:
        file = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == GZIP_MAGIC else raw
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise TraceError(f"{printable(path)}: more than {_MAX_BYTES >> 20} MiB unpacked")
    return data


def _events(data: bytes) -> RankEvents:
    """The events of a file.

    Raises
    ------
    ValueError, TypeError, KeyError, struct.error
        It is damaged.
    """
    if not data.startswith(_MAGIC):
        raise ValueError("no magic")
    (length,) = _LENGTH.unpack_from(data, len(_MAGIC))
    begin = len(_MAGIC) + _LENGTH.size
    end = begin + length
    if length > _MAX_HEAD_BYTES or end > len(data):
        raise ValueError("no head")
    head = json.loads(data[begin:end])
    groups = tuple(_group(*each) for each in head["groups"])
    names = tuple(_text(each) for each in head["names"])
    rows = _whole(head["events"], 0, _MAX_BYTES)
    columns: dict[str, Any] = _columns(data, end, rows, head["columns"])
    _check(columns, groups=len(groups), names=len(names))
    world = _whole(head["world_size"], 0, MAX_SIZE)
    return RankEvents(
        rank=_whole(head["rank"], 0, (world or MAX_SIZE) - 1),
        world_size=world,
        **columns,
        groups=groups,
        names=names,
        steps=tuple(_step(*each) for each in head["steps"]),
        host=_optional_text(head["host"]),
        backend=_optional_text(head["backend"]),
        on_gpu=_flag(head["on_gpu"]),
        timed=_flag(head["timed"]),
        dropped=tuple(_loss(*each) for each in head["dropped"]),
        notes=tuple(_text(each) for each in head["notes"]),
    )


def _columns(data: bytes, at: int, rows: int, names: list[str]) -> dict[str, NDArray[Any]]:
    """The columns of these names; what a file lacks is unknown."""
    if not {"start_ns", "duration_ns"} <= set(names) <= set(EVENT_COLUMNS):
        raise ValueError("other columns")
    types = [np.dtype(EVENT_COLUMNS[name][0]).newbyteorder("<") for name in names]
    if len(data) - at != rows * sum(each.itemsize for each in types):
        raise ValueError("columns of another length")
    columns: dict[str, NDArray[Any]] = {
        name: np.full(rows, none, dtype) for name, (dtype, none) in EVENT_COLUMNS.items()
    }
    for name, little in zip(names, types, strict=True):
        columns[name][:] = np.frombuffer(data, little, rows, at)
        at += rows * little.itemsize
    return columns


def _check(columns: Mapping[str, NDArray[Any]], *, groups: int, names: int) -> None:
    """Look at every number.

    Raises
    ------
    ValueError
        One is out of its range, or the events are not sorted.
    """
    start, duration = columns["start_ns"], columns["duration_ns"]
    bounds = {**_CODES, "group": groups, "name": names}
    sound = (
        all(_within(columns[name], -1, bound - 1) for name, bound in bounds.items())
        and all(_within(columns[name], -1, _MAX_NUMBER) for name in _NUMBERS)
        and _within(start, -_MAX_NUMBER, _MAX_NUMBER)
        and _within(duration, 0, MAX_DURATION_NS)
        and bool((np.diff(start) >= 0).all())
    )
    if not sound:
        raise ValueError("a number is out of its range")


def _within(values: NDArray[Any], low: int, high: int) -> bool:
    return not len(values) or (int(values.min()) >= low and int(values.max()) <= high)


def _group(name: object, description: object, ranks: list[object], size: object) -> ProcessGroup:
    return ProcessGroup(
        name=_text(name),
        description=_text(description),
        ranks=tuple(_whole(rank, 0, MAX_SIZE - 1) for rank in ranks),
        size=_whole(size, 0, MAX_SIZE),
    )


def _step(number: object, start_ns: object, duration_ns: object) -> StepSpan:
    return StepSpan(
        _whole(number, -1, _MAX_NUMBER),
        _whole(start_ns, -_MAX_NUMBER, _MAX_NUMBER),
        _whole(duration_ns, 0, _MAX_NUMBER),
    )


def _loss(reason: object, events: object) -> tuple[str, int]:
    return _text(reason), _whole(events, 0, _MAX_NUMBER)


def _whole(value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError("expected a whole number in its range")
    return value


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError("expected true or false")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError("expected text")
    return value


def _optional_text(value: object) -> str | None:
    return None if value is None else _text(value)
