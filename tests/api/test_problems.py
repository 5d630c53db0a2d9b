"""Errors are problem documents, whatever goes wrong; and nothing of the inside is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from smon.api.edge import REQUEST_ID
from smon.errors import ConflictError, MissingError, SMonError, StoreError, WireError
from smon.wire.problems import KINDS, Problem
from tests.api.conftest import Filled
from tests.api.filled import World, make_world

INSIDE: Final = "a secret of the server"


def check(answer: Any, problem: Problem) -> dict[str, Any]:  # noqa: ANN401  # of httpx
    """The document of a problem, complete and of the right type."""
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert document["type"] == f"urn:smon:problem:{problem.value}"
    assert document["status"] == answer.status_code == KINDS[problem].status
    assert document["title"] == KINDS[problem].title
    assert document["instance"] == answer.headers[REQUEST_ID]
    if answer.status_code in (503, 507):
        assert int(answer.headers["retry-after"]) >= 1
    return document


@pytest.mark.parametrize(
    "method, path, problem",
    [
        ("GET", "/api/v1/nothing", Problem.NOT_FOUND),
        ("GET", "/nothing", Problem.NOT_FOUND),
        ("GET", "/api/v1/jobs/", Problem.NOT_FOUND),
        ("PUT", "/api/v1/jobs", Problem.METHOD_NOT_ALLOWED),
        ("GET", "/api/v1/jobs/0123456789abcdef", Problem.NOT_FOUND),
        ("GET", "/api/v1/jobs/../../etc", Problem.NOT_FOUND),
        ("GET", "/api/v1/jobs/XYZ", Problem.INVALID),
        ("GET", "/api/v1/jobs?limit=0", Problem.INVALID),
        ("GET", "/api/v1/jobs?limit=501", Problem.INVALID),
        ("GET", "/api/v1/jobs?limit=ten", Problem.INVALID),
        ("GET", "/api/v1/jobs?cursor=%00", Problem.INVALID),
        ("GET", "/api/v1/jobs?cursor=bzk5OTk5OTk5OTk5OTk5OTk", Problem.INVALID),
        ("GET", "/api/v1/jobs?sort=id", Problem.INVALID),
        ("GET", "/api/v1/jobs?min_waste=nan", Problem.INVALID),
        ("GET", "/api/v1/jobs/0123456789abcdef/findings?since=inf", Problem.INVALID),
        ("GET", "/api/v1/jobs/0123456789abcdef/history?points=9", Problem.INVALID),
        ("GET", "/api/v1/jobs/0123456789abcdef/workers?step=99999999999999999999", Problem.INVALID),
        ("GET", "/api/v1/jobs/0123456789abcdef/windows/newest", Problem.INVALID),
        ("GET", "/api/v1/hosts/%0A", Problem.INVALID),
        ("GET", "/api/v1/fleet/summary?days=0", Problem.INVALID),
    ],
)
def test_what_a_client_gets_wrong_is_a_problem(
    world: World, method: str, path: str, problem: Problem
) -> None:
    """The status, a stable type, and words that say what was expected."""
    document = check(world.client("admin").request(method, path), problem)
    assert len(document["detail"]) > 10


def test_a_method_that_is_not_known_says_which_are(world: World) -> None:
    """405 has Allow."""
    assert world.client().request("PATCH", "/api/v1/jobs").headers["allow"] == "GET"


@pytest.mark.parametrize(
    "body, problem",
    [
        (b"{", Problem.MALFORMED_BODY),
        (b"\xff", Problem.MALFORMED_BODY),
        (b"[]", Problem.INVALID),
        (b'{"unknown": 1}', Problem.INVALID),
        (b'{"job": "a\\nb"}', Problem.INVALID),
        (b'{"job": ""}', Problem.INVALID),
        (b'{"attempt": -1}', Problem.INVALID),
        (b'{"layout": "../.."}', Problem.INVALID),
    ],
)
def test_a_wrong_body_is_not_echoed(world: World, body: bytes, problem: Problem) -> None:
    """What was sent does not come back."""
    answer = world.client("ingest").post(
        "/api/v1/imports", content=body, headers={"content-type": "application/json"}
    )
    document = check(answer, problem)
    assert "\\n" not in document["detail"]
    assert "../.." not in document["detail"]


def test_bodies_have_a_limit(tmp_path: Path) -> None:
    """At the limit a body is read, above it is not; chunks without a length are not taken."""
    world = make_world(tmp_path, None, {"max_json_bytes": 64})
    client = world.client("ingest")
    json = {"content-type": "application/json"}
    at_limit = b'{"job": "x"}'.ljust(64)
    assert client.post("/api/v1/imports", content=at_limit, headers=json).status_code == 201
    above = client.post("/api/v1/imports", content=at_limit + b" ", headers=json)
    check(above, Problem.TOO_LARGE)
    chunked = {**json, "transfer-encoding": "chunked"}
    answer = client.post("/api/v1/imports", content=b"{}", headers=chunked)
    check(answer, Problem.LENGTH_REQUIRED)
    world.database.close()


@pytest.mark.parametrize(
    "path",
    ["/api/v1/jobs?name=%00", "/api/v1/jobs?name=a%00b", "/api/v1/hosts/a%00", "/?q=%00", "/%00"],
)
def test_an_address_holds_no_nul(filled: Filled, path: str) -> None:
    """One database would cut a filter off there and find everything, the other would fail."""
    check(filled.world.client().get(path), Problem.INVALID)


@pytest.mark.parametrize(
    "error, problem",
    [
        (StoreError(INSIDE), Problem.STORE_UNAVAILABLE),
        (MissingError("expected something"), Problem.NOT_FOUND),
        (ConflictError("expected another state"), Problem.STATE_CONFLICT),
        (WireError(Problem.NOT_READY, "ask again"), Problem.NOT_READY),
        (SMonError(INSIDE), Problem.INTERNAL),
        (RuntimeError(INSIDE), Problem.INTERNAL),
    ],
)
def test_errors_of_the_inside_become_problems(
    world: World, error: Exception, problem: Problem
) -> None:
    """Each kind of error has its status; a defect shows no traceback and no message."""

    def fail(_request: Request) -> Response:
        raise error

    world.app.router.routes.insert(0, Route("/api/v1/fail", fail))
    answer = world.client().get("/api/v1/fail")
    check(answer, problem)
    assert INSIDE not in answer.text
    assert "Traceback" not in answer.text


def test_a_database_that_is_gone_is_503(tmp_path: Path, filled: Filled) -> None:
    """The client may come again; what the database said stays inside."""
    world = filled.world
    with world.database.write() as session:
        session.connection().exec_driver_sql("DROP TABLE finding_events")
        session.connection().exec_driver_sql("DROP TABLE findings")
    answer = world.client().get(f"/api/v1/jobs/{filled.slow.job_id}")
    check(answer, Problem.STORE_UNAVAILABLE)
    assert "findings" not in answer.text


def test_a_damaged_report_is_no_defect(filled: Filled) -> None:
    """A stored report that cannot be unpacked is an error of the store."""
    world = filled.world
    with world.database.write() as session:
        session.connection().exec_driver_sql("UPDATE results SET report = ?", (b"garbage",))
    path = f"/api/v1/jobs/{filled.slow.job_id}"
    check(world.client().get(f"{path}/workers"), Problem.STORE_UNAVAILABLE)
    assert world.client().get(path).status_code == 200


def test_a_request_keeps_its_id_if_it_is_harmless(world: World) -> None:
    """The client's id comes back, unless it could do harm in a log."""
    client = world.client()
    assert (
        client.get("/api/v1/version", headers={REQUEST_ID: "abc-1"}).headers[REQUEST_ID] == "abc-1"
    )
    for bad in ("a b", "x" * 65, "<script>", ""):
        got = client.get("/api/v1/version", headers={REQUEST_ID: bad}).headers[REQUEST_ID]
        assert got != bad
        assert len(got) == 16


def test_nothing_is_shared_with_other_sites(world: World) -> None:
    """No CORS: a preflight is refused, and no answer allows another origin."""
    headers = {"origin": "https://evil.example", "access-control-request-method": "PUT"}
    answer = world.client().request("OPTIONS", "/api/v1/jobs", headers=headers)
    assert answer.status_code == 405
    plain = world.client().get("/api/v1/jobs", headers={"origin": "https://evil.example"})
    assert not [name for name in plain.headers if name.startswith("access-control")]
    assert plain.headers["x-content-type-options"] == "nosniff"
    assert plain.headers["cache-control"] == "no-store"
