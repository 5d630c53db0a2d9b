"""Load a trace: paths, as a person gives them → one op table and the job it belongs to.

Flow: paths → **here** (`smon.trace.formats`, `smon.trace.meta`) → `smon.trace.grid`. What cannot
be used is one sentence in an error; what is left out is one in the notes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smon.errors import MetaError, NothingUsableError, TopologyError, TraceError
from smon.ops import STREAM_COMPUTE
from smon.topology import Layout
from smon.trace.formats.reading import Reading, numbered, printable
from smon.trace.meta import Job
from smon.trace.sources import Source, find_sources, job_beside, job_of_meta
from smon.trace.table import OpTable, concat

#: Called with what is being done, and how much of it is done, of how much.
Progress = Callable[[str, int, int], None]

#: Ranks are 32-bit in the table, far above any job.
_MAX_WORLD_SIZE = 2**31 - 1

#: A layout is inferred only if at least this share of its workers occurs in the trace: one wrong
#: rank number must not make a job of a million workers.
_MIN_SEEN_SHARE = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A window of a job, as far as its files go.

    Attributes
    ----------
    table
        Ops of all files.
    job
        Name and layout.
    notes
        Sentences for the report: files left out, a layout that was inferred.
    sources
        Files that were read.
    """

    table: OpTable
    job: Job
    notes: tuple[str, ...]
    sources: tuple[Path, ...]


def load(
    paths: Sequence[Path],
    *,
    meta: Path | None = None,
    layout: Layout | None = None,
    format_name: str | None = None,
    steps: tuple[int | None, int | None] | None = None,
    progress: Progress | None = None,
) -> Trace:
    """Read the trace of one job.

    Parameters
    ----------
    paths
        Files, or folders of files (and of folders of files): one job's.
    meta
        Its meta file. By default it is looked for beside the files: ``meta-X.yaml`` for
        ``trace-X.parquet``, ``X.meta.yaml`` for ``X.parquet``, ``meta.yaml``; also ``.yml`` and
        ``.json``.
    layout
        Its layout. Must agree with the meta file, if there is one.
    format_name
        Read every file as this format; by default, its content says.
    steps
        First and last step to keep, both included; None is open.
    progress
        Called after each file.

    Raises
    ------
    ConfigError
        There is no such format.
    UnknownFormatError
        No reader recognises a file, or any file of a folder.
    MetaError
        The layout is not given and cannot be inferred, or contradicts the meta file or the trace.
    NothingUsableError
        There is no op at all, or none in `steps`.
    TraceError
        A file is absent, unreadable, empty or damaged.
    """
    sources, notes = find_sources(paths, format_name)
    job = _declared_job(sources, meta, layout)
    readings, more = _read(sources, progress)
    notes += more + [note for _, reading in readings for note in reading.notes]
    table = _one_table([reading for _, reading in readings])
    name = _name(readings)
    if job is None:
        job = Job(
            name, layout or _inferred_layout(table, max(reading.tp for _, reading in readings))
        )
        if layout is None:
            notes.append(
                f"the layout {job.layout} was inferred from the ranks in the trace: "
                "a rank that sent nothing at all cannot be noticed"
            )
    table, more = fitted(table, job.layout)
    notes += more
    used = tuple(source.path for source, _ in readings)
    return Trace(_cut(table, steps), job, tuple(notes), used)


def fitted(table: OpTable, layout: Layout) -> tuple[OpTable, list[str]]:
    """A table checked against its layout and completed by it, and notes on it.

    Raises
    ------
    MetaError
        The table has ranks that the layout has not.
    """
    notes = _checked(table, layout)
    return _with_global_chunks(table, layout.pp), notes


def _declared_job(
    sources: Sequence[Source], meta: Path | None, layout: Layout | None
) -> Job | None:
    """The job as its meta file says; None if there is none, but the files or `layout` will do."""
    job = job_beside(sources) if meta is None else job_of_meta(meta)
    if job is not None and layout is not None and job.layout != layout:
        raise MetaError(
            f"the given layout {layout} and the meta file's {job.layout} differ: "
            "leave one out, or correct it"
        )
    if job is None and layout is None:
        for source in sources:
            if not source.reader.SELF_DESCRIBED:
                raise MetaError(source.missing_meta())
    return job


def _read(
    sources: Sequence[Source], progress: Progress | None
) -> tuple[list[tuple[Source, Reading]], list[str]]:
    """Every file's content; a damaged one of a folder is left out with a note."""
    readings: list[tuple[Source, Reading]] = []
    notes: list[str] = []
    failures: list[TraceError] = []
    for done, source in enumerate(sources, 1):
        try:
            readings.append((source, source.reader.read(source.path)))
        except TraceError as error:
            if source.folder is None:
                raise
            failures.append(error)
            notes.append(f"left out: {error}")
        if progress is not None:
            progress("read", done, len(sources))
    if not readings:
        raise failures[0]
    return readings, notes


