"""``smon db``: bring the schema of the database up to date, and check the store."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from smon.config import Settings
    from smon.store.database import Database

EXIT_FAULTS = 1

#: Files that are named; the others are counted.
_MAX_NAMED = 10


def add(commands: _SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "db",
        help="upgrade or check the database",
        description="Upgrade the schema of the database, or check the store.",
    )
    inner = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    upgrade = inner.add_parser(
        "upgrade",
        help="bring the schema up to date",
        description="Bring the schema up to date; smon serve does so when it starts.",
    )
    upgrade.set_defaults(run=_upgrade)
    check = inner.add_parser(
        "check",
        help="say what is wrong with the store, if anything",
        description="Compare the schema with what this version expects, files with their rows, and "
        "see whether both can be written. Exit codes: 0 all is well, 1 something is wrong.",
    )
    check.set_defaults(run=_check)
    for each in (upgrade, check):
        each.add_argument(
            "--data-dir", type=Path, metavar="DIR", help="folder of the database (smon-data)"
        )


def _upgrade(parsed: argparse.Namespace) -> int:
    from smon.commands.serve import settings_of
    from smon.store import schema
    from smon.store.database import Database

    database = Database(settings_of(parsed).database)
    try:
        before = schema.revision_of(database)
        schema.upgrade(database)
    finally:
        database.close()
    newest = schema.newest()
    print(
        f"schema {newest}: nothing to do"
        if before == newest
        else f"schema {before or 'empty'} → {newest}"
    )
    return 0


def _check(parsed: argparse.Namespace) -> int:
    from smon.commands.serve import settings_of
    from smon.store.database import Database

    settings = settings_of(parsed)
    database = Database(settings.database)
    try:
        faults = _schema_faults(database)
        if not faults:
            faults = _write_faults(database, settings) + _file_faults(database, settings)
    finally:
        database.close()
    for fault in faults:
        print(fault)
    if not faults:
        print("all is well: schema, rows and files agree, and both can be written")
    return EXIT_FAULTS if faults else 0


def _schema_faults(database: Database) -> list[str]:
    from smon.store import schema

    revision, newest = schema.revision_of(database), schema.newest()
    if revision != newest:
        return [f"schema: expected {newest}, found {revision or 'none'}: run smon db upgrade"]
    return [f"schema: {difference}" for difference in schema.differences(database)]


def _write_faults(database: Database, settings: Settings) -> list[str]:
    """Write a row that is undone, and a file that is removed."""
    from smon.errors import SMonError
    from smon.store.database import now_ns
    from smon.store.models import Node, new_uuid
    from smon.store.objects import Objects

    faults = []
    probe = f"check-{new_uuid()}"
    try:
        with database.write() as session:
            now = now_ns()
            session.add(
                Node(id=probe, role="check", host="", started_ns=now, seen_ns=now, version="")
            )
            session.flush()
            session.rollback()
    except SMonError as error:
        faults.append(f"database: {error}")
    try:
        objects = Objects(settings.traces)
        objects.put(f"checks/{probe}", b"check")
        objects.delete(f"checks/{probe}")
    except SMonError as error:
        faults.append(f"event files: {error}")
    return faults


def _file_faults(database: Database, settings: Settings) -> list[str]:
    from smon.store.objects import Objects
    from smon.store.reconcile import compare

    orphans, lost = compare(database, Objects(settings.traces))
    faults = []
    for names, what in ((orphans, "files without a row"), (lost, "rows without a file")):
        if names:
            shown = ", ".join(names[:_MAX_NAMED]) + (" …" if len(names) > _MAX_NAMED else "")
            faults.append(f"{len(names)} {what}: {shown}")
    return faults
