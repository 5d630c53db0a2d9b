"""Flight Recorder: what PyTorch dumps when a collective times out (``docs/sources.md``).

JSON or pickle, one dump per rank, or one JSON file with the dumps of all ranks by their number.
A dump does not hold its rank: that is the number in the file's name. Pickles are decoded as plain
data (`smon.trace.pickled`): nothing in them is run.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from smon.errors import TraceError
from smon.topology import MAX_SIZE
from smon.trace.dumps import Call, Progress, RankDump
from smon.trace.events import Collective, ProcessGroup
from smon.trace.formats.reading import (
    GZIP_MAGIC,
    Reading,
    inflated,
    printable,
    quoted,
    reading_from,
)
from smon.trace.pickled import plain_data
from smon.trace.words import collective_of

NAME: Final = "flight-recorder"
LOOKS_FOR: Final = (
    'a dump of PyTorch\'s Flight Recorder, JSON or pickle, with "pg_config" and "pg_status", or '
    'entries with "collective_seq_id"'
)
SELF_DESCRIBED: Final = True

_SEARCHED_BYTES: Final = 1 << 16
_MAX_BYTES: Final = 1 << 28
_MAX_RANKS: Final = MAX_SIZE
_MAX_SEQ: Final = 2**62

#: Versions whose fields are known: 2.4 is the first with ``pg_config``.
_FIRST_VERSION: Final = (2, 4)
_LAST_VERSION: Final = (2, 10)

_PICKLE: Final = re.compile(rb"\x80[\x02-\x05]")
_MARKS: Final = (b"collective_seq_id", b"pg_status")
#: Kineto's files list process groups too.
_NOT_OURS: Final = (b'"traceEvents"', b'"distributedInfo"')

_RANK_WORD: Final = re.compile(r"rank[-_.]?(\d{1,8})(?!\d)", re.IGNORECASE)
_LAST_NUMBER: Final = re.compile(r"(?<!\d)(\d{1,8})(?:\.(?:json|pkl|pickle|pt|gz|bin))*$")
_MESSAGE: Final = re.compile(r"(\d{1,8})(->|<-)(\d{1,8})")
_MAX_NAME: Final = 200
_WORLD: Final = "default_pg"


def recognises(head: bytes, path: Path) -> bool:  # noqa: ARG001  # the signature of all readers
    """Whether the file, unpacked if need be, begins like a dump."""
    text = inflated(head, _SEARCHED_BYTES)
    if _PICKLE.match(text):
        return b"pg_config" in text or any(mark in text for mark in _MARKS)
    if b"\0" in text or any(mark in text for mark in _NOT_OURS):
        return False
    empty = b'"pg_config"' in text and b'"version"' in text
    return empty or any(b'"' + mark + b'"' in text for mark in _MARKS)


def read(path: Path) -> Reading:
    """Read the dump of one rank, or those of all.

    Raises
    ------
    TraceError
        The file cannot be read, is damaged, refers to code, is of an unknown version, or does not
        say which rank it is of.
    """
    name = printable(path)
    with reading_from(path):
        data = _data(path)
    raw = _decoded(data, name)
    if not isinstance(raw, dict):
        raise TraceError(f"{name}: expected a dump, found a {type(raw).__name__}")
    dumps = raw if _is_by_rank(raw) else {_rank_of(raw, path): raw}
    return Reading(
        dumps=tuple(_dump(int(rank), dump, name) for rank, dump in dumps.items()),
    )


def _data(path: Path) -> bytes:
    with path.open("rb") as raw:
        packed = raw.peek(2)[:2] == GZIP_MAGIC
        file = gzip.GzipFile(fileobj=raw) if packed else raw
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise TraceError(
            f"{printable(path)}: more than {_MAX_BYTES >> 20} MiB: expected the dump of one rank"
        )
    return data


def _decoded(data: bytes, name: str) -> Any:  # noqa: ANN401  # whatever the file holds
    try:
        if _PICKLE.match(data):
            return plain_data(data)
        return json.loads(data.decode("utf-8", "replace"), strict=False)
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{name}: damaged or truncated: {quoted(error)}") from error


def _is_by_rank(raw: Mapping[Any, Any]) -> bool:
    """Whether the file holds several dumps, by rank."""
    return bool(raw) and all(
        str(key).isdecimal()
        and len(str(key)) <= len(str(_MAX_RANKS))
        and int(key) < _MAX_RANKS
        and isinstance(value, dict)
        for key, value in raw.items()
    )


def _rank_of(raw: Mapping[Any, Any], path: Path) -> int:
    rank = _whole(raw.get("rank"), _MAX_RANKS)
    if rank is not None:
        return rank
    match = _RANK_WORD.search(path.name) or _LAST_NUMBER.search(path.name)
    if match is None or int(match[1]) >= _MAX_RANKS:
        raise TraceError(
            f"{printable(path)}: a dump holds no rank: looked for rank and a number, or a number "
            "at the end, in the file's name"
        )
    return int(match[1])


# --- one dump -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """One usable entry."""

    call: Call
    group_id: int | None
    is_message: bool
    finished: bool


def _dump(rank: int, raw: Mapping[str, Any], name: str) -> RankDump:
    notes = _version_notes(raw.get("version"), name)
    if not isinstance(raw.get("entries", []), list | tuple):
        raise TraceError(f"{name}: damaged: expected a list of entries")
    groups = _declared(raw.get("pg_config"))
    dropped: Counter[str] = Counter()
    entries = list(_entries(raw.get("entries"), groups, dropped))
    calls = [entry for entry in entries if not entry.is_message]
    status = _status(raw.get("pg_status"), entries, list(groups))
    backends = {entry.call.name.partition(":")[0] for entry in entries if ":" in entry.call.name}
    listed = tuple(groups.values())
    return RankDump(
        rank=rank,
        world_size=_world(listed),
        groups=listed,
        progress=tuple(_progress(at, calls, status.get(at)) for at in range(len(listed))),
        calls=tuple(entry.call for entry in calls if not entry.finished),
        messages=tuple(e.call for e in entries if e.is_message and not e.finished),
        entries=len(entries),
        backend=min(backends, default=None),
        dropped=tuple(sorted(dropped.items())),
        notes=notes,
    )


def _version_notes(version: object, name: str) -> tuple[str, ...]:
    """A note on a version that is newer than this code, or missing.

    Raises
    ------
    TraceError
        The version is older than the fields that are needed.
    """
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})", str(version)[:_MAX_NAME])
    if match is None:
        return ("a dump of Flight Recorder without a version: read like 2.10",)
    found = int(match[1]), int(match[2])
    if found < _FIRST_VERSION:
        raise TraceError(
            f"{name}: expected Flight Recorder 2.4 or later, found {match[0]}: its dumps do not "
            "list the members of groups"
        )
    if found > _LAST_VERSION:
        return (f"Flight Recorder {match[0]} is newer than what was tested: read like 2.10",)
    return ()


def _declared(config: object) -> dict[str, ProcessGroup]:
    """The groups of ``pg_config``, by name."""
    groups: dict[str, ProcessGroup] = {}
    for key, value in config.items() if isinstance(config, dict) else ():
        name = _text(key)
        if name and isinstance(value, dict):
            ranks = _members(value.get("ranks"))
            groups[name] = ProcessGroup(name, _text(value.get("desc")), ranks, len(ranks))
    return groups


def _members(ranks: object) -> tuple[int, ...]:
    """Ranks as a list or as text such as ``[0, 1]``; none if any is unusable."""
    if isinstance(ranks, str):
        parts = ranks.strip("[]() ").split(",")
        ranks = [part.strip() for part in parts if part.strip()]
    if not isinstance(ranks, list | tuple):
        return ()
    found = [_whole(rank, _MAX_RANKS) for rank in ranks]
    return tuple(rank for rank in found if rank is not None) if None not in found else ()


def _world(groups: tuple[ProcessGroup, ...]) -> int:
    """Size of the group of all ranks; 0 if its members are not listed."""
    return next((group.size for group in groups if group.description == _WORLD), 0)


# --- entries ------------------------------------------------------------------------------------


def _entries(
    raw: object, groups: dict[str, ProcessGroup], dropped: Counter[str]
) -> Iterator[_Entry]:
    """Usable entries; adds groups that are used but not declared."""
    seen: set[tuple[int, int]] = set()
    for value in raw if isinstance(raw, list | tuple) else ():  # absent: no entry at all
        entry = _entry(value, groups) if isinstance(value, dict) else None
        if entry is None:
            dropped["entry of Flight Recorder without a group, a name or a number"] += 1
            continue
        record = _whole(value.get("record_id"), _MAX_SEQ)
        key = (-1 if record is None else record, entry.call.created_ns)
        if record is not None and key in seen:
            dropped["entry of Flight Recorder that is there twice"] += 1
            continue
        seen.add(key)
        yield entry


def _entry(raw: Mapping[str, Any], groups: dict[str, ProcessGroup]) -> _Entry | None:
    group, name = raw.get("process_group"), raw.get("profiling_name")
    is_message = raw.get("is_p2p") is True
    seq = _whole(raw.get("p2p_seq_id" if is_message else "collective_seq_id"), _MAX_SEQ)
    if seq is None or not isinstance(name, str) or not isinstance(group, list | tuple) or not group:
        return None
    key = _text(group[0])
    if key not in groups:
        groups[key] = ProcessGroup(key, _text(group[1]) if len(group) > 1 else "")
    call = Call(
        group=list(groups).index(key),
        seq=seq,
        kind=collective_of(name),
        name=_text(name),
        shape=_shape(raw.get("input_sizes")),
        created_ns=_whole(raw.get("time_created_ns"), _MAX_SEQ) or 0,
    )
    if is_message:
        call = _message(call, groups[key])
    return _Entry(
        call=call,
        group_id=_whole(raw.get("pg_id"), _MAX_RANKS),
        is_message=is_message,
        finished=raw.get("state") == "completed" or raw.get("retired") is True,
    )


def _message(call: Call, group: ProcessGroup) -> Call:
    """With its direction and its peer, which the name gives by places in the group."""
    match = _MESSAGE.search(call.name)
    if match is None:
        return call
    place = int(match[3])
    peer = group.ranks[place] if place < len(group.ranks) else None
    kind = Collective.SEND if match[2] == "->" else Collective.RECV
    return replace(call, kind=kind, peer=peer)


def _shape(sizes: object) -> str:
    """The first tensor's, e.g. ``4027 × 5120``."""
    first = sizes[0] if isinstance(sizes, list | tuple) and sizes else None
    if not isinstance(first, list | tuple):
        return ""
    parts = [_whole(part, _MAX_SEQ) for part in first[:8]]
    return " × ".join(map(str, parts)) if None not in parts else ""


