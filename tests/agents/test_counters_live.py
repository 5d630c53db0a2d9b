"""From the driver of a GPU to the verdict: counters that an agent ships tell heat from slowness."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingest_agents.agent import Agent
from ingest_agents.link import Link
from ingest_agents.payload import OpRow, context_batch, ops_batch
from ingest_agents.sources.counters.gpu import NvidiaGpus
from ingest_agents.sources.counters.patient import Seams
from ingest_agents.sources.counters.source import CounterSource, Readers
from ingest_agents.spool.folder import StreamSpec, key_of
from ingest_agents.spool.writer import SpoolWriter
from ingest_agents.transport import HttpTransport, address_of
from smon.ops import OpType
from smon.synth.presets import scenario
from smon.synth.scenario import Synthetic, generate
from smon.trace.table import OpTable
from tests.agents.builders import SMALL, settings
from tests.agents.counting import Gpu, Nvml, at_once, process
from tests.system.server import ServerProcess
from tests.system.test_same_report import finished_report

pytestmark = [pytest.mark.slow]

S = 10**9

#: The suspect of the scenario.
RANK = 9


class Machine:
    """A host with a GPU for each rank, whose trainers go through the steps of a synthetic job.

    Attributes
    ----------
    gpus
        In the order of ranks.
    """

    def __init__(self, root: Path, made: Synthetic, job: str) -> None:
        self.spool, self.root = root / "spool", root / "machine"
        self.spool.mkdir(parents=True)
        layout = made.job.layout
        ranks = range(layout.world_size)
        self.gpus = [Gpu(f"GPU-{rank}", processes={100 + rank: 1 << 30}) for rank in ranks]
        self.table = _recent(made.table)
        self.now_ns = int(self.table.start_ns.min()) - S
        seams = Seams(lambda: self.now_ns / S, lambda: self.now_ns, at_once)
        nvml = NvidiaGpus(Nvml(self.gpus))
        readers = Readers(nvml.read, dict, dict, self.root, seams)
        self.source = CounterSource(self.spool, 3.0, readers, SMALL, lambda _name, _text: None)
        self._writers: dict[int, SpoolWriter] = {}
        for rank in ranks:
            process(self.root, 100 + rank, RANK=rank, SMON_JOB_ID=job)
            key = key_of("recorder", job, rank)
            spec = StreamSpec(
                key, job, 0, layout, "live", "unix", "node-1", "recorder", (rank,), window_steps=60
            )
            self._writers[rank] = SpoolWriter(self.spool, spec, SMALL)
            self._writers[rank].append(context_batch({"hosts": {str(rank): "node-1"}}, rows=0))

    def step(self, number: int) -> None:
        """A step: the agent polls while it goes on; recorders write when it is over."""
        rows = self.table.between(number, number)
        begin, end = int(rows.start_ns.min()), int((rows.start_ns + rows.duration_ns).max())
        for now in range(begin, end, (end - begin) // 4):
            self.now_ns = now
            self.source.poll()
        self.now_ns = end
        for rank, writer in self._writers.items():
            mine = rows.take(rows.rank == rank)
            writer.append(ops_batch(_rows(mine), steps_done=number))
        self.source.poll()

    def end(self) -> None:
        """Trainers end, and a moment later the agent has seen it."""
        for writer in self._writers.values():
            writer.end("closed")
            writer.close()
        self.now_ns += 2 * S
        self.source.poll()


def _recent(table: OpTable) -> OpTable:
    """The same job, an hour ago: a server refuses what is too old."""
    shift = time.time_ns() - 3600 * S - int(table.start_ns.min())
    return replace(table, start_ns=table.start_ns + shift)


def _rows(table: OpTable) -> list[OpRow]:
    columns = (
        table.step,
        table.dp,
        table.stage,
        table.rank,
        np.array([OpType(int(each)).label for each in table.optype]),
        table.start_ns,
        table.duration_ns,
        table.seq,
        table.chunk,
        table.global_chunk,
        table.microbatch,
    )
    return [OpRow(*row) for row in zip(*(each.tolist() for each in columns), strict=True)]


def ship(server: ServerProcess, spool: Path) -> None:
    """Send all that is in the spool, as an agent that is about to stop does."""
    transport = HttpTransport(address_of(server.url), timeout_s=30.0)
    link = Link(lambda: transport, lambda: None, "node-1")
    agent = Agent(settings(spool, stop_s=60.0), link, [], lambda _name, _text: None)
    agent.round()
    agent.finish()
    transport.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server."""
    with ServerProcess(tmp_path_factory.mktemp("server")) as running:
        yield running


def finding_of(server: ServerProcess, made: Synthetic, folder: Path, job: str) -> dict[str, Any]:
    """The one finding of a job that ran, as the server tells it."""
    ship(server, folder / "spool")
    report = finished_report(server, job)
    assert report["window"]["steps_used"] == len(set(made.table.step.tolist()))
    (finding,) = report["findings"]
    return dict(finding)


def test_heat_is_told_by_what_the_agent_reads(server: ServerProcess, tmp_path: Path) -> None:
    """A clock that falls while its GPU slows down: thermal; nobody waits for the counters."""
    made = generate(scenario("C02-no-counters"))
    machine = Machine(tmp_path, made, "hot")
    for number in range(60):
        # As in the scenario: 1980 MHz over how much longer its computes take.
        rise = 0.6 * min(max((number - 10) / 30, 0.0), 1.0)
        machine.gpus[RANK].clock = int(1980 / (1 + rise))
        machine.gpus[RANK].reasons = 0x40 if number >= 14 else 0
        machine.step(number)
    machine.end()
    finding = finding_of(server, made, tmp_path, "hot")
    assert (finding["cause"], finding["where"]["rank"]) == ("thermal", RANK)
    assert finding["where"]["gpu_uuid"] == f"GPU-{RANK}"
    assert any(line.startswith("GPU clock 1") for line in finding["evidence"])
    assert any(line.startswith("as elsewhere: ") for line in finding["evidence"])


def test_a_gpu_that_is_slow_at_full_clock_is_just_slow(
    server: ServerProcess, tmp_path: Path
) -> None:
    """The same job, and no counter that differs."""
    made = generate(scenario("C02-no-counters"))
    machine = Machine(tmp_path, made, "slow")
    for number in range(60):
        machine.step(number)
    machine.end()
    finding = finding_of(server, made, tmp_path, "slow")
    assert (finding["cause"], finding["where"]["rank"]) == ("slow_gpu", RANK)
    assert any("GPU clock 1980 MHz" in line for line in finding["evidence"])
    window = finished_report(server, "slow")["window"]
    assert window["coverage_ratio"] == 1.0
