"""Kineto: what `torch.profiler` writes, one Chrome trace per rank (``docs/sources.md``).

Kernels, NCCL's among them, annotations, launches. A GPU event belongs to the step whose host side
launched it, not to the step that ran meanwhile: up to half of the GPU events lie outside every
step by their own time. Files of several ages spell things differently; what is missing is said in
the notes.

Flow: file → `smon.trace.formats.chrome` → `smon.trace.kineto_rows` → **here** →
`smon.trace.kineto_columns` → `smon.trace.load`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from smon.errors import TraceError
from smon.trace.events import ProcessGroup, RankEvents, StepSpan, event_columns
from smon.trace.formats.chrome import read_chrome
from smon.trace.formats.reading import Reading, inflated, printable
from smon.trace.kineto_columns import Builder, Identity, times_of
from smon.trace.kineto_rows import Rows, number_of, ranks_of, size_of
from smon.trace.schema import INVALID_NS

NAME: Final = "kineto"
LOOKS_FOR: Final = 'Chrome JSON of torch.profiler: "traceEvents" with "distributedInfo"'
SELF_DESCRIBED: Final = True

_SEARCHED_BYTES: Final = 1 << 16
#: What the profiler writes and other makers of Chrome traces do not.
_KEYS: Final = (b'"distributedInfo"', b'"deviceProperties"')
_KEYS_OF_EVENTS: Final = (b'"schemaVersion"', b'"ProfilerStep#', b'"External id"')
_RANK_IN_NAME: Final = re.compile(r"rank[\[\-_/]?(\d{1,7})")
_MAX_BASE_NS: Final = 2**62


def recognises(head: bytes, path: Path) -> bool:  # noqa: ARG001  # the signature of all readers
    """Whether the file, unpacked if need be, begins like a Chrome trace of Kineto."""
    text = inflated(head, _SEARCHED_BYTES)
    own = any(key in text for key in _KEYS)
    events = b'"traceEvents"' in text and any(key in text for key in _KEYS_OF_EVENTS)
    return b"\0" not in text[:64] and (own or events)


def read(path: Path, rank: int | None = None, world_size: int | None = None) -> Reading:
    """Read the trace of one rank.

    Parameters
    ----------
    rank, world_size
        For whom knows them from elsewhere: used where the file itself has none.

    Raises
    ------
    TraceError
        The file cannot be read; or it has no rank, no step or no collective: the message says
        what was looked for.
    """
    collected = Rows()
    facts = read_chrome(path, collected.take, collected.dropped)
    known = {"rank": rank, "world_size": world_size}
    identity = _identity(_completed(facts, known), path)
    events = _rank_events(collected, identity, number_of(facts.get("baseTimeNanoseconds")), path)
    return Reading(events=(events,))


# --- who ------------------------------------------------------------------------------------


def _completed(facts: Mapping[str, Any], known: Mapping[str, int | None]) -> Mapping[str, Any]:
    """The facts of a file, with what it lacks of who wrote it."""
    info = facts.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    lacking = {
        name: value
        for name, value in known.items()
        if value is not None and size_of(info.get(name)) is None
    }
    return {**facts, "distributedInfo": {**info, **lacking}} if lacking else facts


def _identity(facts: Mapping[str, Any], path: Path) -> Identity:
    info = facts.get("distributedInfo")
    info = info if isinstance(info, dict) else {}
    name = printable(path)
    world = size_of(info.get("world_size"))
    rank = size_of(info.get("rank"))
    notes = []
    if rank is None:
        named = _RANK_IN_NAME.search(path.name)
        if named is None or world is None:
            found = "a world size but no rank" if world is not None else "neither rank nor size"
            raise TraceError(
                f"{name}: whose trace this is cannot be told: looked for rank and world_size in "
                f'"distributedInfo", and for "rank" and a number in the file\'s name beside a '
                f"world size; found {found}"
            )
        rank = int(named[1])
        notes.append(f"{name}: its rank, {rank}, comes from the file's name")
    if world is not None and rank >= world:
        raise TraceError(f"{name}: rank {rank} of a world of {world}: damaged distributedInfo")
    groups = tuple(_groups(info.get("pg_config")))
    declared = size_of(info.get("pg_count"))
    if declared is not None and groups and declared > len(groups):
        notes.append(f"rank {rank} lists {len(groups)} of {declared} process groups: only its own")
    backend, host = info.get("backend"), facts.get("host_name") or facts.get("hostname")
    return Identity(
        rank=rank,
        world_size=world or 0,
        backend=printable(backend) if isinstance(backend, str) else None,
        host=printable(host) if isinstance(host, str) and host else None,
        groups=groups,
        notes=tuple(notes),
    )


def _groups(config: object) -> list[ProcessGroup]:
    """Process groups; two that share name and members are one."""
    entries = config if isinstance(config, list) else []
    groups = [_group(entry) for entry in entries if isinstance(entry, dict)]
    return list(dict.fromkeys(groups))


def _group(entry: Mapping[str, Any]) -> ProcessGroup:
    ranks = ranks_of(entry.get("ranks"))
    return ProcessGroup(
        name=str(entry.get("pg_name", "")),
        description=str(entry.get("pg_desc", "")),
        ranks=ranks,
        size=size_of(entry.get("pg_size")) or len(ranks),
    )


# --- what ---------------------------------------------------------------------------------


def _rank_events(rows: Rows, identity: Identity, base_ns: int | None, path: Path) -> RankEvents:
    base = base_ns if base_ns is not None and 0 <= base_ns < 2**62 else 0
    steps = _steps(rows, base, path)
    if not rows.transfers and not any(rows.host_messages):
        raise TraceError(
            f"{printable(path)}: no collective in {len(rows.kernels):,} kernels and "
            f"{len(rows.annotations):,} annotations: looked for NCCL kernels "
            "(ncclKernel…, ncclDevKernel…) and gloo: spans"
        )
    build = Builder(rows, identity, base, steps)
    columns: dict[str, Any] = event_columns(build.columns(), rows.dropped)
    return RankEvents(
        rank=identity.rank,
        world_size=identity.world_size,
        **columns,
        groups=tuple(build.groups),
        names=tuple(rows.names),
        steps=steps,
        host=identity.host,
        backend=identity.backend,
        on_gpu=bool(rows.kernels),
        dropped=tuple(sorted(rows.dropped.items())),
        notes=(*identity.notes, *build.notes()),
    )


def _steps(rows: Rows, base: int, path: Path) -> tuple[StepSpan, ...]:
    """Step markers by start; one that is recorded twice counts once."""
    spans = [(start, duration, 0, number) for start, duration, number in rows.steps]
    times = times_of(spans, base)
    found = {
        int(number): StepSpan(int(number), int(start), int(duration))
        for number, start, duration in zip(times.name, times.start, times.duration, strict=True)
        if start != INVALID_NS and duration >= 0
    }
    if not found:
        raise TraceError(
            f"{printable(path)}: no step: looked for annotations ProfilerStep#N: call "
            "profiler.step() once per training step"
        )
    return tuple(sorted(found.values(), key=lambda step: step.start_ns))
