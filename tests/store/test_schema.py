from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from smon.errors import StoreError
from smon.store import schema
from smon.store.database import Database
from smon.store.models import Base
from tests.service import BOTH

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=BOTH)
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database without tables: SQLite, then PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/empty.db"
    return str(request.getfixturevalue("empty_postgres_url"))


@pytest.fixture
def empty(empty_url: str) -> Iterator[Database]:
    """A database without tables: SQLite, then PostgreSQL."""
    database = Database(empty_url)
    yield database
    database.close()


def test_the_migrations_make_what_the_models_say(empty: Database) -> None:
    """From nothing, the migrated schema and the tables of the code are the same."""
    assert not schema.is_current(empty)
    assert len(schema.differences(empty)) > 15
    schema.upgrade(empty)
    assert schema.is_current(empty)
    assert schema.differences(empty) == []
    assert schema.revision_of(empty) == schema.newest()


def test_migrations_go_down_and_up_again(empty: Database) -> None:
    """Nothing that an upgrade makes is left behind by a downgrade."""
    nothing = schema.differences(empty)
    schema.upgrade(empty)
    schema.downgrade(empty, "base")
    assert schema.differences(empty) == nothing
    assert schema.revision_of(empty) is None
    schema.upgrade(empty)
    assert schema.differences(empty) == []


def test_an_upgrade_of_a_present_schema_changes_nothing(database: Database) -> None:
    """Every start of the server upgrades; mostly there is nothing to do."""
    schema.upgrade(database)
    assert schema.is_current(database)
    assert schema.differences(database) == []


def test_processes_that_start_at_once_migrate_once(empty_url: str) -> None:
    """Two servers on an empty database: both come up with the present schema."""
    script = (
        "import sys; from smon.store.database import Database; from smon.store import schema;"
        "d = Database(sys.argv[1]); schema.upgrade(d); print(schema.is_current(d))"
    )
    command = [sys.executable, "-W", "error", "-c", script, empty_url]
    running = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [process.communicate() for process in running]
    assert [out.strip() for out, _ in said] == [b"True", b"True"], [e.decode() for _, e in said]
    found = Database(empty_url)
    assert schema.differences(found) == []
    found.close()


def test_a_schema_of_a_newer_version_is_refused(database: Database) -> None:
    """A server that is rolled back does not touch tables that it does not know."""
    with database.write() as session:
        session.connection().exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    assert not schema.is_current(database)
    with pytest.raises(StoreError, match="a newer one"):
        schema.upgrade(database)


def test_a_difference_is_named(tmp_path: Path, sqlite: Database) -> None:
    """A table that somebody has changed by hand is noticed, with the name of the column."""
    with sqlite3.connect(tmp_path / "sql" / "smon.db") as connection:
        connection.execute("ALTER TABLE jobs DROP COLUMN pinned")
    assert schema.differences(sqlite) == ["add_column jobs pinned"]


def test_a_database_that_cannot_be_reached_is_a_store_error(tmp_path: Path) -> None:
    """The message says so in one line, without a traceback of the driver."""
    (tmp_path / "smon.db").write_bytes(b"no database at all" * 100)
    database = Database(f"sqlite:///{tmp_path}/smon.db")
    with pytest.raises(StoreError, match="cannot be used"):
        schema.upgrade(database)
    gone = Database(f"postgresql://nobody@/none?host={tmp_path}")
    with pytest.raises(StoreError, match="cannot be used"):
        schema.is_current(gone)


def test_every_table_is_documented() -> None:
    """The page on the store has each table, and no other."""
    text = (ROOT / "docs" / "reference" / "store.md").read_text(encoding="utf-8")
    tables = text.partition("\n## Tables\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE) == list(Base.metadata.tables)
