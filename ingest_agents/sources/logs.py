"""Logs of NCCL Inspector: followed while they grow, in portions that all hosts cut alike.

A log is known by its beginning, so that it is the same one after it was renamed or copied, and
another one if a file of its name begins anew. How far it was read is written together with the
portion.

Flow: folder → **here** → `ingest_agents.sources.reducing` → `ingest_agents.sources.outbox`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ingest_agents.files import WholeFile, digest_of
from ingest_agents.sources.listing import FileKind, Listed, Passed, listed, named_otherwise
from ingest_agents.sources.outbox import Outbox, Shared, with_rank
from ingest_agents.sources.portions import HEAD_BYTES, key_of_log
from ingest_agents.sources.processes import Owner
from ingest_agents.sources.reducing import Answer, Order
from smon.wire.parts import FileFormat

#: Logs are dumped by a thread now and then: so long after the end of a period all of it is there.
_GRACE_S: Final = 5.0

#: Looks at a folder: at least so far apart, and at most a hundredth of the time.
_LOOK_S: Final = 1.0
_SHARE: Final = 100

#: A log that is not seen in so many looks is gone.
_GONE_LOOKS: Final = 20

_US: Final = 10**6


@dataclass(slots=True)
class _Log:
    """A log, and how far it was read.

    Attributes
    ----------
    state
        ``offset`` and ``carry``, see `ingest_agents.sources.portions`; ``rank`` and ``size`` of
        the job, once they are known, for when its process has ended.
    """

    file: Listed
    state: dict[str, Any]
    owner: Owner
    unseen: int = 0


@dataclass(frozen=True, slots=True)
class _Ready:
    """A portion that can be shipped; `file` is None if there is nothing in it."""

    key: str
    file: WholeFile | None
    state: Mapping[str, Any]


class LogSource:
    """Follows the logs of one folder.

    Parameters
    ----------
    folder
        Where they lie.
    outbox
        Where they go.
    shared
        What all sources have in common.
    """

    def __init__(self, folder: Path, outbox: Outbox, shared: Shared) -> None:
        self._folder, self._outbox = folder, outbox
        self._processes, self._reducer = shared.processes, shared.reducer
        self._wall, self._clock, self._oldest_ns = shared.wall, shared.clock, shared.oldest_ns
        inspector_portion_s = shared.settings.inspector_portion_s
        self._period_us = int(inspector_portion_s * _US)
        self._grace_us = int(min(_GRACE_S, inspector_portion_s / 2) * _US)
        self._logs: dict[str, _Log] = {}
        self._ordered: frozenset[str] = frozenset()
        self._ready: list[_Ready] = []
        self._next_look, self._cut_us = 0.0, 0

    # --- rounds ---------------------------------------------------------------------------------

    def poll(self) -> None:
        """Take in the portions whose period is over."""
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
            self._ordered = frozenset()
        self._ship()
        now = self._clock()
        if now >= self._next_look:
            self._look()
            self._next_look = now + max(_LOOK_S, _SHARE * (self._clock() - now))
            self._outbox.tend()
        self._cut()

    def close(self) -> None:
        """Let go of the spool; what is not read yet is read after a restart."""
        with contextlib.suppress(OSError):
            self._ship()
        self._reducer.close()
        self._outbox.close()

    # --- finding logs ---------------------------------------------------------------------------

    def _look(self) -> None:
        """Find logs: new ones, and those that have another name now."""
        seen: dict[str, Listed] = {}
        complete = True
        for each in listed(self._folder):
            if not isinstance(each, Listed):
                complete = complete and each[1] is not Passed.UNREADABLE
            elif not named_otherwise(each.name, FileKind.INSPECTOR):
                key = self._key(each)
                # Of a log and its copy, the one that has more.
                if key is not None and (key not in seen or seen[key].size < each.size):
                    seen[key] = each
        inodes = {log.file.inode: log for log in self._logs.values()}
        for key, file in seen.items():
            if key in self._logs:
                self._logs[key].file, self._logs[key].unseen = file, 0
            elif not self._outbox.is_done(key):
                self._found(key, file, inodes.get(file.inode))
        if complete:
            self._miss(seen)

    def _key(self, file: Listed) -> str | None:
        """Which log a file is; None if it has no whole record yet, or cannot be read."""
        try:
            with file.path.open("rb") as opened:
                head = opened.read(HEAD_BYTES)
        except OSError as error:
            key = f"unreadable-{file.inode}"
            if not self._outbox.is_done(key):
                what = f"{file.name}: {error.strerror}"
                self._outbox.pass_over(key, Passed.UNREADABLE, what)
            return None
        return key_of_log(head)

    def _found(self, key: str, file: Listed, before: _Log | None) -> None:
        """Begin with a log, or go on with it after a restart."""
        known = self._outbox.state(key)
        if not known and file.mtime_ns < self._oldest_ns:
            self._outbox.pass_over(key, Passed.TOO_OLD, file.name)
            return
        state = {"offset": 0, "carry": {}}
        owner = self._processes.owner(file.name)
        if "offset" in known:
            state = known
        elif before is not None:
            # Cut off and begun anew: the same process, and its header is not repeated.
            state["carry"], owner = before.state["carry"], before.owner
        self._logs[key] = _Log(file, state, owner)

    def _miss(self, seen: Mapping[str, Listed]) -> None:
        """Notice logs that are gone, and what was not read of them."""
        for key in [key for key in self._logs if key not in seen]:
            log = self._logs[key]
            log.unseen += 1
            if log.unseen <= _GONE_LOOKS or key in self._ordered:
                continue
            if log.state["offset"] < log.file.size:
                self._outbox.give_up(self._owner_of(log), key, "gone-before-read", log.file.name)
            del self._logs[key]
            self._outbox.forget([key])

    def _owner_of(self, log: _Log) -> Owner:
        """Who writes a log: its process, else what is remembered of it."""
        if log.owner.identity.rank is None:
            log.owner = self._processes.owner(log.file.name)
        if "rank" in log.state:
            known = replace(
                log.owner.identity,
                job=log.state["job"],
                attempt=log.state["attempt"],
                rank=log.state["rank"],
                world_size=log.state["size"],
            )
            return Owner(known, log.owner.how)
        return log.owner

    # --- cutting --------------------------------------------------------------------------------

    def _cut(self) -> None:
        """Have all logs read up to the end of the last period."""
        until = (self._wall() // 1000 - self._grace_us) // self._period_us * self._period_us
        if until <= self._cut_us or self._ready or not self._reducer.is_free:
            return
        grown = [
            key
            for key, log in self._logs.items()
            if log.file.size > log.state["offset"] and not log.unseen
        ]
        if not grown or not self._can_read():
            self._cut_us = until
            return
        self._reducer.give(self, [self._order(key, until) for key in grown])
        self._ordered, self._cut_us = frozenset(grown), until

    def _can_read(self) -> bool:
        lacking = self._reducer.lacking()
        if lacking:
            self._outbox.lacks(lacking)
        return not lacking

    def _order(self, key: str, until_us: int) -> Order:
        log = self._logs[key]
        who = self._owner_of(log).identity
        details: dict[str, Any] = {
            "format": "inspector",
            "path": str(log.file.path),
            "offset": log.state["offset"],
            "carry": log.state["carry"],
            "period_us": self._period_us,
            "until_us": until_us,
            "rank": who.rank,
            "world_size": who.world_size,
            "largest": log.state.get("largest", [0, 0]),
            "out": str(self._reducer.place(f"log-{key}")),
        }
        return Order(key, details)

    def _answered(self, answer: Answer) -> None:
        self._ordered -= {answer.key}
        log = self._logs.get(answer.key)
        if log is None:
            return
        owner = self._owner_of(log)
        what = f"{log.file.name}: {answer.detail}"
        if answer.fault == Passed.NOT_THIS:
            self._outbox.pass_over(answer.key, answer.fault, what)
            del self._logs[answer.key]
        elif answer.fault == Passed.NO_SPACE:
            self._outbox.failed(OSError(answer.detail))
        elif answer.fault == Passed.MOVED:
            # The next look, at once, finds it under its new name.
            log.unseen, self._next_look, self._cut_us = 1, 0.0, 0
        elif answer.fault == Passed.UNREADABLE:
            self._outbox.give_up(owner, answer.key, answer.fault, what)
            del self._logs[answer.key]
        elif answer.fault is not None:
            # What has come so far is left out; what comes from now on may be better.
            log.state = {**log.state, "offset": log.file.size}
            self._outbox.give_up(owner, answer.key, answer.fault, what, state=log.state)
        else:
            portions = answer.details["portions"]
            self._ready += [self._portion(answer.key, log, owner, each) for each in portions]
            if portions and answer.details["more"]:
                self._cut_us = 0

    def _portion(self, key: str, log: _Log, owner: Owner, portion: Mapping[str, Any]) -> _Ready:
        who, made = owner.identity, portion["file"]
        state: dict[str, Any] = {name: portion[name] for name in ("offset", "carry", "largest")}
        if who.job is not None and who.rank is not None:
            state |= {
                "job": who.job,
                "attempt": who.attempt,
                "rank": who.rank,
                "size": who.world_size,
            }
        if made is None:
            return _Ready(key, None, state)
        path = Path(made["path"])
        size, sha256 = digest_of(path)
        file = WholeFile(
            name=f"{log.file.name}@{portion['begin_us'] // _US}",
            format=FileFormat.RANK_EVENTS,
            path=path,
            size=size,
            sha256=sha256,
            rank=made["rank"],
            world_size=made["world_size"],
            times=None if made["times"] is None else (made["times"][0], made["times"][1]),
        )
        return _Ready(key, file, state)

    def _ship(self) -> None:
        """Write what is ready, as far as there is space."""
        while self._ready:
            ready = self._ready[0]
            log = self._logs.get(ready.key)
            if log is not None and not self._shipped(ready, log):
                return
            self._ready.pop(0)
            if ready.file is not None:
                with contextlib.suppress(OSError):
                    ready.file.path.unlink()

    def _shipped(self, ready: _Ready, log: _Log) -> bool:
        """Whether a portion, and how far the log was read, could be written."""
        if ready.file is None:
            self._outbox.note(ready.key, ready.state)
        else:
            owner = with_rank(self._owner_of(log), ready.file.rank, ready.file.world_size)
            if not self._outbox.put(owner, ready.file, ready.key, ready.state):
                return False
        log.state = dict(ready.state)
        return True
