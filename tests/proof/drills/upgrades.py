"""What older versions left behind, under a server of this one: databases, logs, agents, spools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from smon.store.database import Database
from smon.store.objects import Objects
from tests.faults.outside import number
from tests.faults.processes import AgentProcess, FaultServer, unsent
from tests.store.released import TOKEN, Released
from tests.store.upgraded import kept_wrong, told_wrong, unlogged
from tests.system.server import request
from tests.waiting import wait_until
from tests.wire.released import Version, held_by, replayed

_OPS = "SELECT coalesce(sum(rows), 0) FROM event_files WHERE kind = 'ops' AND doomed_ns IS NULL"


def upgraded(kept: Released, folder: Path, url: str = "") -> list[str]:
    """What a server that starts on an older version's data does not have."""
    server = FaultServer(folder, {"database_url": url} if url else {})
    server.data.mkdir(parents=True)
    url = url or f"sqlite:///{server.data / 'smon.db'}"
    kept.load(url, server.data)
    before = number(url, _OPS)

    def get(path: str) -> Any:  # noqa: ANN401  # JSON
        headers = {"Authorization": f"Bearer {TOKEN}"}
        status, body = request(server.port, "GET", f"/api/v1/{path}", None, headers)
        if status != 200:
            raise RuntimeError(f"{path}: {status} {body[:200]!r}")
        return json.loads(body)

    with server:
        wait_until(lambda: not server.wal_records, "an empty log")
        wrong = told_wrong(kept, get)
        database = Database(url)
        wrong += kept_wrong(kept, database, Objects(str(server.data / "objects")))
        database.close()
    return wrong + unlogged(kept, before, number(url, _OPS))


def agents(version: Version, folder: Path) -> list[str]:
    """What a server does not take of an older version's agents, and of the spool of one."""
    server = FaultServer(folder)
    with server:
        wrong = replayed(version, server)
        wrong += _newer(version, server)
        ops = len(held_by(server)["ops"])
        spool = folder / "spool"
        shutil.copytree(version.folder / "spool", spool)
        with AgentProcess(server.url, spool, "node-1", log_folder=folder):
            wait_until(lambda: not unsent(spool), "an empty spool")
        wait_until(lambda: not server.wal_records, "an empty log")
        found = len(held_by(server)["ops"]) - ops
    wanted = len(version.stored()["ops"])
    return wrong + (
        [f"ops of the spool: expected {wanted}, found {found}"] if found != wanted else []
    )


def _newer(version: Version, server: FaultServer) -> list[str]:
    """Whether a version that is not known yet is refused with a problem that says so."""
    body = json.loads((version.folder / "hello.body").read_bytes()) | {"protocol": 1 << 20}
    headers = {"Content-Type": "application/json"}
    path = "/api/v1/agents/hello"
    status, answer = request(server.port, "POST", path, json.dumps(body).encode(), headers)
    fits = status == 422 and b"expected protocol" in answer
    return [] if fits else [f"a newer hello: {status} {answer[:200]!r}"]
