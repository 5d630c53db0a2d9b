"""The databases and roots of files that the tests of the store run on."""

from __future__ import annotations

from tests.service import (
    any_root,
    database,
    database_url,
    empty_postgres_url,
    postgres_url,
    root,
    s3_root,
    sqlite,
)

__all__ = [
    "any_root",
    "database",
    "database_url",
    "empty_postgres_url",
    "postgres_url",
    "root",
    "s3_root",
    "sqlite",
]
