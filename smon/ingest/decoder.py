"""The processes that decode: what they are given may end them, and ends nothing else.

Flow: `smon.ingest.fence` starts one of these → **here**: it forks a decoder for each lane, and
another when one dies → `smon.ingest.decode`. The first process never sees a body, and has one
thread: forking it is safe, and takes milliseconds where a new interpreter takes half a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from smon.errors import WireError
from smon.ingest import parcels
from smon.ingest.arena import NOT_BEGUN, NOTE_BYTES, Arena, Note, Said
from smon.ingest.decode import Content, check, decode
from smon.ingest.limits import TRUSTED, Limits
from smon.ingest.parcels import Parcel
from smon.wire.problems import Problem

#: What a decoder does with a parcel.
Decode = Callable[[Parcel, Limits], Content]

#: Exit code of a decoder whose memory did not suffice.
NO_MEMORY: Final = 77

#: One body may take so many times its CPU time by the clock, on a machine that is busy.
_WALL: Final = 20

#: Decoders that die without a body follow each other more and more slowly.
_FIRST_PAUSE_S: Final = 0.05
_LAST_PAUSE_S: Final = 5.0

#: Room for what is said of a round, contents aside: 64 bodies with 128 long op types each.
_SPEECH_BYTES: Final = 4 << 20

_PR_SET_PDEATHSIG: Final = 1
_DATA: Final = re.compile(r"VmData:\s+(\d+) kB")


@dataclass(frozen=True, slots=True)
class End:
    """What a decoder has of its lane: a socket, and memory."""

    socket: socket.socket
    arena: Arena


@dataclass(frozen=True, slots=True)
class Orders:
    """How to decode; `memory_bytes` and `timeout_s` are for one body."""

    limits: Limits
    memory_bytes: int
    timeout_s: float
    decode: Decode


def content_of(parcel: Parcel, limits: Limits) -> Content:
    """What is in a body, checked as far as it was not before.

    Raises
    ------
    WireError
        It is refused.
    """
    trusted = parcel.producer is None
    content = decode(parcel.head, parcel.body, parcel.seq, TRUSTED if trusted else limits)
    if parcel.producer is not None:
        check(content, parcel.producer, limits, parcel.now_ns)
    return content


# --- the first process ------------------------------------------------------------------------


def main(arguments: Sequence[str], decode: Decode = content_of) -> int:
    """Keep a decoder at work in each lane until the server is gone or closes them.

    Parameters
    ----------
    arguments
        One: `Start` of the fence as JSON.
    decode
        What decoders do; a test plants another.
    """
    start = orjson.loads(arguments[0])
    _die_with(start["parent"])
    # Ctrl-C and a service manager mean all processes of the server: it ends these when it is done.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    orders = Orders(Limits(**start["limits"]), start["memory_bytes"], start["timeout_s"], decode)
    lanes = [
        End(socket.socket(fileno=descriptor), Arena(memory))
        for descriptor, memory in start["lanes"]
    ]
    gc.collect()
    gc.freeze()
    working = {_forked(lane, orders): lane for lane in lanes}
    pause_s = _FIRST_PAUSE_S
    last = (0, 0)
    while working:
        process, status = os.wait()
        lane = working.pop(process)
        if status == 0:
            continue
        at = lane.arena.at()
        # One that dies twice at the same place dies of something else than bodies.
        pause_s = min(2 * pause_s, _LAST_PAUSE_S) if at == last else _FIRST_PAUSE_S
        time.sleep(pause_s if at == last else 0.0)
        last = at
        _drop(lane, at[0])
        lane.socket.send(Note(Said.DIED, at[0], at[1], status).encode())
        working[_forked(lane, orders)] = lane
    return 0


def _drop(lane: End, round_: int) -> None:
    """Take the question of a round that was begun off the socket, if it is there still.

    The server asks its bodies again, in another round: answered now, they would be read where the
    next question lies by then. A question of a later round stays, for the next decoder.
    """
    with contextlib.suppress(BlockingIOError):
        seen = lane.socket.recv(NOTE_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        if seen and Note.decode(seen).round <= round_:
            lane.socket.recv(NOTE_BYTES, socket.MSG_DONTWAIT)


def _die_with(parent: int) -> None:
    """Be killed when the parent is gone, however it went."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _forked(lane: End, orders: Orders) -> int:
    """Process id of a new decoder of this lane."""
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        _die_with(parent)
        _limit(orders.memory_bytes)
        lane.socket.send(Note(Said.READY).encode())
        code = _work(lane, orders)
    except MemoryError:
        code = NO_MEMORY
    except BaseException:  # noqa: BLE001  # this process ends here, whatever it was
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _limit(memory_bytes: int) -> None:
    """So much memory more than now, no core files, and the first to go when memory is short."""
    found = _DATA.search(Path("/proc/self/status").read_text(encoding="ascii"))
    most = (int(found[1]) << 10 if found else 0) + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Some containers do not let it.
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    faulthandler.enable()


# --- a decoder --------------------------------------------------------------------------------


def _work(lane: End, orders: Orders) -> int:
    """Decode until the server closes the socket; the exit code.

    A question is looked at, noted as begun, and only then taken: whenever this process is killed,
    either the question still lies there for the next one, or the note says that it was taken.
    """
    while data := lane.socket.recv(NOTE_BYTES, socket.MSG_PEEK):
        note = Note.decode(data)
        lane.arena.set_at(note.round, NOT_BEGUN)
        lane.socket.recv(NOTE_BYTES)
        lane.arena.resume(note.first + note.second)
        asked = parcels.parsed(lane.arena.take(note.first, note.second))
        said = _answers(lane.arena, note.round, asked, orders)
        encoded = parcels.encode(said)
        at = lane.arena.put(encoded, len(encoded))
        lane.socket.send(Note(Said.ANSWERED, note.round, at, len(encoded)).encode())
    return 0


def _answers(arena: Arena, round_: int, asked: list[list[Any]], orders: Orders) -> list[list[Any]]:
    """What is to be said of the bodies of a round: of as many as there is room for."""
    said: list[list[Any]] = []
    for place, question in enumerate(asked):
        arena.set_at(round_, place)
        _time(orders.timeout_s)
        answer = _answer(arena, parcels.unpack(question, arena), orders)
        if answer is None:
            break
        said.append(answer)
    _time(0.0)
    arena.set_at(round_, len(asked))
    return said or [parcels.refused(_too_large())]


def _answer(arena: Arena, parcel: Parcel, orders: Orders) -> list[Any] | None:
    """What is to be said of one body; None: there is no room for it."""
    try:
        content = orders.decode(parcel, orders.limits)
    except WireError as error:
        return parcels.refused(error)
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001  # a defect costs the body that shows it, no other
        sys.excepthook(*sys.exc_info())
        return parcels.refused(WireError(Problem.INTERNAL, "decoding failed: the log says why"))
    try:
        said = parcels.answer(content, arena)
    except ValueError:
        return None
    return said if arena.room(_SPEECH_BYTES) else None


def _time(seconds: float) -> None:
    """End this process after so much CPU time, or much more by the clock; 0: not any more.

    Nobody handles these signals: a loop in native code would not let Python do it.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, _WALL * seconds)


def _too_large() -> WireError:
    return WireError(
        Problem.TOO_LARGE, "expected a body that decodes to less: send smaller batches"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
