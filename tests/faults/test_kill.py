"""Agents, server and database are killed at random under load: each event is stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.events import NOTHING_WRONG
from tests.faults.harness import Figures, Plan, run
from tests.faults.outside import number
from tests.faults.postgres import Postgres, postgres
from tests.faults.processes import FaultServer
from tests.faults.producers import Load
from tests.faults.site import Site
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

PLAN = Plan(
    load=Load(hosts=4, pause_s=0.15),
    # Many segments: each begins, is full, and is removed in the middle of everything.
    settings={"wal_segment_bytes": 1 << 16},
)


#: Runs of a plan, until its kills have hit what they are for.
MAX_RUNS = 5


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    """A PostgreSQL server that can be crashed."""
    with postgres() as server:
        yield server


def run_until(
    hit: Callable[[list[Figures]], bool],
    plan: Plan,
    folder: Path,
    database: Postgres | None = None,
) -> list[Figures]:
    """Runs of a plan, each with a seed of its own and each good, until its kills have hit.

    What is under way at a kill is chance: one run in many has nothing there. No run may lose
    anything, and together they have to meet what the test is about.
    """
    runs: list[Figures] = []
    while not (runs and hit(runs)):
        assert len(runs) < MAX_RUNS, runs
        number = len(runs)
        place = folder / f"run-{number}"
        runs.append(run(replace(plan, seed=plan.seed + 10 * number), place, database))
        assert runs[-1].good, runs[-1]
    return runs


def killed_in_flight(runs: list[Figures]) -> bool:
    """Whether kills of the server hit batches under way, and agents had to send again."""
    return bool(
        sum(each.in_flight_at_kills for each in runs)
        and sum(each.unacknowledged_at_kills for each in runs)
        and sum(each.duplicates for each in runs)
    )


def taken_and_brought_back(runs: list[Figures]) -> bool:
    """Whether power cuts took what was not synced, and brought removed segments back."""
    return bool(
        killed_in_flight(runs)
        and sum(each.truncated_files + each.removed_files for each in runs)
        and sum(each.returned_files for each in runs)
    )


def test_kills_of_agents_and_server_lose_and_double_nothing(tmp_path: Path) -> None:
    """SIGKILL at random moments, connections cut: no event lost, doubled or changed, no GAP."""
    plan = replace(PLAN, agent_kills=40, server_kills=13, seed=1)
    runs = run_until(killed_in_flight, plan, tmp_path)
    assert {(each.agent_kills, each.server_kills) for each in runs} == {(40, 13)}


def test_power_cuts_of_the_server_lose_and_double_nothing(tmp_path: Path) -> None:
    """What was not synced is gone after each kill, and what was removed may be there again."""
    # Large segments: those of before a cut are removed, and then no sync follows for a while.
    plan = replace(PLAN, settings={}, agent_kills=20, server_kills=10, power_cut=True, seed=2)
    runs = run_until(taken_and_brought_back, plan, tmp_path)
    assert {(each.agent_kills, each.server_kills) for each in runs} == {(20, 10)}


def wait_for_more(url: str, count: str) -> None:
    """Wait until a query counts more than now."""
    before = number(url, count)
    wait_until(lambda: number(url, count) > before, count)


def test_a_worker_that_compacts_files_meanwhile_changes_nothing(tmp_path: Path) -> None:
    """Server and worker are killed while windows are analysed and compacted: as many events."""
    settings = {"compact_after_s": 0.1, "maintenance_interval_s": 0.1, "min_free_bytes": 0}
    server = FaultServer(tmp_path / "server", settings, role="all", warm=False)
    replaced = "SELECT count(*) FROM event_files WHERE doomed_ns IS NOT NULL"
    with Site(tmp_path, [server], load=Load(hosts=2, window_steps=5)) as site:
        for _ in range(2):
            wait_for_more(site.url, replaced)
            server.kill()
            server.start()
            for _ in range(5):
                site.restart_agents()
                site.wait_for_batches(5)
        wait_for_more(site.url, replaced)
        assert site.finish() == NOTHING_WRONG
        assert not site.proxy.counts.gaps


@pytest.mark.postgres
def test_crashes_of_the_database_lose_and_double_nothing(
    tmp_path: Path, database: Postgres
) -> None:
    """PostgreSQL crashes, and agents and server are killed: no event lost or doubled, no GAP."""
    plan = replace(PLAN, agent_kills=30, server_kills=6, postgres_restarts=10, seed=4)
    runs = run_until(lambda each: bool(each[-1].duplicates), plan, tmp_path, database)
    assert {each.postgres_restarts for each in runs} == {10}
