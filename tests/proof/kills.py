"""Agents, servers and PostgreSQL killed at random under load: every event exactly once."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from tests.faults.harness import Figures, Plan, Run
from tests.faults.postgres import postgres
from tests.faults.producers import Load
from tests.faults.test_planted import PLANTED, is_caught
from tests.proof.line import Form, Goal, Line, at_least, exactly

_SHORT: Final = Plan(load=Load(hosts=2, pause_s=0.05), agent_kills=6, server_kills=3)
#: What agents still have when all is killed takes as long to send as the machine needs.
_LONG: Final = Plan(load=Load(hosts=8), agent_kills=200, server_kills=50, drain_s=900.0)

#: Events of the long form.
_EVENTS: Final = 2_000_000


def prove(form: Form, folder: Path) -> Line:
    """On SQLite with power cuts, on PostgreSQL with crashes of it; then with planted bugs."""
    begin, long = time.monotonic(), form is Form.LONG
    plan = _LONG if long else _SHORT
    sqlite = Run(replace(plan, power_cut=True), folder / "sqlite").go()
    runs = {"sqlite": sqlite}
    if long:
        with postgres() as database:
            crashes = replace(plan, postgres_restarts=20)
            runs["postgresql"] = Run(crashes, folder / "postgres", database).go()
    goals = [goal for name, figures in runs.items() for goal in _goals(name, figures)]
    events = sum(figures.events for figures in runs.values())
    if long:
        goals += [at_least("events in all", events, _EVENTS), *_planted(folder)]
    records = [
        {
            "database": name,
            "events": figures.events,
            "kills_of_agents": figures.agent_kills,
            "kills_of_servers": figures.server_kills,
            "crashes_of_the_database": figures.postgres_restarts,
            "in_flight_at_kills": figures.in_flight_at_kills,
            "sent_again": figures.resent,
            "duplicates": figures.duplicates,
            "s": figures.seconds,
        }
        for name, figures in runs.items()
    ]
    figures = {"events": events, "runs": records}
    return Line("kills", form, tuple(goals), figures, round(time.monotonic() - begin, 1))


def _goals(name: str, figures: Figures) -> list[Goal]:
    wrong = figures.verdict
    lost = -1 if wrong is None else wrong.lost + wrong.changed
    more = -1 if wrong is None else wrong.doubled + wrong.invented
    return [
        exactly(f"events lost or changed, {name}", lost, 0),
        exactly(f"events doubled or made up, {name}", more, 0),
        exactly(f"everything stored and nothing given up, {name}", int(figures.good), 1),
    ]


def _planted(folder: Path) -> list[Goal]:
    """Whether the same harness finds each bug that is put in."""
    found = sum(is_caught(name, folder / f"plant-{name}") for name in PLANTED)
    return [exactly("planted bugs that the harness finds", found, len(PLANTED))]
