"""Producers: threads that append known events to the spools of several hosts, as recorders do."""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass
from pathlib import Path

from ingest_agents.payload import ops_batch
from ingest_agents.spool.folder import StreamSpec
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.topology import Layout
from tests.faults.events import Appended, rows_of

#: Streams of one host.
STREAMS = 2


@dataclass(frozen=True, slots=True)
class Load:
    """How much is written.

    Attributes
    ----------
    hosts
        Each with a spool of its own and `STREAMS` streams.
    batch_events
        Largest batch; the size of each is drawn.
    pause_s
        Between two batches of a stream.
    segment_bytes
        Of a spool: small ones are acknowledged and removed all the time.
    """

    hosts: int = 4
    batch_events: int = 400
    pause_s: float = 0.1
    segment_bytes: int = 20_000
    window_steps: int = 20
    job: str = "faults"


class Producer(threading.Thread):
    """Writes the streams of one host until it is stopped, and then their ends."""

    def __init__(self, number: int, spool: Path, load: Load, appended: Appended) -> None:
        super().__init__(name=f"producer-{number}", daemon=True)
        self.spool = spool
        self.refused = 0
        self._load, self._appended = load, appended
        self._chance = random.Random(number)  # noqa: S311  # no secret
        self._stopping = threading.Event()
        self._step = 0
        limits = SpoolLimits(load.segment_bytes, 60.0, 1 << 30)
        ranks = range(number * STREAMS, (number + 1) * STREAMS)
        self._writers = {rank: SpoolWriter(spool, self._spec(rank), limits) for rank in ranks}

    def _spec(self, rank: int) -> StreamSpec:
        return StreamSpec(
            key=f"{self._load.job}/{rank}",
            job=self._load.job,
            attempt=0,
            layout=Layout(dp=self._load.hosts * STREAMS, pp=1),
            mode="live",
            time="unix",
            host=f"host-{rank // STREAMS}",
            source="test",
            ranks=(rank,),
            window_steps=self._load.window_steps,
        )

    def run(self) -> None:
        """Append a batch of each stream, then pause."""
        while not self._stopping.wait(self._load.pause_s):
            self.step()
        for writer in self._writers.values():
            writer.end("complete")
            writer.close()

    def step(self) -> None:
        """Append one step of each stream."""
        for rank, writer in self._writers.items():
            count = self._chance.randint(1, self._load.batch_events)
            rows = rows_of(rank, self._step, count, self._appended.begin_ns)
            if writer.append(ops_batch(rows, steps_done=self._step)):
                self._appended.add(rank, self._step, count)
            else:
                self.refused += count
        self._step += 1

    @property
    def next_seqs(self) -> dict[int, int]:
        """Numbers that the streams have used, by rank."""
        return {rank: writer.next_seq for rank, writer in self._writers.items()}

    @property
    def dropped(self) -> int:
        """Events that did not fit into the spool."""
        return sum(writer.dropped.total() for writer in self._writers.values())

    def finish(self) -> None:
        """Write the ends, and let go of the spool."""
        self._stopping.set()
        self.join()
