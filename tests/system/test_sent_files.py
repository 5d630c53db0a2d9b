"""Files of ranks over HTTP to a real server, which is killed between their parts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from smon.wire import API, TYPE_FILE, Batch, BatchKind
from smon.wire.parts import FilePart, encode_part
from tests.system.server import ServerProcess, request
from tests.waiting import wait_until
from tests.worker.sent import dump_parts, file_parts, kineto_files

pytestmark = [pytest.mark.slow]

NVRX = "nvrx-flight-recorder"
GLOO = "torch-gloo-2pp2dp"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server with its worker."""
    with ServerProcess(tmp_path / "server") as made:
        yield made


class Sender:
    """What an agent does: a stream, its batches in order, each until it is acknowledged."""

    def __init__(self, server: ServerProcess, job: str, world: int) -> None:
        self.server = server
        self.batches: list[Batch] = []
        self.spec = {
            "key": f"files/{job}",
            "job": job,
            "attempt": 0,
            "layout": {"dp": world, "pp": 1},
            "mode": "live",
            "time": "unix",
            "window_steps": None,
            "host": "node-0",
            "source": "files",
            "ranks": [],
            "epoch": 0,
            "notes": [],
        }

    def hello(self) -> tuple[str, int]:
        """(stream, number from which to go on)."""
        agent = {"version": "1", "host": "node-0", "pid": 1}
        asked = {"protocol": 1, "agent": agent, "streams": [self.spec]}
        (answer,) = self.server.post("agents/hello", asked)["streams"]
        return str(answer["stream_id"]), int(answer["next_seq"])

    def add(self, parts: Sequence[FilePart]) -> None:
        """Have parts to send."""
        for part in parts:
            body = encode_part(part)
            self.batches.append(
                Batch(len(self.batches), BatchKind.FILE, TYPE_FILE, "identity", 1, body)
            )

    def send(self, most: int = 1 << 30) -> None:
        """Send what the server lacks, at most so many batches."""
        stream, first = self.hello()
        for batch in self.batches[first : first + most]:
            path = f"{API}/ingest/{stream}/0/{batch.seq}"
            status, answer = request(self.server.port, "PUT", path, batch.body, batch.headers())
            assert status == 200, answer


def job_of(server: ServerProcess, name: str) -> Mapping[str, Any]:
    """A job in the list of jobs."""
    (found,) = [one for one in server.get("jobs")["items"] if one["name"] == name]
    return dict(found)


def analysed(server: ServerProcess, name: str) -> list[Mapping[str, Any]]:
    """Windows of a job that have a report."""
    windows = server.get(f"jobs/{job_of(server, name)['id']}/windows")["items"]
    return [one for one in windows if one["analysed_s"] is not None]


def test_profiles_of_four_ranks_name_the_slow_one(server: ServerProcess, traces: Path) -> None:
    """The server is killed after every eight parts, and each part counts once all the same."""
    sender = Sender(server, "gloo", 4)
    for rank, content in kineto_files(traces / GLOO / "slow_rank3").items():
        steps = {"first_step": 0, "last_step": 20}
        sender.add(file_parts(content, size=1000, rank=rank, world_size=4, **steps))
    while sender.hello()[1] < len(sender.batches):
        sender.send(most=8)
        server.kill()
        server.start()
    (window,) = wait_until(lambda: analysed(server, "gloo"), "a report")
    assert (window["kind"], window["missing_count"], window["state"]) == ("capture", 0, "done")
    job = job_of(server, "gloo")
    assert job["running"]
    report = server.get(f"jobs/{job['id']}/windows/{window['id']}")
    assert report["findings"][0]["where"]["rank"] == 3
    assert report["job"]["layout"]["pp"] == 2
    (finding, *_) = server.get(f"jobs/{job['id']}/findings")["items"]
    assert (finding["rank"], finding["state"]) == (3, "open")
    quality = server.get(f"jobs/{job['id']}/quality")
    assert quality["files_dropped"] == []
    # Nothing more comes of it: neither another capture, nor a running diagnosis.
    sender.send()
    assert len(analysed(server, "gloo")) == 1


def test_ranks_that_never_arrived_are_named_over_rest(server: ServerProcess, traces: Path) -> None:
    """And over the metrics, whose alert on hangs looks at them."""
    sender = Sender(server, "stuck", 16)
    now_ns = time.time_ns()
    for path in sorted((traces / NVRX / "lock_gil_2nd").glob("_dump_*")):
        rank = int(path.name.rpartition("_")[2])
        sender.add(dump_parts(path.read_bytes(), rank, 16, now_ns))
    sender.send()
    wait_until(lambda: analysed(server, "stuck"), "a report")
    job = job_of(server, "stuck")
    assert (job["state"], job["verdict"], job["last_step"]) == ("critical", "hang", None)
    found = server.get(f"jobs/{job['id']}/findings")["items"]
    assert {(one["rank"], one["severity"], one["state"]) for one in found} == {
        (10, "critical", "open"),
        (15, "critical", "open"),
    }
    active = [line for line in server.metrics() if line.startswith("smon_finding_active")]
    assert any('cause="hang"' in line for line in active)
    assert server.get(f"jobs/{job['id']}/plan")["lines"]
    for page in ("", "/quality", "/ranks/10", f"/windows/{analysed(server, 'stuck')[0]['id']}"):
        status, body = request(server.port, "GET", f"/jobs/{job['id']}{page}")
        assert (status, b"cannot be shown" in body) == (200, False)
    (window,) = analysed(server, "stuck")
    status, body = request(
        server.port, "GET", f"/api/v1/jobs/{job['id']}/windows/{window['id']}/timeline?kind=actual"
    )
    assert (status, "capture" in json.loads(body)["detail"]) == (404, True)


def test_a_file_that_is_not_what_its_digest_says_is_noted(server: ServerProcess) -> None:
    """In REST, on the page of the data quality, and in the metrics of the worker."""
    sender = Sender(server, "damaged", 2)
    sender.add(file_parts(b"content of a rank", size=8, sha256="0" * 64, name="rank0.json"))
    sender.send()
    job = wait_until(
        lambda: [one for one in server.get("jobs")["items"] if one["name"] == "damaged"], "a job"
    )
    place = f"jobs/{job[0]['id']}/quality"
    (dropped,) = wait_until(lambda: server.get(place)["files_dropped"], "what was dropped")
    assert (dropped["reason"], dropped["files"], dropped["name"]) == ("digest", 1, "rank0.json")
    _, page = request(server.port, "GET", f"/{place}")
    assert b"not what its agent read" in page
