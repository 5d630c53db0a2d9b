"""What a job costs the service: bytes of each event on its way, CPU time, memory, rows.

A job of 8-GPU hosts is sent, one stream a host, to a server that does nothing else; then one worker
does all there is to do: windows, and compaction of their files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil

from smon.synth import causes
from smon.synth.scenario import Synthetic, generate
from smon.synth.spec import Scenario
from smon.wire import Batch
from tests.faults.outside import number, query
from tests.proof.child import Took, smon
from tests.proof.line import Form, Goal, Line, at_most, exactly
from tests.system.replay import end_batch, ops_batch
from tests.system.server import ServerProcess
from tests.waiting import wait_until

#: GPUs of a host; one worker is one host here.
_TP: Final = 8
_STEPS: Final = {Form.SHORT: 80, Form.LONG: 160}
_DP: Final = {Form.SHORT: 4, Form.LONG: 32}

#: Steps that a batch holds: about 1,600 ops of one worker.
_BATCH_STEPS: Final = 16

_WINDOW_STEPS: Final = 40

_WAIT_S: Final = 300.0
_AT_ONCE: Final = {"SMON_COMPACT_AFTER_S": "0", "SMON_MAINTENANCE_INTERVAL_S": "1"}

_LIVING: Final = "FROM event_files WHERE kind = 'ops' AND doomed_ns IS NULL"


@dataclass(frozen=True, slots=True)
class _Files:
    """Files of ops that count."""

    files: int
    rows: int
    size: int


def prove(form: Form, folder: Path) -> Line:
    """Send the job, analyse it, and weigh what is there."""
    begin, made = time.monotonic(), _job(form)
    server = ServerProcess(folder, role="api", min_free_bytes=0)
    data = Path(str(server.settings["data_dir"]))
    url = f"sqlite:///{data}/smon.db"
    with server:
        start_s = _cpu_s(server)
        batches, wire = _send(server, made)
        wait_until(lambda: _files(url).rows == len(made.table), "all events in files", _WAIT_S)
        # What says that streams have ended comes last.
        wait_until(lambda: not server.metrics()["smon_wal_records"], "an empty log", _WAIT_S)
        server_s, memory = _cpu_s(server) - start_s, _memory(server)
    loose = _files(url)
    # Files of a window are compacted some time after it: by the second worker, if not the first.
    worker, _ = (
        smon(["worker", "--once", "--data-dir", str(data)], _AT_ONCE).checked() for _ in range(2)
    )
    packed = _files(url)
    figures = {
        "gpus": made.job.layout.world_size,
        "events": len(made.table),
        "batches": batches,
        "bytes_per_event_sent": round(wire / len(made.table), 2),
        "bytes_per_event_in_files_as_they_come": round(loose.size / loose.rows, 2),
        "bytes_per_event_in_files_once_compacted": round(packed.size / packed.rows, 2),
        "files_as_they_come": loose.files,
        "files_once_compacted": packed.files,
        "server_cpu_us_per_event": round(1e6 * server_s / len(made.table), 2),
        "server_mib": memory >> 20,
        **_analysed(url, data, len(made.table), made.job.layout.dp * made.job.layout.pp, worker),
    }
    goals = tuple(_goals(url, made, figures, packed))
    return Line("sizes", form, goals, figures, round(time.monotonic() - begin, 1))


def _goals(url: str, made: Synthetic, figures: dict[str, Any], packed: _Files) -> Iterator[Goal]:
    windows = number(url, "SELECT count(*) FROM windows")
    done = number(url, "SELECT count(*) FROM windows WHERE state = 'done'")
    yield exactly("events in files, before and after compaction", packed.rows, len(made.table))
    yield exactly("windows analysed", done, windows)
    yield exactly("files that windows have too many once compacted", packed.files - windows, 0)
    # What the protocol reckons with: 9.2 bytes of each event.
    yield at_most("bytes of an event on the wire", figures["bytes_per_event_sent"], 12)
    stored = figures["bytes_per_event_in_files_once_compacted"]
    yield at_most("bytes of an event at rest", stored, 12)


def _analysed(
    url: str, data: Path, events: int, workers: int, worker: Took
) -> dict[str, float | int]:
    """What one worker process took for all windows, and what it left."""
    windows = number(url, "SELECT count(*) FROM windows")
    results = sum(file.stat().st_size for file in (data / "objects").rglob("results/**/*.parquet"))
    rows = (data / "smon.db").stat().st_size
    return {
        "windows": windows,
        "worker_cpu_us_per_event": round(1e6 * worker.cpu_s / events, 2),
        "worker_peak_mib": worker.peak_bytes >> 20,
        "kib_per_window_in_the_database": round(rows / windows / 1024, 1),
        "result_bytes_per_worker_and_window": round(results / windows / workers, 1),
    }


def _job(form: Form) -> Synthetic:
    scenario = Scenario(
        name="sizes",
        dp=_DP[form],
        pp=4,
        tp=_TP,
        microbatches=16,
        steps=_STEPS[form],
        causes=(causes.slow_gpu(1, 0, 1.3),),
    )
    return generate(scenario)


def _send(server: ServerProcess, made: Synthetic) -> tuple[int, int]:
    """Batches and bytes of all streams; 16 steps of one worker in each."""
    table = made.table
    ranks = np.unique(table.rank).tolist()
    connection = HTTPConnection("127.0.0.1", server.port, timeout=60)
    batches, size = 0, 0
    last = -(-(int(table.step.max()) + 1) // _BATCH_STEPS)
    for rank, stream in zip(ranks, _streams(server, made, ranks), strict=True):
        mine = table.take(table.rank == rank)
        for seq in range(last):
            first = seq * _BATCH_STEPS
            batch = ops_batch(seq, mine.between(first, first + _BATCH_STEPS - 1))
            size += _put(connection, stream, batch)
            batches += 1
        size += _put(connection, stream, end_batch(last))
    connection.close()
    return batches, size


def _streams(server: ServerProcess, made: Synthetic, ranks: list[int]) -> list[str]:
    layout = made.job.layout
    streams = [
        {
            "key": f"sizes-{rank}", "job": "sizes", "attempt": 0,
            "layout": {"dp": layout.dp, "pp": layout.pp, "tp": layout.tp},
            "mode": "recorded", "time": "unix", "window_steps": _WINDOW_STEPS,
            "host": f"host-{rank // _TP}", "source": "proof", "ranks": [rank], "epoch": 0,
            "notes": [],
        }
        for rank in ranks
    ]  # fmt: skip
    agent = {"version": "0", "host": "host", "pid": 1}
    answer = server.post("agents/hello", {"protocol": 1, "agent": agent, "streams": streams})
    return [stream["stream_id"] for stream in answer["streams"]]


def _put(connection: HTTPConnection, stream: str, batch: Batch) -> int:
    """Bytes of the body and its head."""
    headers = batch.headers()
    connection.request("PUT", f"/api/v1/ingest/{stream}/0/{batch.seq}", batch.body, headers)
    response = connection.getresponse()
    body = response.read()
    if response.status != 200:
        raise RuntimeError(f"a batch was answered with {response.status}: {body[:300]!r}")
    return len(batch.body) + sum(len(name) + len(text) + 4 for name, text in headers.items())


def _files(url: str) -> _Files:
    files, rows, size = query(url, f"SELECT count(*), sum(rows), sum(bytes) {_LIVING}")[0]
    return _Files(int(files), int(rows or 0), int(size or 0))


def _processes(server: ServerProcess) -> list[psutil.Process]:
    """The server, and those that decode for it."""
    assert server.process is not None
    first = psutil.Process(server.process.pid)
    return [first, *first.children(recursive=True)]


def _cpu_s(server: ServerProcess) -> float:
    times = [process.cpu_times() for process in _processes(server)]
    return float(sum(each.user + each.system for each in times))


def _memory(server: ServerProcess) -> int:
    return int(sum(process.memory_info().rss for process in _processes(server)))