# --- progress -----------------------------------------------------------------------------------


def _progress(group: int, calls: list[_Entry], status: Progress | None) -> Progress:
    """From the rank's entries and, where it is clear whose it is, the status of the group."""
    own = [entry for entry in calls if entry.call.group == group]
    done = [entry.call.seq for entry in own if entry.finished]
    left = [entry.call.seq for entry in own if not entry.finished]
    called = [entry.call.seq for entry in own]
    finished = max(done) if done else min(left) - 1 if left else None
    if status is not None:
        called += [] if status.called is None else [status.called]
        finished = status.finished if finished is None else finished
    return Progress(max(called, default=None), finished)


def _status(raw: object, entries: list[_Entry], names: list[str]) -> dict[int, Progress]:
    """``pg_status`` by index of the group.

    It is keyed by another number than the groups. Entries hold both; of groups without entries
    the order tells, as both count groups in the order in which they were made, if there are as
    many of one as of the other and no entry contradicts. Groups with messages are left out: they
    share the counter with collectives.
    """
    parts = raw if isinstance(raw, dict) else {}
    by_id = {
        number: _progress_of(value)
        for key, value in parts.items()
        if (number := _whole(key, _MAX_RANKS)) is not None and isinstance(value, dict)
    }
    pairs = {e.group_id: e.call.group for e in entries if e.group_id is not None}
    pairs |= _by_order(sorted(by_id), names, pairs)
    mixed = {entry.call.group for entry in entries if entry.is_message}
    return {
        group: by_id[number]
        for number, group in pairs.items()
        if number in by_id and group not in mixed
    }


