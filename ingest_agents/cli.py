"""The ``smon-agent`` command: parse, call, print (``docs/reference/agent.md``).

Exit codes: 0 done, 1 ``check`` found something wrong, 2 bad usage, unreadable input or refused.
Modules that read files are imported by the commands that need them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from ingest_agents.config import (
    AgentSettings,
    Configured,
    configure,
    default_of,
    flag_of,
    meaning_of,
    names,
    token_of,
)
from smon import __version__
from smon.errors import ConfigError, SMonError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ingest_agents.link import Link

EXIT_OK: Final = 0
EXIT_WRONG: Final = 1
EXIT_USAGE: Final = 2
_EXIT_INTERRUPTED: Final = 130

_CODES: Final = "exit codes: 0 done, 1 check found something wrong, 2 bad usage or input"

#: A round that hangs in a request must not hold up the end of the host.
_GRACE_S: Final = 1.0

#: Settings that `send` has no use for.
_NOT_FOR_SEND: Final = frozenset(
    {
        "enable",
        "spool_dir",
        "cap_bytes",
        "dead_bytes",
        "directory",
        "kineto_dir",
        "inspector_dir",
        "flight_recorder_dir",
        "file_still_s",
        "file_age_s",
        "file_bytes",
        "file_hour_bytes",
        "inspector_portion_s",
        "reader_bytes",
        "reader_s",
        "counters_s",
        "stop_s",
        "poll_s",
        "queue_events",
        "flush_s",
        "window_steps",
        "layout",
        "job_id",
        "attempt",
    }
)


class _Parser(argparse.ArgumentParser):
    """Errors in one line, with the way to the help."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns
    -------
    int
        The exit code.
    """
    parsed = parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed, os.environ)
        sys.stdout.flush()
    except SMonError as error:
        print(f"smon-agent {parsed.command}: error: {_line(error)}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    else:
        return code
    return EXIT_OK


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    top = _Parser(
        prog="smon-agent", description="Ship op traces from this host to SMon.", epilog=_CODES
    )
    top.add_argument("--version", action="version", version=f"smon-agent {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run",
        help="ship what recorders on this host write, until stopped",
        description="Ship the spool of this host, and what appears in the folders that are given.",
        epilog=_CODES,
    )
    _add_settings(run, names())
    run.set_defaults(run=_run)
    _add_send(commands)
    look = commands.add_parser(
        "check",
        help="explain what the agent sees: settings, identity, spool, server, clock",
        description="Look at everything an agent needs, and change nothing.",
        epilog=_CODES,
    )
    _add_settings(look, names())
    look.set_defaults(run=_check)
    return top


def _add_send(commands: _SubParsersAction[_Parser]) -> None:
    send = commands.add_parser(
        "send",
        help="ship recorded trace files once",
        description="Ship the trace of one job, wait until the server has it, leave nothing "
        "behind. The same files are the same stream: repeating it is harmless.",
        epilog=_CODES,
    )
    send.add_argument("files", nargs="+", type=Path, metavar="FILE", help="trace file or folder")
    send.add_argument("--meta", type=Path, metavar="FILE", help="meta file, YAML or JSON")
    send.add_argument("--format", metavar="NAME", help="read the files as this format")
    send.add_argument("--layout", metavar="tp4-dp4-pp4", help="if there is no meta file")
    send.add_argument("--job", metavar="NAME", help="name of the job, instead of the files'")
    send.add_argument("--attempt", type=int, metavar="N", help="restarts of the job before it")
    send.add_argument(
        "--wait",
        type=float,
        metavar="SECONDS",
        nargs="?",
        const=300.0,
        help="wait for the analysis, and print its verdict; needs the scope read as well",
    )
    _add_settings(send, [name for name in names() if name not in _NOT_FOR_SEND])
    send.set_defaults(run=_send)


def _add_settings(parser: argparse.ArgumentParser, wanted: Sequence[str]) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, YAML or JSON")
    group = parser.add_argument_group("settings")
    for name in wanted:
        default = default_of(name)
        group.add_argument(
            f"--{flag_of(name)}",
            dest=f"setting_{name}",
            metavar=type(default).__name__.upper(),
            help=f"{meaning_of(name)} (default: {default!r})".replace("%", "%%"),
        )


def _configured(parsed: argparse.Namespace, environ: Mapping[str, str]) -> Configured:
    flags = {name: getattr(parsed, f"setting_{name}", None) for name in names()}
    return configure(environ, flags=flags, file=parsed.config)


def _link(settings: AgentSettings) -> Link:
    """A link to the server of the settings.

    Raises
    ------
    ConfigError
        Its address or certificates cannot be used.
    """
    import socket

    from ingest_agents.link import Link
    from ingest_agents.payload import clean
    from ingest_agents.transport import HttpTransport, address_of

    address = address_of(settings.server)
    host = clean(settings.hostname or socket.gethostname()) or "unknown"
    # Made once here, so that a wrong certificate file is an error now.
    HttpTransport(address, timeout_s=settings.timeout_s, ca_file=settings.ca_file)
    return Link(
        lambda: HttpTransport(address, timeout_s=settings.timeout_s, ca_file=settings.ca_file),
        lambda: token_of(settings),
        host,
    )


class Notices:
    """Sentences on stderr; the same one is not repeated until something else was said."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._last: dict[str, str] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str, text: str) -> None:
        """Say something under a name; empty: it is over."""
        with self._lock:
            if self._last.get(name, "") == text:
                return
            self._last[name] = text
            if text:
                print(f"smon-agent {self._command}: {_line(Exception(text))}", file=sys.stderr)
                sys.stderr.flush()


