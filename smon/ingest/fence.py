"""Decoding in processes of their own, so that what ends one of them does not end the server.

Flow: `smon.ingest.service` → **here** → `smon.ingest.lane` → `smon.ingest.decoder`. When one dies,
the body that it was at is refused, and the others go to the next one. Everything here belongs to
one event loop.
``docs/decisions/0006-decoding-aside.md`` has the reasons and what it costs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Final

import orjson

from smon.config import Settings
from smon.errors import WireError
from smon.ingest.decode import Content
from smon.ingest.decoder import NO_MEMORY
from smon.ingest.decoding import is_large
from smon.ingest.lane import Lane, Waiting
from smon.ingest.limits import Limits
from smon.ingest.metrics import DecoderMetrics
from smon.ingest.parcels import Parcel
from smon.wire.frames import MAX_BODY_BYTES
from smon.wire.problems import Problem

_log = logging.getLogger(__name__)

#: Memory for one round: only what is used of it is taken.
_ARENA_BYTES: Final = 256 << 20

#: A body that so many decoders died of is refused for good; how many such bodies are remembered.
DEATHS: Final = 3

#: Likewise of bodies at which decoders were killed from outside, mostly because the host is short
#: of memory: that is hardly ever the body's fault, and it may have been acknowledged.
KILLS: Final = 12
_REMEMBERED: Final = 4096

#: Decoders that may die of no body, one after the other, before the server says so.
_IDLE_DEATHS: Final = 4

#: When a body that a decoder died of may come again.
_RETRY_S: Final = 2.0

#: Pause before the decoders are started again; doubles up to the last.
_FIRST_PAUSE_S: Final = 0.5
_LAST_PAUSE_S: Final = 30.0

#: How long they may take to go when the server closes.
_END_S: Final = 2.0

#: The module that is run, with this interpreter.
_MODULE: Final = ("-m", "smon.ingest.decoder")

#: What decoders get of the environment, by how names begin: no secret of the server.
_ENVIRON: Final = (
    "PATH", "HOME", "TMPDIR", "LANG", "LC_", "LD_LIBRARY_PATH", "PYTHON", "VIRTUAL_ENV",
)  # fmt: skip

#: Libraries that start threads, one for each core, which a process that forks must not have.
_ONE_THREAD: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class Fence:
    """Decoders in processes of their own.

    Parameters
    ----------
    command
        The module that decodes, and the options before it; a test runs another.
    arena_bytes
        Memory that is shared with each decoder; 0: enough for a round of the largest bodies.
    """

    def __init__(
        self,
        settings: Settings,
        metrics: DecoderMetrics,
        command: Sequence[str] = _MODULE,
        arena_bytes: int = 0,
    ) -> None:
        self._settings, self._metrics = settings, metrics
        self._command = tuple(command)
        self._limits = Limits.of(settings)
        # What the log holds may be larger than what the limits allow now.
        size = max(_ARENA_BYTES, 2 * settings.max_decoded_bytes) + MAX_BODY_BYTES
        self._arena_bytes = arena_bytes or size
        self._lanes: list[Lane] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths: OrderedDict[str, int] = OrderedDict()
        self._problem = ""
        self._pause_s = _FIRST_PAUSE_S
        self._again: asyncio.TimerHandle | None = None
        self._up = False

    # --- life -----------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the decoders; bodies may come before they are ready."""
        self._start(())

    def _start(self, left: Iterable[Waiting]) -> None:
        self._again, self._up = None, False
        try:
            for _ in range(self._settings.decode_processes):
                lane = Lane(self._arena_bytes, self._died, self._ready, self._gone)
                self._lanes.append(lane)
            self._process = self._started()
        except OSError as error:
            self._refuse(left)
            self._failed(str(error.strerror))
            return
        for lane in self._lanes:
            lane.started()
        for waiting in left:
            self._lane(waiting.parcel).put(waiting)

    def _started(self) -> subprocess.Popen[bytes]:
        settings = self._settings
        lanes = [(lane.far.fileno(), lane.memory) for lane in self._lanes]
        start = {
            "parent": os.getpid(),
            "limits": asdict(self._limits),
            "memory_bytes": settings.decode_memory_bytes,
            "timeout_s": settings.decode_timeout_s,
            "lanes": lanes,
        }
        return subprocess.Popen(  # noqa: S603  # our own
            [sys.executable, *self._command, orjson.dumps(start).decode()],
            stdin=subprocess.DEVNULL,
            env={**_without_secrets(os.environ), **_ONE_THREAD},
            pass_fds=[descriptor for lane in lanes for descriptor in lane],
        )

    def _ready(self) -> None:
        if not self._up:
            self._up, self._problem, self._pause_s = True, "", _FIRST_PAUSE_S
            self._metrics.up.set(1)

    def _gone(self, lane: Lane) -> None:
        """The process that forks decoders is gone: start another."""
        if lane not in self._lanes:
            return
        if not self._up:
            self._failed("it ended before it was ready")
            return
        _log.error("the process that starts decoders is gone; starting it again")
        self._metrics.deaths.labels("all").inc()
        self._start(self._closed())

    def _failed(self, reason: str) -> None:
        """It cannot be started: say so, refuse what comes, and try again in a while."""
        self._refuse(self._closed())
        self._metrics.up.set(0)
        self._problem = (
            f"bodies cannot be decoded: the process for it cannot be started: {reason}: see the "
            "log; SMON_DECODE_PROCESSES=0 decodes without it"
        )
        _log.error("%s; trying again in %.1f s", self._problem, self._pause_s)
        self._again = asyncio.get_running_loop().call_later(self._pause_s, self._start, ())
        self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)

    def _closed(self) -> list[Waiting]:
        """Close all lanes, and see the process off; bodies that are still to be decoded."""
        left = [waiting for lane in self._lanes for waiting in lane.close()]
        self._lanes.clear()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        return left

    def _refuse(self, left: Iterable[Waiting]) -> None:
        for waiting in left:
            if not waiting.outcome.done():
                waiting.outcome.set_exception(_down())

    def problem(self) -> str:
        """Why nothing can be decoded; empty if it can. From any thread."""
        return self._problem

    async def stop(self) -> None:
        """End the decoders."""
        if self._again is not None:
            self._again.cancel()
        process, self._process = self._process, None
        # They go when their sockets are closed.
        self._refuse(self._closed())
        if process is None:
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(None, process.wait, _END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            await loop.run_in_executor(None, process.wait)

    # --- bodies ---------------------------------------------------------------------------------

    async def decode(self, parcel: Parcel) -> Content:
        """What is in a body.

        Raises
        ------
        WireError
            It is refused: also if decoders die of it, or none can be started.
        """
        if self._deaths and self._deaths.get(parcel.digest, 0) >= KILLS:
            raise _deadly()
        if not self._lanes:
            raise _down()
        waiting = Waiting(parcel, asyncio.get_running_loop().create_future())
        self._lane(parcel).put(waiting)
        content = await waiting.outcome
        if self._deaths:
            self._deaths.pop(parcel.digest, None)
        return content

    def _lane(self, parcel: Parcel) -> Lane:
        if len(self._lanes) == 1 or not is_large(parcel):
            return self._lanes[0]
        return min(self._lanes[1:], key=lambda lane: lane.length)

    def _died(self, culprit: Waiting | None, status: int) -> None:
        cause = cause_of(status)
        self._metrics.deaths.labels(cause).inc()
        if culprit is None:
            _log.warning("a decoder died (%s), of no body", cause)
            if any(lane.idle_deaths > _IDLE_DEATHS for lane in self._lanes):
                self._failed("those that decode end by themselves")
            return
        digest = culprit.parcel.digest
        weight = 1 if cause == "killed" else KILLS // DEATHS
        deaths = self._deaths[digest] = self._deaths.get(digest, 0) + weight
        self._deaths.move_to_end(digest)
        if len(self._deaths) > _REMEMBERED:
            self._deaths.popitem(last=False)
        _log.error(
            "a decoder died (%s) of a body of %d bytes, seq %d, digest %s",
            cause, len(culprit.parcel.body), culprit.parcel.seq, digest,
        )  # fmt: skip
        if not culprit.outcome.done():
            culprit.outcome.set_exception(_died_of_it() if deaths < KILLS else _deadly())


def _without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_ENVIRON)}


def cause_of(status: int) -> str:
    """Label of what a decoder died of, by what ``waitpid`` says."""
    code = os.waitstatus_to_exitcode(status)
    if code in (-signal.SIGPROF, -signal.SIGALRM):
        return "time"
    if code == NO_MEMORY:
        return "memory"
    return "killed" if code == -signal.SIGKILL else "crash"


def _died_of_it() -> WireError:
    return WireError(
        Problem.DECODER_DIED,
        "the process that decoded this body died of it, and nothing else was harmed: send it again",
        _RETRY_S,
    )


def _deadly() -> WireError:
    return WireError(
        Problem.UNDECODABLE,
        f"expected a body that can be decoded, but {DEATHS} processes or more died of this one: it "
        "is not tried again",
    )


def _down() -> WireError:
    return WireError(
        Problem.OVERLOADED, "the server cannot decode bodies now: come again later", _RETRY_S
    )
