"""Files of one move from the log: ops by window, side evidence by window, parts of files of ranks.

Flow: `smon.ingest.drain` → **here** → `smon.store.events`. All batches of one attempt become one
file for each window that they touch.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from smon.ingest.decode import Content
from smon.ingest.order import WindowOps, by_window
from smon.ingest.ports import Store
from smon.ingest.records import Origin, RecordHead
from smon.store.commit import CONTEXT, OPS, NewFile
from smon.store.events import context_path, ops_path, part_path
from smon.store.files import NewPart


@dataclass(frozen=True, slots=True)
class Item:
    """A batch on its way from the log to the store."""

    head: RecordHead
    content: Content


@dataclass(frozen=True, slots=True)
class _Place:
    """What one file is of: an attempt, or a window of it."""

    tenant_id: str
    job_id: str
    attempt_id: str
    window_steps: int
    step_relative: bool

    def window(self, step: int) -> int:
        return step // self.window_steps if self.window_steps else 0


def _place(origin: Origin) -> _Place:
    return _Place(
        origin.tenant_id,
        origin.job_id,
        origin.attempt_id,
        origin.window_steps,
        origin.step_relative,
    )


def write_files(store: Store, items: Sequence[Item], now_ns: int, files: list[NewFile]) -> None:
    """Write the files of these batches, and add each to `files` when it is there.

    Raises
    ------
    StoreError
        One cannot be written; `files` has those before it.
    """
    ops: dict[_Place, list[pa.RecordBatch]] = defaultdict(list)
    evidence: dict[tuple[_Place, int | None], list[Content]] = defaultdict(list)
    for item in items:
        place, content = _place(item.head.origin), item.content
        if content.ops is not None and content.ops.num_rows:
            ops[place].append(content.ops)
        elif content.evidence is not None:
            first = content.evidence.first_step
            window = None if first is None else place.window(first)
            evidence[place, window].append(content)
    for place, batches in ops.items():
        # One by one: if a later one fails, those that are written are known.
        files.extend(
            _write_ops(store, place, part, now_ns)
            for part in by_window(batches, place.window_steps)
        )
    for (place, window), contents in evidence.items():
        files.append(_write_evidence(store, place, window, contents, now_ns))


def write_parts(store: Store, items: Sequence[Item], now_ns: int, parts: list[NewPart]) -> None:
    """Write the parts of files of ranks among these batches, and add each to `parts`.

    Raises
    ------
    StoreError
        One cannot be written; `parts` has those before it.
    """
    for item in items:
        part, origin = item.content.part, item.head.origin
        if part is None:
            continue
        file_id = str(uuid.uuid4())
        path = part_path(origin.job_id, now_ns, file_id)
        size = store.write_part(path, part.content)
        parts.append(
            NewPart(
                id=file_id,
                tenant_id=origin.tenant_id,
                job_id=origin.job_id,
                attempt_id=origin.attempt_id,
                path=path,
                bytes=size,
                part=replace(part, content=b""),
            )
        )


def _write_ops(store: Store, place: _Place, part: WindowOps, now_ns: int) -> NewFile:
    file_id = str(uuid.uuid4())
    path = ops_path(place.job_id, now_ns, part.window, file_id)
    size = store.write_ops(path, part.table, step_relative=place.step_relative)
    return NewFile(
        id=file_id,
        tenant_id=place.tenant_id,
        job_id=place.job_id,
        attempt_id=place.attempt_id,
        window_number=part.window,
        kind=OPS,
        path=path,
        rows=part.table.num_rows,
        bytes=size,
        first_step=part.first_step,
        last_step=part.last_step,
    )


def _write_evidence(
    store: Store, place: _Place, window: int | None, contents: Sequence[Content], now_ns: int
) -> NewFile:
    found = [content.evidence for content in contents if content.evidence is not None]
    file_id = str(uuid.uuid4())
    path = context_path(place.job_id, now_ns, window, file_id)
    size = store.write_context(path, [each.document for each in found])
    firsts = [each.first_step for each in found if each.first_step is not None]
    lasts = [each.last_step for each in found if each.last_step is not None]
    return NewFile(
        id=file_id,
        tenant_id=place.tenant_id,
        job_id=place.job_id,
        attempt_id=place.attempt_id,
        window_number=window,
        kind=CONTEXT,
        path=path,
        rows=len(found),
        bytes=size,
        first_step=min(firsts, default=-1),
        last_step=max(lasts, default=-1),
    )
