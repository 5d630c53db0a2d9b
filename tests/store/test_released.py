"""What released versions left behind is read by this one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from smon.api.access import TokenGate
from smon.api.app import create_app
from smon.api.routes.common import Seams
from smon.config import Settings
from smon.ingest.segments import recover
from smon.store import schema
from smon.store.database import Database
from smon.store.models import Base
from smon.store.objects import Objects
from tests.api.filled import Client
from tests.service import BOTH
from tests.store.released import GOLDEN, TOKEN, Released, main, released, revisions
from tests.store.rows import NOW
from tests.store.upgraded import kept_wrong, told_wrong


@pytest.fixture(params=BOTH)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database without tables: SQLite, then PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/old.db"
    return str(request.getfixturevalue("empty_postgres_url"))


def test_every_schema_is_kept() -> None:
    """A migration needs a dump of the schema before it, and of what it makes.

    If this fails after a new migration: ``make golden``, see ``docs/releases.md``.
    """
    assert [kept.revision for kept in released()] == revisions()


@pytest.mark.parametrize("kept", released(), ids=str)
def test_what_is_kept_has_rows_in_every_table(kept: Released) -> None:
    """What has no row is not tried by an upgrade."""
    filled = {name for name, rows in kept.rows().items() if rows}
    assert set(Base.metadata.tables) <= filled | _newer_than(kept)
    assert kept.rows()["alembic_version"] == [{"version_num": kept.revision}]
    assert len(recover(kept.folder / "wal").records) == 2


def _newer_than(kept: Released) -> set[str]:
    """Tables that this schema did not have."""
    script = (kept.folder / "sqlite.sql").read_text(encoding="utf-8")
    return {name for name in Base.metadata.tables if f"CREATE TABLE {name} " not in script}


@pytest.mark.parametrize("kept", released(), ids=str)
def test_an_old_database_is_upgraded_and_read(kept: Released, url: str, tmp_path: Path) -> None:
    """From each released schema to the newest: no row is lost, and all routes tell of them."""
    kept.load(url, tmp_path)
    database, objects = Database(url), Objects(str(tmp_path / "objects"))
    schema.upgrade(database)
    assert schema.differences(database) == []
    assert counted(database) == Counter({name: len(rows) for name, rows in kept.rows().items()})
    settings, gate = Settings(data_dir=tmp_path, database_url=url), TokenGate(database, lambda: NOW)
    app = create_app(settings, database, objects, None, gate, Seams(lambda: NOW, 0.05))
    client = Client(app, {"authorization": f"Bearer {TOKEN}"})
    assert told_wrong(kept, lambda path: client.json(f"/api/v1/{path}")) == []
    assert kept_wrong(kept, database, objects) == []
    database.close()


def counted(database: Database) -> Counter[str]:
    """Rows by table."""
    with database.read() as session:
        connection = session.connection()
        names = [*Base.metadata.tables, "alembic_version"]
        query = "SELECT count(*) FROM "
        return Counter({name: connection.exec_driver_sql(query + name).scalar() for name in names})


def test_the_newest_dump_is_what_the_migrations_make(url: str, tmp_path: Path) -> None:
    """Whoever changes a migration before its release makes the dump again (``make golden``)."""
    newest = released()[-1]
    newest.load(url, tmp_path)
    database = Database(url)
    assert schema.is_current(database)
    assert schema.differences(database) == []
    database.close()


def test_what_is_kept_is_not_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Only who says so writes over it."""
    before = {path: path.stat().st_mtime_ns for path in GOLDEN.rglob("*")}
    assert main([]) == 0
    assert "--again" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in GOLDEN.rglob("*")} == before
