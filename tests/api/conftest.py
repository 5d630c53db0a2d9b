"""Servers for the tests of the API: an empty one, and one with jobs of two tenants."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.api.filled import (
    Made,
    World,
    add_job,
    make_world,
    open_world,
    put_workers,
    report_of,
)
from tests.service import postgres_url

__all__ = ["postgres_url"]


@dataclass(frozen=True, slots=True)
class Filled:
    """A server with a slow, a healthy and an empty job, and one of another tenant."""

    world: World
    slow: Made
    healthy: Made
    empty: Made
    foreign: Made


def fill(world: World) -> Filled:
    """Put the jobs in."""
    with world.database.write() as session:
        slow = add_job(session, world.tenant_id, "slow-job", report_of("slow"))
        healthy = add_job(session, world.tenant_id, "healthy-job", report_of("healthy"))
        empty = add_job(session, world.tenant_id, "empty-job", report_of("empty"))
        foreign = add_job(session, world.other_id, "foreign-job", report_of("slow"))
    for made in (slow, foreign):
        put_workers(world.objects, made, report_of("slow"))
    return Filled(world, slow, healthy, empty, foreign)


@functools.cache
def _template() -> tuple[Path, Filled]:
    """A folder that every test gets a copy of: filling it takes longer than most tests."""
    folder = Path(tempfile.mkdtemp(prefix="smon-api-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    filled = fill(make_world(folder))
    filled.world.database.close()
    return folder, filled


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A server without jobs."""
    made = make_world(tmp_path)
    yield made
    made.database.close()


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Filled]:
    """A server with jobs."""
    folder, template = _template()
    shutil.copytree(folder, tmp_path / "filled")
    copy = open_world(tmp_path / "filled", template.world)
    yield replace(template, world=copy)
    copy.database.close()


@pytest.fixture(scope="session")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The OpenAPI document of a server without ingest, as a client gets it without a token."""
    made = make_world(tmp_path_factory.mktemp("document"))
    found: dict[str, Any] = made.client(None).json("/api/v1/openapi.json")
    made.database.close()
    return found
