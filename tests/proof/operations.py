"""What operators do: back up and restore, upgrade, restart, stop; and what stands in logs."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tests.faults.postgres import Postgres, postgres
from tests.proof.drills import backups, secrets, stops, upgrades
from tests.proof.line import Form, Goal, Line, at_least, at_most, exactly
from tests.store.released import released
from tests.wire.released import versions

#: Steps of the job that comes while the backup is made.
_STEPS: Final = {Form.SHORT: 60, Form.LONG: 1500}

#: Files of a backup that are damaged.
_DAMAGED: Final = {Form.SHORT: 3, Form.LONG: 100}

#: Commands whose output is searched for secrets.
_COMMANDS: Final = {Form.SHORT: 2, Form.LONG: 100}

#: How often each of two servers is restarted.
_ROUNDS: Final = 5

_STOP_S: Final = 10


def prove(form: Form, folder: Path) -> Line:
    """On SQLite in short; on PostgreSQL too, and with restarts, in full."""
    begin, goals, figures = time.monotonic(), [], dict[str, Any]()
    with ExitStack() as stack:
        server = stack.enter_context(postgres()) if form is Form.LONG else None
        drills = [backups.drill(folder / "backup", _STEPS[form], _DAMAGED[form])]
        if server is not None:
            urls = server.new("backed"), server.new("restored")
            drills.append(backups.drill(folder / "backup-pg", _STEPS[form], _DAMAGED[form], urls))
        goals += [goal for drill in drills for goal in _of_backup(drill)]
        figures["backups"] = [asdict(drill) for drill in drills]
        goals += _of_upgrades(folder, server)
        found, searched = secrets.leaks(folder / "secrets", _COMMANDS[form])
        what = "secrets in logs, answers, backups, spools and what commands print"
        goals.append(exactly(_with(what, found), len(found), 0))
        figures["bytes_searched_for_secrets"] = searched
        if server is not None:
            restarts, more = _restarted(folder, server)
            goals, figures = goals + restarts, figures | more
    return Line("operations", form, tuple(goals), figures, round(time.monotonic() - begin, 1))


def _restarted(folder: Path, server: Postgres) -> tuple[list[Goal], dict[str, Any]]:
    """Processes stopped at work, and servers restarted in turn."""
    done = [
        *stops.under_load(folder / "stops"),
        *stops.without_database(folder / "away", server),
    ]
    rolled = stops.rolling(folder / "rolling", server, _ROUNDS)
    figures = {
        "rolling_restarts": [asdict(rolled)],
        "stops": [asdict(stop) for stop in done],
    }
    return [*_of_rolling(rolled), *_of_stops(done)], figures


def _of_backup(drill: backups.Drill) -> list[Goal]:
    at = drill.database
    return [
        at_least(f"batches stored while a backup was made, {at}", drill.during, 1),
        exactly(f"reports that are others after a restore, {at}", drill.reports_differ, 0),
        exactly(f"ops lost after all was sent again, {at}", drill.lost, 0),
        exactly(f"ops doubled after all was sent again, {at}", drill.doubled, 0),
        exactly(f"batches refused, {at}", drill.refused, 0),
        exactly(f"damages of a backup that were not found, {at}", drill.unnoticed, 0),
    ]


def _of_upgrades(folder: Path, server: Postgres | None) -> list[Goal]:
    """Every released schema to each database, and every version of the protocol."""
    goals = []
    for kept in released():
        urls = {"sqlite": ""}
        if server is not None:
            urls["postgresql"] = server.new(f"old_{kept.revision}")
        for name, url in urls.items():
            wrong = upgrades.upgraded(kept, folder / f"old-{kept.revision}-{name}", url)
            what = f"schema {kept.revision} and its log, upgraded, {name}: what is missing"
            goals.append(exactly(_with(what, wrong), len(wrong), 0))
    for version in versions():
        wrong = upgrades.agents(version, folder / f"agents-{version.number}")
        what = f"agents of protocol {version.number}: what is not taken or not stored as sent"
        goals.append(exactly(_with(what, wrong), len(wrong), 0))
    return goals


def _of_rolling(rolled: stops.Rolled) -> list[Goal]:
    return [
        exactly("batches refused during rolling restarts", rolled.refused, 0),
        exactly("batches given up during rolling restarts", rolled.gave_up, 0),
        exactly("rolling restarts that lost or doubled events", rolled.wrong, 0),
    ]


def _of_stops(done: list[stops.Stop]) -> list[Goal]:
    failed, lost = sum(each.code != 0 for each in done), sum(each.lost for each in done)
    slowest = max(each.s for each in done)
    return [
        exactly("processes that SIGTERM ended with another code than 0", failed, 0),
        exactly("batches that a stopped server had acknowledged and lost", lost, 0),
        at_most("SIGTERM to the end, at most, s", slowest, _STOP_S, timed=True),
    ]


def _with(what: str, wrong: list[str]) -> str:
    """The goal, with the first few things that miss it."""
    return f"{what}: {'; '.join(wrong[:3])}" if wrong else what
