"""A training job that runs in real time: its hosts write each step to their spools as it ends.

A worker becomes slow when it is told to, and well again; the recorder's format and the agents are
the real ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from ingest_agents.payload import OpRow, ops_batch
from ingest_agents.spool.folder import StreamSpec
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.ops import LABELS
from smon.synth import causes
from smon.synth.presets import scenario
from smon.synth.scenario import generate
from smon.synth.timing import Durations
from smon.topology import Layout
from smon.trace.table import OpTable
from smon.wire.columns import COLUMNS, OPTYPE

LAYOUT = Layout(dp=4, pp=2)

#: The worker that becomes slow, and how much.
SLOW_DP, SLOW_STAGE, SLOW_FACTOR = 1, 0, 1.8
SLOW_RANK = LAYOUT.rank(SLOW_DP, SLOW_STAGE)

#: Steps that are made at a time: a change comes into force with the next ones.
_CHUNK = 4

#: A step of 0.6 s.
_DURATIONS = Durations(
    forward_s=0.030,
    backward_s=0.060,
    all_gather_s=0.010,
    reduce_scatter_s=0.030,
    embedding_s=0.003,
    optimizer_s=0.005,
)


@dataclass(frozen=True, slots=True)
class Host:
    """Where a host of the job spools, and the DP ranks that run on it, with all stages.

    Attributes
    ----------
    ahead_ns
        By how much its clock is ahead now.
    """

    spool: Path
    dp: tuple[int, ...]
    ahead_ns: Callable[[], int] = int

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks."""
        return tuple(LAYOUT.rank(dp, stage) for stage in range(LAYOUT.pp) for dp in self.dp)


class Trainer:
    """Runs a job until it is stopped.

    Parameters
    ----------
    speed
        How many times faster its steps are than 0.6 s.
    late_s
        If it is later than this (the machine stood still), it pauses for as long, and goes on from
        now; till then it makes up for it.
    """

    def __init__(
        self, job: str, hosts: list[Host], *, speed: float = 1.0, late_s: float = 1.0
    ) -> None:
        self.job = job
        names = (each.name for each in fields(Durations))
        self._durations = Durations(**{name: getattr(_DURATIONS, name) / speed for name in names})
        self.error: BaseException | None = None
        #: First slow step, and when it began.
        self.onset: tuple[int, float] | None = None
        self.step = -1
        #: All that was written, as it was.
        self.written: list[OpTable] = []
        self._hosts = hosts
        self._late_ns = int(late_s * 1e9)
        self._slow = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=job, daemon=True)

    def start(self) -> None:
        """Begin with step 0 now."""
        self._thread.start()

    def stop(self) -> None:
        """End after the present step."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def slow_down(self) -> None:
        """One worker becomes slow, soon."""
        self._slow = True

    def cure(self) -> None:
        """It is well again, soon."""
        self._slow = False

    def _run(self) -> None:
        writers = [
            SpoolWriter(host.spool, self._spec(host, number), SpoolLimits())
            for number, host in enumerate(self._hosts)
        ]
        try:
            first, begin = 0, time.time_ns()
            while not self._stop.is_set():
                begin = self._run_chunk(first, max(begin, time.time_ns() - self._late_ns), writers)
                first += _CHUNK
        # A thread cannot raise; whoever started it looks.
        except BaseException as error:  # noqa: BLE001
            self.error = error
        finally:
            for writer in writers:
                writer.end("finished")
                writer.close()

    def _run_chunk(self, first: int, begin: int, writers: list[SpoolWriter]) -> int:
        """Run some steps; when the last one ends, unix ns."""
        if self._slow and self.onset is None:
            self.onset = (first, begin / 1e9)
        table = _ops(first, begin, self._durations, slow=self._slow)
        ends = begin
        for step in range(first, first + _CHUNK):
            rows = table.take(np.flatnonzero(table.step == step))
            ends = int((rows.start_ns + rows.duration_ns).max())
            if self._stop.wait(max(ends - time.time_ns(), 0) / 1e9):
                break
            for writer, host in zip(writers, self._hosts, strict=True):
                mine = rows.take(np.isin(rows.rank, host.ranks))
                mine = replace(mine, start_ns=mine.start_ns + host.ahead_ns())
                self.written.append(mine)
                writer.append(ops_batch(_rows(mine), steps_done=step))
                writer.flush()
            self.step = step
        return ends

    def _spec(self, host: Host, number: int) -> StreamSpec:
        return StreamSpec(
            key=f"{self.job}-{time.time_ns()}-{number}",
            job=self.job,
            attempt=0,
            layout=LAYOUT,
            mode="live",
            time="unix",
            host=f"node-{host.spool.name}",
            source="recorder",
            ranks=host.ranks,
        )


def _ops(first: int, begin: int, durations: Durations, *, slow: bool) -> OpTable:
    fault = causes.slow_gpu(SLOW_DP, SLOW_STAGE, SLOW_FACTOR, first=first)
    made = generate(
        scenario(
            "slow-worker",
            dp=LAYOUT.dp,
            pp=LAYOUT.pp,
            tp=LAYOUT.tp,
            microbatches=5,
            durations=durations,
            steps=_CHUNK,
            first_step=first,
            start_unix_s=begin // 10**9,
            seed=first,
            causes=(fault,) if slow else (),
        )
    )
    # The synthetic clock counts whole seconds.
    return replace(made.table, start_ns=made.table.start_ns + begin % 10**9)


def _rows(table: OpTable) -> list[OpRow]:
    labels = np.array(LABELS)
    columns = [
        (labels[table.optype] if column.name == OPTYPE else getattr(table, column.name)).tolist()
        for column in COLUMNS
    ]
    return [OpRow(*values) for values in zip(*columns, strict=True)]
