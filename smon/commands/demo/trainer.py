"""The training job of the demo: its hosts write the ops of a step when the step has ended.

Flow: `smon.synth` → **here** → one spool per host, as a recorder writes it → ``smon-agent``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from ingest_agents.payload import OpRow, ops_batch
from ingest_agents.spool.folder import StreamSpec
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.ops import LABELS
from smon.synth import causes
from smon.synth.presets import scenario
from smon.synth.scenario import generate
from smon.synth.spec import Scenario
from smon.synth.timing import Durations
from smon.topology import Layout
from smon.trace.table import OpTable
from smon.wire.columns import COLUMNS, OPTYPE

JOB: Final = "demo-llama-70b"
HOSTS: Final = 4

#: The worker that becomes slow, in which step, and how much.
SLOW_DP: Final = 5
SLOW_STAGE: Final = 2
SLOW_FACTOR: Final = 1.5
ONSET_STEP: Final = 8

#: Steps that are made at a time: half an hour.
_CHUNK_STEPS: Final = 2_000

#: A step of about a second, so that something is to be seen.
_DURATIONS: Final = Durations(
    forward_s=0.025,
    backward_s=0.050,
    all_gather_s=0.020,
    reduce_scatter_s=0.050,
    embedding_s=0.005,
    optimizer_s=0.010,
)


class Trainer:
    """Runs the job until it is stopped.

    Parameters
    ----------
    spools
        Spool of each host.
    said
        Called with (step) when a step has ended.
    """

    def __init__(self, spools: list[Path], said: Callable[[int], None]) -> None:
        self._spools = spools
        self._said = said
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainer", daemon=True)
        self.error: BaseException | None = None

    def start(self) -> None:
        """Begin with step 0 now."""
        self._thread.start()

    def stop(self) -> None:
        """End after the present step."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        writers: list[SpoolWriter] = []
        try:
            layout = _job(0, 0).layout
            hosts = _hosts(layout, len(self._spools))
            writers = [
                SpoolWriter(root, _spec(layout, ranks, number), SpoolLimits())
                for number, (root, ranks) in enumerate(zip(self._spools, hosts, strict=True))
            ]
            first = 0
            while not self._stop.is_set():
                self._run_chunk(first, writers, hosts)
                first += _CHUNK_STEPS
        # A thread cannot raise; whoever started it looks.
        except BaseException as error:  # noqa: BLE001
            self.error = error
        finally:
            for writer in writers:
                writer.end("finished")
                writer.close()

    def _run_chunk(self, first: int, writers: list[SpoolWriter], hosts: list[np.ndarray]) -> None:
        begin = time.time_ns()
        made = generate(_job(first, begin // 10**9))
        # The synthetic clock counts whole seconds.
        table = replace(made.table, start_ns=made.table.start_ns + begin % 10**9)
        bounds = np.searchsorted(table.step, np.arange(first, first + _CHUNK_STEPS + 1))
        for index in range(_CHUNK_STEPS):
            step = table.take(np.arange(bounds[index], bounds[index + 1]))
            ends = int((step.start_ns + step.duration_ns).max())
            if self._stop.wait(max(ends - time.time_ns(), 0) / 1e9):
                return
            for writer, ranks in zip(writers, hosts, strict=True):
                mine = step.take(np.isin(step.rank, ranks))
                writer.append(ops_batch(_rows(mine), steps_done=first + index))
                writer.flush()
            self._said(first + index)


def _job(first_step: int, start_unix_s: int) -> Scenario:
    return scenario(
        "slow-worker",
        microbatches=8,
        durations=_DURATIONS,
        steps=_CHUNK_STEPS,
        first_step=first_step,
        start_unix_s=start_unix_s,
        seed=first_step,
        causes=(
            causes.slow_gpu(
                SLOW_DP, SLOW_STAGE, SLOW_FACTOR, first=max(ONSET_STEP, first_step), onset=True
            ),
        ),
    )


def _hosts(layout: Layout, hosts: int) -> list[np.ndarray]:
    """Ranks that stand in the trace, by host; ranks of a host follow each other."""
    ranks = [layout.rank(dp, stage) for stage in range(layout.pp) for dp in range(layout.dp)]
    return np.array_split(np.array(ranks), hosts)


def _spec(layout: Layout, ranks: np.ndarray, number: int) -> StreamSpec:
    return StreamSpec(
        key=f"{JOB}-{time.time_ns()}-{number}",
        job=JOB,
        attempt=0,
        layout=layout,
        mode="live",
        time="unix",
        host=f"gpu-node-{number}",
        source="recorder",
        ranks=tuple(ranks.tolist()),
    )


def _rows(table: OpTable) -> list[OpRow]:
    labels = np.array(LABELS)
    columns = [
        (labels[table.optype] if column.name == OPTYPE else getattr(table, column.name)).tolist()
        for column in COLUMNS
    ]
    return [OpRow(*values) for values in zip(*columns, strict=True)]
