"""What agents on the hosts would have seen of a synthetic job, besides its ops.

Flow: `smon.synth.scenario` (steps that have run) → **here** → `smon.trace.context.Context`. Only
what the scenario asks for is recorded; faults add to it by `Fault.testify`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from smon.synth.faults.base import Draft, Fault, Stream, generator
from smon.synth.record import Batch
from smon.topology import Layout
from smon.trace.context import Context, Counters, Event, EventKind, ExpertTokens, Microbatches


class Evidence(StrEnum):
    """Kinds of side evidence."""

    COUNTERS = "counters"
    LENGTHS = "lengths"
    EXPERTS = "experts"
    EVENTS = "events"


#: Counters of a healthy rank: value, and spread from reading to reading.
_HEALTHY: Final = {
    "gpu_clock_mhz": (1980.0, 0.0),
    "gpu_temperature_c": (72.0, 0.5),
    "gpu_throttle_thermal": (0.0, 0.0),
    "gpu_power_w": (650.0, 5.0),
    "nic_errors": (0.0, 0.0),
    "host_cpu_ratio": (0.35, 0.02),
}


class Witness:
    """Notes of one batch of steps; faults write into them.

    Attributes
    ----------
    draft
        The steps as they were before they ran.
    events
        What was noted so far.
    """

    __slots__ = (
        "_batch",
        "_gauges",
        "_layout",
        "_lengths",
        "_origins",
        "_tokens",
        "draft",
        "events",
    )

    def __init__(
        self, draft: Draft, batch: Batch, layout: Layout, origins: Mapping[int, int] | None
    ) -> None:
        self.draft = draft
        self.events: list[Event] = []
        self._batch = batch
        self._layout = layout
        self._origins = origins
        self._lengths: tuple[int, NDArray[np.float64]] | None = None
        self._tokens: dict[int, NDArray[np.float64]] = {}
        self._gauges = _healthy_gauges(draft)

    @property
    def steps(self) -> NDArray[np.int64]:
        """Step numbers; shape ``(steps,)``."""
        return self.draft.steps

    def gauge(self, name: str, dp: int, stage: int) -> NDArray[np.float64]:
        """A counter of one worker, to be changed in place; shape ``(steps,)``."""
        values = self._gauges[name]
        if dp >= values.shape[1]:  # an elastic step can be without this rank
            return np.empty(len(self.steps))
        gauge: NDArray[np.float64] = values[:, dp, stage]
        return gauge

    def lengths(self, tokens: int, squares: NDArray[np.float64]) -> None:
        """Note tokens and sums of squared lengths; shape ``(steps, dp, microbatches)``."""
        self._lengths = tokens, squares

    def expert_tokens(self, stage: int, tokens: NDArray[np.float64]) -> None:
        """Note the tokens of the experts of a stage; shape ``(steps, dp)``."""
        self._tokens[stage] = tokens

    def event_inside(
        self, kind: EventKind, place: int, dp: int, row: int, duration_s: float
    ) -> None:
        """Note an event that ended with an op of one worker; `place` is that of the step."""
        kept = int(np.count_nonzero(self._batch.kept[:row]))
        rank = self._layout.rank(dp, int(self.draft.plan.stage[row]))
        start = int(self._batch.end[kept, place, dp]) - round(duration_s * 1e9)
        self.events.append(self._event(kind, place, rank, start, duration_s))

    def event_after(self, kind: EventKind, place: int, duration_s: float) -> None:
        """Note an event of the whole job that began at the end of a step."""
        start = int(self._batch.end[:, place].max())
        self.events.append(self._event(kind, place, None, start, duration_s))

    def _event(
        self, kind: EventKind, place: int, rank: int | None, start: int, duration_s: float
    ) -> Event:
        step = int(self.steps[place])
        first = int(self._batch.start[:, place].min())
        origin = 0 if self._origins is None else self._origins[step]
        return Event(kind, step, rank, start - first + origin, duration_s)

    def microbatches(self) -> Microbatches | None:
        """What was noted of sequence lengths."""
        if self._lengths is None:
            return None
        tokens, squares = self._lengths
        place, dp, microbatch = np.indices(squares.shape).reshape(3, -1)
        return Microbatches(
            self.steps[place],
            dp.astype(np.int32),
            microbatch.astype(np.int32),
            np.full(squares.size, tokens),
            squares.ravel(),
        )

    def experts(self) -> list[ExpertTokens]:
        """What was noted of the tokens of experts, one table per stage."""
        tables = []
        for stage, tokens in self._tokens.items():
            place, dp = np.indices(tokens.shape).reshape(2, -1)
            ranks = np.array([self._layout.rank(rank, stage) for rank in range(tokens.shape[1])])
            counts = np.rint(tokens).astype(np.int64).ravel()
            tables.append(ExpertTokens(self.steps[place], ranks[dp].astype(np.int32), counts))
        return tables

    def counters(self) -> list[Counters]:
        """Readings of all ranks that are traced, one table per counter."""
        dp_size, pp = self.draft.plan.shape.dp, self.draft.plan.shape.pp
        place, dp, stage = np.indices((len(self.steps), dp_size, pp)).reshape(3, -1)
        ranks = np.array([[self._layout.rank(d, p) for p in range(pp)] for d in range(dp_size)])
        rank = ranks[dp, stage].astype(np.int32)
        return [
            Counters(self.steps[place], rank, np.full(len(place), name), values.ravel())
            for name, values in self._gauges.items()
        ]


def _healthy_gauges(draft: Draft) -> dict[str, NDArray[np.float64]]:
    """Counters of a healthy job; each of shape ``(steps, dp, pp)``."""
    shape = draft.plan.shape
    size = (len(_HEALTHY), shape.dp, shape.pp)
    noise = np.empty((len(draft.steps), *size))
    for place, step in enumerate(draft.steps.tolist()):
        noise[place] = generator(draft.seed, Stream.COUNTERS, step).standard_normal(size)
    return {
        name: mean + spread * noise[:, index]
        for index, (name, (mean, spread)) in enumerate(_HEALTHY.items())
    }


@dataclass(frozen=True, slots=True)
class Machines:
    """How the ranks of a job are spread over hosts, and hosts over leaf switches.

    Attributes
    ----------
    ranks_per_host, hosts_per_switch
        Numbers; None: not recorded.
    """

    ranks_per_host: int | None = None
    hosts_per_switch: int | None = None

    def host(self, rank: int) -> str | None:
        """Name of the host of a global rank; None if hosts are not recorded."""
        return None if self.ranks_per_host is None else f"node-{rank // self.ranks_per_host:04d}"

    def hosts(self, layout: Layout) -> dict[int, str]:
        """Host of every global rank."""
        names = ((rank, self.host(rank)) for rank in range(layout.world_size))
        return {rank: host for rank, host in names if host is not None}

    def switches(self, layout: Layout) -> dict[str, str]:
        """Leaf switch of every host."""
        if self.hosts_per_switch is None:
            return {}
        hosts = dict.fromkeys(self.hosts(layout).values())
        return {
            host: f"leaf-{index // self.hosts_per_switch:03d}" for index, host in enumerate(hosts)
        }

    def gpus(self, layout: Layout) -> dict[int, str]:
        """UUID of the GPU of every global rank."""
        if self.ranks_per_host is None:
            return {}
        return {rank: f"GPU-{rank:08x}-0000-4000-8000-000000000000" for rank in self.hosts(layout)}


def gather(
    witnesses: Sequence[Witness],
    faults: Sequence[Fault],
    wanted: frozenset[Evidence],
    machines: Machines,
    layout: Layout,
) -> Context:
    """Everything that was asked for, of all batches of steps."""
    if wanted:
        for witness in witnesses:
            for fault in faults:
                fault.testify(witness)
    parts: dict[str, object] = {
        "hosts": machines.hosts(layout),
        "switches": machines.switches(layout),
        "gpus": machines.gpus(layout),
    }
    if Evidence.LENGTHS in wanted:
        noted = [witness.microbatches() for witness in witnesses]
        parts["microbatches"] = _joined([table for table in noted if table is not None])
    if Evidence.EXPERTS in wanted:
        experts = [table for witness in witnesses for table in witness.experts()]
        parts["expert_tokens"] = _joined(experts)
    if Evidence.COUNTERS in wanted:
        counters = [table for witness in witnesses for table in witness.counters()]
        parts["counters"] = _joined(counters)
    if Evidence.EVENTS in wanted:
        events = [event for witness in witnesses for event in witness.events]
        parts["events"] = tuple(sorted(events, key=lambda event: (event.step, event.rank or 0)))
    return Context(**{name: part for name, part in parts.items() if part})  # type: ignore[arg-type]


_Table = TypeVar("_Table", Microbatches, ExpertTokens, Counters)


def _joined(tables: Sequence[_Table]) -> _Table | None:
    """One table of several; None of none."""
    if not tables:
        return None
    kind = type(tables[0])
    names = [field.name for field in fields(kind)]
    return kind(
        **{name: np.concatenate([getattr(table, name) for table in tables]) for name in names}
    )
