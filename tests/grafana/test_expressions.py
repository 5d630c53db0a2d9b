"""Every expression of every panel, asked of a real Prometheus that scrapes a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from tests.chain.programs import agent_command, running, wait_ready
from tests.chain.trainer import Host, Trainer
from tests.deploy.files import tool
from tests.grafana.boards import boards, expressions, variables
from tests.notify.receiver import receiving
from tests.system.server import ServerProcess, free_port, request
from tests.waiting import wait_until

JOB = 'llama "70b" .*'

#: Panels that are empty while nothing goes wrong; all others must show something.
CALM = {
    "Refused requests by problem",
    "Lost events by reason",
    "Failures of workers",
}

#: Queries that are empty while nothing goes wrong, in panels that show something besides.
CALM_METRICS = {"smon_ingest_connections_refused_total", "smon_steps_skipped_total"}

#: Until there is something in each panel.
WAIT_S = 90.0


@dataclass(frozen=True, slots=True)
class Scene:
    """Ports of Prometheus, the server and the worker."""

    prometheus: int
    ops: tuple[int, ...]

    def get(self, path: str, **parameters: str) -> Any:  # noqa: ANN401  # JSON
        """What Prometheus answers."""
        status, body = request(self.prometheus, "GET", f"{path}?{urlencode(parameters)}")
        document = json.loads(body)
        assert status == 200, (parameters, document)
        assert document["status"] == "success"
        return document["data"]

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now."""
        found: list[dict[str, Any]] = self.get("/api/v1/query", query=expression)["result"]
        return found

    def families(self) -> dict[str, str]:
        """The type of each family of metrics that server and worker publish, by name."""
        found = {}
        for port in self.ops:
            _, body = request(port, "GET", "/metrics")
            for line in body.decode().splitlines():
                if line.startswith("# TYPE "):
                    name, kind = line.split()[2:4]
                    found[name] = kind
        return found


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A job with a slow worker that runs, a server, its worker, agents, a receiver, Prometheus."""
    program = tool("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("grafana")
    with ExitStack() as stack:
        receiver = stack.enter_context(receiving())
        settings: dict[str, Any] = {
            "notify_webhook_url": receiver.url,
            "notify_private": 1,
            "price_per_gpu_hour": 2,
            "worker_ops_port": free_port(),
            "window_steps": 10,
        }
        server = stack.enter_context(ServerProcess(folder, **settings))
        ops = (server.ops_port, settings["worker_ops_port"])
        stack.enter_context(_agent(folder, server.url))
        trainer = Trainer(JOB, [Host(folder / "spool", (0, 1, 2, 3))])
        trainer.slow_down()
        trainer.start()
        stack.callback(trainer.stop)
        port = stack.enter_context(_prometheus(program, folder, ops))
        scene = Scene(port, ops)
        # Each test alone may be the first one here.
        wait_until(lambda: not empty(scene), "something in every panel", WAIT_S, pause_s=1.0)
        yield scene
        assert trainer.error is None


def _agent(folder: Path, url: str) -> AbstractContextManager[object]:
    spool = folder / "spool"
    spool.mkdir()
    environ = {"SMON_SERVER": url, "SMON_SPOOL_DIR": str(spool), "SMON_HOSTNAME": "node-0"}
    environ["SMON_HEARTBEAT_INTERVAL_S"] = "1"
    return running(agent_command(), folder / "agent.log", **environ)


@contextmanager
def _prometheus(program: str, folder: Path, ops: tuple[int, ...]) -> Iterator[int]:
    """Prometheus that looks every two seconds; its port."""
    port, log = free_port(), folder / "prometheus.log"
    targets = [f"127.0.0.1:{each}" for each in ops]
    document = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [{"job_name": "smon", "static_configs": [{"targets": targets}]}],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    command = [
        program,
        f"--config.file={path}",
        f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with running(command, log):
        wait_ready(port, log)
        yield port


def empty(scene: Scene) -> list[tuple[str, str]]:
    """Queries that show nothing although they should."""
    return [
        (one.panel, one.text)
        for one in expressions()
        if one.panel not in CALM and not one.metrics() & CALM_METRICS and not scene.ask(one.asked())
    ]


@pytest.mark.slow
def test_every_panel_shows_something_of_a_running_job(scene: Scene) -> None:
    """No expression is an error; only those of what goes wrong are empty while nothing does."""
    # A look that Prometheus missed leaves a hole for a moment.
    wait_until(lambda: not empty(scene), "something in every panel", pause_s=1.0)
    for one in expressions():
        scene.ask(one.asked(train_job="llama", instance="127.0.0.1:1"))


@pytest.mark.slow
def test_every_metric_that_is_named_exists(scene: Scene) -> None:
    """Server and worker publish it, also where it has no series yet."""
    families = scene.families()
    known = set(families)
    for name, kind in families.items():
        if kind == "histogram":
            known |= {f"{name}_bucket", f"{name}_count", f"{name}_sum"}
    wanted = {name for one in expressions() for name in one.metrics()}
    assert not wanted - known
    counters = {name for name, kind in families.items() if kind == "counter"}
    bare = [
        (one.panel, name)
        for one in expressions()
        for name in one.metrics() & counters
        if f"rate({name}" not in one.text and f"increase({name}" not in one.text
    ]
    assert not bare


@pytest.mark.slow
def test_the_variables_have_values(scene: Scene) -> None:
    """The reader can choose each job and each process; a name is matched as it is."""
    for board in boards().values():
        for name, variable in variables(board).items():
            if variable["type"] != "query":
                continue
            metric, label = variable["definition"].removeprefix("label_values(")[:-1].split(", ")
            values = scene.get(f"/api/v1/label/{label}/values", **{"match[]": metric})
            assert values, name
            if name == "train_job":
                assert values == [JOB]


@pytest.mark.slow
def test_the_numbers_are_those_of_the_job(scene: Scene) -> None:
    """Slowdown, waste and the rank that is slow, as REST has them."""
    asked = {one.panel: one.asked() for one in expressions()}
    slowdown, waste = (
        wait_until(partial(scene.ask, asked[panel]), panel)[0]
        for panel in ("Slowdown by job", "Waste by job")
    )
    value = float(slowdown["value"][1])
    assert value > 1.1
    assert float(waste["value"][1]) == pytest.approx(1 - 1 / value, abs=0.05)
    assert slowdown["metric"]["train_job"] == JOB
