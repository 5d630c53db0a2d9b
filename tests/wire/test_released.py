"""What agents of every version of the protocol send is taken by this server, and stored right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest_agents.payload import last_seq
from ingest_agents.spool.reader import SpoolReader
from smon.wire import (
    _TYPES,
    DIGEST_HEADER,
    ENCODINGS,
    PROTOCOL,
    SCHEMA_HEADER,
    TYPE_JSON,
    BatchKind,
    parse_headers,
)
from tests.system.server import ServerProcess, request
from tests.wire.released import GOLDEN, Version, main, replayed, versions


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server that analyses nothing."""
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, role="api", min_free_bytes=0) as running:
        yield running


def test_every_version_is_kept() -> None:
    """A new version of the protocol begins with what its agents send.

    If this fails: ``make golden``, see ``docs/releases.md``.
    """
    assert [version.number for version in versions()] == list(range(1, PROTOCOL + 1))


def test_every_kind_is_kept_in_every_type_and_encoding() -> None:
    """A kind that is new needs bodies, or nobody knows whether later servers take them."""
    wanted = {
        (kind.schema, content_type, encoding)
        for kind in BatchKind
        for content_type in _TYPES.get(kind, (TYPE_JSON,))
        for encoding in ENCODINGS
    }
    newest = Version(PROTOCOL)
    assert newest.covered() == wanted
    assert {"hello", "heartbeat", "time"} <= {each["name"] for each in newest.requests()}


@pytest.mark.parametrize("version", versions(), ids=str)
def test_what_is_kept_is_whole(version: Version) -> None:
    """Each body is what its headers say, and no file is left over."""
    bodies = set()
    for each in version.requests():
        if SCHEMA_HEADER in each["headers"]:
            head = parse_headers({name.lower(): text for name, text in each["headers"].items()})
            body = (version.folder / each["body"]).read_bytes()
            assert head.length == len(body), each["name"]
            assert DIGEST_HEADER in each["headers"], each["name"]
        if "body" in each:
            bodies.add(each["body"])
    assert {path.name for path in version.folder.glob("*.body")} == bodies


@pytest.mark.parametrize("version", versions(), ids=str)
def test_a_server_takes_and_stores_what_old_agents_send(version: Version, tmp_path: Path) -> None:
    """Every request succeeds, every batch is a duplicate when it comes again; rows are as sent."""
    with ServerProcess(tmp_path, role="api", min_free_bytes=0) as server:
        assert replayed(version, server) == []


@pytest.mark.parametrize("version", versions(), ids=str)
def test_an_agent_reads_the_spool_of_an_older_one(version: Version, tmp_path: Path) -> None:
    """All batches, byte for byte: an agent is upgraded on hosts that were cut off, too."""
    shutil.copytree(version.folder / "spool", tmp_path / "spool")
    (stream,) = (tmp_path / "spool").iterdir()
    reader, at, found = SpoolReader(stream), 0, []
    while (batch := reader.next(at)) is not None:
        found.append(batch)
        at = last_seq(batch) + 1
    reader.forget()
    sent = {path.read_bytes() for path in version.folder.glob("*.body")}
    assert [batch.kind.name[0] for batch in found[-2:]] == ["F", "E"]
    assert {
        batch.body for batch in found if batch.kind in {BatchKind.OPS, BatchKind.CONTEXT}
    } < sent


@pytest.mark.parametrize("protocol", [PROTOCOL + 1, 0, None, "1"])
def test_a_version_that_is_not_known_is_refused(server: ServerProcess, protocol: object) -> None:
    """With a problem that says why; the agent keeps its data and says it on."""
    body = json.loads((GOLDEN / f"v{PROTOCOL}" / "hello.body").read_bytes())
    raw = json.dumps(body | {"protocol": protocol}).encode()
    path, kind = "/api/v1/agents/hello", {"Content-Type": "application/json"}
    status, answer = request(server.port, "POST", path, raw, kind)
    assert status == 422
    problem = json.loads(answer)
    assert problem["type"] == "urn:smon:problem:invalid"
    assert f"expected protocol {PROTOCOL}" in problem["detail"]


def test_a_newer_schema_of_a_batch_is_refused(server: ServerProcess) -> None:
    """By its name, before the body is read."""
    (each, *_) = (one for one in Version(PROTOCOL).requests() if "/ingest/" in one["path"])
    newer = each["headers"] | {SCHEMA_HEADER: "smon.ops/2"}
    path, body = f"/api/v1/ingest/{'0' * 8}/0/0", (Version(PROTOCOL).folder / each["body"])
    status, answer = request(server.port, "PUT", path, body.read_bytes(), newer)
    assert (status, json.loads(answer)["type"]) == (422, "urn:smon:problem:wrong-schema")


def test_what_is_kept_is_not_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Only who says so writes over it."""
    before = {path: path.stat().st_mtime_ns for path in GOLDEN.rglob("*")}
    assert main([]) == 0
    assert "--again" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in GOLDEN.rglob("*")} == before
