"""Reads profiles for the agent, in a process of its own that may fail.

``python -m ingest_agents.sources.reduce``. Orders come on stdin, a JSON line each, the limits
first; each gets one line on stdout. With `ingest_agents.sources.recorded` the only module of the
agent that knows trace formats, numpy and pyarrow. A process that has no memory left, or takes too
long, ends; the agent goes on.

Flow: `ingest_agents.sources.reducing` → **here** (`smon.trace.formats`) → files of rank events.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from ingest_agents.files import MAX_BYTES, digest_of
from ingest_agents.sources.listing import Passed, is_whole_gzip
from ingest_agents.sources.portions import (
    HEAD_BYTES,
    Portion,
    key_of_log,
    portions_of,
)
from ingest_agents.sources.portions import MAX_BYTES as MOST
from smon.errors import TraceError
from smon.trace.events import RankEvents
from smon.trace.formats import inspector, kineto
from smon.trace.formats.rank_events import packed

_LEAST_PRIORITY: Final = 19
#: Faults that are none of the file's: it is not what is looked for, or not now.
OTHER: Final = Passed.NOT_THIS.value
NOT_WHOLE: Final = Passed.NOT_WHOLE.value
MOVED: Final = Passed.MOVED.value
NO_SPACE: Final = Passed.NO_SPACE.value

#: Times of a profile below this (the year 2000) count from something else than the epoch.
_FIRST_NS: Final = 946_684_800 * 10**9

Details = Mapping[str, Any]
Result = dict[str, Any]


class FaultError(Exception):
    """Why a file cannot be shipped: a word, and a sentence."""

    def __init__(self, word: str, sentence: str) -> None:
        super().__init__(sentence)
        self.word = word


def main() -> int:
    """Answer the orders on stdin.

    Returns
    -------
    int
        The exit code.
    """
    agent = os.getppid()
    limits, *orders = [json.loads(line) for line in sys.stdin.buffer]
    _be_modest(int(limits["memory_bytes"]), float(limits["seconds"]) * max(len(orders), 1))
    for order in orders:
        if os.getppid() != agent:
            # It was killed: the next one has these files read.
            return 1
        line = json.dumps({"key": order["key"], **answer(order)})
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    return 0


def _be_modest(memory_bytes: int, seconds: float) -> None:
    """Least priority, first to be ended if memory runs out, no more memory and time than given."""
    with contextlib.suppress(OSError):
        os.nice(_LEAST_PRIORITY)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    for what, limit in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, int(seconds) + 1),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(what, (limit, limit))


def answer(order: Details) -> Result:
    """What comes of one order: files, or a fault."""
    try:
        return _FORMATS[order["format"]](order)
    except FaultError as error:
        return {"fault": error.word, "detail": str(error)}
    except TraceError as error:
        return {"fault": "refused-by-reader", "detail": str(error)}
    except MemoryError:
        return {"fault": "out-of-memory", "detail": "it takes more than `reader_bytes`"}
    except OSError as error:
        return {"fault": "unreadable-file", "detail": error.strerror or str(error)}


# --- whole profiles -----------------------------------------------------------------------------


def _profile(order: Details) -> Result:
    path = Path(order["path"])
    with path.open("rb") as opened:
        if not kineto.recognises(opened.read(HEAD_BYTES), path):
            raise FaultError(OTHER, f"looked for {kineto.LOOKS_FOR}")
    if not is_whole_gzip(path):
        raise FaultError(NOT_WHOLE, "the gzip has no end yet")
    _, digest = digest_of(path)
    (events,) = kineto.read(path, order.get("rank"), order.get("world_size")).events
    file = _written(events, kineto.NAME, str(order["out"]))
    return {"file": file, "digest": digest}


def _written(events: RankEvents, source: str, out: str) -> Result:
    """Write the events of one rank; what the agent has to know of the file.

    Raises
    ------
    FaultError
        It is larger than a server takes, or there is no space.
    """
    content = packed(events, source)
    if len(content) > MAX_BYTES:
        raise FaultError("too-large", f"{len(events)} events are more than a server takes")
    _write(Path(out), content)
    return {
        "path": out,
        "rank": events.rank,
        "world_size": events.world_size or None,
        "steps": _steps(events),
        "times": _times(events),
        "events": len(events),
    }


def _write(path: Path, content: bytes) -> None:
    """Write a file.

    Raises
    ------
    FaultError
        There is no space.
    """
    try:
        path.write_bytes(content)
    except OSError as error:
        raise FaultError(NO_SPACE, f"{path}: {error.strerror}") from error


def _steps(events: RankEvents) -> Sequence[int] | None:
    """First and last step that is marked; None if none is."""
    numbers = [step.number for step in events.steps if step.number >= 0]
    return (min(numbers), max(numbers)) if numbers else None


def _times(events: RankEvents) -> Sequence[int] | None:
    """When it begins and ends, unix ns; None if the file does not know."""
    if not events.timed or not len(events) or int(events.start_ns[0]) < _FIRST_NS:
        return None
    return int(events.start_ns[0]), int(np.max(events.end_ns))


# --- growing logs -------------------------------------------------------------------------------


def _log(order: Details) -> Result:
    """The portions of a log that are over; of the log that was meant, not of its successor."""
    with _opened(Path(order["path"])) as file:
        head = file.read(HEAD_BYTES)
        if key_of_log(head) != order["key"]:
            raise FaultError(MOVED, "another file has its name now")
        if not order["offset"] and not inspector.recognises(head, Path(order["path"])):
            raise FaultError(OTHER, f"looked for {inspector.LOOKS_FOR}")
        return {"portions": _portions(file, order), "more": file.tell() - order["offset"] >= MOST}


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise FaultError(MOVED, "nothing has its name now") from error


def _portions(file: BinaryIO, order: Details) -> list[Result]:
    found = portions_of(
        file, order["offset"], order["carry"], order["period_us"], order["until_us"]
    )
    portions, largest = [], order["largest"]
    for number, portion in enumerate(found):
        out = Path(f"{order['out']}-{number}")
        made, detail = None, ""
        try:
            events = _events_of(portion, out)
        except TraceError as error:
            detail = str(error)
        else:
            largest = max(largest, [events.world_size, events.rank])
            made = _written(_as_rank(events, order, largest), inspector.NAME, str(out))
        portions.append(
            {
                "offset": portion.end,
                "carry": portion.carry,
                "begin_us": portion.begin_us,
                "largest": largest,
                "file": made,
                "detail": detail,
            }
        )
    return portions


def _events_of(portion: Portion, out: Path) -> RankEvents:
    """The collectives of a portion.

    Raises
    ------
    TraceError
        There are none.
    """
    text = out.with_suffix(".log")
    _write(text, portion.text)
    try:
        (events,) = inspector.read(text).events
    finally:
        text.unlink()
    return events


def _as_rank(events: RankEvents, order: Details, largest: Sequence[int]) -> RankEvents:
    """Under the global rank, if the agent knows it, else that in the largest communicator so far.

    A log has ranks inside communicators only.
    """
    rank, world = order["rank"], order["world_size"]
    if rank is None:
        return replace(events, world_size=largest[0], rank=largest[1])
    notes = tuple(note for note in events.notes if note != inspector.LOCAL_RANKS)
    known = world if world and rank < world else 0
    return replace(events, rank=rank, world_size=known, notes=notes)


_FORMATS: Final = {"kineto": _profile, "inspector": _log}


if __name__ == "__main__":
    sys.exit(main())
