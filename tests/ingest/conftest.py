"""Servers for tests of ingest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from smon.ingest.service import Parts
from smon.store.models import Mode
from tests.ingest.batches import FakeStore, info
from tests.ingest.serving import Running, folder_settings


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Starts servers, and stops them."""
    made: list[Running] = []

    def make(parts: Parts | None = None, **changed: Any) -> Running:  # noqa: ANN401  # settings
        server = Running(folder_settings(tmp_path, **changed), parts or Parts())
        made.append(server)
        server.start()
        return server

    yield make
    for server in made:
        server.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One server for tests that only ask."""
    store = FakeStore(info(mode=Mode.RECORDED))
    server = Running(folder_settings(tmp_path_factory.mktemp("shared")), Parts(store=store))
    server.start()
    yield server
    server.stop()
