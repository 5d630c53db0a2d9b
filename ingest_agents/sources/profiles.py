"""Folders in which whole files appear: profiles of torch.profiler, dumps of Flight Recorder.

A file is taken once it has not changed for a while and has an end. Profiles are reduced to the
events of their rank first (`ingest_agents.sources.reducing`); dumps are small, and go as they are.

Flow: folder → **here** → `ingest_agents.sources.outbox` → spool.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from ingest_agents.files import MAX_BYTES, WholeFile, digest_of
from ingest_agents.sources.listing import (
    FileKind,
    Listed,
    Passed,
    listed,
    named_otherwise,
    state_of,
)
from ingest_agents.sources.outbox import Outbox, Shared, with_rank
from ingest_agents.sources.processes import Owner
from ingest_agents.sources.reducing import Answer, Order
from smon.wire.parts import FileFormat

#: Profiles that one process reads, so that another source gets its turn.
_ORDERS: Final = 8

#: A file without an end that does not change for so long will never have one.
_GIVE_UP_S: Final = 60.0

#: So long a profile waits for space before it is read again.
_NO_SPACE_S: Final = 60.0

#: A file that is not seen in so many looks is gone.
_GONE_LOOKS: Final = 20

#: Looks at a folder: at least so far apart, and at most a hundredth of the time.
_LOOK_S: Final = 1.0
_SHARE: Final = 100


@dataclass(slots=True)
class _Seen:
    """A file in one state, and since when it has been in it, on the agent's clock."""

    file: Listed
    since: float
    waits: bool = False


@dataclass(frozen=True, slots=True)
class _Ready:
    """A file that can be shipped."""

    owner: Owner
    file: WholeFile
    key: str
    digest: str


