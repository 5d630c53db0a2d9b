"""A file that ends the worker which reads it: it is given up after a few tries, others are read."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest

from smon.api.child import ChildProcess
from smon.store.models import WorkState
from smon.synth.write import write_trace
from tests.builders import synthetic_job
from tests.faults.planted_worker import COMMAND, DEADLY
from tests.system.server import ServerProcess, request
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

TRIES = 2
WAIT_S = 120.0


def upload(server: ServerProcess, files: dict[str, bytes]) -> str:
    """Have files imported; the id."""
    import_id = str(server.post("imports", {"job": "crash"})["id"])
    for number, (name, content) in enumerate(files.items()):
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        path = f"/api/v1/imports/{import_id}/files/{number}"
        headers = {"Content-Digest": f"sha-256=:{digest}:", "SMon-File-Name": name}
        assert request(server.port, "PUT", path, content, headers)[0] == 200
    server.post(f"imports/{import_id}/start", {})
    return import_id


def test_an_import_that_ends_its_worker_is_given_up(tmp_path: Path) -> None:
    """The worker is started again each time, and then does what came after it."""
    (tmp_path / "job").mkdir()
    table, job = synthetic_job(dp=4, pp=2, steps=3)
    good = {path.name: path.read_bytes() for path in write_trace(table, job, tmp_path / "job")}
    server = ServerProcess(tmp_path, role="api", lease_s=0.5, max_tries=TRIES, poll_interval_s=0.05)
    with server:
        ids = [upload(server, {"trace.parquet": DEADLY}), upload(server, good)]
        worker = ChildProcess(COMMAND, server.environ, stop_timeout_s=5.0)
        worker.start()
        try:
            found: list[dict[str, Any]] = []

            def both() -> bool:
                found[:] = [server.get(f"imports/{each}") for each in ids]
                return {each["state"] for each in found} <= {WorkState.DONE, WorkState.FAILED}

            wait_until(both, "both imports are over", WAIT_S)
        finally:
            worker.stop()
    assert [each["state"] for each in found] == [WorkState.FAILED, WorkState.DONE], found
    assert f"given up after {TRIES} tries" in str(found[0])
    assert "perhaps for lack of memory" in str(found[0])
