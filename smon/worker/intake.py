"""Files of ranks that have come are checked and gathered into captures, until these are ready.

Flow: `smon.store.files` → **here** (`smon.worker.gathering` decides) → `smon.store.captures` →
`smon.worker.captures`, which analyses them. What cannot be used is counted and noted at its
attempt, and goes.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from typing import Final

from smon.errors import StoreError
from smon.store import captures, files
from smon.store import windows as table
from smon.store.files import Dropped, FileInfo
from smon.worker.assembly import ENDED_WAIT_S
from smon.worker.gathering import Waits, choose, readiness
from smon.worker.service import Service

_LOG: Final = logging.getLogger(__name__)

#: Files that one round looks at, and bytes of them that it reads: other work must not wait long.
_MOST: Final = 256
_ROUND_BYTES: Final = 64 << 20

#: Captures of an attempt that a file may join or be too late for.
_LATEST: Final = 16

#: A file that cannot be read for now is left alone for so long.
_PAUSE_NS: Final = 30 * 10**9


class Intake:
    """Gathers the files of ranks that have come.

    Parameters
    ----------
    service
        Of the worker.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._paused: dict[str, int] = {}

    def run(self) -> bool:
        """Look once at all that has come; whether anything changed.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        service = self._service
        now = service.clock()
        self._paused = {name: until for name, until in self._paused.items() if until > now}
        with service.database.read() as session:
            whole = files.whole_files(session, _MOST)
            stale = files.incomplete_files(session, now - files.INCOMPLETE_NS, _MOST)
        changed = [self._settle(file) for file in self._affordable(whole)]
        for file in stale:
            self._drop(file, Dropped.INCOMPLETE)
        return any(changed) or bool(stale) or self._let_go(now) > 0

    def _affordable(self, whole: Sequence[FileInfo]) -> list[FileInfo]:
        """The first of the files, until so many bytes would have been read."""
        chosen: list[FileInfo] = []
        left = _ROUND_BYTES
        for file in whole:
            if file.id in self._paused:
                continue
            if chosen and file.bytes > left:
                break
            left -= file.bytes
            chosen.append(file)
        return chosen

    def _settle(self, file: FileInfo) -> bool:
        """Check a file and put it into a capture; False if that must wait."""
        try:
            fault = self._fault(file)
        except StoreError as error:
            _LOG.warning("file %s waits: %s", file.id, error)
            self._paused[file.id] = self._service.clock() + _PAUSE_NS
            return False
        if fault is not None:
            self._drop(file, fault)
        else:
            self._place(file)
        return True

    def _fault(self, file: FileInfo) -> Dropped | None:
        """What is wrong with the content of a file; None if it is what its agent made."""
        objects = self._service.objects
        digest, size = hashlib.sha256(), 0
        for path in file.paths:
            if objects.size(path) is None:
                return Dropped.LOST
            content = objects.get(path)
            digest.update(content)
            size += len(content)
        sound = size == file.bytes and digest.hexdigest() == file.sha256
        return None if sound else Dropped.DIGEST

    def _place(self, file: FileInfo) -> None:
        now = self._service.clock()
        with self._service.database.write() as session:
            mine = captures.locked_file(session, file)
            if mine is None:
                return
            known = captures.latest_captures(session, mine.attempt_id, mine.format, _LATEST)
            choice = choose(mine, known)
            late = choice.late
            if choice.into:
                # A worker may just have taken one of them.
                late = not any(captures.join(session, one, mine, now) for one in choice.into)
            elif not (choice.late or choice.full):
                captures.begin(session, mine, now)
        if late or choice.full:
            self._drop(file, Dropped.LATE if late else Dropped.TOO_MANY)

    def _drop(self, file: FileInfo, reason: Dropped) -> None:
        """Count a file and remove it, unless another worker has."""
        now = self._service.clock()
        with self._service.database.write() as session:
            captures.lock_attempt(session, file.attempt_id)
            paths = files.drop_rows(session, file.attempt_id, [file.id])
            if paths:
                files.count_drop(session, file, file.name, reason, now)
        if not paths:
            return
        _LOG.warning("file %s of attempt %s is not used: %s", file.name, file.attempt_id, reason)
        self._service.metrics.files_dropped.labels(reason.value).inc()
        for path in paths:
            self._service.objects.delete(path)

    def _let_go(self, now: int) -> int:
        """Let captures be analysed that are complete or have waited long enough; how many."""
        settings = self._service.settings
        waits = Waits(settings.window_timeout_s, min(ENDED_WAIT_S, settings.window_timeout_s))
        with self._service.database.read() as session:
            waiting = captures.open_captures(session, _MOST)
        ready = [found for one in waiting if (found := readiness(one, waits, now)) is not None]
        if not ready:
            return 0
        with self._service.database.write() as session:
            return sum(table.set_ready(session, one, now) for one in ready)
