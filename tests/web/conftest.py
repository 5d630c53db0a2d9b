"""Servers for the tests of the pages: an empty one, and one with jobs of two tenants."""

from __future__ import annotations

from tests.api.conftest import filled, postgres_url, world

__all__ = ["filled", "postgres_url", "world"]
