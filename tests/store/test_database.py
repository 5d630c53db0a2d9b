"""A database that is not there yet."""

from __future__ import annotations

import socket
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from smon.errors import StoreError
from smon.store.database import Database
from tests.service import postgres_url

__all__ = ["postgres_url"]


def nobody() -> Database:
    """A PostgreSQL where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return Database(f"postgresql://nobody@127.0.0.1:{port}/smon")


def test_a_database_that_never_comes_is_an_error_after_the_wait() -> None:
    """Tried with growing pauses until the time is up; the error says how long and why."""
    now, pauses = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        now[0] += seconds

    with pytest.raises(StoreError, match=r"cannot be used: .*\(waited 10 s for it\)"):
        nobody().wait(10, sleep, lambda: now[0])
    assert pauses == [0.25, 0.5, 1, 2, 4, 5]


def test_a_database_that_comes_late_is_waited_for(postgres_url: str) -> None:
    """Machines that start together start in any order."""
    late, there = nobody(), Database(postgres_url)
    pauses = list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            late.engine = there.engine

    late.wait(10, sleep, lambda: 0.0)
    assert pauses == [0.25, 0.5]
    assert late.problems() == []
    there.close()


def test_sqlite_waits_for_nobody() -> None:
    """It is a file: whatever is wrong with it will not mend itself."""
    Database("sqlite:////proc/nowhere.db").wait(10, lambda _: pytest.fail("it waits"))


def test_processes_that_make_a_sqlite_file_at_once_wait_for_each_other(tmp_path: Path) -> None:
    """Changing the journal of a file that another is writing is refused at once: it is waited."""
    path = tmp_path / "new.db"
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    other.execute("CREATE TABLE being_made (number INTEGER)")
    ends = threading.Timer(0.2, lambda: other.execute("COMMIT"))
    ends.start()
    database = Database(f"sqlite:///{path}")
    with database.engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
    ends.join()
    other.close()
    database.close()


def test_a_postgresql_whose_machine_is_gone_is_noticed(postgres_url: str) -> None:
    """Else the kernel waits for two hours, and with it the log, leases and heartbeats."""
    database = Database(postgres_url)
    with database.engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        found = driver.info.get_parameters()
    database.close()
    assert int(found["keepalives_idle"]) + 3 * int(found["keepalives_interval"]) <= 30
    assert int(found["tcp_user_timeout"]) <= 30_000
