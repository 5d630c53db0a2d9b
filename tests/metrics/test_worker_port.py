from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from smon.commands.worker import operations
from smon.config import Settings
from smon.errors import ConfigError
from smon.metrics.process import register_process
from smon.store.database import Database
from tests.service import sqlite
from tests.system.server import free_port, request

__all__ = ["sqlite"]


@pytest.fixture
def registry() -> CollectorRegistry:
    """Metrics of a worker."""
    made = CollectorRegistry()
    register_process(made, "worker")
    return made


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_a_worker_says_how_it_is(sqlite: Database, registry: CollectorRegistry) -> None:
    """Health, readiness and metrics on a port of its own, and nothing when it has ended."""
    with operations(Settings(worker_ops_port=0), registry, sqlite) as port:
        assert port is not None
        assert request(port, "GET", "/healthz") == (200, b"ok\n")
        assert request(port, "GET", "/readyz")[0] == 200
        assert b'role="worker"' in request(port, "GET", "/metrics")[1]
    with pytest.raises(ConnectionRefusedError):
        request(port, "GET", "/healthz")


def test_a_worker_without_a_database_is_not_ready(
    registry: CollectorRegistry, tmp_path: Path
) -> None:
    """It lives and waits for it."""
    database = Database("postgresql+psycopg://nobody@127.0.0.1:1/none")
    with operations(Settings(worker_ops_port=0), registry, database) as port:
        assert port is not None
        status, body = request(port, "GET", "/readyz")
        assert status == 503
        assert b"the database cannot be used" in body
        assert request(port, "GET", "/healthz")[0] == 200
    database.close()


def test_workers_of_one_machine_take_the_ports_after_the_server(
    sqlite: Database, registry: CollectorRegistry, taken: int
) -> None:
    """The first that is free; so two workers beside one server both have one."""
    settings = Settings(ops_port=taken - 1)
    with (
        operations(settings, registry, sqlite) as first,
        operations(settings, registry, sqlite) as second,
    ):
        assert first is not None
        assert second is not None
        assert taken < first < second <= taken + 16


def test_a_port_that_was_asked_for_is_needed(
    sqlite: Database, registry: CollectorRegistry, taken: int
) -> None:
    """Prometheus looks for it there: another one would never be found."""
    with (
        pytest.raises(ConfigError, match=f"port {taken}"),
        operations(Settings(worker_ops_port=taken), registry, sqlite),
    ):
        pass


def test_a_server_with_any_port_has_a_worker_with_any_port(
    sqlite: Database, registry: CollectorRegistry
) -> None:
    """Port 0 chooses."""
    with operations(Settings(port=0), registry, sqlite) as port:
        assert port is not None
        assert port != free_port()
