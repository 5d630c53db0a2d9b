"""What tests of notification share."""

from __future__ import annotations

from pathlib import Path

import pytest

from smon.store.database import Database
from tests.notify.scene import Scene, make_scene
from tests.service import database, database_url, postgres_url, sqlite

__all__ = ["database", "database_url", "postgres_url", "sqlite"]


@pytest.fixture
def scene(sqlite: Database, tmp_path: Path) -> Scene:
    """A job that runs, on SQLite."""
    return make_scene(sqlite, tmp_path)


@pytest.fixture
def both(database: Database, tmp_path: Path) -> Scene:
    """A job that runs, on SQLite, then on PostgreSQL."""
    return make_scene(database, tmp_path)
