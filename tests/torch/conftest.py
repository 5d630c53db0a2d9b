"""Real training with torch: run by ``make torch``, left out by everybody else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.server import ServerProcess

HERE = Path(__file__).parent
MARKER = "torch"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every test of this folder; without ``-m torch`` they are not there."""
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker(MARKER)
    if mine and MARKER not in config.option.markexpr:
        items[:] = [item for item in items if HERE not in item.path.parents]
        config.hook.pytest_deselected(items=mine)


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A real server, for all jobs of the session."""
    with ServerProcess(tmp_path_factory.mktemp("server")) as one:
        yield one
