"""The database: one engine, transactions, the server's own time.

Flow: `smon.config` → **here** → every module of `smon.store`. SQLite by default, PostgreSQL where
several servers share the work; nothing else in SMon knows which it is.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine, create_engine, event, func, make_url, select
from sqlalchemy.engine import URL
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.orm import Session

from smon.errors import ConfigError, StoreError
from smon.store.objects import make_folder

#: SQLite lets one writer in at a time; the others wait for so long.
_BUSY_S: Final = 30.0

#: Pause between two tries to give a new file its journal, which takes some milliseconds.
_JOURNAL_PAUSE_S: Final = 0.01

#: Pauses between two tries to reach a database that is not there yet.
_FIRST_PAUSE_S: Final = 0.25
_LONGEST_PAUSE_S: Final = 5.0

_LOG: Final = logging.getLogger(__name__)

#: A database whose machine has gone without a word is noticed after half a minute, not after the
#: two hours that the kernel takes by itself (``libpq``: seconds, and one in milliseconds).
_ALIVE: Final = {
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 25_000,
}

#: Connections of one process to PostgreSQL.
_POOL: Final = 8
_OVERFLOW: Final = 8


def now_ns() -> int:
    """Unix time, ns."""
    return time.time_ns()


class Database:
    """Transactions on one database.

    Parameters
    ----------
    url
        As SQLAlchemy wants it.

    Raises
    ------
    ConfigError
        The URL is malformed, or of a database that SMon does not support.
    """

    __slots__ = ("engine",)

    def __init__(self, url: str) -> None:
        self.engine = _engine(_url(url))

    @property
    def is_sqlite(self) -> bool:
        """Whether one process at a time may write."""
        return self.engine.dialect.name == "sqlite"

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A transaction that only reads, with a view that does not change.

        Raises
        ------
        StoreError
            The database cannot be reached, or refuses.
        """
        with self._session(immediate=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction: committed at the end, undone if anything is raised.

        Raises
        ------
        StoreError
            The database cannot be reached, or refuses.
        """
        with self._session(immediate=True) as session:
            yield session
            session.commit()

    @contextmanager
    def _session(self, *, immediate: bool) -> Iterator[Session]:
        try:
            options: dict[str, Any] = {"smon_immediate": immediate}
            with (
                self.engine.connect().execution_options(**options) as connection,
                Session(bind=connection, expire_on_commit=False) as session,
            ):
                yield session
        except (DBAPIError, PoolTimeoutError) as error:
            raise StoreError(f"the database cannot be used: {_first_line(error)}") from error
        except SQLAlchemyError as error:
            raise StoreError(f"the database refuses: {_first_line(error)}") from error

    def problems(self) -> list[str]:
        """Why it cannot be used; empty if it can."""
        try:
            with self.read() as session:
                session.execute(select(1))
        except StoreError as error:
            return [str(error)]
        return []

    def ahead_ns(self, own: Callable[[], int] = time.time_ns) -> int:
        """By how much its clock is ahead of this machine's; 0 of SQLite, which has none of its own.

        Raises
        ------
        StoreError
            It cannot be used.
        """
        if self.is_sqlite:
            return 0
        with self.read() as session:
            before = own()
            seconds = session.scalar(select(func.extract("epoch", func.clock_timestamp())))
            after = own()
        return round((seconds or 0) * 10**9) - (before + after) // 2

    def wait(
        self,
        patience_s: float,
        sleep: Callable[[float], object] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Wait until it can be used: machines that start together start in any order.

        SQLite is a file, and waits for nobody.

        Raises
        ------
        StoreError
            It cannot be used after so long.
        """
        give_up, pause = clock() + patience_s, _FIRST_PAUSE_S
        while not self.is_sqlite and (problems := self.problems()):
            if clock() >= give_up:
                raise StoreError(f"{problems[0]} (waited {patience_s:g} s for it)")
            _LOG.warning("waiting for the database: %s", problems[0])
            sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Give all connections back."""
        self.engine.dispose()


def _first_line(error: BaseException) -> str:
    """Without the statement and its parameters, which may hold what a user sent."""
    cause = error.orig if isinstance(error, DBAPIError) and error.orig else error
    return (str(cause).strip().splitlines() or [type(cause).__name__])[0]


def _url(text: str) -> URL:
    try:
        url = make_url(text)
    except ArgumentError as error:
        raise ConfigError(
            "expected a database such as sqlite:////var/lib/smon/smon.db or "
            "postgresql+psycopg://user@host/smon, found something else"
        ) from error
    if url.drivername in {"postgresql", "postgres"}:
        url = url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() not in {"sqlite", "postgresql"}:
        raise ConfigError(f"expected SQLite or PostgreSQL, found {url.get_backend_name()!r}")
    return url


def _engine(url: URL) -> Engine:
    if url.get_backend_name() == "sqlite":
        if url.database and url.database != ":memory:":
            _make_folder(Path(url.database).parent)
        engine = create_engine(url, connect_args={"timeout": _BUSY_S})
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        return engine
    engine = create_engine(
        url,
        pool_size=_POOL,
        max_overflow=_OVERFLOW,
        pool_pre_ping=True,
        connect_args={"connect_timeout": 5, "application_name": "smon", **_ALIVE},
    )
    event.listen(engine, "begin", _begin_postgres)
    return engine


def _make_folder(folder: Path) -> None:
    try:
        make_folder(folder, folder)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error


def _prepare_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    # The driver shall not begin transactions by itself: `_begin_sqlite` does, and says which kind.
    connection.isolation_level = None
    _keep_a_write_ahead_log(connection)
    for pragma in ("synchronous = FULL", "foreign_keys = ON"):
        connection.execute(f"PRAGMA {pragma}")


def _keep_a_write_ahead_log(connection: sqlite3.Connection) -> None:
    # Where two processes change the journal of a new file at once, SQLite refuses one of them at
    # once: its timeout waits for locks, but not for this change, which both would wait for.
    until = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(_JOURNAL_PAUSE_S)
        else:
            return


def _begin_sqlite(connection: Any) -> None:  # noqa: ANN401  # sqlalchemy.Connection
    immediate = connection.get_execution_options().get("smon_immediate", False)
    # A transaction that reads first and writes later can meet another writer in between, and
    # SQLite then fails at once; taking the lock at the beginning waits.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _begin_postgres(connection: Any) -> None:  # noqa: ANN401  # sqlalchemy.Connection
    if not connection.get_execution_options().get("smon_immediate", True):
        connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