class ProfileSource:
    """Ships the profiles or dumps of one folder, each once.

    Parameters
    ----------
    kind
        Profiles, or dumps.
    folder
        Where they appear.
    outbox
        Where they go.
    shared
        What all sources have in common.
    """

    def __init__(self, kind: FileKind, folder: Path, outbox: Outbox, shared: Shared) -> None:
        self._kind, self._folder, self._outbox = kind, folder, outbox
        self._processes, self._reducer = shared.processes, shared.reducer
        self._clock, self._oldest_ns = shared.clock, shared.oldest_ns
        self._still_s, self._limit = shared.settings.file_still_s, shared.settings.file_bytes
        if kind is FileKind.FLIGHT_RECORDER:
            self._limit = min(self._limit, MAX_BYTES)
        self._seen: dict[str, _Seen] = {}
        self._ready: list[_Ready] = []
        self._ordered: dict[str, _Seen] = {}
        self._missing: Counter[str] = Counter()
        self._next_look = 0.0

    # --- rounds ---------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in what is whole."""
        try:
            self._round()
        except OSError as error:
            # What was read and not shipped is read again: the agent's other work goes on.
            self._ready.clear()
            self._outbox.failed(error)

    def _round(self) -> None:
        self._processes.look()
        for answer in self._reducer.take(self):
            self._answered(answer)
        if not self._reducer.works_for(self):
            self._ordered.clear()
        now = self._clock()
        if now < self._next_look:
            return
        self._ship()
        self._look(now)
        self._next_look = now + max(_LOOK_S, _SHARE * (self._clock() - now))
        self._take(self._due(now))
        self._outbox.tend()

    def close(self) -> None:
        """Let go of the spool; what is being read is read again after a restart."""
        with contextlib.suppress(OSError):
            self._ship()
        self._reducer.close()
        self._outbox.close()

    def _look(self, now: float) -> None:
        """Find files, and notice which have changed or gone."""
        found: dict[str, _Seen] = {}
        complete = True
        for each in listed(self._folder):
            if not isinstance(each, Listed):
                self._pass(f"{each[1]} {each[0]}", each[0], each[1])
                complete = complete and each[1] is not Passed.UNREADABLE
            elif not named_otherwise(each.name, self._kind):
                found[each.key] = self._seen.get(each.key) or _Seen(each, now)
                self._sift(each)
        if complete:
            self._miss(found)
        self._seen = found

    def _miss(self, found: Mapping[str, _Seen]) -> None:
        """Forget files that were not found for a while: a folder may be away for a moment."""
        missing = {*self._missing, *self._seen} - found.keys()
        self._missing = Counter({key: self._missing[key] + 1 for key in missing})
        gone = {key for key, looks in self._missing.items() if looks > _GONE_LOOKS}
        self._outbox.forget(gone)
        for key in gone:
            del self._missing[key]

    def _sift(self, file: Listed) -> None:
        """Pass over what is not even looked at."""
        if file.size > self._limit:
            self._pass(file.key, f"{file.name}, {file.size} bytes", Passed.TOO_LARGE)
        elif file.mtime_ns < self._oldest_ns:
            self._pass(file.key, file.name, Passed.TOO_OLD)

    def _pass(self, key: str, what: str, reason: Passed) -> None:
        if not self._outbox.is_done(key):
            self._outbox.pass_over(key, reason, what)

    def _due(self, now: float) -> list[_Seen]:
        """Files that have not changed for a while and are not dealt with, the oldest first."""
        busy = {*self._ordered, *(ready.key for ready in self._ready)}
        due = [
            seen
            for key, seen in self._seen.items()
            if now - seen.since >= self._still_s
            and key not in busy
            and not self._outbox.is_done(key)
        ]
        return sorted(due, key=lambda seen: (seen.file.mtime_ns, seen.file.name))

    # --- taking ---------------------------------------------------------------------------------

    def _take(self, due: list[_Seen]) -> None:
        """Have the oldest of these files read, or ship them as they are."""
        whole = (seen for seen in due if self._is_whole(seen))
        if self._kind is FileKind.FLIGHT_RECORDER:
            for seen in whole:
                self._take_dump(seen.file)
        elif due and self._can_read() and self._reducer.is_free:
            orders = list(islice(whole, _ORDERS))
            if orders:
                self._order(orders)

    def _is_whole(self, seen: _Seen) -> bool:
        """Whether a file that does not change is one to take; if not, for good or for a while."""
        reason = Passed.NOT_WHOLE if seen.waits else state_of(seen.file, self._kind)
        if reason is None:
            return True
        waits = reason in {Passed.NOT_WHOLE, Passed.EMPTY}
        if not waits or self._clock() - seen.since >= _GIVE_UP_S:
            owner = self._owner(seen.file)
            self._outbox.give_up(owner, seen.file.key, reason, seen.file.name)
        return False

    def _owner(self, file: Listed) -> Owner:
        return self._processes.owner(file.name, dump=self._kind is FileKind.FLIGHT_RECORDER)

    def _can_read(self) -> bool:
        lacking = self._reducer.lacking()
        if lacking:
            self._outbox.lacks(lacking)
        return not lacking

    def _order(self, files: list[_Seen]) -> None:
        orders = []
        for seen in files:
            who = self._owner(seen.file).identity
            details: dict[str, Any] = {
                "format": "kineto",
                "path": str(seen.file.path),
                "out": str(self._reducer.place(f"profile-{seen.file.key}")),
                "rank": who.rank,
                "world_size": who.world_size,
            }
            orders.append(Order(seen.file.key, details))
        self._reducer.give(self, orders)
        self._ordered = {seen.file.key: seen for seen in files}

    def _answered(self, answer: Answer) -> None:
        """Ship what was made of a profile, or give it up."""
        seen = self._ordered.pop(answer.key, None)
        if seen is None:
            return
        owner = self._owner(seen.file)
        if answer.fault == Passed.NOT_WHOLE:
            seen.waits = True
        elif answer.fault == Passed.NO_SPACE:
            self._outbox.failed(OSError(answer.detail))
            seen.since = self._clock() + _NO_SPACE_S
        elif answer.fault == Passed.NOT_THIS:
            self._outbox.pass_over(answer.key, answer.fault, f"{seen.file.name}: {answer.detail}")
        elif answer.fault is not None:
            what = f"{seen.file.name}: {answer.detail}"
            self._outbox.give_up(owner, answer.key, answer.fault, what)
        elif self._outbox.is_copy(answer.details["digest"]):
            self._outbox.pass_over(answer.key, Passed.COPY, seen.file.name)
        else:
            self._made(owner, seen.file, answer)

    def _made(self, owner: Owner, read: Listed, answer: Answer) -> None:
        made = answer.details["file"]
        path = Path(made["path"])
        if owner.identity.rank is None:
            # The name says nothing of the rank: what the file says may tell the job.
            owner = self._processes.of_rank(made["rank"])
        size, sha256 = digest_of(path)
        file = WholeFile(
            name=read.name,
            format=FileFormat.RANK_EVENTS,
            path=path,
            size=size,
            sha256=sha256,
            rank=made["rank"],
            world_size=made["world_size"],
            steps=_pair(made["steps"]),
            times=_pair(made["times"]),
        )
        owner = with_rank(owner, file.rank, file.world_size)
        self._add(_Ready(owner, file, answer.key, answer.details["digest"]))

    def _take_dump(self, dump: Listed) -> None:
        """A dump goes as it is; when it was made is when it was written."""
        owner = self._owner(dump)
        copy = self._reducer.place(f"dump-{dump.key}")
        try:
            shutil.copyfile(dump.path, copy, follow_symlinks=False)
            size, sha256 = digest_of(copy)
        except OSError as error:
            self._outbox.give_up(
                owner, dump.key, Passed.UNREADABLE, f"{dump.name}: {error.strerror}"
            )
            return
        if size != dump.size:
            # It is being written to after all.
            return
        # Dumps of ranks that have called nothing are the same.
        digest = f"{sha256}:{owner.identity.rank}"
        if self._outbox.is_copy(digest):
            self._outbox.pass_over(dump.key, Passed.COPY, dump.name)
            return
        if owner.identity.rank is None:
            self._outbox.rankless(dump.name)
        file = WholeFile(
            name=dump.name,
            format=FileFormat.FLIGHT_RECORDER,
            path=copy,
            size=size,
            sha256=sha256,
            rank=owner.identity.rank,
            world_size=owner.identity.world_size,
            times=(dump.mtime_ns, dump.mtime_ns),
        )
        self._add(_Ready(owner, file, dump.key, digest))

    def _add(self, ready: _Ready) -> None:
        """Ship a file at once, if there is space: a copy of it may be the next."""
        self._ready.append(ready)
        self._ship()

    def _ship(self) -> None:
        """Write what is ready, as far as there is space."""
        while self._ready:
            each = self._ready[0]
            state = {"done": "shipped", "digest": each.digest}
            if not self._outbox.put(each.owner, each.file, each.key, state):
                return
            self._ready.pop(0)
            with contextlib.suppress(OSError):
                each.file.path.unlink()


def _pair(numbers: Sequence[int] | None) -> tuple[int, int] | None:
    return None if numbers is None else (numbers[0], numbers[1])
