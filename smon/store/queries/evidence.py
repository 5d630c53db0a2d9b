"""Side evidence of one rank: its counters beside those of all others, its host, what happened.

Flow: files of side evidence (``smon.context/1``) → **here** → the page of a rank, REST. The worker
reads all of it for the diagnosis; a page reads a bounded part, newest windows first, as plain JSON.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import orjson
import zstandard
from numpy.typing import NDArray
from sqlalchemy import select
from sqlalchemy.orm import Session

from smon.errors import StoreError
from smon.store.models import Attempt, EventFile
from smon.store.objects import Objects

#: Most files of one answer.
MAX_FILES: Final = 200

#: Counters, events and neighbours of one answer.
MAX_COUNTERS: Final = 64
MAX_EVENTS: Final = 200
MAX_NEIGHBOURS: Final = 64

#: Bytes that are unpacked at once.
_CHUNK: Final = 4 << 20

#: Longest document: larger ones are refused on their way in.
_MAX_LINE: Final = 64 << 20

#: Parts of a document that are small, and are read of every rank. Without quotes: the search goes
#: by the last byte, and quotes are everywhere.
_SMALL: Final = (b"hosts", b"gpus", b"events")
_RANKS: Final = b"rank"

#: Longest names that the wire lets in.
_MAX_NAME: Final = 255


@dataclass(frozen=True, slots=True)
class EvidenceLimits:
    """Most bytes of one answer.

    Attributes
    ----------
    packed, unpacked
        Of files, and of what is looked at of them, line by line.
    parsed
        Of counters of other ranks, for the medians: of a large job some of its ranks stand for
        all. Counters of the rank itself are always parsed.
    """

    packed: int = 32 << 20
    unpacked: int = 192 << 20
    parsed: int = 4 << 20


_LIMITS: Final = EvidenceLimits()


@dataclass(frozen=True, slots=True)
class EvidenceFile:
    """A file of side evidence; steps -1: of the whole attempt."""

    path: str
    bytes: int
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True)
class CounterSeries:
    """One counter of a rank over steps; sequences of equal length.

    Attributes
    ----------
    values
        Of this rank.
    median
        Of all other ranks that report it in that step; None where none does.
    others
        How many other ranks report it.
    """

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    median: tuple[float | None, ...]
    others: int


@dataclass(frozen=True, slots=True)
class Happening:
    """Something that the rank, or (`rank` None) the whole job, did besides computing."""

    kind: str
    step: int
    rank: int | None
    duration_s: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """Side evidence of one rank.

    Attributes
    ----------
    neighbours
        Other ranks of the same host, ascending, the first of `neighbours_count`.
    complete
        False if something was left out: there was too much, or it could not be read.
    """

    host: str | None = None
    gpu_uuid: str | None = None
    neighbours: tuple[int, ...] = ()
    neighbours_count: int = 0
    counters: tuple[CounterSeries, ...] = ()
    happenings: tuple[Happening, ...] = ()
    complete: bool = True


def evidence_files(
    session: Session, tenant_id: str, job_id: str, attempt: int, steps: tuple[int, int] | None
) -> tuple[EvidenceFile, ...]:
    """Files of side evidence of an attempt, of these steps and of the whole, newest steps last."""
    query = (
        select(EventFile.path, EventFile.bytes, EventFile.first_step, EventFile.last_step)
        .join(Attempt, Attempt.id == EventFile.attempt_id)
        .where(
            EventFile.tenant_id == tenant_id,
            EventFile.job_id == job_id,
            EventFile.kind == "context",
            EventFile.doomed_ns.is_(None),
            Attempt.number == attempt,
        )
        .order_by(EventFile.first_step.desc(), EventFile.created_ns.desc())
        .limit(MAX_FILES + 1)
    )
    if steps is not None:
        of_them = (EventFile.first_step <= steps[1]) & (EventFile.last_step >= steps[0])
        query = query.where(of_them | (EventFile.last_step < 0))
    return tuple(EvidenceFile(*row) for row in reversed(session.execute(query).all()))


def evidence_of(
    objects: Objects,
    files: Sequence[EvidenceFile],
    rank: int,
    steps: tuple[int, int] | None = None,
    limits: EvidenceLimits = _LIMITS,
) -> Evidence:
    """Side evidence of one rank.

    Parameters
    ----------
    files
        Of `evidence_files`.
    steps
        First and last step that are wanted.
    limits
        How much is read, newest steps first.
    """
    wanted, complete = _within_limits(files, limits)
    found = _Found(rank, steps)
    for document in _documents(objects, wanted, found, limits):
        found.add(document)
    hosts = found.hosts
    host = hosts.get(rank)
    neighbours = sorted(each for each, name in hosts.items() if name == host and each != rank)
    return Evidence(
        host=host,
        gpu_uuid=found.gpu_uuid,
        neighbours=tuple(neighbours[:MAX_NEIGHBOURS]) if host is not None else (),
        neighbours_count=len(neighbours) if host is not None else 0,
        counters=found.counters(),
        happenings=tuple(sorted(found.happenings, key=lambda one: -one.step)[:MAX_EVENTS]),
        complete=complete and not found.damaged,
    )


def _within_limits(
    files: Sequence[EvidenceFile], limits: EvidenceLimits
) -> tuple[list[EvidenceFile], bool]:
    """Those of the whole attempt, oldest first, then the newest steps first, as many as may be."""
    whole = [one for one in files if one.last_step < 0]
    order = [*whole, *sorted(set(files).difference(whole), key=lambda one: -one.first_step)]
    chosen: list[EvidenceFile] = []
    size = 0
    for one in order[:MAX_FILES]:
        size += one.bytes
        if size > limits.packed:
            break
        chosen.append(one)
    return chosen, len(chosen) == len(files)


def _documents(
    objects: Objects, files: Sequence[EvidenceFile], found: _Found, limits: EvidenceLimits
) -> Iterator[Mapping[str, Any]]:
    """Documents that are about the rank or about names, and some of the others of each file."""
    unpacked = limits.unpacked
    for file in files:
        left = limits.parsed // len(files)
        for line in _lines(objects, file, found):
            unpacked -= len(line)
            if unpacked < 0:
                found.damaged = True
                return
            if not _concerns(line, found.rank):
                left -= len(line)
                if left < 0:
                    continue
            document = _parsed(line)
            if document is None:
                found.damaged = True
            else:
                yield document


def _concerns(line: bytes, rank: int) -> bool:
    """Whether a document may have counters of the rank, names, or what happened.

    Parsing the counters of 16,384 ranks would take many seconds; finding a number in them does not.
    """
    if any(name in line for name in _SMALL):
        return True
    number, begin = b"%d" % rank, line.find(_RANKS)
    while begin >= 0:
        begin += len(_RANKS)
        column = line[begin : line.find(b"]", begin)].lstrip(b'" :[')
        if number in column and number in column.replace(b" ", b"").split(b","):
            return True
        begin = line.find(_RANKS, begin)
    return False


def _lines(objects: Objects, file: EvidenceFile, found: _Found) -> Iterator[bytes]:
    """Lines of a file; no more than one of them and a little beyond is in memory at once."""
    try:
        packed = objects.get(file.path)
        with zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)) as stream:
            rest = b""
            while chunk := stream.read(_CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from lines
                if len(rest) > _MAX_LINE:
                    found.damaged = True
                    return
            yield rest
    except (StoreError, zstandard.ZstdError):
        found.damaged = True


def _parsed(line: bytes) -> Mapping[str, Any] | None:
    try:
        document = orjson.loads(line) if line.strip() else {}
    except orjson.JSONDecodeError:
        return None
    return document if isinstance(document, dict) else None


@dataclass(slots=True)
class _Readings:
    """Rows of one counter, as they come."""

    steps: list[NDArray[np.int64]] = field(default_factory=list)
    ranks: list[NDArray[np.int64]] = field(default_factory=list)
    values: list[NDArray[np.float64]] = field(default_factory=list)


@dataclass(slots=True)
class _Found:
    """What has been read for one rank."""

    rank: int
    wanted: tuple[int, int] | None
    hosts: dict[int, str] = field(default_factory=dict)
    gpu_uuid: str | None = None
    readings: dict[str, _Readings] = field(default_factory=dict)
    happenings: set[Happening] = field(default_factory=set)
    damaged: bool = False

    def add(self, document: Mapping[str, Any]) -> None:
        """What one document says; what cannot be read is left out and noted."""
        try:
            self._add_names(document)
            self._add_counters(document.get("counters") or {})
            self._add_happenings(document.get("events") or {})
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self.damaged = True

    def _add_names(self, document: Mapping[str, Any]) -> None:
        for rank, host in (document.get("hosts") or {}).items():
            self.hosts[int(rank)] = str(host)[:_MAX_NAME]
        gpu = (document.get("gpus") or {}).get(str(self.rank))
        if gpu is not None:
            self.gpu_uuid = str(gpu)[:_MAX_NAME]

    def _add_counters(self, table: Mapping[str, Any]) -> None:
        if not table:
            return
        steps = np.array(table["step"], np.int64)
        ranks = np.array(table["rank"], np.int64)
        values = np.array(table["value"], np.float64)
        numbers: dict[str, int] = {}
        names = np.array([numbers.setdefault(each, len(numbers)) for each in table["name"]])
        if not len(steps) == len(ranks) == len(values) == len(names):
            self.damaged = True
            return
        inside = np.ones(len(steps), bool)
        if self.wanted is not None:
            inside = (steps >= self.wanted[0]) & (steps <= self.wanted[1])
        for name, number in numbers.items():
            mine = inside & (names == number)
            kept = self.readings.setdefault(str(name)[:_MAX_NAME], _Readings())
            kept.steps.append(steps[mine])
            kept.ranks.append(ranks[mine])
            kept.values.append(values[mine])

    def _add_happenings(self, table: Mapping[str, Any]) -> None:
        if not table:
            return
        columns = (table["kind"], table["step"], table["rank"], table["duration_s"])
        for kind, step, rank, duration_s in zip(*columns, strict=True):
            if rank in (None, self.rank) and self._wants(step):
                self.happenings.add(Happening(str(kind), int(step), rank, float(duration_s)))

    def _wants(self, step: int) -> bool:
        return self.wanted is None or self.wanted[0] <= step <= self.wanted[1]

    def counters(self) -> tuple[CounterSeries, ...]:
        """Counters that this rank reports, by name."""
        found = (_series(name, self.rank, kept) for name, kept in sorted(self.readings.items()))
        return tuple(one for one in found if one is not None)[:MAX_COUNTERS]


def _series(name: str, rank: int, kept: _Readings) -> CounterSeries | None:
    steps, ranks, values = (np.concatenate(part) for part in (kept.steps, kept.ranks, kept.values))
    mine = ranks == rank
    if not mine.any():
        return None
    # Of two readings of one step the later one holds.
    own = dict(zip(steps[mine].tolist(), values[mine].tolist(), strict=True))
    medians = _medians_of(steps[~mine], values[~mine])
    shown = tuple(sorted(own))
    return CounterSeries(
        name=name,
        steps=shown,
        values=tuple(own[step] for step in shown),
        median=tuple(medians.get(step) for step in shown),
        others=len(np.unique(ranks[~mine])),
    )


def _medians_of(steps: NDArray[np.int64], values: NDArray[np.float64]) -> dict[int, float]:
    if not len(steps):
        return {}
    order = np.argsort(steps, kind="stable")
    numbers, begins = np.unique(steps[order], return_index=True)
    parts = np.split(values[order], begins[1:])
    return {
        step: float(np.median(part)) for step, part in zip(numbers.tolist(), parts, strict=True)
    }
