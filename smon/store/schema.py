"""The SQL schema: brought up to date, and compared with what the code expects.

Flow: `smon serve` and `smon db` → **here** → ``migrations/``. Several processes may start at once:
one of them migrates, the others wait and find it done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

import migrations
from smon.errors import StoreError
from smon.store.database import Database
from smon.store.models import Base

#: Names the lock of PostgreSQL under which one process at a time migrates; any number.
_LOCK: Final = 0x534D6F6E


def upgrade(database: Database, revision: str = "head") -> None:
    """Bring the schema to the newest revision, or to the given one; nothing else is lost.

    All of it happens in one transaction: a crash in between leaves the schema as it was.

    Raises
    ------
    StoreError
        The database cannot be used, or is of a newer version of SMon.
    """
    _run(database, lambda config: command.upgrade(config, revision))


def downgrade(database: Database, revision: str) -> None:
    """Take the schema back to an earlier revision (``base``: no tables); data in newer ones go.

    Raises
    ------
    StoreError
        The database cannot be used, or has no such revision.
    """
    _run(database, lambda config: command.downgrade(config, revision))


def is_current(database: Database) -> bool:
    """Whether the schema is at the newest revision that this version of SMon knows.

    Raises
    ------
    StoreError
        The database cannot be used.
    """
    return revision_of(database) == newest()


def newest() -> str:
    """The newest revision that this version of SMon knows."""
    return ScriptDirectory.from_config(_config()).get_current_head() or ""


def is_known(revision: str) -> bool:
    """Whether this version of SMon knows a revision."""
    known = ScriptDirectory.from_config(_config()).walk_revisions()
    return revision in {script.revision for script in known}


def revision_of(database: Database) -> str | None:
    """The revision of a database; None if it is empty.

    Raises
    ------
    StoreError
        The database cannot be used.
    """
    with _connection(database, immediate=False) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def differences(database: Database) -> list[str]:
    """What the schema lacks of what the code expects, and what it has beyond; empty if they agree.

    Raises
    ------
    StoreError
        The database cannot be used.
    """
    with _connection(database, immediate=False) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return [_shown(change) for change in compare_metadata(context, Base.metadata)]


def _shown(change: object) -> str:
    """One difference on one line: what it is, and of which table or column."""
    parts = change[0] if isinstance(change, list) else change
    if not isinstance(parts, tuple):
        return str(parts)
    return " ".join(str(getattr(part, "name", part)) for part in parts if part is not None)


def _config() -> Config:
    folder = Path(migrations.__file__).parent
    config = Config()
    # Percent signs are Alembic's own in this value.
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _run(database: Database, change: Callable[[Config], None]) -> None:
    config = _config()
    with _connection(database, immediate=True) as connection:
        if not database.is_sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        config.attributes["connection"] = connection
        try:
            change(config)
        except CommandError as error:
            raise StoreError(
                f"the schema cannot be changed: {error}: use the version of SMon that made it, or "
                "a newer one"
            ) from error
        connection.commit()


@contextmanager
def _connection(database: Database, *, immediate: bool) -> Iterator[Connection]:
    """A transaction; SQLite lets one process at a time into one that is immediate."""
    try:
        with database.engine.connect().execution_options(smon_immediate=immediate) as connection:
            yield connection
    except SQLAlchemyError as error:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()
        raise StoreError(f"the database cannot be used: {cause[0] if cause else error}") from error