# --- run ----------------------------------------------------------------------------------------


def _run(parsed: argparse.Namespace, environ: Mapping[str, str]) -> int:
    settings = _configured(parsed, environ).settings
    if not settings.enable:
        print("smon-agent run: SMON_ENABLE=0, nothing to do", file=sys.stderr)
        return EXIT_OK
    from ingest_agents.agent import Agent
    from ingest_agents.sources.watched import watched

    say = Notices("run")
    token_of(settings)
    sources = [_directory(settings, environ)] if settings.directory else []
    if settings.counters_s:
        sources.append(_counters(settings, say))
    sources += watched(settings, environ, say)
    agent = Agent(settings, _link(settings), sources, say)
    stop = threading.Event()
    _on_signals(stop, settings.stop_s)
    agent.run(stop)
    return EXIT_OK


def _on_signals(stop: threading.Event, stop_s: float) -> None:
    """End in good order on SIGTERM and SIGINT; in any case soon after the time for that is over."""

    def handle(_signal: int, _frame: object) -> None:
        stop.set()
        # What is not sent is in the spool: leaving without more ado loses nothing.
        last = threading.Timer(stop_s + _GRACE_S, os._exit, (EXIT_OK,))
        last.daemon = True
        last.start()

    signal.signal(signal.SIGTERM, handle)
    signal.signal(signal.SIGINT, handle)


def _directory(settings: AgentSettings, environ: Mapping[str, str]) -> Any:  # noqa: ANN401  # a source
    from ingest_agents.identity import identify
    from ingest_agents.sources.directory import DirectorySource
    from ingest_agents.spool.folder import StreamSpec, key_of
    from ingest_agents.spool.writer import SpoolLimits

    who = identify(environ, settings)
    if who.job is None or who.layout is None:
        missing = "--job-id" if who.job is None else "--layout"
        raise ConfigError(f"a directory needs {missing}: its files do not say")
    folder = Path(settings.directory)
    spec = StreamSpec(
        key=key_of("directory", who.job, who.attempt, who.host, folder.absolute()),
        job=who.job,
        attempt=who.attempt,
        layout=who.layout,
        mode="live",
        time="unix",
        host=who.host,
        source="directory",
        ranks=_ranks(settings, who.layout.world_size),
        window_steps=settings.window_steps or None,
    )
    limits = SpoolLimits(settings.segment_bytes, settings.segment_s, settings.cap_bytes)
    return DirectorySource(folder, Path(settings.spool_dir), spec, limits, _read_table)


def _counters(settings: AgentSettings, say: Notices) -> Any:  # noqa: ANN401  # a source
    from ingest_agents.sources.counters.source import CounterSource, readers_of
    from ingest_agents.spool.writer import SpoolLimits

    limits = SpoolLimits(settings.segment_bytes, settings.segment_s, settings.cap_bytes)
    return CounterSource(Path(settings.spool_dir), settings.counters_s, readers_of(), limits, say)


