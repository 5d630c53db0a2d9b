"""Whose GPU is it: ranks of a job, by the processes that have memory on a GPU.

Flow: `ingest_agents.sources.counters.gpu`, `trainers` → **here** →
`ingest_agents.sources.counters.source`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ingest_agents.sources.counters.gpu import GpuReading, Holder
from ingest_agents.sources.counters.trainers import Trainer
from ingest_agents.spool.folder import StreamSpec


@dataclass(frozen=True, slots=True)
class JobHere:
    """The part of a job attempt that runs on this host.

    Attributes
    ----------
    spec
        Of one of its streams.
    ranks
        That have a stream here.
    """

    spec: StreamSpec
    ranks: tuple[int, ...]

    def rank_of(self, trainer: Trainer) -> int | None:
        """Rank of a process in this job; None if it is of another one."""
        # Whoever names a growing folder may call the job as they like.
        says = self.spec.source == "recorder" and trainer.job is not None
        if says and (trainer.job, trainer.attempt) != (self.spec.job, self.spec.attempt):
            return None
        rank = trainer.rank
        if rank is None and self.spec.layout.world_size == 1:
            # A process that is alone need not be told that it is rank 0.
            rank = 0
        return rank if rank in self.ranks else None


@dataclass(frozen=True, slots=True)
class Owned:
    """A rank's GPU.

    Attributes
    ----------
    uuid
        Of the GPU, or of the part of it that the rank runs on.
    """

    uuid: str
    pid: int
    reading: GpuReading


def owned_by(
    job: JobHere, readings: Sequence[GpuReading], trainer_of: Callable[[int], Trainer | None]
) -> dict[int, Owned]:
    """The GPU of each rank of a job.

    A rank may have a little memory on GPUs that are not its own, GPU 0 above all: its own is the
    one on which it has most, and among equals the one with the fewest ranks.
    """
    found: list[tuple[int, Holder, GpuReading]] = []
    for reading in readings:
        for holder in reading.holders:
            trainer = trainer_of(holder.pid)
            rank = None if trainer is None else job.rank_of(trainer)
            if rank is not None:
                found.append((rank, holder, reading))
    crowd = Counter(holder.uuid for _, holder, _ in found)
    best: dict[int, tuple[tuple[int, int], Owned]] = {}
    for rank, holder, reading in found:
        rating = (holder.used_bytes, -crowd[holder.uuid])
        if rank not in best or rating > best[rank][0]:
            best[rank] = rating, Owned(holder.uuid, holder.pid, reading)
    return {rank: owned for rank, (_, owned) in best.items()}


def jobs_in(specs: Iterable[StreamSpec]) -> dict[tuple[str, int], JobHere]:
    """Job attempts, by name and number, of these streams."""
    found: dict[tuple[str, int], JobHere] = {}
    for spec in specs:
        key = spec.job, spec.attempt
        ranks = {*spec.ranks, *(found[key].ranks if key in found else ())}
        found[key] = JobHere(spec, tuple(sorted(ranks)))
    return found
