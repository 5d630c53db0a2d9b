"""What agents say in hello and heartbeat, read strictly: every field has its type and bounds.

Flow: body → **here** → `smon.api.agents`. A malformed document as a whole is refused; a stream of a
hello that is wrong is answered for itself, so that it does not hold up its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from smon.errors import TopologyError, WireError
from smon.store.models import Mode, TimeBase
from smon.store.streams import StreamRequest
from smon.topology import Layout
from smon.wire import PROTOCOL
from smon.wire.parts import MAX_RANKS
from smon.wire.problems import Problem

MAX_NAME: Final = 200
MAX_KEY: Final = 256
MAX_NOTES: Final = 100
MAX_NOTE: Final = 1000
MAX_STREAMS: Final = 4096
MAX_REASONS: Final = 64

_MAX_INT: Final = 2**63 - 1
_MAX_INT32: Final = 2**31 - 1
_MAX_WINDOW_STEPS: Final = 1_000_000

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Hello:
    """A hello: the agent's host, and each stream with its key, or why it is refused."""

    host: str
    streams: list[tuple[str, StreamRequest | WireError]]


@dataclass(frozen=True, slots=True)
class StreamBeat:
    """What a heartbeat says of one stream.

    Attributes
    ----------
    document
        What is kept of it, with what the agent says of itself.
    dropped
        Events by reason.
    """

    stream_id: str
    spool_bytes: int
    dropped: dict[str, int]
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat; `clock` is (offset, error), ns."""

    host: str
    streams: list[StreamBeat]
    clock: tuple[int, int] | None


def read_hello(raw: bytes) -> Hello:
    """The hello of a body.

    Raises
    ------
    WireError
        It is malformed, or of another protocol.
    """
    parsed = _parsed(raw)
    if parsed.get("protocol") != PROTOCOL:
        raise _invalid(f"expected protocol {PROTOCOL}: agent and server are of different versions")
    agent = _agent(parsed)
    read: list[tuple[str, StreamRequest | WireError]] = []
    for stream in _objects(parsed, "streams", MAX_STREAMS):
        key = _text(stream, "key", MAX_KEY)
        try:
            read.append((key, _stream(stream, key)))
        except WireError as error:
            read.append((key, error))
    return Hello(str(agent["host"]), read)


def _stream(stream: Object, key: str) -> StreamRequest:
    layout = _layout(_object(stream, "layout"))
    mode, time_base = stream.get("mode"), stream.get("time")
    if mode not in list(Mode) or time_base not in list(TimeBase):
        raise _invalid("expected mode live or recorded, and time unix or step")
    window_steps = stream.get("window_steps")
    return StreamRequest(
        key=key,
        job=_text(stream, "job", MAX_NAME),
        attempt=_whole(stream, "attempt", 0, _MAX_INT32),
        layout=layout,
        mode=Mode(mode),
        time_base=TimeBase(time_base),
        window_steps=None
        if window_steps is None
        else _whole(stream, "window_steps", 0, _MAX_WINDOW_STEPS),
        host=_text(stream, "host", MAX_NAME),
        source=_text(stream, "source", MAX_NAME),
        ranks=_ranks(stream, layout),
        epoch=_whole(stream, "epoch", 0, _MAX_INT32),
        notes=_notes(stream),
    )


def _layout(sizes: Object) -> Layout:
    unknown = set(sizes) - {"dp", "pp", "tp", "cp", "ep", "vpp"}
    if unknown or not {"dp", "pp"} <= set(sizes):
        raise _invalid("expected a layout of dp, pp and, if need be, tp, cp, ep, vpp")
    try:
        layout = Layout(**sizes)
    except TopologyError as error:
        raise _invalid("expected the sizes of a layout to be whole numbers from 1") from error
    if layout.world_size > MAX_RANKS:
        # Workers keep arrays of all workers of a job.
        raise _invalid(f"expected at most {MAX_RANKS} ranks, found {layout.world_size}")
    return layout


def _ranks(stream: Object, layout: Layout) -> tuple[int, ...]:
    ranks = stream.get("ranks", [])
    if not isinstance(ranks, list) or set(map(type, ranks)) - {int}:
        raise _invalid("expected ranks to be a list of whole numbers")
    if ranks and not (min(ranks) >= 0 and max(ranks) < layout.world_size):
        raise _invalid(f"expected ranks below {layout.world_size}, the world size of {layout}")
    if len(set(ranks)) != len(ranks):
        raise _invalid("expected every rank once")
    return tuple(sorted(ranks))


def _notes(stream: Object) -> tuple[str, ...]:
    notes = stream.get("notes", [])
    if not isinstance(notes, list) or len(notes) > MAX_NOTES:
        raise _invalid(f"expected at most {MAX_NOTES} notes")
    if not all(isinstance(note, str) and len(note) <= MAX_NOTE for note in notes):
        raise _invalid(f"expected notes of at most {MAX_NOTE} characters")
    # Notes are shown; they may quote files, so what cannot be printed is not a reason to refuse.
    return tuple("".join(c if c.isprintable() else " " for c in note) for note in notes)


def read_heartbeat(raw: bytes) -> Beat:
    """The heartbeat of a body.

    Raises
    ------
    WireError
        It is malformed.
    """
    parsed = _parsed(raw)
    agent = {**_agent(parsed), **_usage(_object(parsed, "agent"))}
    clock = None if parsed.get("clock") is None else _clock(_object(parsed, "clock"))
    about = {"agent": agent, "clock": clock}
    beats = [_beat(stream, about) for stream in _objects(parsed, "streams", MAX_STREAMS)]
    known = None if clock is None else (int(clock["offset_ns"]), int(clock["error_ns"]))
    return Beat(str(agent["host"]), beats, known)


def _beat(stream: Object, about: Object) -> StreamBeat:
    dropped = stream.get("dropped", {})
    if not isinstance(dropped, dict) or len(dropped) > MAX_REASONS:
        raise _invalid(f"expected dropped to have at most {MAX_REASONS} reasons")
    counts = {_printable(reason, MAX_NAME): _whole(dropped, reason) for reason in dropped}
    stream_id, spool_bytes = _text(stream, "stream_id", MAX_KEY), _whole(stream, "spool_bytes")
    document = {
        **about,
        "epoch": _whole(stream, "epoch", 0, _MAX_INT32),
        "next_seq": _whole(stream, "next_seq"),
        "spool_bytes": spool_bytes,
        "oldest_unsent_s": _optional_number(stream, "oldest_unsent_s"),
        "dropped": counts,
    }
    return StreamBeat(stream_id, spool_bytes, counts, document)


def _clock(clock: Object) -> dict[str, float]:
    return {
        "offset_ns": _whole(clock, "offset_ns", -_MAX_INT, _MAX_INT),
        "error_ns": _whole(clock, "error_ns"),
        "drift_ppm": _optional_number(clock, "drift_ppm") or 0.0,
    }


def _agent(parsed: Object) -> dict[str, str | int]:
    agent = _object(parsed, "agent")
    return {
        "version": _text(agent, "version", MAX_NAME),
        "host": _text(agent, "host", MAX_NAME),
        "pid": _whole(agent, "pid"),
    }


def _usage(agent: Object) -> dict[str, float]:
    """What an agent takes of its host, where it says so."""
    given = {name: _optional_number(agent, name) for name in ("cpu_ratio", "rss_bytes")}
    return {name: value for name, value in given.items() if value is not None}


# --- fields -----------------------------------------------------------------------------------


def _parsed(raw: bytes) -> Object:
    try:
        parsed = orjson.loads(raw)
    except ValueError as error:
        raise WireError(Problem.MALFORMED_BODY, "expected a body of JSON") from error
    if not isinstance(parsed, dict):
        raise _invalid("expected a JSON object")
    return parsed


def _object(parsed: Object, name: str) -> Object:
    value = parsed.get(name)
    if not isinstance(value, dict):
        raise _invalid(f"expected {name} to be an object")
    return value


def _objects(parsed: Object, name: str, most: int) -> list[Object]:
    values = parsed.get(name)
    if not isinstance(values, list) or len(values) > most:
        raise _invalid(f"expected {name} to be a list of at most {most}")
    if not all(isinstance(value, dict) for value in values):
        raise _invalid(f"expected {name} to be a list of objects")
    return values


def _text(parsed: Object, name: str, most: int) -> str:
    value = parsed.get(name)
    try:
        return _printable(value, most)
    except WireError as error:
        raise _invalid(f"expected {name} to be 1 to {most} printable characters") from error


def _printable(value: object, most: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isprintable():
        raise _invalid(f"expected names of 1 to {most} printable characters")
    return value


def _whole(parsed: Object, name: str, low: int = 0, high: int = _MAX_INT) -> int:
    value = parsed.get(name)
    if type(value) is not int or not low <= value <= high:
        raise _invalid(f"expected {name[:MAX_NAME]!a} to be a whole number from {low} to {high}")
    return value


def _optional_number(parsed: Object, name: str) -> float | None:
    value = parsed.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not math.isfinite(value):
        raise _invalid(f"expected {name} to be a number")
    return float(value)


def _invalid(message: str) -> WireError:
    return WireError(Problem.INVALID, message)
