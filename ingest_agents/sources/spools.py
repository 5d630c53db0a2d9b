"""Streams that others write on this host, and the agent's own: who they are, and how much waits.

The normal way: recorders write to the spool, `ingest_agents.agent` finds and ships their folders.
Flow: spool → **here** → ``smon-agent check``. Reads only; needs no lock.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ingest_agents.spool.folder import (
    LOCK_NAME,
    StreamSpec,
    is_held,
    read_checkpoint,
    read_spec,
    segments_of,
    size_of,
    streams_in,
)
from smon.errors import StoreError


@dataclass(frozen=True, slots=True)
class SpooledStream:
    """A stream's folder as it is now.

    Attributes
    ----------
    spec
        None where the description is damaged.
    next_seq
        First number that the server has not acknowledged, as far as the checkpoint knows.
    written
        Whether somebody writes to it.
    """

    folder: Path
    spec: StreamSpec | None
    bytes: int
    next_seq: int
    written: bool


def spooled(root: Path) -> list[SpooledStream]:
    """All streams in a spool."""
    return [_spooled(folder) for folder in streams_in(root)]


def _spooled(folder: Path) -> SpooledStream:
    try:
        spec = read_spec(folder)
    except StoreError:
        spec = None
    return SpooledStream(
        folder=folder,
        spec=spec,
        bytes=sum(size_of(path) for _, path in segments_of(folder)),
        next_seq=read_checkpoint(folder).next_seq,
        written=is_held(folder / LOCK_NAME),
    )
