"""What an older version left behind, as today's routes tell it: whether anything is missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import zstandard

from smon.config import Settings
from smon.store.database import Database
from smon.store.events import read_ops
from smon.store.objects import Objects
from smon.store.streams import register
from smon.store.tenants import tenant_id
from tests.store.released import LOGGED_EVENTS, TENANT, Released
from tests.store.rows import NOW, live_paths, request

#: The JSON of a route below ``/api/v1/``; raises where it does not answer 200.
Get = Callable[[str], Any]

#: Routes that must answer, with the ids of the job that has everything.
_ROUTES = (
    "jobs/{job}", "jobs/{job}/findings", "jobs/{job}/windows", "jobs/{job}/workers",
    "jobs/{job}/history", "jobs/{job}/plan", "jobs/{job}/quality", "jobs/{job}/ranks/3",
    "hosts", "hosts/node-7", "agents", "imports", "fleet/summary",
)  # fmt: skip


def told_wrong(kept: Released, get: Get) -> list[str]:
    """What a server says otherwise than the rows; empty if it has everything."""
    rows = kept.rows()
    (result,) = rows["results"]
    job = result["job_id"]
    told = {route: get(route.format(job=job)) for route in _ROUTES}
    window = get(f"jobs/{job}/windows/{result['window_id']}")
    pairs = {
        "jobs": (
            sorted(each["name"] for each in get("jobs")["items"]),
            sorted(row["name"] for row in rows["jobs"]),
        ),
        "report": (
            window,
            json.loads(zstandard.ZstdDecompressor().decompress(result["report"])),
        ),
        "findings": (
            sorted(each["id"] for each in told["jobs/{job}/findings"]["items"]),
            sorted(row["id"] for row in rows["findings"]),
        ),
        "steps": (told["jobs/{job}/history"]["steps"], len(rows["steps"])),
        "windows": (
            [each["id"] for each in told["jobs/{job}/windows"]["items"]],
            [result["window_id"]],
        ),
        "host": (len(told["hosts/node-7"]["findings"]), len(rows["findings"])),
        "imports": (
            [each["error"] for each in told["imports"]["items"]],
            [row["error"] for row in rows["imports"]],
        ),
        "agents": (
            sorted(each["stream_id"] for each in told["agents"]["items"]),
            sorted(row["id"] for row in rows["streams"]),
        ),
    }
    return [
        f"{what}: expected {wanted!r:.200}, found {found!r:.200}"
        for what, (found, wanted) in pairs.items()
        if found != wanted
    ]


def kept_wrong(kept: Released, database: Database, objects: Objects) -> list[str]:
    """What is missing of event files, and of what is known of streams."""
    rows = kept.rows()
    (live,) = (row for row in rows["streams"] if row["key"] == "k0")
    (covered,) = (row for row in rows["coverage"] if row["stream_id"] == live["id"])
    with database.write() as session:
        tenant = tenant_id(session, TENANT) or ""
        stream = register(session, tenant, request(), Settings(), NOW)
    files = [row["path"] for row in rows["event_files"]]
    pairs = {
        "stream of the same key": (stream.id, live["id"]),
        "next number": (stream.next_seq, covered["ranges"][-1][1] + 1),
        "files": (sorted(set(files) - set(live_paths(database))), []),
        "ops": (len(read_ops(objects, files)), sum(row["rows"] for row in rows["event_files"])),
    }
    return [
        f"{what}: expected {wanted!r}, found {found!r}"
        for what, (found, wanted) in pairs.items()
        if found != wanted
    ]


def unlogged(kept: Released, before: int, after: int) -> list[str]:
    """Whether what was in the log alone is stored now; numbers of ops that are stored."""
    missing = before + LOGGED_EVENTS - after
    return [f"{missing} ops of the log of {kept.revision} are not stored"] if missing else []
