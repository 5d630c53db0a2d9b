"""Secrets that stand in settings, and all that processes write: none of them may be in it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final

from smon.store import schema, tokens
from smon.store.database import Database, now_ns
from tests.faults.processes import AgentProcess, FaultServer, unsent
from tests.proof.child import ROOT
from tests.system.server import free_port, quiet_environ, request
from tests.waiting import wait_until
from tests.wire.released import versions

#: By what they are; each is long enough to be found in anything.
MARKERS: Final = {
    "password of the database": "m4rk-password-0f-db",
    "key of the object store": "m4rk-secret-0f-s3",
    "webhook": "m4rk-path-0f-webh00k",
    "webhook of Slack": "m4rk-path-0f-slack",
    "token in an address": "smon_m4rk0000_" + "q" * 43,
    "token in a cookie": "smon_m4rk0001_" + "c" * 43,
    "wrong token of an agent": "smon_m4rk0002_" + "w" * 43,
}

_S3: Final = "s3://key:{}@bucket/events?endpoint_override=127.0.0.1:{}&scheme=http&region=x"


def leaks(folder: Path, commands: int) -> tuple[list[str], int]:
    """(what is written where it should not be, bytes that were searched).

    Parameters
    ----------
    commands
        At most so many are run beside the server.
    """
    folder.mkdir(parents=True)
    markers = dict(MARKERS)
    server = FaultServer(folder / "server", {"log_level": "debug", **_hooks()})
    server.data.mkdir(parents=True)
    made = _tokens(server)
    markers |= {f"token of {name}": text.rpartition("_")[2] for name, text in made.items()}
    (folder / "token").write_text(made["agents"])
    (folder / "wrong-token").write_text(markers["wrong token of an agent"])
    with server:
        _agents(server, folder)
        said = _asked(server, made["everything"])
        said += _commands(server, folder, commands)
        server.stop()
    (folder / "said").write_bytes(b"\n".join(said))
    # The files that they are read from, and the agents' copies of none.
    given = {folder / "token", folder / "wrong-token"}
    files = [path for path in folder.rglob("*") if path.is_file() and path not in given]
    texts = {path: path.read_bytes() for path in files}
    found = [
        f"{name} in {path.relative_to(folder)}"
        for path, text in texts.items()
        for name, marker in markers.items()
        if marker.encode() in text
    ]
    return found, sum(map(len, texts.values()))


def _hooks() -> dict[str, object]:
    address = f"https://127.0.0.1:{free_port()}"
    return {
        "notify_webhook_url": f"{address}/{MARKERS['webhook']}",
        "notify_slack_url": f"{address}/{MARKERS['webhook of Slack']}",
    }


def _tokens(server: FaultServer) -> dict[str, str]:
    database = Database(f"sqlite:///{server.data / 'smon.db'}")
    schema.upgrade(database)
    with database.write() as session:
        made = {
            "agents": tokens.create(session, "default", "agents", ["ingest"], None, now_ns()),
            "everything": tokens.create(
                session, "default", "everything", tokens.SCOPES, None, now_ns()
            ),
        }
    database.close()
    return made


def _agents(server: FaultServer, folder: Path) -> None:
    """One whose token is good, with something to send, and one that is refused."""
    for host, token in (("good", "token"), ("bad", "wrong-token")):
        spool = folder / f"spool-{host}"
        shutil.copytree(versions()[-1].folder / "spool", spool)
        settings = {"token_file": folder / token, "log_level": "debug", "heartbeat_s": 0.1}
        with AgentProcess(server.url, spool, host, settings, log_folder=folder) as agent:
            if host == "good":
                wait_until(partial(_is_sent, spool), "an empty spool")
            else:
                wait_until(partial(_says, agent.log, b"401"), "a refusal")
            agent.stop()


def _is_sent(spool: Path) -> bool:
    return not unsent(spool)


def _says(log: Path, text: bytes) -> bool:
    return log.exists() and text in log.read_bytes()


def _asked(server: FaultServer, token: str) -> list[bytes]:
    """Answers to who shows a token where it does not belong, and to who may ask."""
    lost, cookie = MARKERS["token in an address"], MARKERS["token in a cookie"]
    good = {"Authorization": f"Bearer {token}"}
    asked: list[tuple[str, str, Mapping[str, str]]] = [
        ("GET", f"/api/v1/jobs?token={lost}", {}),
        ("GET", "/api/v1/jobs", {"Authorization": f"Bearer {lost}"}),
        ("GET", "/", {"Cookie": f"smon_token={cookie}", "Accept": "text/html"}),
        ("POST", "/api/v1/imports", {"Authorization": f"Bearer {cookie}"}),
        ("PUT", "/api/v1/ingest/x/0/0", good),
        ("GET", "/api/v1/jobs", good),
        ("GET", "/api/v1/version", good),
        ("GET", "/", {**good, "Accept": "text/html"}),
        ("GET", "/nothing", {**good, "Accept": "text/html"}),
    ]
    said = [request(server.port, method, path, None, head)[1] for method, path, head in asked]
    return said + [request(server.ops_port, "GET", path)[1] for path in ("/metrics", "/readyz")]


def _commands(server: FaultServer, folder: Path, most: int) -> list[bytes]:
    """What commands print that have the secrets in their settings, when all goes well or not."""
    away = f"postgresql://smon:{MARKERS['password of the database']}@127.0.0.1:{free_port()}/smon"
    store = _S3.format(MARKERS["key of the object store"], free_port())
    both = {"SMON_DATABASE_URL": away, "SMON_TRACE_URL": store, "SMON_START_WAIT_S": "0.1"}
    runs: list[tuple[Sequence[str], Mapping[str, str]]] = [
        (("smon.cli", "config", "show", "--json"), both),
        (("smon.cli", "serve", "--port", "0"), both),
        (("ingest_agents.cli", "check"), _of_agent(server, folder)),
        (("smon.cli", "backup", "create", str(folder / "backup")), {}),
        (("smon.cli", "notify", "test"), {}),
        (("smon.cli", "config", "show"), both),
        (("smon.cli", "db", "check"), both),
        (("smon.cli", "worker", "--once"), both),
        (("smon.cli", "token", "list"), {}),
    ]

    def run(each: tuple[Sequence[str], Mapping[str, str]]) -> bytes:
        environ = {**server.environ, "SMON_LOG_LEVEL": "debug", **each[1]}
        command = [sys.executable, "-m", *each[0]]
        done = subprocess.run(
            command, env=environ, capture_output=True, check=False, cwd=ROOT, timeout=120
        )
        return json.dumps(each[0]).encode() + done.stdout + done.stderr

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, runs[:most]))


def _of_agent(server: FaultServer, folder: Path) -> dict[str, str]:
    return {
        **quiet_environ(),
        "SMON_SERVER": server.url,
        "SMON_TOKEN": MARKERS["wrong token of an agent"],
        "SMON_SPOOL_DIR": str(folder / "spool-good"),
    }
