"""Mutated bodies and heads over real HTTP: never a death, a 5xx, or a body whose digest is wrong.

Sound batches of every kind are damaged, mostly with a digest that fits the damage, so that they get
as far as they can; and bombs, bodies that would be a thousand times larger once unpacked.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import psutil

from smon.wire import TYPE_ARROW, TYPE_JSON, Batch, BatchKind
from smon.wire.arrow import encoded
from tests.ingest.batches import bomb, ipc_claiming
from tests.proof.child import measured
from tests.proof.line import Form, Line, at_most, exactly
from tests.proof.mutated import Tally, send
from tests.proof.sending import Connection, register
from tests.system.server import ServerProcess

_BODIES: Final = {Form.SHORT: 400, Form.LONG: 1_000_000}

#: Processes that send; 0: this one. And streams that each of them sends at a time.
_PROCESSES: Final = {Form.SHORT: 0, Form.LONG: 2}
_STREAMS: Final = {Form.SHORT: 4, Form.LONG: 8}

#: Tries at each bomb: the fastest counts, for others use the machine too.
_TRIES: Final = 5

_MIB: Final = 1 << 20


def prove(form: Form, folder: Path) -> Line:
    """Send them all, in two halves, then the bombs, then a sound batch."""
    begin, tally = time.monotonic(), Tally()
    with ServerProcess(folder / "server", role="api") as server:
        before = _memory(server)
        memory = []
        for half in range(2):
            tally.add(_send(server, form, half, _BODIES[form] // 2))
            memory.append(_memory(server))
        sent_s = time.monotonic() - begin
        (stream,) = register(server, "bombs", 1)
        slowest, taken = _bombs(server, stream)
        deaths = _deaths(server)
        alive = _sound(server, stream)
    failed = sum(count for status, count in tally.statuses.items() if status >= 500)
    goals = (
        exactly("answers of 500 or above", failed, 0),
        exactly("connections that ended without an answer", tally.cut, 0),
        exactly("bodies taken although their digest does not fit", tally.wrong_digests_taken, 0),
        exactly("processes that died while they decoded", deaths, 0),
        exactly("bombs taken", taken, 0),
        at_most("slowest refusal of a bomb, ms", max(slowest.values()) * 1000, 100, timed=True),
        at_most("memory that the second half added, MiB", (memory[1] - memory[0]) / _MIB, 32),
        exactly("sound batches taken after all that", alive, 1),
    )
    figures = {
        "bodies": tally.statuses.total(),
        "bodies_per_s": round(tally.statuses.total() / sent_s),
        "memory_before_mib": before >> 20,
        "memory_after_mib": memory[1] >> 20,
        "answers": _records("status", tally.statuses),
        "sent": _records("kind", tally.kinds),
        "bombs": [{"bomb": name, "ms": round(1000 * took, 1)} for name, took in slowest.items()],
    }
    return Line("bodies", form, goals, figures, round(time.monotonic() - begin, 1))


def _records(name: str, counts: Counter[int] | Counter[str]) -> list[dict[str, object]]:
    return [{name: key, "count": counts[key]} for key in sorted(counts)]  # type: ignore[index]  # one kind of key each


def _memory(server: ServerProcess) -> int:
    """Bytes of the server's processes together, that of shared pages once."""
    assert server.process is not None
    process = psutil.Process(server.process.pid)
    family = [process, *process.children(recursive=True)]
    return sum(int(each.memory_full_info().pss) for each in family)


def _deaths(server: ServerProcess) -> int:
    name = "smon_ingest_decoder_deaths_total{"
    return int(sum(count for key, count in server.metrics().items() if key.startswith(name)))


def _send(server: ServerProcess, form: Form, half: int, count: int) -> Tally:
    """Send so many, from as many processes and to as many streams as the form says."""
    processes, width = _PROCESSES[form], _STREAMS[form]
    groups = [
        register(server, f"hostile-{half}-{number}", width) for number in range(processes or 1)
    ]
    each = max(count // (len(groups) * width), 1)
    if not processes:
        return send(server.port, half, each, groups[0])
    tally = Tally()
    with ThreadPoolExecutor(processes) as pool:
        asked = [
            pool.submit(
                measured,
                "tests.proof.mutated",
                [str(server.port), str(half * processes + number), str(each), *streams],
            )
            for number, streams in enumerate(groups)
        ]
        for found in asked:
            tally.add(Tally.of(found.result()))
    return tally


def _bombs(server: ServerProcess, stream: str) -> tuple[dict[str, float], int]:
    """Seconds of the refusal of each, the fastest of a few tries; and how many were taken."""
    took, taken = {}, 0
    with Connection(server.port) as connection:
        for name, body, encoding, content_type in _six():
            batch = Batch(0, BatchKind.OPS, content_type, encoding, 12, body)
            times = []
            for _ in range(_TRIES):
                begin = time.monotonic()
                taken += connection.put(stream, batch).status == 200
                times.append(time.monotonic() - begin)
            took[name] = min(times)
    return took, taken


def _six() -> Iterator[tuple[str, bytes, str, str]]:
    """Name, body, encoding, type."""
    yield "1 GiB of zeros in a zstd frame", bomb(1 << 30), "zstd", TYPE_ARROW
    zeros = bytes(1 << 28)
    yield "256 MiB of zeros, gzip", gzip.compress(zeros, 9), "gzip", TYPE_ARROW
    yield "the same in another gzip", gzip.compress(gzip.compress(zeros)), "gzip", TYPE_JSON
    yield "Arrow that claims 2^31 rows", ipc_claiming(2**31 - 1), "identity", TYPE_ARROW
    yield "100,000 brackets", b"[" * 100_000, "identity", TYPE_JSON
    values = b'{"schema":"smon.ops/1","columns":{"step":[' + b"1," * (1 << 22)
    yield "4 million numbers, zstd", encoded(values), "zstd", TYPE_JSON


def _sound(server: ServerProcess, stream: str) -> int:
    body = json.dumps({"reason": "x"}).encode()
    batch = Batch(0, BatchKind.END, TYPE_JSON, "identity", 0, body)
    with Connection(server.port) as connection:
        return int(connection.put(stream, batch).status == 200)
