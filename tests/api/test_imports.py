"""Imports: files piece by piece, the worker reads them, the command does it all."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from smon.commands import import_
from smon.errors import ConfigError, StoreError, TraceError
from smon.synth.write import write_trace
from smon.worker.loop import Worker
from tests.api.filled import Client, World, make_world
from tests.api.served import served
from tests.builders import synthetic_job

PATH = "/api/v1/imports"


def digest_of(content: bytes) -> str:
    """The header Content-Digest of a body."""
    return f"sha-256=:{base64.b64encode(hashlib.sha256(content).digest()).decode()}:"


def make(client: Client, **options: Any) -> str:  # noqa: ANN401  # any JSON
    """Id of a new import."""
    answer = client.post(PATH, json=options)
    assert answer.status_code == 201, answer.text
    return str(answer.json()["id"])


def put(client: Client, import_id: str, n: int, content: bytes, **headers: str) -> httpx.Response:
    """Send one file."""
    sent = {"content-digest": digest_of(content), **headers}
    return client.request("PUT", f"{PATH}/{import_id}/files/{n}", content=content, headers=sent)


@pytest.fixture
def client(world: World) -> Client:
    """Somebody who may import and read."""
    return world.client("admin")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Trace and meta file of a small job with a slow worker."""
    table, job = synthetic_job(dp=4, pp=2, steps=6)
    return write_trace(table, job, tmp_path_factory.mktemp("trace"))


def test_files_are_kept_as_they_came(world: World, client: Client) -> None:
    """Byte for byte, under a path of ids; the name is for people, and again replaces."""
    import_id = make(client, job="x")
    name = "..%2F..%2Fetc%2Fpass%20wd%0A%C3%BC.parquet"
    first = put(client, import_id, 0, b"one", **{"smon-file-name": name}).json()
    assert first["files"] == [
        {
            "n": 0,
            "name": "pass wdü.parquet",
            "bytes": 3,
            "sha256": hashlib.sha256(b"one").hexdigest(),
        }
    ]
    body = put(client, import_id, 0, b"").json()
    assert (body["bytes"], body["files"][0]["name"]) == (0, "file 0")
    large = b"x" * (3 << 20)
    assert put(client, import_id, 1, large).json()["bytes"] == len(large)
    assert world.objects.get(f"imports/{import_id}/1") == large
    assert list((world.settings.data_dir / "uploads").iterdir()) == []


