"""What an agent sees from here: settings, identity, spool, server, clock: ``smon-agent check``.

Flow: settings → **here** → lines for people, and whether anything is wrong. Changes nothing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ingest_agents.clock import ClockWatch
from ingest_agents.config import Configured, token_of
from ingest_agents.identity import identify
from ingest_agents.link import Link
from ingest_agents.sender import named, slug_of
from ingest_agents.sources.counters.preview import preview
from ingest_agents.sources.spools import spooled
from ingest_agents.sources.survey import surveys
from ingest_agents.spool.folder import AGENT_LOCK_NAME, is_held
from ingest_agents.transport import TransportError
from smon.errors import ConfigError, SMonError

_OK: Final = 200
_MIB: Final = 1 << 20


@dataclass(slots=True)
class Checkup:
    """What was found.

    Attributes
    ----------
    lines
        For people.
    wrong
        What keeps data from arriving.
    """

    lines: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        """Something that is as it should be."""
        self.lines.append(line)

    def fault(self, line: str) -> None:
        """Something that is not."""
        self.lines.append(f"WRONG  {line}")
        self.wrong.append(line)


def check(configured: Configured, environ: Mapping[str, str], link: Link) -> Checkup:
    """Look at everything an agent needs."""
    found = Checkup()
    found.lines += ["settings (flag > environment > file > default)"]
    found.lines += [f"  {line}" for line in configured.lines()]
    if not configured.settings.enable:
        found.say("SMON_ENABLE=0: agent and recorders on this host do nothing")
    _identity(configured, environ, found)
    _spool(configured, found)
    _directory(configured, found)
    _watched(configured, environ, found)
    _counters(configured, found)
    _server(configured, link, found)
    return found


def _identity(configured: Configured, environ: Mapping[str, str], found: Checkup) -> None:
    found.say("identity")
    try:
        who = identify(environ, configured.settings)
    except ConfigError as error:
        found.fault(str(error))
        return
    for name in ("job", "attempt", "rank", "world_size", "layout", "host"):
        value = getattr(who, name)
        origin = who.origins.get(name, "default")
        found.say(f"  {name} = {'unknown' if value is None else value} ({origin})")


def _spool(configured: Configured, found: Checkup) -> None:
    root = Path(configured.settings.spool_dir)
    found.say(f"spool {root}")
    if not root.is_dir():
        found.say("  does not exist yet: recorders and `smon-agent run` make it")
        return
    if not os.access(root, os.W_OK | os.X_OK):
        found.fault(f"  {root}: no permission to write")
        return
    streams = spooled(root)
    total = sum(stream.bytes for stream in streams)
    cap, free = configured.settings.cap_bytes, shutil.disk_usage(root).free
    found.say(
        f"  {total / _MIB:.1f} MiB of at most {cap / _MIB:.0f} MiB, {free / _MIB:.0f} MiB free"
    )
    running = "runs" if is_held(root / AGENT_LOCK_NAME) else "does not run"
    found.say(f"  an agent {running} on it")
    for stream in streams:
        if stream.spec is None:
            found.fault(f"  {stream.folder.name}: its stream.json is damaged")
            continue
        spec = stream.spec
        written = "being written" if stream.written else "nobody writes"
        found.say(
            f"  {spec.source} of job {spec.job}, attempt {spec.attempt}, ranks "
            f"{_ranks(spec.ranks)}: {stream.bytes / _MIB:.2f} MiB, acknowledged up to "
            f"{stream.next_seq}, {written}"
        )


def _ranks(ranks: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"{shown}, … ({len(ranks)})" if len(ranks) > 4 else shown or "none"  # noqa: PLR2004  # as shown


def _directory(configured: Configured, found: Checkup) -> None:
    folder = configured.settings.directory
    if not folder:
        return
    if Path(folder).is_dir():
        found.say(f"source directory {folder}")
    else:
        found.fault(f"source directory {folder}: no such folder")


def _watched(configured: Configured, environ: Mapping[str, str], found: Checkup) -> None:
    """Folders of profilers: what they hold."""
    try:
        every = surveys(configured.settings, environ)
    except ConfigError as error:
        found.fault(str(error))
        return
    for survey in every:
        for line in survey.lines():
            found.say(line)
        for wrong in survey.wrong:
            found.fault(f"  {wrong}")


def _counters(configured: Configured, found: Checkup) -> None:
    if configured.settings.counters_s:
        for line in preview():
            found.say(line)
    else:
        found.say("counters: not read, counters_s is 0")


def _server(configured: Configured, link: Link, found: Checkup) -> None:
    found.say(f"server {configured.settings.server}")
    try:
        has_token = token_of(configured.settings) is not None
    except ConfigError as error:
        found.fault(f"  {error}")
        return
    found.say("  token: given, not shown" if has_token else "  token: none")
    watch = ClockWatch(time.time_ns, time.monotonic_ns)
    try:
        response = link.hello([])
        if response.status != _OK:
            _refused(named(response), slug_of(response), found)
            return
        found.say("  reachable, and takes data")
        for line in _answer(response.document()):
            found.say(line)
        watch.probe(link.time)
    except (TransportError, SMonError) as error:
        found.fault(f"  cannot be reached: {error}")
        return
    state = watch.state()
    if state is None:
        found.fault("  does not tell its time")
        return
    found.say(
        f"  its clock is {state.offset_ns / 1e6:+.3f} ms from this host's, "
        f"± {state.error_ns / 1e6:.3f} ms"
    )


def _refused(what: str, slug: str, found: Checkup) -> None:
    hints = {
        "unauthorized": "the token is missing, wrong, expired or revoked: make one with "
        "`smon token create --scope ingest`",
        "forbidden": "the token lacks the scope ingest: make another",
    }
    found.fault(f"  answers {what}: {hints.get(slug, 'is this the address of an SMon server?')}")


def _answer(document: Mapping[str, object]) -> Iterator[str]:
    flush, limits = document.get("flush"), document.get("limits")
    if isinstance(flush, dict):
        yield f"  wants data every {flush.get('interval_s')} s"
    if isinstance(limits, dict):
        yield f"  takes bodies of up to {limits.get('body_bytes')} bytes"
