"""From the times of all ops to one op table: the profiler of the synthetic job.

Flow: `smon.synth.model` → **here** → `smon.trace.table.OpTable`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.synth.faults.base import Fault
from smon.synth.plan import Plan
from smon.topology import Layout
from smon.trace.schema import COLUMNS
from smon.trace.table import OpTable, make_table

#: Columns of one (step, replica) block after another; of any integer type.
_Block = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Steps of one shape, run together.

    Attributes
    ----------
    plan
        The ops of each step.
    kept
        Rows of the plan that are recorded; shape ``(rows,)``.
    steps
        Step numbers.
    start, end
        ns on each step's own clock; shape ``(kept rows, steps, dp)``.
    never
        Ops that never end, of the same shape; None: all do.
    lost
        Ops that the profiler loses, of the same shape; None: none is.
    """

    plan: Plan
    kept: NDArray[np.bool_]
    steps: tuple[int, ...]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    never: NDArray[np.bool_] | None = None
    lost: NDArray[np.bool_] | None = None

    def last_end(self) -> NDArray[np.int64]:
        """Last end of each step, of the ops that end; shape ``(steps,)``."""
        ends = self.end if self.never is None else np.where(self.never, self.start.min(), self.end)
        last: NDArray[np.int64] = ends.max(axis=(0, 2))
        return last

    def hung_steps(self) -> list[int]:
        """Steps with an op that never ends."""
        if self.never is None:
            return []
        hung = np.flatnonzero(self.never.any(axis=(0, 2)))
        return [self.steps[place] for place in hung.tolist()]

    def unrecorded(self, place: int) -> NDArray[np.bool_] | None:
        """Ops of one step that are not in the trace; shape ``(kept rows, dp)``, None: all are."""
        masks = [mask[:, place] for mask in (self.never, self.lost) if mask is not None]
        return np.logical_or.reduce(masks) if masks else None


@dataclass(frozen=True, slots=True, eq=False)
class Clocks:
    """How wrong the clock of each worker's host is.

    Attributes
    ----------
    offset_ns
        By how much it is ahead at the start of the window; shape ``(dp, stages)``.
    drift
        What it gains, s per s; same shape.
    """

    offset_ns: NDArray[np.int64]
    drift: NDArray[np.float64]

    @classmethod
    def of(cls, faults: Sequence[Fault], dp: int, pp: int) -> Clocks | None:
        """The clocks of a job with these faults; None if all are right."""
        offset_s, drift = np.zeros((dp, pp)), np.zeros((dp, pp))
        for fault in faults:
            if fault.clock() != (0.0, 0.0):
                for rank, stage in fault.places():
                    place = (
                        slice(None) if rank is None else rank,
                        slice(None) if stage is None else stage,
                    )
                    offset_s[place] += fault.clock()[0]
                    drift[place] += fault.clock()[1]
        if not offset_s.any() and not drift.any():
            return None
        return cls(np.rint(offset_s * 1e9).astype(np.int64), drift)

    def read(
        self, true_ns: NDArray[np.int64], stage: NDArray[np.int32], epoch_ns: int
    ) -> NDArray[np.int64]:
        """What the clocks show; times of shape ``(rows, dp)``, stages of ``(rows,)``."""
        replicas = true_ns.shape[1]
        offset, drift = self.offset_ns[:replicas, stage].T, self.drift[:replicas, stage].T
        gained = np.rint((true_ns - epoch_ns) * drift).astype(np.int64)
        shown: NDArray[np.int64] = true_ns + offset + gained
        return shown


def step_spans(batches: Sequence[Batch]) -> dict[int, tuple[int, int]]:
    """First start and last end of each step, ns on the step's own clock, in order of steps."""
    spans: dict[int, tuple[int, int]] = {}
    for batch in batches:
        first, last = batch.start.min(axis=(0, 2)), batch.last_end()
        spans.update(zip(batch.steps, zip(first.tolist(), last.tolist(), strict=True), strict=True))
    return dict(sorted(spans.items()))


def assemble(
    batches: Sequence[Batch],
    layout: Layout,
    origins: Mapping[int, int],
    clocks: Clocks | None = None,
    *,
    step_relative: bool = False,
) -> OpTable:
    """Put the steps of all batches, in order, into one table.

    Parameters
    ----------
    layout
        Gives the global ranks.
    origins
        Unix time of each step's first start, ns.
    clocks
        Clocks that are wrong; None: times are true.
    step_relative
        Times restart at 0 in every step.

    Returns
    -------
    OpTable
        In order of step, dp, stage, op type, seq.
    """
    length = sum(batch.start.size for batch in batches)
    columns = {column.name: np.empty(length, column.dtype) for column in COLUMNS}
    recorded = np.ones(length, bool)
    ranks = _ranks(layout)
    epoch = min(origins.values())
    for batch, place, rows in _places(batches):
        replicas = batch.plan.shape.dp
        block = {name: values[rows].reshape(replicas, -1) for name, values in columns.items()}
        start, end = _recorded_times(batch, place, origins[batch.steps[place]], clocks, epoch)
        _fill_structure(block, batch, ranks[:replicas])
        block["step"][:] = batch.steps[place]
        block["start_ns"][:] = (start - (start.min() if step_relative else 0)).T
        block["duration_ns"][:] = (end - start).T
        missing = batch.unrecorded(place)
        if missing is not None:
            recorded[rows] = ~missing.T.ravel()
    if not recorded.all():
        columns = {name: values[recorded] for name, values in columns.items()}
    return make_table(columns, step_relative=step_relative)


def _places(batches: Sequence[Batch]) -> Iterator[tuple[Batch, int, slice]]:
    """Each step's batch, its place there, and its rows in the table, in order of steps."""
    found = [(step, place, batch) for batch in batches for place, step in enumerate(batch.steps)]
    end = 0
    for _, place, batch in sorted(found, key=lambda one: one[0]):
        begin, end = end, end + batch.start[:, place].size
        yield batch, place, slice(begin, end)


def _ranks(layout: Layout) -> NDArray[np.int64]:
    """Global rank of each worker; shape ``(dp, stages)``."""
    return np.array(
        [[layout.rank(dp, stage) for stage in range(layout.pp)] for dp in range(layout.dp)],
        np.int64,
    )


def _fill_structure(block: _Block, batch: Batch, ranks: NDArray[np.int64]) -> None:
    """What does not depend on the step; arrays of a block have shape ``(dp, kept rows)``."""
    block["dp"][:] = np.arange(batch.plan.shape.dp)[:, None]
    for name in ("stage", "optype", "chunk", "global_chunk", "microbatch"):
        block[name][:] = getattr(batch.plan, name)[batch.kept]
    block["seq"][:] = batch.plan.seq(batch.kept)
    block["rank"][:] = ranks[:, batch.plan.stage[batch.kept]]


def _recorded_times(
    batch: Batch, place: int, origin: int, clocks: Clocks | None, epoch: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Starts and ends of one step as its hosts' clocks show them; shape ``(kept rows, dp)``."""
    shift = origin - int(batch.start[:, place].min())
    start, end = batch.start[:, place] + shift, batch.end[:, place] + shift
    if clocks is None:
        return start, end
    stage = batch.plan.stage[batch.kept]
    return clocks.read(start, stage, epoch), clocks.read(end, stage, epoch)
