"""Runs migrations for Alembic: on the connection that `smon.store.schema` hands over.

From the command line of Alembic, which only developers use, there is none: then the database is the
one that ``SMON_DATABASE_URL`` or ``SMON_DATA_DIR`` names.
"""

from __future__ import annotations

import os

from alembic import context
from sqlalchemy import Connection

from smon.config import Settings
from smon.store.database import Database
from smon.store.models import Base


def _migrate(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=Base.metadata,
        # SQLite cannot change a column: Alembic copies the table instead.
        render_as_batch=connection.dialect.name == "sqlite",
    )
    with context.begin_transaction():
        context.run_migrations()


def _main() -> None:
    given = context.config.attributes.get("connection")
    if given is not None:
        _migrate(given)
        return
    database = Database(Settings.from_env(os.environ).database)
    try:
        with database.engine.begin() as connection:
            _migrate(connection)
    finally:
        database.close()


_main()
