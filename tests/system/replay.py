"""A recorded trace sent live by several agents, shuffled and with duplicates, over real HTTP."""

from __future__ import annotations

import json
import random
import threading
from dataclasses import dataclass
from http.client import HTTPConnection

import numpy as np

from smon.trace.load import Trace
from smon.trace.table import OpTable
from smon.wire import TYPE_ARROW, TYPE_JSON, Batch, BatchKind
from smon.wire.arrow import encoded, ipc_body
from tests.service import record_batch
from tests.system.server import ServerProcess


@dataclass(frozen=True, slots=True)
class Answers:
    """What the server said to all batches of a replay."""

    stored: int
    duplicates: int


def ops_batch(seq: int, table: OpTable, steps_done: int | None = None) -> Batch:
    """A batch of these rows."""
    body = encoded(ipc_body(record_batch(table)))
    return Batch(seq, BatchKind.OPS, TYPE_ARROW, "zstd", len(table), body, steps_done=steps_done)


def end_batch(seq: int) -> Batch:
    """The batch that ends a stream."""
    body = json.dumps({"reason": "finished"}).encode()
    return Batch(seq, BatchKind.END, TYPE_JSON, "identity", 0, body)


def register(server: ServerProcess, trace: Trace, agents: int, **more: object) -> list[str]:
    """Stream ids of so many agents of the job."""
    layout = trace.job.layout
    ranks = np.array_split(np.unique(trace.table.rank), agents)
    sizes = {name: getattr(layout, name) for name in ("dp", "pp", "tp", "cp", "ep", "vpp")}
    streams = [
        {
            "key": f"replay-{trace.job.job_id}-{number}",
            "job": trace.job.job_id,
            "attempt": trace.job.attempt,
            "layout": sizes,
            "mode": "recorded",
            "time": "step" if trace.table.step_relative else "unix",
            "window_steps": None,
            "host": f"node{number}",
            "source": "replay",
            "ranks": part.tolist(),
            "epoch": 0,
            "notes": list(trace.notes),
            **more,
        }
        for number, part in enumerate(ranks)
    ]
    hello = {
        "protocol": 1,
        "agent": {"version": "0", "host": "test", "pid": 1},
        "streams": streams,
    }
    answer = server.post("agents/hello", hello)
    return [stream["stream_id"] for stream in answer["streams"]]


def replay(server: ServerProcess, trace: Trace, *, agents: int, seed: int) -> Answers:
    """Send every row once, and about a third of the batches again, in shuffled order.

    Batches of one agent are shuffled within a stretch, as those of a sender with several
    connections are; agents run at the same time.
    """
    ids = register(server, trace, agents)
    parts = np.array_split(np.unique(trace.table.rank), agents)
    answers: list[tuple[int, int]] = [(0, 0)] * agents
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            mine = trace.table.take(np.isin(trace.table.rank, parts[number]))
            chance = random.Random(seed + number)  # noqa: S311  # the same shuffle for a seed
            answers[number] = _send(server.port, ids[number], mine, chance)
        except BaseException as error:  # noqa: BLE001  # a thread's failure is the test's
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(agents)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return Answers(*(sum(column) for column in zip(*answers, strict=True)))


def _send(port: int, stream: str, table: OpTable, chance: random.Random) -> tuple[int, int]:
    batches = _batches(table, chance)
    order: list[Batch] = []
    for first in range(0, len(batches), 64):
        stretch = batches[first : first + 64]
        again = chance.sample(stretch, k=-(-len(stretch) * 3 // 10))
        mixed = [*stretch, *again]
        chance.shuffle(mixed)
        order += mixed
    counts = {"stored": 0, "duplicate": 0}
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    for batch in order:
        path = f"/api/v1/ingest/{stream}/0/{batch.seq}"
        connection.request("PUT", path, batch.body, batch.headers())
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (answer.status, body)
        counts[json.loads(body)["status"]] += 1
    connection.close()
    return counts["stored"], counts["duplicate"]


def _batches(table: OpTable, chance: random.Random) -> list[Batch]:
    batches: list[Batch] = []
    order = np.lexsort((table.start_ns, table.step))
    at = 0
    while at < len(order):
        size = chance.randint(100, 1000)
        batches.append(ops_batch(len(batches), table.take(order[at : at + size])))
        at += size
    return [*batches, end_batch(len(batches))]
