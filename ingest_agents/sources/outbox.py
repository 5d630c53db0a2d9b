"""Streams of files, one per job and attempt: what is shipped, what is passed over, and why.

Which files were dealt with is written in the same record as the batch that deals with them, so
that neither a restart nor a kill ships one twice or forgets one.

Flow: `ingest_agents.sources.profiles`, `ingest_agents.sources.logs` → **here** → spool.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ingest_agents.config import AgentSettings
from ingest_agents.files import MAX_BYTES, WholeFile, file_batches, parts_of
from ingest_agents.payload import Gap, clean, end_batch
from ingest_agents.sender import Say
from ingest_agents.sources.processes import Owner, Processes
from ingest_agents.sources.reducing import Reducer
from ingest_agents.spool.folder import StreamSpec, key_of, read_spec, streams_in
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.errors import StoreError
from smon.topology import Layout
from smon.wire import Batch

SOURCE: Final = "files"

#: A stream of a job that has no process here any more ends if nothing comes for so long.
_IDLE_S: Final = 86_400.0

#: Files of earlier states that are remembered at most, so that copies are known as such.
_MAX_DIGESTS: Final = 4096

_FILE: Final = "file:"
_TOLD: Final = "told:"
_ENDED: Final = "ended"

#: The files of a job and attempt.
Job = tuple[str, int]


@dataclass(slots=True)
class _Stream:
    """One stream, and what it knows of files, by key.

    `news` is to be written with the next batch: if that is forgotten, it is found out again.
    """

    writer: SpoolWriter
    used: float
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    news: dict[str, Any] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    told: Counter[str] = field(default_factory=Counter)

    def knows(self, key: str, state: Mapping[str, Any]) -> None:
        """Take note of a file."""
        self.files[key] = self.news[f"{_FILE}{key}"] = dict(state)

    def write(self, batch: Batch, position: Mapping[str, Any]) -> bool:
        """Write a batch with all that is new; whether there was space."""
        if not self.writer.try_append(batch, {**self.news, **position}):
            return False
        self.news.clear()
        return True


class Budget:
    """Bytes that may be shipped in an hour, by all sources together.

    Parameters
    ----------
    file_hour_bytes
        0: no limit.
    clock
        Seconds that never go back.
    """

    def __init__(self, file_hour_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._left = file_hour_bytes, float(file_hour_bytes)
        self._clock, self._at = clock, clock()

    def allows(self, size: int) -> bool:
        """Take so many bytes, if that is allowed."""
        now = self._clock()
        self._left = min(self._left + (now - self._at) * self._limit / 3600, float(self._limit))
        self._at = now
        if self._limit and size > self._left:
            return False
        self._left -= size
        return True


@dataclass(frozen=True, slots=True)
class Shared:
    """What the sources of files have in common.

    Attributes
    ----------
    settings
        Of the agent.
    host
        Name of this machine.
    processes
        Who runs here.
    reducer
        Reads profiles.
    budget
        Bytes that may be shipped.
    say
        For people.
    wall, clock
        Unix ns, and seconds that never go back.
    """

    settings: AgentSettings
    host: str
    processes: Processes
    reducer: Reducer
    budget: Budget
    say: Say
    wall: Callable[[], int] = time.time_ns
    clock: Callable[[], float] = time.monotonic

    @property
    def oldest_ns(self) -> int:
        """Files that were last changed before this are not shipped, if the agent starts now."""
        return self.wall() - int(self.settings.file_age_s * 10**9)


class Outbox:
    """The streams of one source of files.

    Parameters
    ----------
    kind
        Of the source: part of the streams' names.
    shared
        What all sources have in common.

    Attributes
    ----------
    passed
        Files that were passed over since the start, by reason.
    """

    def __init__(self, kind: str, shared: Shared) -> None:
        self.passed: Counter[str] = Counter()
        self._unsaid: dict[str, str] = {}
        settings = shared.settings
        self._kind, self._settings, self._host = kind, settings, shared.host
        self._processes, self._budget, self._say = shared.processes, shared.budget, shared.say
        self._clock = shared.clock
        self._root = Path(settings.spool_dir)
        self._limits = SpoolLimits(settings.segment_bytes, settings.segment_s, settings.cap_bytes)
        self._streams: dict[Job, _Stream] = {}
        self._finished: set[str] = set()
        self._digests: dict[str, None] = {}
        self._reopen()

    # --- streams --------------------------------------------------------------------------------

    def _reopen(self) -> None:
        """Go on with the streams that an earlier agent has left."""
        for folder in streams_in(self._root):
            try:
                spec = read_spec(folder)
                if spec.source == SOURCE and spec.key.startswith(f"{self._prefix}/"):
                    self._open(spec)
            except StoreError as error:
                self._say(f"stream {folder.name}", str(error))

    @property
    def _prefix(self) -> str:
        return f"{SOURCE}-{self._kind}"

    def _open(self, spec: StreamSpec) -> _Stream | None:
        """A stream of the spool; None if it has ended."""
        writer = SpoolWriter(self._root, spec, self._limits, clock=self._clock)
        if writer.position.get(_ENDED):
            writer.close()
            return None
        stream = _Stream(writer, self._clock())
        for name, value in writer.position.items():
            if name.startswith(_FILE) and isinstance(value, dict):
                stream.files[name.removeprefix(_FILE)] = value
                self._finish(name.removeprefix(_FILE), value)
            elif name.startswith(_TOLD) and isinstance(value, int):
                stream.told[name.removeprefix(_TOLD)] = value
        stream.lost = stream.told.copy()
        self._streams[spec.job, spec.attempt] = stream
        return stream

    def _stream_of(self, owner: Owner, job: Job, file: WholeFile | None) -> _Stream:
        """The stream of a job, made if need be.

        Raises
        ------
        StoreError
            The spool cannot be written.
        """
        if job not in self._streams:
            self._open(self._spec(owner, job, file))
        return self._streams[job]

    def _spec(self, owner: Owner, job: Job, file: WholeFile | None) -> StreamSpec:
        world = (file.world_size if file else None) or owner.identity.world_size
        layout = owner.identity.layout or Layout(dp=world or 1, pp=1)
        known = self._processes.ranks_of(job)
        return StreamSpec(
            # Of its own, so that a job that comes back after its stream has ended gets another.
            key=key_of(self._prefix, *job, self._host, time.time_ns()),
            job=job[0],
            attempt=job[1],
            layout=layout,
            mode="live",
            time="unix",
            host=self._host,
            source=SOURCE,
            ranks=known if max(known, default=0) < layout.world_size else (),
            window_steps=self._settings.window_steps or None,
        )

    # --- what is known of files -----------------------------------------------------------------

    def state(self, key: str) -> dict[str, Any]:
        """What was last written of a file; empty if nothing was."""
        for stream in self._streams.values():
            if key in stream.files:
                return stream.files[key]
        return {}

    def is_done(self, key: str) -> bool:
        """Whether a file was shipped or given up, by this agent or an earlier one."""
        return key in self._finished

    def is_copy(self, digest: str) -> bool:
        """Whether a file of this content was shipped."""
        return digest in self._digests

    def forget(self, keys: Iterable[str]) -> None:
        """Drop what is known of files that are gone."""
        for key in keys:
            self._finished.discard(key)
            for stream in self._streams.values():
                if stream.files.pop(key, None) is not None:
                    stream.news.pop(f"{_FILE}{key}", None)
                    stream.writer.position.pop(f"{_FILE}{key}", None)

    def _remember(self, state: Mapping[str, Any]) -> None:
        digest = state.get("digest")
        if isinstance(digest, str):
            self._digests[digest] = None
            while len(self._digests) > _MAX_DIGESTS:
                del self._digests[next(iter(self._digests))]

    # --- shipping -------------------------------------------------------------------------------

    def put(self, owner: Owner, file: WholeFile, key: str, state: Mapping[str, Any]) -> bool:
        """Write a file to the stream of its job, and what is known of it from now on.

        Returns
        -------
        bool
            False if there is no space now: try again. What was written stays.

        Raises
        ------
        OSError
            The content cannot be read.
        """
        if owner.job is None:
            self.pass_over(key, "job-unknown", file.name)
            return True
        if not 0 < file.size <= MAX_BYTES:
            return self.give_up(owner, key, "too-large", file.name, state=state)
        job = (clean(owner.job[0]), owner.job[1])
        before = self.state(key)
        same = before.get("sha256") == file.sha256
        if not same and not self._budget.allows(file.size):
            return self.give_up(owner, key, "hourly-limit", file.name, state=state)
        try:
            stream = self._stream_of(owner, job, file)
        except StoreError as error:
            self._say("spool", str(error))
            return False
        return self._append(stream, file, key, state, before.get("parts", 0) if same else 0)

    def _append(
        self,
        stream: _Stream,
        file: WholeFile,
        key: str,
        state: Mapping[str, Any],
        first: int,
    ) -> bool:
        before = stream.files.get(key) or {}
        for number, batch in enumerate(file_batches(file, first), first + 1):
            last = number == parts_of(file)
            known = state if last else {**before, "sha256": file.sha256, "parts": number}
            if not stream.write(batch, {f"{_FILE}{key}": dict(known)}):
                return False
            stream.files[key] = dict(known)
        stream.used = self._clock()
        self._finish(key, state)
        return True

    def _finish(self, key: str, state: Mapping[str, Any]) -> None:
        if state.get("done"):
            self._finished.add(key)
        self._remember(state)

    def give_up(
        self,
        owner: Owner,
        key: str,
        reason: str,
        what: str,
        *,
        state: Mapping[str, Any] | None = None,
    ) -> bool:
        """Leave a file or a part of it out for good: counted, said, and told to the server.

        Parameters
        ----------
        what
            Which file, and what is wrong, for people.
        state
            What is known of the file from now on; by default that it is done with.

        Returns
        -------
        bool
            True: there is nothing to try again.
        """
        known = dict(state or {"done": reason})
        self.pass_over(key, reason, what, state=known)
        job = owner.job
        if job is not None:
            try:
                stream = self._stream_of(owner, (clean(job[0]), job[1]), None)
            except StoreError:
                return True
            stream.lost[reason] += 1
            stream.knows(key, known)
            self._tell(stream)
        return True

    def pass_over(
        self, key: str, reason: str, what: str, *, state: Mapping[str, Any] | None = None
    ) -> None:
        """Leave a file out until the agent starts anew: counted and said."""
        self._finish(key, state or {"done": reason})
        self.passed[reason] += 1
        self._unsaid[reason] = what

    def lacks(self, libraries: Sequence[str]) -> None:
        """Say, once, that profiles cannot be read here."""
        self._say(
            f"{self._kind} libraries",
            f"{self._kind}: files stay unread: {', '.join(libraries)} is not installed here: "
            'pip install "smon[agent]"',
        )

    def failed(self, error: OSError) -> None:
        """Say that the system refused something; it is tried again."""
        self._say(f"{self._kind} system", f"{self._kind}: {error.strerror or error}; trying again")

    def rankless(self, what: str) -> None:
        """Say that nobody knows of which rank a file is."""
        self._say(
            f"{self._kind} rank",
            f"{self._kind}: {what} goes without a rank: neither its name, nor a process on this "
            "host, nor its content has one",
        )

    def _speak(self) -> None:
        """Say what was passed over since the last time, a sentence for each reason."""
        for reason, what in self._unsaid.items():
            self._say(
                f"{self._kind} {reason}",
                f"{self._kind}: {self.passed[reason]} passed over, {reason}, the last: {what}",
            )
        self._unsaid.clear()

    def note(self, key: str, state: Mapping[str, Any]) -> None:
        """What is known of a file from now on, to be written with the next batch."""
        for stream in self._streams.values():
            if key in stream.files:
                stream.knows(key, state)

    def _tell(self, stream: _Stream) -> None:
        """Tell the server of files that were left out, each once."""
        for reason, count in (stream.lost - stream.told).items():
            seq = stream.writer.next_seq
            told = {f"{_TOLD}{reason}": stream.lost[reason]}
            if not stream.write(Gap(seq, seq, count, reason).batch(), told):
                return
            stream.told[reason] = stream.lost[reason]

    # --- rounds ---------------------------------------------------------------------------------

    def tend(self) -> None:
        """Say and tell what was passed over; end streams of jobs that are gone."""
        now = self._clock()
        self._speak()
        for job, stream in list(self._streams.items()):
            self._tell(stream)
            stream.writer.flush()
            if self._processes.runs(job):
                stream.used = now
            ends = now - stream.used > _IDLE_S
            if ends and stream.write(end_batch("job-gone"), {_ENDED: True}):
                stream.writer.close()
                del self._streams[job]

    def close(self) -> None:
        """Let go of the spool. The streams go on after a restart."""
        for stream in self._streams.values():
            stream.writer.close()
        self._streams.clear()


def with_rank(owner: Owner, rank: int | None, world_size: int | None) -> Owner:
    """An owner, with what the file itself says of rank and size where nobody else knows."""
    who = owner.identity
    changed = replace(
        who,
        rank=who.rank if rank is None else rank,
        world_size=who.world_size if world_size is None else world_size,
    )
    return replace(owner, identity=changed)
