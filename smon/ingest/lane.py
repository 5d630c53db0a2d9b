"""One decoder as its server sees it: rounds of bodies to it, answers and obituaries back.

Flow: `smon.ingest.fence` → **here** → `smon.ingest.arena` → `smon.ingest.decoder` → **here**.
Bodies that come while the decoder is busy go to it together, in its next round. All of it belongs
to one event loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from smon.errors import SMonError
from smon.ingest import parcels
from smon.ingest.arena import NOTE_BYTES, Arena, Note, Said, create
from smon.ingest.decode import Content
from smon.ingest.parcels import Parcel

#: Bodies of one round: more would wait for each other, fewer cost more wake-ups.
_ROUND: Final = 64

#: Room that a round leaves for what is in its bodies.
_SLACK_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A body, and who waits for what is in it."""

    parcel: Parcel
    outcome: asyncio.Future[Content]


class Lane:
    """One decoder, and the bodies that wait for it.

    Parameters
    ----------
    died
        Told of each death: the body that the decoder was at, None if it was at none; its status.
    ready
        Called when a decoder has begun to wait for bodies.
    gone
        Called when there is nobody at the other end any more.

    Attributes
    ----------
    idle_deaths
        Decoders that died of no body since the last round that was answered.
    """

    def __init__(
        self,
        arena_bytes: int,
        died: Callable[[Waiting | None, int], None],
        ready: Callable[[], None],
        gone: Callable[[Lane], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._died, self._ready, self._gone = died, ready, gone
        self._queue: deque[Waiting] = deque()
        self._round = 0
        self._asked: list[Waiting] = []
        self._flushing = False
        self.idle_deaths = 0
        self._socket, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)  # noqa: FBT003  # its only argument
        self.memory = create(arena_bytes)
        self._arena = Arena(self.memory)
        self._loop.add_reader(self._socket.fileno(), self._readable)

    @property
    def length(self) -> int:
        """Bodies that wait."""
        return len(self._queue) + len(self._asked)

    def put(self, waiting: Waiting) -> None:
        """Have a body decoded."""
        self._queue.append(waiting)
        if not self._asked and not self._flushing:
            # At the end of this turn of the loop: all bodies of the turn go together.
            self._flushing = True
            self._loop.call_soon(self._send)

    def started(self) -> None:
        """The decoder has the other end of the socket, and the memory."""
        self.far.close()
        if self.memory >= 0:
            os.close(self.memory)
            self.memory = -1

    def close(self) -> list[Waiting]:
        """End it; bodies that are still to be decoded."""
        self.started()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._arena.close()
        left = [*self._asked, *self._queue]
        self._asked.clear()
        self._queue.clear()
        return left

    def _send(self) -> None:
        """Begin the next round, if something waits and none is under way."""
        self._flushing = False
        if self._asked or not self._queue or self._socket.fileno() < 0:
            return
        arena = self._arena
        said: list[list[Any]] = []
        arena.begin()
        while self._queue and len(said) < _ROUND:
            waiting = self._queue[0]
            if said and not arena.room(2 * len(waiting.parcel.body) + _SLACK_BYTES):
                break
            self._asked.append(self._queue.popleft())
            said.append(parcels.pack(waiting.parcel, arena))
        encoded = parcels.encode(said)
        at = arena.put(encoded, len(encoded))
        self._round += 1
        try:
            self._socket.send(Note(Said.ASK, self._round, at, len(encoded)).encode())
        except OSError:
            self._loop.call_soon(self._gone, self)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(NOTE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._gone(self)
            return
        note = Note.decode(data)
        if note.said is Said.READY:
            self._ready()
        elif note.said is Said.DIED:
            self._buried(note)
        elif note.round == self._round:
            self._answered(note)

    def _answered(self, note: Note) -> None:
        self.idle_deaths = 0
        arena = self._arena
        said = parcels.parsed(arena.take(note.first, note.second))
        for waiting, answer in zip(self._asked, said, strict=False):
            _settle(waiting, answer, arena)
        # The rest did not fit: it comes first the next time.
        self._queue.extendleft(reversed(self._asked[len(said) :]))
        self._asked.clear()
        arena.resume(note.first + note.second)
        self._send()

    def _buried(self, note: Note) -> None:
        """The decoder died: of a body of this round, or of none. Another one reads on."""
        if note.round != self._round or not self._asked:
            # Of no round, or of one that was answered; one that is under way was not begun.
            self.idle_deaths += 1
            self._died(None, note.second)
            return
        asked, self._asked = self._asked, []
        culprit = asked.pop(note.first) if note.first < len(asked) else None
        self.idle_deaths += culprit is None
        self._queue.extendleft(reversed(asked))
        self._died(culprit, note.second)
        self._send()


def _settle(waiting: Waiting, answer: list[Any], arena: Arena) -> None:
    if waiting.outcome.done():
        return
    try:
        waiting.outcome.set_result(parcels.content_of(answer, arena))
    except SMonError as error:
        waiting.outcome.set_exception(error)