def _one_table(readings: Sequence[Reading]) -> OpTable:
    table = concat(reading.table for reading in readings)
    if not len(table):
        found = ", ".join(f"{count} × {reason}" for reason, count in table.dropped)
        raise NothingUsableError(f"the trace has no usable op; found {found or 'no row at all'}")
    unnumbered = frozenset[str]().union(*(reading.unnumbered for reading in readings))
    # One rank's ops of a step can be spread over files: only all of them together can be counted.
    return numbered(table, unnumbered) if unnumbered and len(readings) > 1 else table


# --- the layout -----------------------------------------------------------------------------


def _name(readings: Sequence[tuple[Source, Reading]]) -> str:
    """The job's name, from the content of the files, else from their names.

    Raises
    ------
    TraceError
        The files say that they are of several jobs.
    """
    names = sorted({reading.job_id for _, reading in readings if reading.job_id is not None})
    if len(names) > 1:
        shown = ", ".join(repr(name) for name in names[:3])
        raise TraceError(f"expected files of one job, found those of {len(names)}: {shown}")
    return names[0] if names else _name_of_files([source for source, _ in readings])


def _name_of_files(sources: Sequence[Source]) -> str:
    """A file's name without ``trace-``; the folder's if there are several files, or only that."""
    first = sources[0]
    stem = first.stem.removeprefix("trace").lstrip("-_")
    if len(sources) > 1 or not stem:
        folder = first.folder or first.path.parent
        stem = folder.absolute().name
    return printable(stem) or "trace"


def _inferred_layout(table: OpTable, tp: int) -> Layout:
    dp, pp, vpp = (int(column.max()) + 1 for column in (table.dp, table.stage, table.chunk))
    seen = len(np.unique((table.dp.astype(np.int64) << 32) + table.stage))
    if seen < _MIN_SEEN_SHARE * dp * pp:
        raise MetaError(
            f"the ranks go up to dp_rank {dp - 1} and stage {pp - 1}, but only {seen} of these "
            f"{dp * pp} workers occur: give --layout or --meta"
        )
    try:
        return Layout(dp=dp, pp=pp, tp=max(tp, 1), vpp=max(vpp, 1))
    except TopologyError as error:
        raise MetaError(f"no layout can be inferred: {error}: give --layout or --meta") from error


def _checked(table: OpTable, layout: Layout) -> list[str]:
    """Notes on a layout that fits the trace.

    Raises
    ------
    MetaError
        It does not: names the first contradiction.
    """
    if layout.world_size > _MAX_WORLD_SIZE:
        raise MetaError(f"layout {layout} has {layout.world_size} ranks: correct its sizes")
    for name, values, size in (("dp_rank", table.dp, layout.dp), ("stage", table.stage, layout.pp)):
        if values.max() >= size:
            raise MetaError(
                f"the trace has {name} {values.max()}, but layout {layout} allows 0 to {size - 1}: "
                "correct --layout or the meta file"
            )
    _check_ranks(table, layout)
    chunks = int(table.chunk.max()) + 1
    if chunks > layout.vpp:
        return [f"the trace has {chunks} model chunks per stage, the layout says vpp{layout.vpp}"]
    return []


def _check_ranks(table: OpTable, layout: Layout) -> None:
    per_worker = layout.tp * layout.cp
    # Cannot overflow: the layout has at most `_MAX_WORLD_SIZE` ranks, and holds all coordinates.
    first = (table.dp + table.stage * np.int32(layout.dp)) * np.int32(per_worker)
    offset = table.rank - first
    wrong = (offset < 0) | (offset >= per_worker)
    wrong &= table.rank >= 0
    if not wrong.any():
        return
    row = int(np.argmax(wrong))
    low = int(first[row])
    expected = f"{low}" if per_worker == 1 else f"{low} to {low + per_worker - 1}"
    raise MetaError(
        f"layout {layout} puts rank {expected} at dp_rank {table.dp[row]}, stage "
        f"{table.stage[row]}, but the trace has rank {table.rank[row]} there: correct the meta "
        "file or give --layout (ranks count in the order tp, cp, dp, pp)"
    )


def _with_global_chunks(table: OpTable, pp: int) -> OpTable:
    """The table, with the model-wide chunk of computes where the file does not give it."""
    unknown = (table.global_chunk < 0) & (table.chunk >= 0)
    unknown &= np.isin(table.optype, list(STREAM_COMPUTE))
    if not unknown.any():
        return table
    computed = table.chunk.astype(np.int64) * pp + table.stage
    fits = unknown & (computed <= np.iinfo(np.int16).max)
    chunk: NDArray[np.int16] = np.where(fits, computed, table.global_chunk).astype(np.int16)
    return replace(table, global_chunk=chunk)


def _cut(table: OpTable, steps: tuple[int | None, int | None] | None) -> OpTable:
    if steps is None or steps == (None, None):
        return table
    first, last = steps
    kept = table.between(first, last)
    if not len(kept):
        wanted = f"{'' if first is None else first}-{'' if last is None else last}"
        raise NothingUsableError(
            f"no step in {wanted}: the trace has steps {table.step.min()} to {table.step.max()}"
        )
    return kept
