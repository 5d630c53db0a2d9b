"""Load a trace: paths, as a person gives them → one op table and the job it belongs to.

Flow: paths → **here** (`smon.trace.formats`, `smon.trace.meta`) → `smon.trace.grid`. What cannot
be used is one sentence in an error; what is left out is one in the notes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from smon.errors import MetaError, NothingUsableError, TopologyError, TraceError
from smon.ops import STREAM_COMPUTE
from smon.topology import Layout
from smon.trace.annotated import names_ops, op_table
from smon.trace.context import Context, merge
from smon.trace.dumps import RankDump, gathered_dumps, world_of
from smon.trace.events import RankEvents
from smon.trace.formats.reading import Reading, numbered, printable
from smon.trace.groups import agreed_layout, expert_size
from smon.trace.meta import Job
from smon.trace.pipeline import Recovered, recover
from smon.trace.ranks import gathered
from smon.trace.series import StepSeries
from smon.trace.sources import Source, find_sources, job_beside, job_of_meta
from smon.trace.table import OpTable, concat, empty_table
from smon.trace.tp_waits import tp_waits

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
    events
        By rank, where the files have no ops but kernels and collectives, and neither annotations
        nor a schedule tell the ops; the table is empty then.
    dumps
        By rank, where the files are dumps of Flight Recorder; the table is empty then.
    series
        Where the file only has step times of the whole job; the table is empty then.
    context
        Side evidence that the files themselves hold: hosts, waits inside tensor-parallel groups.
    """

    table: OpTable
    job: Job
    notes: tuple[str, ...]
    sources: tuple[Path, ...]
    events: tuple[RankEvents, ...] = ()
    dumps: tuple[RankDump, ...] = ()
    series: StepSeries | None = None
    context: Context = field(default_factory=Context)

    def evidence(self, beside: Context | None) -> Context:
        """All side evidence: of the files themselves, and what stands beside them."""
        return merge([self.context, beside or Context()])

    def ops(self) -> OpTable:
        """The table, for whom nothing else is of use.

        Raises
        ------
        NothingUsableError
            The trace has kernels and collectives, but no ops.
        """
        if self.events:
            raise NothingUsableError(
                "the trace has kernels and collectives, but no ops: `smon analyze` can tell who "
                "comes late; for everything else annotate the ops (docs/sources.md)"
            )
        if self.dumps:
            raise NothingUsableError(
                "dumps of Flight Recorder tell who has not arrived, and have no times: "
                "`smon analyze` reads them (docs/sources.md)"
            )
        if self.series is not None:
            raise NothingUsableError(
                "the file has step times of the whole job only: `smon analyze` reads them "
                "(docs/sources.md)"
            )
        return self.table


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
    readings, fewer = _of_one_kind(readings)
    notes += more + fewer + [note for _, reading in readings for note in reading.notes]
    if any(reading.events for _, reading in readings):
        declared = layout if job is None else job.layout
        name = _name(readings) if job is None else job.job_id
        return _of_events(readings, name, declared, notes=notes, steps=steps)
    if any(reading.dumps for _, reading in readings):
        return _of_dumps(readings, job, layout, notes)
    if any(reading.series is not None for _, reading in readings):
        return _of_series(readings, job, layout, notes=notes, steps=steps)
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


def _of_one_kind(
    readings: list[tuple[Source, Reading]],
) -> tuple[list[tuple[Source, Reading]], list[str]]:
    """Files of the kind that tells most, and notes on those that a folder holds beside them.

    Raises
    ------
    TraceError
        Files of several kinds were given one by one.
    """
    kinds: dict[str, list[tuple[Source, Reading]]] = {
        "ops": [each for each in readings if each[1].has_ops],
        "kernels and collectives": [each for each in readings if each[1].events],
        "dumps of Flight Recorder": [each for each in readings if each[1].dumps],
        "step times": [each for each in readings if each[1].series is not None],
    }
    found = [kind for kind, files in kinds.items() if files]
    spare = [source for kind in found[1:] for source, _ in kinds[kind]]
    if any(source.folder is None for source in spare):
        raise TraceError(
            f"some files are of {' and some of '.join(found)}: analyse them one by one"
        )
    notes = [
        f"left out: {len(kinds[kind])} files of {kind}, beside {found[0]}" for kind in found[1:]
    ]
    return kinds[found[0]], notes


