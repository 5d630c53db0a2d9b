"""Who may ask what: every route, every scope, both tenants."""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any, Final

import httpx
import pytest
from starlette.routing import Route

from smon.api.routes.common import SCOPE_KEY
from smon.store.models import Import
from tests.api.conftest import Filled
from tests.api.filled import NOW, World

#: What each route of the REST API is asked with, and which of its ids belong to a tenant.
CALLS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("GET", "/api/v1/jobs"): {},
    ("GET", "/api/v1/jobs/{job_id}"): {},
    ("POST", "/api/v1/jobs/{job_id}/pin"): {},
    ("POST", "/api/v1/jobs/{job_id}/unpin"): {},
    ("DELETE", "/api/v1/jobs/{job_id}"): {},
    ("GET", "/api/v1/jobs/{job_id}/findings"): {},
    ("GET", "/api/v1/jobs/{job_id}/windows"): {},
    ("GET", "/api/v1/jobs/{job_id}/windows/{window}"): {},
    ("GET", "/api/v1/jobs/{job_id}/windows/{window}/timeline"): {"ok": 503},
    ("GET", "/api/v1/jobs/{job_id}/windows/{window}/timeline/marks"): {"ok": 503},
    ("GET", "/api/v1/jobs/{job_id}/workers"): {},
    ("GET", "/api/v1/jobs/{job_id}/ranks/{rank}"): {},
    ("GET", "/api/v1/jobs/{job_id}/quality"): {},
    ("GET", "/api/v1/jobs/{job_id}/history"): {},
    ("GET", "/api/v1/jobs/{job_id}/plan"): {},
    ("GET", "/api/v1/hosts"): {},
    ("GET", "/api/v1/hosts/{host}"): {"shared": True},
    ("GET", "/api/v1/fleet/summary"): {},
    ("GET", "/api/v1/agents"): {},
    ("GET", "/api/v1/version"): {},
    ("POST", "/api/v1/imports"): {"json": {"job": "x"}},
    ("GET", "/api/v1/imports"): {},
    ("GET", "/api/v1/imports/{import_id}"): {},
    ("PUT", "/api/v1/imports/{import_id}/files/{n}"): {"content": b"hello"},
    ("POST", "/api/v1/imports/{import_id}/start"): {},
    ("DELETE", "/api/v1/imports/{import_id}"): {},
}

#: Routes that are not behind the gate, or are tested with the pages.
OPEN: Final = {
    "/api/v1/openapi.json",
    "/",
    "/fleet",
    "/fleet.csv",
    "/jobs.csv",
    "/jobs/{job_id}",
    "/jobs/{job_id}/csv/{table}",
    "/jobs/{job_id}/heat",
    "/jobs/{job_id}/windows/{window}",
    "/jobs/{job_id}/ranks/{rank}",
    "/jobs/{job_id}/quality",
    "/hosts",
    "/hosts/{name}",
    "/jobs/{job_id}/windows/{window}/timeline-view",
    "/login",
    "/logout",
    "/runbooks",
    "/runbooks/{name}",
    "/static/{name}",
}

DIGEST: Final = base64.b64encode(hashlib.sha256(b"hello").digest()).decode()
FILE_HEADERS: Final = {"content-digest": f"sha-256=:{DIGEST}:"}


def documented(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Operations of the OpenAPI document by method and path."""
    return {
        (method.upper(), path): operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }


def add_import(world: World, tenant_id: str) -> str:
    """Id of an import with one file."""
    row = Import(
        id=hashlib.sha256(tenant_id.encode()).hexdigest()[:16], tenant_id=tenant_id,
        state="uploading", options={}, created_ns=NOW, progress=0.0, fence=0, lease_ns=0, tries=0,
        files=[{"n": 0, "name": "a", "bytes": 1, "sha256": "0" * 64}],
    )  # fmt: skip
    with world.database.write() as session:
        session.add(row)
        session.flush()
        return row.id


def ask(
    filled: Filled, call: tuple[str, str], scope: str | None, *, foreign: bool = False
) -> httpx.Response:
    """Ask a route for things of the first tenant, or of the other."""
    world = filled.world
    made = filled.foreign if foreign else filled.slow
    values = {
        "job_id": made.job_id,
        "window": made.window_id,
        "host": "node-7",
        "rank": "3",
        "n": "1",
        "import_id": add_import(world, world.other_id if foreign else world.tenant_id),
    }
    method, path = call
    filled_path = re.sub(r"\{(\w+)\}", lambda match: values[match[1]], path)
    more = {name: value for name, value in CALLS[call].items() if name in ("json", "content")}
    headers = FILE_HEADERS if "content" in more else {}
    return world.client(scope).request(method, filled_path, headers=headers, **more)


def test_every_route_is_in_the_matrix(world: World, document: dict[str, Any]) -> None:
    """A route that is new must say who may use it, here and in the OpenAPI document."""
    assert set(documented(document)) == set(CALLS)
    known = {path for _, path in CALLS} | OPEN
    routes = {
        re.sub(r":\w+\}", "}", route.path) for route in world.app.routes if isinstance(route, Route)
    }
    assert {path for path in routes if path not in known} == set()


@pytest.mark.parametrize("call", CALLS, ids=" ".join)
@pytest.mark.parametrize("scope", ["ingest", "read", "admin", None])
def test_a_route_is_open_to_its_scope_and_to_admin_alone(
    filled: Filled, document: dict[str, Any], call: tuple[str, str], scope: str | None
) -> None:
    """401 without a token, 403 with the wrong scope, else an answer that succeeds."""
    wanted = documented(document)[call][SCOPE_KEY]
    answer = ask(filled, call, scope)
    if scope is None:
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    elif scope in (wanted, "admin"):
        assert answer.status_code in (CALLS[call].get("ok", 200), 201, 204), answer.text
    else:
        assert answer.status_code == 403, answer.text


@pytest.mark.parametrize("call", [call for call in CALLS if "_id}" in call[1]], ids=" ".join)
def test_what_belongs_to_another_tenant_is_not_there(filled: Filled, call: tuple[str, str]) -> None:
    """404 for the id of another tenant, whatever the scope; and its owner still has it."""
    answer = ask(filled, call, "admin", foreign=True)
    assert answer.status_code == 404, answer.text
    kept = filled.world.client("other").get(f"/api/v1/jobs/{filled.foreign.job_id}")
    assert kept.status_code == 200


def test_lists_hold_nothing_of_another_tenant(filled: Filled) -> None:
    """Jobs, agents, hosts, imports and the fleet are those of the tenant."""
    world = filled.world
    add_import(world, world.other_id)
    mine = world.client()
    names = {job["name"] for job in mine.json("/api/v1/jobs")["items"]}
    assert names == {"slow-job", "healthy-job", "empty-job"}
    assert mine.json("/api/v1/imports")["items"] == []
    assert {each["job"] for each in mine.json("/api/v1/agents")["items"]} == names
    assert mine.json("/api/v1/fleet/summary")["jobs"] == 3
    (host,) = mine.json("/api/v1/hosts")["items"]
    assert host["jobs"] == 1
    detail = mine.json("/api/v1/hosts/GPU-00000007")
    assert {each["job"] for each in detail["findings"]} == {"slow-job"}


def test_a_window_of_another_job_is_not_there(filled: Filled) -> None:
    """The window's id must go with the job's."""
    path = f"/api/v1/jobs/{filled.healthy.job_id}/windows/{filled.slow.window_id}"
    assert filled.world.client().get(path).status_code == 404
