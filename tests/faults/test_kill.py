"""Agents, server and database are killed at random under load: each event is stored once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.harness import Figures, Plan, run
from tests.faults.postgres import Postgres, postgres
from tests.faults.producers import Load

pytestmark = pytest.mark.slow

PLAN = Plan(
    load=Load(hosts=4, pause_s=0.15),
    # Many segments: each begins, is full, and is removed in the middle of everything.
    settings={"wal_segment_bytes": 1 << 16},
)


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    """A PostgreSQL server that can be crashed."""
    with postgres() as server:
        yield server


def killed_in_flight(figures: Figures) -> bool:
    """Whether kills of the server hit batches under way, and agents had to send again."""
    return bool(
        figures.in_flight_at_kills and figures.unacknowledged_at_kills and figures.duplicates
    )


def test_kills_of_agents_and_server_lose_and_double_nothing(tmp_path: Path) -> None:
    """SIGKILL at random moments, connections cut: no event lost, doubled or changed, no GAP."""
    figures = run(replace(PLAN, agent_kills=40, server_kills=13, seed=1), tmp_path)
    assert figures.good, figures
    assert (figures.agent_kills, figures.server_kills) == (40, 13)
    assert killed_in_flight(figures)


def test_power_cuts_of_the_server_lose_and_double_nothing(tmp_path: Path) -> None:
    """What was not synced is gone after each kill, and what was removed may be there again."""
    # Large segments: those of before a cut are removed, and then no sync follows for a while.
    plan = replace(PLAN, settings={}, agent_kills=20, server_kills=10, power_cut=True, seed=2)
    figures = run(plan, tmp_path)
    assert figures.good, figures
    assert killed_in_flight(figures)
    # The cuts have taken something, and brought segments of the log back.
    assert figures.truncated_files + figures.removed_files
    assert figures.returned_files


def test_a_worker_that_compacts_files_meanwhile_changes_nothing(tmp_path: Path) -> None:
    """The whole server is killed: the worker analyses and compacts windows, events stay as many."""
    settings = {**PLAN.settings, "compact_after_s": 0.1, "maintenance_interval_s": 0.1}
    plan = replace(PLAN, role="all", warm=False, settings=settings, seed=3, server_pause_s=2.0)
    figures = run(replace(plan, agent_kills=10, server_kills=2), tmp_path)
    assert figures.good, figures


@pytest.mark.postgres
def test_crashes_of_the_database_lose_and_double_nothing(
    tmp_path: Path, database: Postgres
) -> None:
    """PostgreSQL crashes, and agents and server are killed: no event lost or doubled, no GAP."""
    plan = replace(PLAN, agent_kills=30, server_kills=6, postgres_restarts=10, seed=4)
    figures = run(plan, tmp_path, database)
    assert figures.good, figures
    assert figures.postgres_restarts == 10
    assert figures.duplicates