def _of_events(
    readings: Sequence[tuple[Source, Reading]],
    name: str,
    declared: Layout | None,
    *,
    notes: list[str],
    steps: tuple[int | None, int | None] | None,
) -> Trace:
    """The trace of files with events: as ops if annotations or a schedule tell them, else as is."""
    used = tuple(source.path for source, _ in readings)
    ranks, more = gathered(events for _, reading in readings for events in reading.events)
    notes += more
    ranks = _cut_events(ranks, steps)
    layout = agreed_layout(ranks, declared)
    if layout is not None:
        layout = replace(layout, ep=max(layout.ep, expert_size(ranks)))
        found, more = _ops_of_events(ranks, layout)
        notes += more
        if found is not None:
            layout = replace(layout, vpp=max(layout.vpp, found.chunks))
            table, more = fitted(found.table, layout)
            context = replace(tp_waits(ranks, layout), hosts=_hosts(ranks))
            return Trace(table, Job(name, layout), (*notes, *more), used, context=context)
    flat = Layout(dp=max(rank.world_size for rank in ranks), pp=1)
    return Trace(empty_table(), Job(name, flat), tuple(notes), used, tuple(ranks))


def _hosts(ranks: Sequence[RankEvents]) -> dict[int, str]:
    """Host of each rank, where all are known: a name that says nothing makes one host of many."""
    hosts = {rank.rank: rank.host for rank in ranks if rank.host not in (None, "localhost")}
    return {rank: str(host) for rank, host in hosts.items()} if len(hosts) == len(ranks) else {}


def _ops_of_events(ranks: list[RankEvents], layout: Layout) -> tuple[Recovered | None, list[str]]:
    """The ops that annotations name, or that follow from a pipeline's schedule; and notes."""
    if names_ops(ranks, layout):
        return Recovered(op_table(ranks, layout), chunks=1, notes=()), []
    if layout.pp == 1:
        return None, []
    found = recover(ranks, layout)
    if isinstance(found, Recovered):
        return found, list(found.notes)
    return None, [
        f"the job is a pipeline ({layout}), but its ops cannot be told: {found.reason}; it is "
        "analysed by its collectives, without stages"
    ]


def _cut_events(
    ranks: list[RankEvents], steps: tuple[int | None, int | None] | None
) -> list[RankEvents]:
    if steps is None or steps == (None, None):
        return ranks
    kept = [rank.between(*steps) for rank in ranks]
    if any(len(rank) for rank in kept):
        return kept
    first, last = ("" if step is None else step for step in steps)
    numbers = [step.number for rank in ranks for step in rank.steps] or [0]
    raise NothingUsableError(
        f"no step in {first}-{last}: the trace has steps {min(numbers)} to {max(numbers)}"
    )


def _of_dumps(
    readings: Sequence[tuple[Source, Reading]],
    job: Job | None,
    layout: Layout | None,
    notes: list[str],
) -> Trace:
    """The trace of files that are dumps of Flight Recorder."""
    dumps, more = gathered_dumps(dump for _, reading in readings for dump in reading.dumps)
    world = world_of(dumps)
    dumps = [replace(dump, world_size=world) for dump in dumps]
    found, notes_on_layout = _layout_of_dumps(dumps, layout if job is None else job.layout)
    more += notes_on_layout
    name = _name(readings) if job is None else job.job_id
    used = tuple(source.path for source, _ in readings)
    found = replace(found, ep=max(found.ep, expert_size(dumps)))
    return Trace(empty_table(), Job(name, found), (*notes, *more), used, dumps=tuple(dumps))


def _of_series(
    readings: Sequence[tuple[Source, Reading]],
    job: Job | None,
    layout: Layout | None,
    *,
    notes: list[str],
    steps: tuple[int | None, int | None] | None,
) -> Trace:
    """The trace of a file that has step times of the whole job only.

    Raises
    ------
    TraceError
        There are several.
    """
    if len(readings) > 1:
        names = ", ".join(printable(source.path.name) for source, _ in readings[:3])
        raise TraceError(
            f"expected the step times of one job in one file, found {len(readings)} files: "
            f"{names}: give one of them"
        )
    series = readings[0][1].series
    if series is None:
        raise TraceError("expected step times")
    declared = layout if job is None else job.layout
    known = declared or series.layout
    if known is None:
        known = Layout(dp=1, pp=1)
        notes.append("the layout is unknown: the job counts as one GPU (--layout, or a meta file)")
    name = _name(readings) if job is None else job.job_id
    used = tuple(source.path for source, _ in readings)
    kept = series.between(*steps) if steps else series
    return Trace(empty_table(), Job(name, known), tuple(notes), used, series=kept)


def _layout_of_dumps(
    dumps: Sequence[RankDump], declared: Layout | None
) -> tuple[Layout, list[str]]:
    """The layout, and a note if it is unknown: who has not arrived is told all the same."""
    flat = Layout(dp=world_of(dumps), pp=1)
    try:
        found = agreed_layout(dumps, declared)
    except MetaError as error:
        if declared is not None:
            raise
        return flat, [f"every rank counts as a DP rank: {error}"]
    if found is None:
        return flat, ["no process group is named after a dimension: every rank is a DP rank"]
    return found, []


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
