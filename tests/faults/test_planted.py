"""The harness finds bugs: with each of these planted, it reports loss or doubles; without, none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.harness import Plan, run
from tests.faults.planted_server import PLANTS
from tests.faults.producers import Load

pytestmark = pytest.mark.slow

#: Every kill is a power cut; spools and log forget as soon as they may.
SERVER = Plan(
    load=Load(hosts=2, pause_s=0.05, segment_bytes=1),
    agent_kills=5,
    server_kills=5,
    power_cut=True,
    cut_ratio=0.05,
    settings={"wal_segment_bytes": 4096},
    drain_s=120.0,
)

#: Agents wait with a batch that has not been delivered most of the time, and are killed then.
AGENT = Plan(
    load=Load(hosts=2, pause_s=0.1, segment_bytes=1),
    agent_kills=12,
    agent_pause_s=0.2,
    cut_ratio=0.5,
    agent_settings={"retry_min_s": 0.3},
    drain_s=120.0,
)

#: What is lost is waited for; so long without news is enough to know.
QUIET_S = 4.0

FORGETFUL = "tests.faults.planted_agent"


@pytest.mark.parametrize("plan", [SERVER, AGENT], ids=["server", "agent"])
def test_without_a_bug_nothing_is_reported(tmp_path: Path, plan: Plan) -> None:
    """The plans that find the bugs find nothing where there is none."""
    figures = run(plan, tmp_path)
    assert figures.good, figures


#: Whether a kill meets the moment that a bug needs is chance: so many runs are given to it.
RUNS = 5

#: Runs with a bug each, and what they report: loss where durability is pretended, or where an agent
#: forgets a batch before the server has it, and doubles where nobody looks for them.
PLANTED = {
    **{plant: (replace(SERVER, plant=plant), "lost") for plant in PLANTS},
    "no-deduplication": (replace(SERVER, plant="no-deduplication"), "doubled"),
    "agent": (replace(AGENT, agent_module=FORGETFUL), "lost"),
}


def is_caught(name: str, folder: Path) -> bool:
    """Whether one of the runs with a bug reports what it does."""
    plan, wrong = PLANTED[name]
    for number in range(RUNS):
        figures = run(replace(plan, seed=number, quiet_s=QUIET_S), folder / f"run-{number}")
        if not figures.good and figures.verdict is not None and getattr(figures.verdict, wrong):
            return True
    return False


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(tmp_path: Path, name: str) -> None:
    """In one of a few runs."""
    assert is_caught(name, tmp_path)
