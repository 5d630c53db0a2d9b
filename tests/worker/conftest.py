"""What tests of the worker share."""

from __future__ import annotations

from pathlib import Path

import pytest

from smon.store.database import Database
from tests.service import database, database_url, postgres_url, sqlite
from tests.worker.feed import Store, make_store

__all__ = ["database", "database_url", "postgres_url", "sqlite"]


@pytest.fixture
def store(sqlite: Database, tmp_path: Path) -> Store:
    """A store on SQLite."""
    return make_store(sqlite, tmp_path)


@pytest.fixture
def both(database: Database, tmp_path: Path) -> Store:
    """A store on SQLite, then on PostgreSQL."""
    return make_store(database, tmp_path)
