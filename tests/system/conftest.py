"""Databases and roots of event files for whole servers."""

from tests.service import (  # noqa: F401  # fixtures
    any_root,
    database_url,
    postgres_url,
    root,
    s3_root,
)
