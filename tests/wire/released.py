"""Requests as agents of each version of the protocol send them, byte for byte, and their effect.

``golden/vN/requests.json`` lists requests in their order, each with its headers and the file of its
body; ``stored.json`` says what a server must hold afterwards. ``python -m tests.wire.released``
makes both for a new version, from this version's agent and server; ``docs/releases.md`` says when.
What an agent has sent once is never made again: it is out there.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
import zstandard

from ingest_agents.files import digest_of
from ingest_agents.payload import Gap, OpRow, context_batch, decode, end_batch, ops_batch
from ingest_agents.spool.folder import StreamSpec
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.store.database import Database
from smon.store.models import Coverage, EventFile, Job, SentFile, Stream
from smon.topology import Layout
from smon.wire import (
    API,
    ENCODINGS,
    PROTOCOL,
    SCHEMA_HEADER,
    TYPE_ARROW,
    TYPE_FILE,
    Batch,
    BatchKind,
)
from smon.wire.arrow import ipc_body
from smon.wire.columns import COLUMNS
from smon.wire.parts import FileFormat, FilePart, encode_part
from tests.ingest.batches import NOW, columns, plain, record_batch
from tests.store.rows import all_rows
from tests.system.server import ServerProcess, request
from tests.waiting import wait_until

GOLDEN: Final = Path(__file__).with_name("golden")

_REQUESTS: Final = "requests.json"
_STORED: Final = "stored.json"
_TYPE: Final = {"Content-Type": "application/json"}

#: Keys of the streams; each ends in another encoding.
_KEYS: Final = ("golden/0", "golden/1", "golden/2")
_EVIDENCE: Final = {
    "counters": {"step": [7, 8], "rank": [1, 1], "name": ["sm_clock_mhz"] * 2, "value": [9, 8]}
}


@dataclass(frozen=True, slots=True)
class Version:
    """All that one version of the protocol sends."""

    number: int
    root: Path = GOLDEN

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.root / f"v{self.number}"

    def requests(self) -> list[dict[str, Any]]:
        """``name``, ``method``, ``path``, ``headers`` and, of a file, ``body``."""
        found: list[dict[str, Any]] = json.loads((self.folder / _REQUESTS).read_bytes())
        return found

    def stored(self) -> dict[str, Any]:
        """What must be stored in the end."""
        found: dict[str, Any] = json.loads((self.folder / _STORED).read_bytes())
        return found

    def covered(self) -> set[tuple[str, str, str]]:
        """(schema, content type, encoding) of the batches."""
        heads = [each["headers"] for each in self.requests() if SCHEMA_HEADER in each["headers"]]
        return {
            (head[SCHEMA_HEADER], head["Content-Type"], head["Content-Encoding"]) for head in heads
        }


def versions() -> list[Version]:
    """All that is kept, the oldest first."""
    numbers = sorted(int(path.name[1:]) for path in GOLDEN.glob("v*"))
    return [Version(number) for number in numbers]


# --- sending it -------------------------------------------------------------------------------


def send(version: Version, port: int) -> list[str]:
    """Send all requests, and all batches once more; what was not answered as it should be."""
    wrong: list[str] = []
    ids: dict[str, str] = {}
    for again in (False, True):
        for each in version.requests():
            status, answer = _ask(version, each, port, ids)
            if each["name"] == "hello" and status == 200:
                ids |= {one["key"]: one["stream_id"] for one in answer["streams"]}
            wanted = "duplicate" if again else "stored"
            if status != 200 or ("/ingest/" in each["path"] and answer["status"] != wanted):
                wrong.append(f"{each['name']}: {status} {answer}")
    return wrong


def _ask(
    version: Version, each: Mapping[str, Any], port: int, ids: Mapping[str, str]
) -> tuple[int, dict[str, Any]]:
    body = (version.folder / each["body"]).read_bytes() if "body" in each else None
    path = each["path"]
    for key, stream_id in ids.items():
        path = path.replace(f"{{{key}}}", stream_id)
        body = body and body.replace(f"{{{key}}}".encode(), stream_id.encode())
    status, answer = request(port, each["method"], path, body, each["headers"])
    return status, json.loads(answer)


# --- what a server holds ----------------------------------------------------------------------


def held(database: Database, objects: Path) -> dict[str, Any]:
    """What is stored, without ids that a server has drawn."""
    files = [row for row in all_rows(database, EventFile) if row["doomed_ns"] is None]
    paths = {
        kind: [str(row["path"]) for row in files if row["kind"] == kind]
        for kind in ("ops", "context", "part")
    }
    covered = {row["stream_id"]: row for row in all_rows(database, Coverage)}
    streams = sorted(all_rows(database, Stream), key=lambda row: str(row["key"]))
    sent = sorted(all_rows(database, SentFile), key=lambda row: str(row["name"]))
    return {
        "jobs": [row["name"] for row in all_rows(database, Job)],
        "streams": [
            {name: row[name] for name in _OF_STREAM}
            | {name: covered[row["id"]][name] for name in ("ranges", "end_seq")}
            for row in streams
        ],
        "ops": sorted(row for path in paths["ops"] for row in _ops(objects / path)),
        "context": sorted(text for path in paths["context"] for text in _texts(objects / path)),
        "files": [{name: row[name] for name in _OF_FILE} for row in sent],
        "parts": sorted(digest_of(objects / path)[1] for path in paths["part"]),
    }


_OF_STREAM: Final = (
    "key", "host", "source", "ranks", "epoch", "steps_done", "ended", "end_reason", "events",
    "lost_events", "heartbeat",
)  # fmt: skip
_OF_FILE: Final = ("name", "format", "rank", "world_size", "sha256", "bytes", "parts", "state")


def _ops(path: Path) -> Iterator[list[Any]]:
    table = pq.ParquetFile(path).read()
    names = [column.name for column in COLUMNS]
    yield from (list(row) for row in zip(*(table[name].to_pylist() for name in names), strict=True))


def _texts(path: Path) -> list[str]:
    text = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes()).decode()
    return [json.dumps(json.loads(line), sort_keys=True) for line in text.splitlines()]


def replayed(version: Version, server: ServerProcess) -> list[str]:
    """What a server answers, and then holds, otherwise than it must."""
    wrong = send(version, server.port)
    wait_until(lambda: not server.metrics()["smon_wal_records"], "an empty log")
    wanted, found = version.stored(), held_by(server)
    return wrong + [
        f"{name}: expected {wanted[name]!r:.300}, found {found[name]!r:.300}"
        for name in wanted
        if found[name] != wanted[name]
    ]


def held_by(server: ServerProcess) -> dict[str, Any]:
    """What a server of its own folder holds, as JSON has it."""
    data = Path(str(server.settings["data_dir"]))
    database = Database(f"sqlite:///{data / 'smon.db'}")
    found: dict[str, Any] = json.loads(json.dumps(held(database, data / "objects")))
    database.close()
    return found


# --- what this version sends ------------------------------------------------------------------


def keep(folder: Path) -> None:
    """Write what this version sends, and what a server of this version makes of it."""
    folder.mkdir(parents=True)
    requests = [_posted(folder, "hello", "agents/hello", _hello()), *_put_all(folder)]
    requests.append(_posted(folder, "heartbeat", "agents/heartbeat", _heartbeat()))
    requests.append({"name": "time", "method": "GET", "path": f"{API}/time", "headers": {}})
    _write(folder / _REQUESTS, requests)
    _spool(folder / "spool")
    version = Version(PROTOCOL)
    with ServerProcess(folder / "server", role="api", min_free_bytes=0) as server:
        wrong = send(replace(version, root=folder.parent), server.port)
        wait_until(lambda: not server.metrics()["smon_wal_records"], "an empty log")
        found = held_by(server)
    shutil.rmtree(folder / "server")
    rows = sorted(row for number in range(_OPS) for row in _rows(number))
    if wrong or found["ops"] != rows:
        raise ValueError(f"this version does not take what it sends: {wrong}")
    _write(folder / _STORED, found)


#: Batches of ops: two types of content, each in every encoding.
_OPS: Final = 2 * len(ENCODINGS)


def _write(path: Path, document: object) -> None:
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _posted(folder: Path, name: str, path: str, document: object) -> dict[str, Any]:
    (folder / f"{name}.body").write_bytes(json.dumps(document).encode())
    return {"name": name, "method": "POST", "path": f"{API}/{path}",
            "headers": _TYPE, "body": f"{name}.body"}  # fmt: skip


def _put_all(folder: Path) -> Iterator[dict[str, Any]]:
    for key, batches in _streams().items():
        for batch in batches:
            name = f"{key.replace('/', '-')}-{batch.seq:02}-{batch.kind.name.lower()}"
            body = f"{name}-{batch.encoding}.body"
            (folder / body).write_bytes(batch.body)
            yield {"name": name, "method": "PUT", "path": f"{API}/ingest/{{{key}}}/0/{batch.seq}",
                   "headers": batch.headers(clock=(-5, 10)), "body": body}  # fmt: skip


def _streams() -> dict[str, list[Batch]]:
    """Every kind of batch in every type and encoding, by stream."""
    ops = [
        *(_arrow(number, encoding) for number, encoding in enumerate(ENCODINGS)),
        *(_coded(ops_batch([OpRow(*row) for row in _rows(number)]), encoding)
          for number, encoding in enumerate(ENCODINGS, len(ENCODINGS))),
    ]  # fmt: skip
    evidence = [_coded(context_batch(_EVIDENCE, rows=2), encoding) for encoding in ENCODINGS]
    gaps = [
        Gap(9, 10, 5, "spool-full", 30, 31), Gap(11, 11, 0, "damaged"),
        Gap(12, 13, 7, "not-on-server", 32, 33),
    ]  # fmt: skip
    lost = [_coded(gap.batch(), code) for gap, code in zip(gaps, ENCODINGS, strict=True)]
    ends = [_coded(end_batch("complete"), encoding) for encoding in ENCODINGS]
    first, second, single = (_coded(part, code) for part, code in zip(
        _parts(), ("identity", "gzip", "zstd"), strict=True))  # fmt: skip
    numbered = [replace(batch, seq=seq) for seq, batch in enumerate([*ops, *evidence])]
    return {
        _KEYS[0]: [*numbered, *lost, replace(ends[0], seq=14)],
        _KEYS[1]: [first, replace(second, seq=1), replace(ends[1], seq=2)],
        _KEYS[2]: [single, replace(ends[2], seq=1)],
    }


def _columns(number: int) -> dict[str, Any]:
    """Of the ops of one batch, which are those of no other."""
    return columns(12, step=[7 + 2 * number + row // 6 for row in range(12)])


def _rows(number: int) -> list[list[Any]]:
    made = plain(_columns(number))
    return [list(row) for row in zip(*(made[column.name] for column in COLUMNS), strict=True)]


def _arrow(number: int, encoding: str) -> Batch:
    raw = ipc_body(record_batch(_columns(number)))
    batch = Batch(number, BatchKind.OPS, TYPE_ARROW, "identity", 12, raw, 8 + 2 * number)
    return _coded(batch, encoding)


def _parts() -> list[Batch]:
    """A file of two parts, and one of one."""
    whole = {"first.json.gz": (b"first half, ", b"second half"), "second.json.gz": (b"all of it",)}
    return [
        Batch(0, BatchKind.FILE, TYPE_FILE, "identity", 1, encode_part(FilePart(
            name=name, format=FileFormat.RANK_EVENTS, rank=2, world_size=8,
            sha256=hashlib.sha256(b"".join(contents)).hexdigest(), bytes=sum(map(len, contents)),
            part=part, parts=len(contents), first_step=5, last_step=6, start_ns=NOW,
            end_ns=NOW + 10**9, content=content,
        )))
        for name, contents in whole.items()
        for part, content in enumerate(contents)
    ]  # fmt: skip


def _coded(batch: Batch, encoding: str) -> Batch:
    raw = decode(batch)
    packers: dict[str, Callable[[bytes], bytes]] = {
        "zstd": zstandard.ZstdCompressor(level=3).compress,
        "gzip": lambda body: gzip.compress(body, mtime=0),
        "identity": bytes,
    }
    return replace(batch, encoding=encoding, body=packers[encoding](raw))


def _hello() -> dict[str, Any]:
    stream = {
        "job": "golden", "attempt": 1, "layout": {"dp": 4, "pp": 2}, "mode": "recorded",
        "time": "unix", "window_steps": None, "host": "node-1", "source": "recorder", "epoch": 0,
        "notes": ["a note"],
    }  # fmt: skip
    streams = [stream | {"key": key, "ranks": [rank]} for rank, key in enumerate(_KEYS, 1)]
    agent = {"version": "0.1.0", "host": "node-1", "pid": 7}
    return {"protocol": PROTOCOL, "agent": agent, "streams": streams}


def _heartbeat() -> dict[str, Any]:
    stream = {
        "stream_id": f"{{{_KEYS[0]}}}", "epoch": 0, "next_seq": 15, "spool_bytes": 100,
        "oldest_unsent_s": 1.5, "dropped": {"spool-full": 4},
    }  # fmt: skip
    usage = {"cpu_ratio": 0.001, "rss_bytes": 2e7}
    clock = {"offset_ns": -5, "error_ns": 10, "drift_ppm": 0.5}
    agent = {"version": "0.1.0", "host": "node-1", "pid": 7, **usage}
    return {"agent": agent, "streams": [stream], "clock": clock}


def _spool(root: Path) -> None:
    """What an agent of this version leaves on a host when it is stopped: a stream not sent yet."""
    spec = StreamSpec(
        key="golden/spool", job="golden spool", attempt=1, layout=Layout(dp=4, pp=2),
        mode="recorded", time="unix", host="node-1", source="test", ranks=(1,),
    )  # fmt: skip
    writer = SpoolWriter(root, spec, SpoolLimits(1 << 20, 1e9, 0))
    for batch in _streams()[_KEYS[0]]:
        if batch.kind in {BatchKind.OPS, BatchKind.CONTEXT}:
            writer.append(batch)
    writer.append(_parts()[2])
    writer.end("complete")
    writer.close()
    (writer.folder / "lock").unlink()


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep what this version sends."""
    parser = argparse.ArgumentParser(prog="python -m tests.wire.released", description=__doc__)
    parser.add_argument("--again", action="store_true", help="in place of what nobody sends yet")
    parsed = parser.parse_args(arguments)
    folder = Version(PROTOCOL).folder
    if folder.exists() and not parsed.again:
        print(f"{folder} is kept already; --again if nobody sends that yet")  # noqa: T201  # a command
        return 0
    with tempfile.TemporaryDirectory(prefix="smon-golden-") as name:
        keep(Path(name) / folder.name)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(name) / folder.name, folder)
    print(f"{folder}: protocol {PROTOCOL}")  # noqa: T201  # a command
    return 0


if __name__ == "__main__":
    sys.exit(main())