def _ranks(settings: AgentSettings, world_size: int) -> tuple[int, ...]:
    """Ranks such as ``0-7,16``; by default all of the layout.

    Raises
    ------
    ConfigError
        They are malformed.
    """
    if not settings.ranks:
        return tuple(range(world_size))
    found: set[int] = set()
    for part in settings.ranks.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdigit() and (last.isdigit() or not dash)):
            raise ConfigError(f"ranks: expected ranks such as 0-7,16, found {settings.ranks!r}")
        end = min(int(last or first), world_size)
        found.update(range(int(first), end + 1))
    if not found or max(found) >= world_size:
        raise ConfigError(f"ranks: expected ranks below {world_size}, found {settings.ranks!r}")
    return tuple(sorted(found))


def _read_table(path: Path, layout: Any) -> Any:  # noqa: ANN401  # as `recorded.read_table`, which is imported late
    from ingest_agents.sources.recorded import read_table

    return read_table(path, layout)


# --- send ---------------------------------------------------------------------------------------


def _send(parsed: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from ingest_agents.send import send
    from ingest_agents.sources.recorded import read_recording, spec_of_recording
    from smon.topology import parse_layout

    settings = _configured(parsed, environ).settings
    token_of(settings)
    link = _link(settings)
    if parsed.attempt is not None and parsed.attempt < 0:
        raise ConfigError(f"--attempt: expected 0 or more, found {parsed.attempt}")
    recording = read_recording(
        parsed.files,
        meta=parsed.meta,
        layout=parse_layout(parsed.layout) if parsed.layout else None,
        format_name=parsed.format,
    )
    spec = spec_of_recording(recording, _host(settings), job=parsed.job, attempt=parsed.attempt)
    with tempfile.TemporaryDirectory(prefix="smon-agent-") as folder:
        sent = send(
            recording,
            spec,
            link,
            replace(settings, spool_dir=folder),
            Notices("send"),
            _progress(),
        )
    return _report(parsed, settings, link, sent)


def _host(settings: AgentSettings) -> str:
    import socket

    from ingest_agents.payload import clean

    return clean(settings.hostname or socket.gethostname()) or "unknown"


def _report(
    parsed: argparse.Namespace,
    settings: AgentSettings,
    link: Link,
    sent: Any,  # noqa: ANN401  # `ingest_agents.send.Sent`, which is imported late
) -> int:
    from ingest_agents.send import job_id_of

    job_id = job_id_of(link, sent.job)
    print(f"job {sent.job}{f' ({job_id})' if job_id else ''}, stream {sent.stream_id}")
    print(f"{sent.batches} batches are stored")
    base = settings.server.rstrip("/")
    print(f"see {base}/jobs/{job_id}" if job_id else f"see {base}/")
    for reason, events in sent.dropped.items():
        print(f"{events} events were refused: {reason}", file=sys.stderr)
    if parsed.wait is not None:
        print(_verdict(link, job_id, parsed.wait))
    return EXIT_USAGE if sent.dropped else EXIT_OK


def _verdict(link: Link, job_id: str | None, wait_s: float) -> str:
    """What the analysis says, once there is one.

    Raises
    ------
    ConfigError
        It cannot be read, or takes too long. The data are stored all the same.
    """
    from ingest_agents.send import may_read, verdict_of

    if job_id is None:
        if not may_read(link):
            raise ConfigError(
                "the data are stored, but --wait needs a token with the scope read as well"
            )
        raise ConfigError("the data are stored, but the server does not list the job: look later")
    verdict = verdict_of(link, job_id, wait_s)
    if verdict is None:
        raise ConfigError(f"no window was analysed within {wait_s:g} s: look later")
    return verdict


def _progress() -> Callable[[str, int, int], None]:
    """A line on stderr if that is a terminal, nothing otherwise."""
    if not sys.stderr.isatty():
        return lambda _phase, _done, _total: None

    def show(phase: str, done: int, total: int) -> None:
        end = "\n" if done >= total else ""
        print(f"\r{phase} {done}/{total} batches", end=end, file=sys.stderr, flush=True)

    return show


# --- check --------------------------------------------------------------------------------------


def _check(parsed: argparse.Namespace, environ: Mapping[str, str]) -> int:
    from ingest_agents.check import check

    configured = _configured(parsed, environ)
    quick = replace(configured.settings, timeout_s=min(configured.settings.timeout_s, 5.0))
    found = check(configured, environ, _link(quick))
    print("\n".join(found.lines))
    for line in found.wrong:
        print(f"smon-agent check: {line.strip()}", file=sys.stderr)
    return EXIT_WRONG if found.wrong else EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
