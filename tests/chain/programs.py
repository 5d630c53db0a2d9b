"""The programs of the chain: Prometheus and Alertmanager with the project's files, a receiver.

Only addresses are changed in these files: intervals, rules, routes and inhibitions are the real
ones.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from tests.deploy.files import ROOT, tool
from tests.system.server import free_port, quiet_environ, request

FILES = ROOT / "dashboards"
_START_S = 30.0


@dataclass(frozen=True, slots=True)
class Message:
    """One alert of one notification."""

    at: float
    receiver: str
    status: str
    labels: dict[str, str]
    annotations: dict[str, str]

    @property
    def name(self) -> str:
        """Of the alert."""
        return self.labels["alertname"]


@dataclass(slots=True, eq=False)
class Receiver:
    """An HTTP server that keeps what Alertmanager sends, one path for each receiver."""

    messages: list[Message] = field(default_factory=list)
    server: ThreadingHTTPServer | None = None

    def take(self, receiver: str, document: dict[str, Any]) -> None:
        """Keep a notification."""
        for alert in document["alerts"]:
            self.messages.append(
                Message(
                    time.time(), receiver, alert["status"], alert["labels"], alert["annotations"]
                )
            )

    def of(self, job: str, status: str = "firing") -> list[Message]:
        """What came about a job."""
        return [
            one
            for one in list(self.messages)
            if one.labels.get("train_job") == job and one.status == status
        ]


@contextlib.contextmanager
def receiving() -> Iterator[tuple[Receiver, int]]:
    """A receiver and its port."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.take(self.path.strip("/"), json.loads(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield receiver, server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def running(command: list[str], log: Path, **environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program, ended at the end, with its children."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=out,
            env={**quiet_environ(), **environ},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(port: int, log: Path) -> None:
    """Wait until Prometheus or Alertmanager is."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError, HTTPException):
            if request(port, "GET", "/-/ready")[0] == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"it does not start: {log.read_text()[-2000:]}")


@contextlib.contextmanager
def alertmanager(folder: Path, receiver_port: int) -> Iterator[int]:
    """Alertmanager with the project's file, whose receivers are webhooks; its port."""
    document = yaml.safe_load((FILES / "alertmanager" / "alertmanager.yml").read_text("utf-8"))
    for receiver in document["receivers"]:
        url = f"http://127.0.0.1:{receiver_port}/{receiver['name']}"
        receiver["webhook_configs"] = [{"url": url, "send_resolved": True}]
    path, port, log = folder / "alertmanager.yml", free_port(), folder / "alertmanager.log"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    command = [
        tool("prometheus-alertmanager", "prometheus-alertmanager"),
        f"--config.file={path}",
        f"--storage.path={folder / 'alertmanager'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    with running(command, log):
        wait_ready(port, log)
        yield port


@dataclass(frozen=True, slots=True)
class Hurry:
    """Shorter times than those of the project's files, as Prometheus writes them.

    Attributes
    ----------
    interval
        Between two scrapes, and between two looks at the rules.
    pending
        How long an alert about a finding is pending.
    """

    interval: str
    pending: str


def _hurried(rules: Path, hurry: Hurry, folder: Path) -> Path:
    """Copies of the rules with these times."""
    copies = folder / "rules"
    copies.mkdir()
    for path in rules.glob("*.yml"):
        document = yaml.safe_load(path.read_text("utf-8"))
        for rule in (rule for group in document["groups"] for rule in group["rules"]):
            if rule.get("labels", {}).get("kind") == "finding":
                rule["for"] = hurry.pending
        (copies / path.name).write_text(yaml.safe_dump(document), encoding="utf-8")
    return copies


@contextlib.contextmanager
def prometheus(
    folder: Path, ops_ports: list[int], alertmanager_port: int, hurry: Hurry | None = None
) -> Iterator[int]:
    """Prometheus with the project's file and rules; its port."""
    document = yaml.safe_load((FILES / "prometheus" / "prometheus.yml").read_text("utf-8"))
    port, log = free_port(), folder / "prometheus.log"
    targets = {"smon": ops_ports, "prometheus": [port]}
    rules = FILES / "prometheus" / "rules"
    if hurry is not None:
        rules = _hurried(rules, hurry, folder)
        times = ("scrape_interval", "scrape_timeout", "evaluation_interval")
        document["global"].update(dict.fromkeys(times, hurry.interval))
    document["rule_files"] = [str(rules / "*.yml")]
    document["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"] = [
        f"127.0.0.1:{alertmanager_port}"
    ]
    document["scrape_configs"] = [
        {
            **job,
            "static_configs": [
                {"targets": [f"127.0.0.1:{each}" for each in targets[job["job_name"]]]}
            ],
        }
        for job in document["scrape_configs"]
        if job["job_name"] in targets
    ]
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    command = [
        tool("prometheus", "prometheus"),
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(command, log):
        wait_ready(port, log)
        yield port


def agent_command() -> list[str]:
    """The agent of a host."""
    return [sys.executable, "-m", "ingest_agents.cli", "run"]


def alerts(prometheus_port: int, job: str) -> list[dict[str, Any]]:
    """Alerts of a job in Prometheus, pending or firing."""
    answer = _json(prometheus_port, "/api/v1/alerts")["data"]["alerts"]
    return [one for one in answer if one["labels"].get("train_job") == job]


def firing(prometheus_port: int, job: str) -> set[str]:
    """Names of the alerts of a job that fire in Prometheus."""
    found = alerts(prometheus_port, job)
    return {one["labels"]["alertname"] for one in found if one["state"] == "firing"}


def is_scraped(prometheus_port: int, ops_port: int) -> bool:
    """Whether the last scrape of a server worked."""
    up = quote(f'up{{instance="127.0.0.1:{ops_port}"}}')
    answer = _json(prometheus_port, f"/api/v1/query?query={up}")
    return any(one["value"][1] == "1" for one in answer["data"]["result"])


def suppressed(alertmanager_port: int, job: str) -> dict[str, bool]:
    """Alerts of a job in Alertmanager, and whether each is inhibited."""
    answer = _json(alertmanager_port, "/api/v2/alerts")
    return {
        one["labels"]["alertname"]: bool(one["status"]["inhibitedBy"])
        for one in answer
        if one["labels"].get("train_job") == job
    }


def _json(port: int, path: str) -> Any:  # noqa: ANN401  # JSON
    status, body = request(port, "GET", path)
    assert status == 200, (status, body[:500])
    return json.loads(body)


def fetched(url: str) -> tuple[int, str]:
    """Status and text of an address on this machine."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = HTTPConnection(host, timeout=30)
    try:
        connection.request("GET", f"/{path}")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