@pytest.mark.parametrize(
    "headers, status",
    [
        ({"content-digest": digest_of(b"other")}, 400),
        ({"content-digest": "md5=:AAAA:"}, 400),
        ({"content-digest": ""}, 400),
        ({"content-digest": "sha-256=:" + "!" * 44 + ":"}, 400),
        ({"transfer-encoding": "chunked"}, 411),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(
    world: World, client: Client, headers: dict[str, str], status: int
) -> None:
    """Nothing is kept of it, neither a row nor a file."""
    import_id = make(client)
    assert put(client, import_id, 0, b"body", **headers).status_code == status
    assert client.json(f"{PATH}/{import_id}")["file_count"] == 0
    assert world.objects.size(f"imports/{import_id}/0") is None
    uploads = world.settings.data_dir / "uploads"
    assert not uploads.exists() or list(uploads.iterdir()) == []


def test_an_import_has_limits(tmp_path: Path) -> None:
    """All files together, and their number: at the limit, and above it."""
    world = make_world(tmp_path, None, {"max_import_bytes": 10, "max_import_files": 2})
    client = world.client("admin")
    import_id = make(client)
    assert put(client, import_id, 0, b"12345678").status_code == 200
    assert put(client, import_id, 1, b"123").status_code == 413
    assert put(client, import_id, 1, b"12").status_code == 200
    assert put(client, import_id, 0, b"1234567").status_code == 200
    assert put(client, import_id, 2, b"").status_code == 422
    world.database.close()


def test_states_of_an_import(world: World, client: Client) -> None:
    """Without files it does not start, with a gap neither; once started it takes none."""
    import_id = make(client)
    start = f"{PATH}/{import_id}/start"
    assert client.post(start).status_code == 409
    put(client, import_id, 1, b"b")
    assert "number 0" in client.post(start).json()["detail"]
    put(client, import_id, 0, b"a")
    assert client.post(start).json()["state"] == "queued"
    assert client.post(start).json()["state"] == "queued"
    assert put(client, import_id, 2, b"c").status_code == 409
    assert [row["id"] for row in client.json(f"{PATH}?state=queued")["items"]] == [import_id]
    assert client.request("DELETE", f"{PATH}/{import_id}").status_code == 204
    assert client.get(f"{PATH}/{import_id}").status_code == 404
    assert world.objects.size(f"imports/{import_id}/0") is None


def work(world: World) -> None:
    """Let a worker do all there is."""
    worker = Worker(world.settings, world.database, world.objects, name="test")
    worker.drain()


def test_an_upload_becomes_an_analysed_job(world: World, client: Client, trace: list[Path]) -> None:
    """From the files to the report and its timeline."""
    import_id = make(client, job="uploaded", attempt=3)
    for n, path in enumerate(trace):
        put(client, import_id, n, path.read_bytes(), **{"smon-file-name": path.name})
    client.post(f"{PATH}/{import_id}/start")
    work(world)
    row = client.json(f"{PATH}/{import_id}")
    assert (row["state"], row["progress"], row["error"]) == ("done", 1.0, None)
    job = client.json(f"/api/v1/jobs/{row['job_id']}")
    assert (job["name"], job["attempt"], job["mode"]) == ("uploaded", 3, "recorded")
    assert job["finding"]["cause"] == "slow_gpu"
    windows = f"/api/v1/jobs/{row['job_id']}/windows/{row['window_id']}"
    assert client.json(windows)["verdict"] == "straggler"
    page = client.get(f"/jobs/{row['job_id']}", headers={"accept": "text/html"})
    assert "slow GPU" in page.text
    workers = client.json(f"/api/v1/jobs/{row['job_id']}/workers?step=2")["items"]
    assert (workers[0]["dp"], workers[0]["stage"]) == (2, 1)
    timeline = f"{windows}/timeline?kind=actual&dp=2"
    waiting = client.get(timeline)
    assert (waiting.status_code, waiting.headers["retry-after"]) == (503, "5")
    work(world)
    answer = client.get(timeline)
    assert answer.status_code == 200
    events = json.loads(answer.content)["traceEvents"]
    assert {event["args"]["dp"] for event in events if event["ph"] == "X"} == {2}


def test_a_timeline_is_asked_for_once(world: World, client: Client, trace: list[Path]) -> None:
    """Who asks again gets the same task; a result that is gone is made again."""
    import_id = make(client)
    put(client, import_id, 0, trace[0].read_bytes())
    put(client, import_id, 1, trace[1].read_bytes(), **{"smon-file-name": "meta.yaml"})
    client.post(f"{PATH}/{import_id}/start")
    work(world)
    job_id = client.json(f"{PATH}/{import_id}")["job_id"]
    path = f"/api/v1/jobs/{job_id}/windows/latest/timeline?stage=1&stage=0"
    for _ in range(2):
        assert client.get(path).status_code == 503
    with world.database.read() as session:
        tasks = session.connection().exec_driver_sql("SELECT count(*) FROM tasks").scalar()
    assert tasks == 1
    work(world)
    assert client.get(path).status_code == 200
    for stored in list(world.objects.list("tasks")):
        world.objects.delete(stored.path)
    assert client.get(path).status_code == 503
    work(world)
    assert client.get(path).status_code == 200


# --- smon import ------------------------------------------------------------------------------


def parsed(*arguments: str) -> argparse.Namespace:
    """Arguments of the command."""
    parser = argparse.ArgumentParser()
    import_.add(parser.add_subparsers())
    return parser.parse_args(["import", *arguments])


@pytest.fixture
def server(world: World) -> Iterator[tuple[str, World]]:
    """A server on a real port."""
    with served(world) as running:
        yield running


def test_the_command_sends_starts_and_waits(
    server: tuple[str, World],
    trace: list[Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It prints the address of the job and what was found."""
    address, world = server
    token = tmp_path / "token"
    token.write_text(world.tokens["admin"] + "\n", encoding="utf-8")
    arguments = parsed(
        str(trace[0]), "--meta", str(trace[1]), "--job", "by hand", "--server", address + "/",
        "--token-file", str(token), "--wait",
    )  # fmt: skip
    worker = Worker(world.settings, world.database, world.objects, name="test")
    # While the command pauses, the worker works.
    assert import_.run(arguments, lambda _s: void(worker.drain())) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{address}/jobs/")
    assert "slow GPU" in lines[1]


def void(_value: object) -> None:
    """Nothing."""


def test_the_command_says_what_the_server_cannot_read(
    server: tuple[str, World], tmp_path: Path
) -> None:
    """A file that is no trace: one line, from the server."""
    address, world = server
    token, junk = tmp_path / "token", tmp_path / "junk"
    token.write_text(world.tokens["admin"], encoding="utf-8")
    junk.write_bytes(b"no trace at all")
    worker = Worker(world.settings, world.database, world.objects, name="test")
    arguments = parsed(str(junk), "--server", address, "--token-file", str(token))
    with pytest.raises(TraceError, match="the server cannot read the files"):
        import_.run(arguments, lambda _s: void(worker.drain()))


@pytest.mark.parametrize("text", ["", "smon_aaaaaaaa_" + "a" * 43])
def test_the_command_says_that_the_token_is_wrong(
    server: tuple[str, World], tmp_path: Path, text: str
) -> None:
    """And does not show it."""
    token = tmp_path / "token"
    token.write_text(text, encoding="utf-8")
    arguments = parsed(str(token), "--server", server[0], "--token-file", str(token))
    with pytest.raises(ConfigError, match="refuses: expected") as caught:
        import_.run(arguments)
    assert not text or text not in str(caught.value)


@pytest.mark.parametrize("address", ["localhost:8080", "ftp://x", "http://", "http://x:99999"])
def test_the_command_wants_an_address(tmp_path: Path, address: str) -> None:
    """What is no http address is said at once."""
    file = tmp_path / "x"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="expected a server"):
        import_.run(parsed(str(file), "--server", address))


def test_the_command_says_that_nobody_answers(tmp_path: Path) -> None:
    """One line, and no traceback."""
    file = tmp_path / "x"
    file.write_bytes(b"")
    with pytest.raises(StoreError, match="cannot reach"):
        import_.run(parsed(str(file), "--server", "http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match="there is no file"):
        import_.run(parsed(str(tmp_path / "y"), "--server", "http://127.0.0.1:9"))


def test_a_large_answer_is_compressed_and_small_ones_are_not(world: World) -> None:
    """Gzip from two kilobytes on, if the client takes it."""
    client = world.client("admin")
    for _ in range(12):
        make(client, job="x" * 100)
    large = client.get(PATH, headers={"accept-encoding": "gzip"})
    assert large.headers["content-encoding"] == "gzip"
    assert len(large.json()["items"]) == 12
    small = client.get("/api/v1/version", headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in small.headers
