"""Windows on PostgreSQL and S3, analysed on a Ray cluster of which nodes are killed."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from smon.worker.elsewhere import analyse_elsewhere
from tests.faults.forge import ROOT
from tests.faults.outside import number
from tests.faults.postgres import postgres
from tests.faults.processes import FaultServer
from tests.proof.line import Form, Goal, Line, at_least, exactly
from tests.proof.windows import WAIT_S, Backlog, done_of, doubled, is_done, same_reports, send_job
from tests.ray_nodes import RayNodes, carrying_out, held, need_ray
from tests.service import new_bucket
from tests.waiting import wait_until

#: Windows of each backlog that is timed, and of the one whose nodes are killed.
_TIMED: Final = {Form.SHORT: 0, Form.LONG: 300}
_WINDOWS: Final = {Form.SHORT: 16, Form.LONG: 1000}
_KILLS: Final = {Form.SHORT: 1, Form.LONG: 5}

#: Reports that are compared with those of this process.
_COMPARED: Final = {Form.SHORT: 4, Form.LONG: 100}

#: Under way at a time, for each node: the next one shall be there when one is done.
_EACH: Final = 2

#: Longer than any cluster takes to begin.
_AT_WORK_S: Final = 180.0

_TASK: Final = analyse_elsewhere.__name__
_AGAIN: Final = "SELECT count(*) FROM windows WHERE fence > 1"


def prove(form: Form, folder: Path) -> Line:
    """Drain backlogs with more and more nodes; then one while nodes are killed."""
    need_ray()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)  # each request of the S3 server
    begin = time.monotonic()
    with ExitStack() as stack:
        site = stack.enter_context(_site(folder))
        rates = [site.drained(_TIMED[form], count) for count in (1, 2) if _TIMED[form]]
        with site.worker("killed", 2 * _EACH):
            site.grow_to(2)
            backlog = Backlog(site.server, site.url, "killed", _WINDOWS[form])
            site.kill(_KILLS[form], backlog)
            site.see(2, backlog)
            site.wait_for(backlog.is_done)
        windows = backlog.total + _TIMED[form] * len(rates)
        goals = tuple(_goals(site, form, backlog, windows))
    figures = {"windows": windows, "throughput": rates}
    return Line("cluster", form, goals, figures, round(time.monotonic() - begin, 1))


@contextmanager
def _site(folder: Path) -> Iterator[Site]:
    """Servers and a cluster of one node, which start side by side: most of it is waiting."""
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(_serve, folder, stack)
        nodes = stack.enter_context(RayNodes())
        yield Site(*serving.result(), nodes)


def _serve(folder: Path, stack: ExitStack) -> tuple[FaultServer, str]:
    url = stack.enter_context(postgres()).new("cluster")
    # What was under way on a node that is killed goes on on another, which is killed in turn.
    tries = 2 * max(_KILLS.values())
    shared = {
        "database_url": url, "trace_url": new_bucket(), "lease_s": 5.0, "max_tries": tries,
    }  # fmt: skip
    return stack.enter_context(FaultServer(folder / "server", shared)), url


class Site:
    """A server, and a cluster whose first node stays while others come and go."""

    def __init__(self, server: FaultServer, url: str, nodes: RayNodes) -> None:
        self.server, self.url, self.nodes = server, url, nodes
        self.others: list[Any] = []
        self.seen: set[str] = set()
        self.kills = 0
        self.codes: set[int] = set()
        self.process: subprocess.Popen[bytes] | None = None

    def grow_to(self, count: int) -> None:
        """So many nodes in all."""
        while len(self.others) + 1 < count:
            self.others.append(self.nodes.add())

    @contextmanager
    def worker(self, name: str, parallel: int) -> Iterator[None]:
        """``smon worker --executor ray``, on the first node."""
        command = [sys.executable, "-m", "smon.cli", "worker", "--name", name]
        command += ["--executor", "ray", "--ray-address", self.nodes.address]
        command += ["--parallel", str(parallel)]
        with (self.server.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, env=dict(self.server.environ), stdout=log, stderr=log, cwd=ROOT
            )
        self.process = process
        try:
            yield
        finally:
            self.process = None
            process.terminate()
            try:
                self.codes.add(process.wait(60.0))
            except subprocess.TimeoutExpired:
                process.kill()
                self.codes.add(process.wait())

    def drained(self, windows: int, count: int) -> dict[str, float]:
        """Windows per second that so many nodes analyse, from the first result to the last."""
        name = f"backlog-{count}"
        self.grow_to(count)
        send_job(self.server, name, windows)
        with self.worker(name, count * _EACH):
            self.wait_for(lambda: done_of(self.url, name))
            begin, first = time.monotonic(), done_of(self.url, name)
            self.wait_for(lambda: is_done(self.url, name, windows))
            seconds = time.monotonic() - begin
        rate = round((windows - first) / max(seconds, 1e-9), 1)
        return {"nodes": count, "windows_per_s": rate}

    def wait_for(self, analysed: Callable[[], object]) -> None:
        """Wait until windows are analysed, as long as there is a worker."""

        def enough() -> object:
            if self.process is not None and self.process.poll() is not None:
                raise RuntimeError(f"the worker has ended with {self.process.returncode}")
            self._look()
            return analysed()

        wait_until(enough, "windows to be analysed", WAIT_S)

    def kill(self, kills: int, backlog: Backlog) -> None:
        """Kill nodes that carry a window out, and let others come in their place."""
        while self.kills < kills:
            self.grow_to(2)
            backlog.refill()
            wait_until(lambda: backlog.is_done() or self._kill_one(), "a node at work", _AT_WORK_S)

    def see(self, nodes: int, backlog: Backlog) -> None:
        """Go on until so many nodes have been seen at work."""
        while len(self.seen) < nodes:
            backlog.refill()
            self.wait_for(lambda: len(self.seen) >= nodes or backlog.is_done())

    def _kill_one(self) -> bool:
        """Kill the newest node, if it carries out a window now."""
        self._look()
        (node,) = self.others
        for process in carrying_out(node, _TASK):
            # What is stopped cannot end before it is killed.
            if held(process, _TASK):
                self.seen.add(str(node.unique_id))
                self.others.remove(node)
                self.nodes.kill(node)
                self.kills += 1
                return True
        return False

    def _look(self) -> None:
        """Remember which nodes have been seen at work."""
        for node in (self.nodes.first, *self.others):
            if carrying_out(node, _TASK):
                self.seen.add(str(node.unique_id))


def _goals(site: Site, form: Form, backlog: Backlog, windows: int) -> Iterator[Goal]:
    url = site.url
    done = number(url, "SELECT count(*) FROM windows WHERE state = 'done'")
    yield exactly("windows analysed", done, windows)
    yield exactly("windows with more than one result", doubled(url), 0)
    yield exactly("nodes killed while they analysed a window", site.kills, _KILLS[form])
    yield at_least("windows analysed again after that", number(url, _AGAIN), 1)
    yield at_least("nodes that analysed windows", len(site.seen), 2)
    yield exactly("workers that did not end well when they were told to", len(site.codes - {0}), 0)
    same = same_reports(site.server, url, backlog.made, backlog.windows, _COMPARED[form])
    yield exactly("reports that are those of one process, of those compared", same, _COMPARED[form])
