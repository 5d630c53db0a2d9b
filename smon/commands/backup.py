"""``smon backup``: make, verify and restore backups."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import _SubParsersAction

EXIT_FAULTS = 1

#: Faults that are printed; the others are counted.
_MAX_SHOWN = 20


def add(commands: _SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "backup",
        help="make, verify or restore a backup",
        description="Make, verify or restore a backup of database, event files and log.",
    )
    inner = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = inner.add_parser(
        "create",
        help="write a backup into a new folder, while the server runs",
        description="Write a backup into a new or empty folder. The server may run meanwhile.",
    )
    create.set_defaults(run=_create)
    verify = inner.add_parser(
        "verify",
        help="see whether a backup is complete and unchanged",
        description="Compare every file of a backup with its checksum. Exit codes: 0 sound, 1 not.",
    )
    verify.set_defaults(run=_verify)
    restore = inner.add_parser(
        "restore",
        help="bring a backup back, into an empty database and folder",
        description="Bring a backup back while no server runs. The database may be of another kind "
        "than the one that was backed up; it, the event files and the log must be empty.",
    )
    restore.set_defaults(run=_restore)
    for each in (create, verify, restore):
        each.add_argument("folder", type=Path, metavar="DIR", help="folder of the backup")
    for each in (create, restore):
        each.add_argument(
            "--data-dir", type=Path, metavar="DIR", help="folder of the server's data (smon-data)"
        )


def _create(parsed: argparse.Namespace) -> int:
    from smon.commands.serve import settings_of
    from smon.store.backup import create
    from smon.store.database import Database
    from smon.store.objects import Objects

    settings = settings_of(parsed)
    database = Database(settings.database)
    try:
        manifest = create(database, Objects(settings.traces), settings.wal, parsed.folder)
    finally:
        database.close()
    size = sum(part.bytes for part in manifest.parts)
    rows = sum(part.rows for part in manifest.tables)
    print(
        f"{parsed.folder}: {rows:,} rows, {len(manifest.objects):,} files, "
        f"{len(manifest.wal):,} log segments, {size:,} bytes"
    )
    for path in manifest.missing[:_MAX_SHOWN]:
        print(f"not there, so not in the backup: {path}")
    return EXIT_FAULTS if manifest.missing else 0


def _verify(parsed: argparse.Namespace) -> int:
    from smon.store.manifest import read_manifest, verify

    faults = verify(parsed.folder)
    for fault in faults[:_MAX_SHOWN]:
        print(fault)
    if faults:
        print(f"{len(faults)} faults: do not rely on this backup")
        return EXIT_FAULTS
    print(f"{parsed.folder}: sound, {len(read_manifest(parsed.folder).parts):,} files")
    return 0


def _restore(parsed: argparse.Namespace) -> int:
    from smon.commands.serve import settings_of
    from smon.store.database import Database
    from smon.store.objects import Objects
    from smon.store.restore import restore

    settings = settings_of(parsed)
    database = Database(settings.database)
    try:
        done = restore(database, Objects(settings.traces), settings.wal, parsed.folder)
    finally:
        database.close()
    print(
        f"restored {sum(done.rows.values()):,} rows, {done.objects:,} files, "
        f"{done.segments:,} log segments"
    )
    return 0