def _by_order(numbers: list[int], names: list[str], known: Mapping[int, int]) -> dict[int, int]:
    """Numbers of the status to groups, by order; empty unless all that is known agrees."""
    if len(numbers) != len(names) or not all(name.isdecimal() for name in names):
        return {}
    order = sorted(range(len(names)), key=lambda at: int(names[at]))
    pairs = dict(zip(numbers, order, strict=True))
    return pairs if all(pairs.get(number) == at for number, at in known.items()) else {}


def _progress_of(raw: Mapping[str, Any]) -> Progress:
    return Progress(
        _number(raw.get("last_enqueued_collective")), _number(raw.get("last_completed_collective"))
    )


def _number(value: object) -> int | None:
    """The number of a collective; -1 stands for none yet."""
    return 0 if value in (-1, "-1") else _whole(value, _MAX_SEQ)


# --- values -------------------------------------------------------------------------------------


def _whole(value: object, limit: int) -> int | None:
    """A whole number from 0, also as text; None for anything else."""
    if isinstance(value, str):
        value = int(value) if value.isdecimal() and len(value) < len(str(limit)) + 1 else None
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < limit else None


def _text(value: object) -> str:
    """Text fit for a report; empty for anything but text and numbers."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return ""
    return printable(str(value)[:_MAX_NAME])
