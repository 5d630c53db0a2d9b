"""Ship recorded files once, and wait until the server has them: ``smon-agent send``.

Flow: files → `ingest_agents.sources.recorded` → a spool of its own, while it takes → server.
Nothing is left behind; a second try with the same files goes on where the first one stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from ingest_agents.agent import Agent
from ingest_agents.config import AgentSettings
from ingest_agents.link import Link
from ingest_agents.sender import Say
from ingest_agents.spool.folder import StreamSpec
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.errors import ConfigError, StoreError
from smon.wire import API

if TYPE_CHECKING:
    from ingest_agents.sources.recorded import Recording

#: Called with (what is done, how much of it, of how much).
Progress = Callable[[str, int, int], None]

_OK: Final = 200
#: Answers that say that the token does not do, and not that nothing is there.
_REFUSED: Final = frozenset({401, 403})
_POLL_S: Final = 0.05
_VERDICT_POLL_S: Final = 0.5
_FINAL: Final = frozenset({"done", "failed"})


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of it.

    Attributes
    ----------
    dropped
        Events that the server refused, by reason.
    """

    stream_id: str
    job: str
    batches: int
    dropped: Mapping[str, int]


def send(
    recording: Recording,
    spec: StreamSpec,
    link: Link,
    settings: AgentSettings,
    say: Say,
    progress: Progress,
) -> Sent:
    """Ship a recording; returns when all of it is acknowledged.

    Parameters
    ----------
    settings
        With a spool folder that nobody else uses.

    Raises
    ------
    ConfigError
        The server does not take the stream.
    StoreError
        The spool cannot be written.
    """
    batches = _spool(recording, spec, settings, progress)
    unlimited = replace(settings, cap_bytes=1 << 62)
    agent = Agent(unlimited, link, (), say)
    try:
        agent.discover()
        shipper = agent.shippers[spec.folder_name]
        while not shipper.ended:
            agent.round()
            if shipper.blocked:
                raise ConfigError(f"the server does not take it: {shipper.blocked}")
            progress("send", min(shipper.next_seq, batches), batches)
            time.sleep(_POLL_S)
    finally:
        agent.close()
    return Sent(shipper.stream_id or "", spec.job, batches, dict(shipper.dropped))


def _spool(
    recording: Recording, spec: StreamSpec, settings: AgentSettings, progress: Progress
) -> int:
    """Put all batches into the spool; how many there are."""
    from ingest_agents.sources.recorded import MAX_EVENTS, batches_of

    about = len(recording.trace.table) // MAX_EVENTS + 1
    writer = SpoolWriter(
        Path(settings.spool_dir),
        spec,
        SpoolLimits(settings.segment_bytes, settings.segment_s, cap_bytes=0),
    )
    for number, batch in enumerate(batches_of(recording), 1):
        if not writer.try_append(batch):
            raise StoreError(
                f"{settings.spool_dir}: no space for the batches of this trace: set TMPDIR to a "
                "folder with more space"
            )
        progress("read", min(number, about), about)
    writer.close()
    return writer.next_seq


def job_id_of(link: Link, job: str) -> str | None:
    """The server's id of a job, by its name; None if it does not say (e.g. without the scope)."""
    for each in _items(link, f"{API}/jobs?name={quote(job, safe='')}"):
        if each.get("name") == job and isinstance(each.get("id"), str):
            return str(each["id"])
    return None


def may_read(link: Link) -> bool:
    """Whether the server lets this token read: sending needs another scope."""
    return link.get(f"{API}/jobs?limit=1").status not in _REFUSED


def verdict_of(
    link: Link, job_id: str, timeout_s: float, sleep: Callable[[float], None] = time.sleep
) -> str | None:
    """The verdict on a job, once one of its windows is analysed; None: not within that time.

    In sentences, a line each, where the server has them; else in one word.
    """
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        for window in _items(link, f"{API}/jobs/{quote(job_id, safe='')}/windows"):
            if window.get("state") in _FINAL:
                return _sentences(link, job_id, window)
        sleep(_VERDICT_POLL_S)
    return None


def _sentences(link: Link, job_id: str, window: Mapping[str, Any]) -> str:
    if window.get("verdict") is None:
        return f"{window['state']}: {window.get('reason') or 'no reason is known'}"
    response = link.get(f"{API}/jobs/{quote(job_id, safe='')}")
    lines = response.document().get("lines") if response.status == _OK else None
    if not isinstance(lines, list) or not lines:
        return str(window["verdict"])
    return "\n".join(map(str, lines))


def _items(link: Link, path: str) -> list[dict[str, Any]]:
    """The objects of a list that the server gives page by page; of the first page."""
    response = link.get(path)
    items = response.document().get("items") if response.status == _OK else None
    return [item for item in items if isinstance(item, dict)] if isinstance(items, list) else []
