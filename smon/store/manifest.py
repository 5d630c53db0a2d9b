"""What a backup holds, file by file: written last, read first, and checked.

Flow: `smon.store.backup` → **here** → ``smon backup verify``, `smon.store.restore`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Table

from smon.errors import ConfigError
from smon.store.models import Base

SCHEMA: Final = "smon.backup/1"
MANIFEST: Final = "manifest.json"

#: Key of the manifest's own checksum.
SEAL: Final = "sha256"

#: Tables that are not kept: processes that run now are none of those after a restore.
LEFT_OUT: Final = frozenset({"nodes"})

#: Read or written at a time, bytes and rows.
PIECE: Final = 1 << 20
ROWS: Final = 1_000

#: Stands before bytes, which JSON does not have.
BYTES: Final = "base64:"

#: Names of log segments.
SEGMENTS: Final = "*.wal"
SEGMENT: Final = re.compile(r"[0-9]{1,20}\.wal")


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a backup.

    Attributes
    ----------
    rows
        Of a table; 0 for other files.
    """

    path: str
    bytes: int
    sha256: str
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a backup holds; written last, so a backup without one is not complete.

    Attributes
    ----------
    revision
        Of the SQL schema.
    missing
        Event files that have a row, but were not there.
    """

    revision: str
    created_ns: int
    version: str
    tables: tuple[Part, ...]
    objects: tuple[Part, ...]
    wal: tuple[Part, ...]
    missing: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """All files."""
        return self.tables + self.objects + self.wal

    def to_json(self) -> str:
        """As it is written."""
        lists = {
            name: [
                {"path": part.path, "bytes": part.bytes, "sha256": part.sha256, "rows": part.rows}
                for part in getattr(self, name)
            ]
            for name in ("tables", "objects", "wal")
        }
        head = {
            "schema": SCHEMA,
            "version": self.version,
            "revision": self.revision,
            "created_ns": self.created_ns,
            "missing": list(self.missing),
        }
        return json.dumps(sealed(head | lists), indent=1) + "\n"


def sealed(document: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest's document with the SHA-256 of all else that is in it."""
    rest = {name: value for name, value in document.items() if name != SEAL}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return rest | {SEAL: hashlib.sha256(text.encode()).hexdigest()}


def kept_tables() -> list[Table]:
    """All tables that are kept, those that others refer to first."""
    return [table for table in Base.metadata.sorted_tables if table.name not in LEFT_OUT]


def hash_of(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """What a backup says that it holds.

    Raises
    ------
    ConfigError
        The folder holds no complete backup, or one of a newer version.
    """
    try:
        document = json.loads((folder / MANIFEST).read_bytes())
        if document["schema"] != SCHEMA:
            raise ConfigError(f"expected a backup of schema {SCHEMA} in {folder}, found another")
        if sealed(document)[SEAL] != document[SEAL]:
            raise ConfigError(f"{folder / MANIFEST}: its content has changed: use another backup")
        lists = {
            name: tuple(
                Part(str(p["path"]), int(p["bytes"]), str(p["sha256"]), int(p["rows"]))
                for p in document[name]
            )
            for name in ("tables", "objects", "wal")
        }
        return Manifest(
            revision=str(document["revision"]),
            created_ns=int(document["created_ns"]),
            version=str(document["version"]),
            missing=tuple(map(str, document["missing"])),
            **lists,
        )
    except OSError as error:
        raise ConfigError(
            f"expected a backup with a {MANIFEST} in {folder}, found none: it was not completed"
        ) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{folder / MANIFEST}: damaged: use another backup") from error


def verify(folder: Path) -> list[str]:
    """What is wrong with a backup, one sentence each; empty if every file is as it was written.

    Raises
    ------
    ConfigError
        The folder holds no complete backup.
    """
    manifest = read_manifest(folder)
    problems = [problem for part in manifest.parts if (problem := _problem(folder, part))]
    known = {part.path for part in manifest.parts} | {MANIFEST}
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return problems + [f"{path}: not of this backup" for path in sorted(there - known)]


def _problem(folder: Path, part: Part) -> str | None:
    path = folder / part.path
    if not _is_below(folder, path):
        return f"{part.path!a}: outside the backup"
    if not path.is_file():
        return f"{part.path}: missing"
    if path.stat().st_size != part.bytes:
        return f"{part.path}: expected {part.bytes} bytes, found {path.stat().st_size}"
    return None if hash_of(path) == part.sha256 else f"{part.path}: its content has changed"


def _is_below(folder: Path, path: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
