"""A backup is made while batches come, the server dies, and a restored one takes its place."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

import numpy as np

from smon.errors import ConfigError
from smon.store import schema
from smon.store.database import Database
from smon.store.manifest import read_manifest, verify
from smon.store.objects import Objects
from smon.store.tenants import default_tenant
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.wire import Batch
from tests.api.filled import add_job, put_workers, report_of
from tests.faults.processes import FaultServer
from tests.faults.test_shared import batches_of, register, rows_sent, rows_stored
from tests.proof.attacks.target import sample
from tests.proof.child import ROOT
from tests.waiting import wait_until

#: Between two batches of a stream: the load lasts longer than the backup.
_PAUSE_S: Final = 0.02

#: Answers that are as they should be, while a server is there.
_GOOD: Final = frozenset({"stored", "duplicate"})


class Sender(threading.Thread):
    """Sends the batches of one stream, one after another, until all are sent or it is stopped.

    Attributes
    ----------
    answers
        By ``stored``, ``duplicate``, the status of what was refused, ``none``.
    """

    def __init__(
        self, port: int, stream: str, batches: Sequence[Batch], pause_s: float = 0.0
    ) -> None:
        super().__init__(daemon=True)
        self.port, self.stream, self.batches = port, stream, batches
        self.answers: Counter[str] = Counter()
        self.stopping = threading.Event()
        self._pause_s = pause_s

    def run(self) -> None:
        """Send."""
        for batch in self.batches:
            if self.stopping.wait(self._pause_s):
                return
            self._send(batch)

    def _send(self, batch: Batch) -> None:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            path = f"/api/v1/ingest/{self.stream}/0/{batch.seq}"
            connection.request("PUT", path, batch.body, batch.headers())
            answer = connection.getresponse()
            document = json.loads(answer.read())
            self.answers[str(document["status"])] += 1
        except (OSError, HTTPException):
            self.answers["none"] += 1
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class Drill:
    """What a drill found.

    Attributes
    ----------
    during
        Batches that were acknowledged while the backup was made.
    reports_differ
        Reports that the restored server tells otherwise.
    lost, doubled
        Ops, after everything was sent once more.
    unnoticed
        Damages of the backup that ``smon backup verify`` did not find.
    refused
        Answers to batches that are neither ``stored`` nor ``duplicate``.
    duplicates
        Of the batches that were sent again, those that the backup had.
    """

    database: str
    backup_bytes: int
    create_s: float
    verify_s: float
    restore_s: float
    during: int
    reports_differ: int
    lost: int
    doubled: int
    refused: int
    damages: int
    unnoticed: int
    duplicates: int
    batches: int


def drill(folder: Path, steps: int, damaged: int, urls: tuple[str, str] = ("", "")) -> Drill:
    """Back up under load, damage the backup, restore it elsewhere, send everything again.

    Parameters
    ----------
    damaged
        Files of the backup that are damaged, one after another.
    urls
        Of the databases before and after; empty: SQLite.
    """
    url, new_url = urls
    old = FaultServer(folder / "old", _at(url))
    old.data.mkdir(parents=True)
    _add_report(old, url)
    made = generate(Scenario(dp=2, pp=2, microbatches=4, steps=steps))
    backup = folder / "backup"
    with old:
        job = old.get("jobs")["items"][0]["id"]
        report = old.get(f"jobs/{job}/windows/latest")
        senders = _senders(old, made)
        for sender in senders:
            sender.start()
        wait_until(lambda: _stored(senders) >= 10, "batches before the backup")
        before = _stored(senders)
        create_s = smon(old, "backup", "create", str(backup))
        during = _stored(senders) - before
        for sender in senders:
            sender.stopping.set()
            sender.join()
        old.kill()
    begin = time.monotonic()
    faults = verify(backup)
    verify_s = round(time.monotonic() - begin, 2)
    if faults:
        raise RuntimeError(f"a backup that is not sound: {faults[:3]}")
    damages, unnoticed = _damaged(backup, damaged)
    new = FaultServer(folder / "new", _at(new_url))
    restore_s = smon(new, "backup", "restore", str(backup))
    with new:
        differ = int(new.get(f"jobs/{job}/windows/latest") != report)
        again = [Sender(new.port, sender.stream, sender.batches) for sender in senders]
        for sender in again:
            sender.start()
        for sender in again:
            sender.join()
        wait_until(lambda: not new.wal_records, "an empty log")
        stored = rows_stored(new_url or f"sqlite:///{new.data / 'smon.db'}", new.data / "objects")
    sent = rows_sent(made.table)
    return Drill(
        database="postgresql" if url else "sqlite",
        backup_bytes=sum(part.bytes for part in read_manifest(backup).parts),
        create_s=create_s,
        verify_s=verify_s,
        restore_s=restore_s,
        during=during,
        reports_differ=differ,
        lost=(sent - stored).total(),
        doubled=(stored - sent).total(),
        refused=sum(
            count
            for sender in (*senders, *again)
            for answer, count in sender.answers.items()
            if answer not in _GOOD
        ),
        damages=damages,
        unnoticed=unnoticed,
        duplicates=sum(sender.answers["duplicate"] for sender in again),
        batches=sum(len(sender.batches) for sender in again),
    )


def _at(url: str) -> dict[str, object]:
    return {"database_url": url} if url else {}


def _add_report(server: FaultServer, url: str) -> None:
    """A job that was analysed before, with its report."""
    database = Database(url or f"sqlite:///{server.data / 'smon.db'}")
    schema.upgrade(database)
    with database.write() as session:
        made = add_job(session, default_tenant(session), "analysed before", report_of("slow"))
    put_workers(Objects(str(server.data / "objects")), made, report_of("slow"))
    database.close()


def _senders(server: FaultServer, made: Synthetic) -> list[Sender]:
    senders = []
    for dp in range(2):
        mine = made.table.take(made.table.dp == dp)
        stream = register(server, dp, np.unique(mine.rank).tolist())
        senders.append(Sender(server.port, stream, batches_of(mine), _PAUSE_S))
    return senders


def _stored(senders: Sequence[Sender]) -> int:
    return sum(sender.answers["stored"] for sender in senders)


def smon(server: FaultServer, *words: str) -> float:
    """Run a command with the settings of a server; seconds that it took.

    Raises
    ------
    RuntimeError
        It failed.
    """
    begin = time.monotonic()
    command = [sys.executable, "-m", "smon.cli", *words]
    done = subprocess.run(
        command, env=dict(server.environ), capture_output=True, check=False, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"smon {' '.join(words)}: {(done.stdout + done.stderr)[-500:]!r}")
    return round(time.monotonic() - begin, 2)


def _damaged(backup: Path, most: int) -> tuple[int, int]:
    """(damages, those that were not found): of each file a changed bit, a lost end, and all."""
    files = [path for path in sorted(backup.rglob("*")) if path.is_file()]
    tried = unnoticed = 0
    for path in sample(files, most):
        data = path.read_bytes()
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else b"x"
        for spoiled in (flipped, data[:-2] if data else b"xx", None):
            path.unlink() if spoiled is None else path.write_bytes(spoiled)
            tried += 1
            unnoticed += _is_sound(backup)
        path.write_bytes(data)
    return tried, unnoticed + (not _is_sound(backup))


def _is_sound(backup: Path) -> bool:
    try:
        return not verify(backup)
    except ConfigError:
        return False
