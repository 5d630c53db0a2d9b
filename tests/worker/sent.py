"""Files of ranks as agents send them and ingest stores them, without a server."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from smon.ingest.ports import SqlStore
from smon.store.commit import NewParts
from smon.store.events import part_path
from smon.store.files import FileLimits, NewPart
from smon.store.models import Mode, new_uuid
from smon.store.streams import StreamInfo
from smon.topology import Layout
from smon.trace.formats import kineto
from smon.trace.formats.rank_events import packed
from smon.wire import BatchKind
from smon.wire.parts import FileFormat, FilePart
from tests.worker.feed import START_NS, Store

LIMITS = FileLimits(1000, 1 << 30)


def file_parts(
    content: bytes,
    *,
    size: int = 0,
    **given: Any,  # noqa: ANN401  # fields of FilePart
) -> list[FilePart]:
    """The parts of a file, of so many bytes each; one if no size is given."""
    step = size or len(content)
    pieces = [content[at : at + step] for at in range(0, len(content), step)]
    known = {
        "name": "file",
        "format": FileFormat.RANK_EVENTS,
        "rank": 0,
        "world_size": None,
        "sha256": hashlib.sha256(content).hexdigest(),
        "bytes": len(content),
        "first_step": None,
        "last_step": None,
        "start_ns": None,
        "end_ns": None,
    }
    return [
        FilePart(**{**known, "part": place, "parts": len(pieces), "content": piece, **given})
        for place, piece in enumerate(pieces)
    ]


def file_stream(store: Store, world: int, **given: Any) -> StreamInfo:  # noqa: ANN401  # as Store.stream
    """The stream of an agent that watches a folder, of a job of so many ranks."""
    known = {"source": "files", "ranks": (), "mode": Mode.LIVE}
    return store.stream(Layout(dp=world, pp=1), **{**known, **given})


def send_parts(
    store: Store,
    stream: StreamInfo,
    parts: Sequence[FilePart],
    limits: FileLimits = LIMITS,
    *,
    end: bool = False,
) -> tuple[str, ...]:
    """Store parts as the drain does; why files were dropped."""
    now = store.clock()
    new, notes = [], []
    for part in parts:
        path = part_path(stream.job_id, now, new_uuid())
        store.objects.put(path, part.content)
        new.append(
            NewPart(
                id=new_uuid(),
                tenant_id=stream.tenant_id,
                job_id=stream.job_id,
                attempt_id=stream.attempt_id,
                path=path,
                bytes=len(part.content),
                part=replace(part, content=b""),
            )
        )
        notes.append(store.note(stream, BatchKind.FILE, 1))
    if end:
        notes.append(store.note(stream, BatchKind.END))
    sent = NewParts(tuple(new), limits)
    dropped = SqlStore(store.database, store.objects).commit(notes, (), now, sent)
    return tuple(reason.value for reason in dropped)


def kineto_files(folder: Path) -> dict[int, bytes]:
    """What an agent makes of the Kineto files of a folder, by rank."""
    found = {}
    for path in sorted(folder.iterdir()):
        if "trace.json" in path.name:
            (events,) = kineto.read(path).events
            found[events.rank] = packed(events, kineto.NAME)
    return found


def dump_parts(content: bytes, rank: int, world: int, at_ns: int = START_NS) -> list[FilePart]:
    """The one part of a dump."""
    return file_parts(
        content,
        name=f"nccl_trace_rank_{rank}",
        format=FileFormat.FLIGHT_RECORDER,
        rank=rank,
        world_size=world,
        start_ns=at_ns,
        end_ns=at_ns,
    )
