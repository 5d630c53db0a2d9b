"""Starts server processes fast: the modules are imported once, and each server is a fork.

``python -m tests.faults.forge`` reads a request per line and answers with what became of the forks.
A server is a process of its own, as any other: it is only its imports that cost nothing. Thirty
restarts within a short test need that; one test starts servers by their command.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from tests.waiting import PATIENCE_S

ROOT: Final = Path(__file__).resolve().parent.parent.parent

_MODULES: Final = (
    "tests.faults.planted_server",
    "smon.api.serve",
    "smon.commands.serve",
    "smon.commands.worker",
    "smon.store.schema",
    "smon.worker.loop",
    "alembic.command",
    "psycopg",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
    "pyarrow.parquet",
    "pyarrow.compute",
    "uvicorn.protocols.http.httptools_impl",
    "uvloop",
)


class Forked:
    """A process that the forge has made; used like `subprocess.Popen`."""

    def __init__(self, forge: Forge, pid: int) -> None:
        self.pid = pid
        self._forge = forge

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._forge.codes.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit code."""
        with self._forge.news:
            if not self._forge.news.wait_for(lambda: self.poll() is not None, timeout):
                raise subprocess.TimeoutExpired("forked", timeout or 0.0)
        return self._forge.codes[self.pid]

    def terminate(self) -> None:
        """SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)


class Forge:
    """The process that forks."""

    def __init__(self) -> None:
        self.codes: dict[int, int] = {}
        self.news = threading.Condition()
        self._made: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forge"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        threading.Thread(target=self._read, name="forge", daemon=True).start()

    def start(
        self, module: str, arguments: Sequence[str], environ: Mapping[str, str], log: Path
    ) -> Forked:
        """Fork, and run `main` of a module."""
        request = {
            "module": module,
            "arguments": list(arguments),
            "environ": dict(environ),
            "log": str(log),
        }
        assert self._process.stdin is not None
        with self.news:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            if not self.news.wait_for(lambda: self._made, PATIENCE_S):
                raise TimeoutError(f"no process for {module}: is the forge gone?")
            return Forked(self, self._made.pop())

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            kind, pid, code = json.loads(line)
            with self.news:
                if kind == "made":
                    self._made.append(pid)
                else:
                    self.codes[pid] = code
                self.news.notify_all()

    def close(self) -> None:
        """End it, and its forks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@cache
def forge() -> Forge:
    """The forge of this process."""
    made = Forge()
    atexit.register(made.close)
    return made


# --- inside the forge ---------------------------------------------------------------------------


def main() -> None:
    """Fork as asked, until nobody asks any more."""
    for name in _MODULES:
        import_module(name)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    rest = b""
    while True:
        ready, _, _ = select.select([0, wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap()
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            _end_all()
            return
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            _fork(json.loads(line))


_running: set[int] = set()


def _end_all() -> None:
    """Whoever asked is gone, or has forgotten these."""
    for pid in _running:
        for send in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                send(pid, signal.SIGKILL)


def _tell(kind: str, pid: int, code: int) -> None:
    os.write(1, json.dumps([kind, pid, code]).encode() + b"\n")


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        _running.discard(pid)
        _tell("ended", pid, os.waitstatus_to_exitcode(status))


def _fork(request: dict[str, Any]) -> None:
    pid = os.fork()
    if pid:
        _running.add(pid)
        _tell("made", pid, 0)
        return
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(request["environ"])
    os._exit(_run(request["module"], request["arguments"]))


def _run(module: str, arguments: list[str]) -> int:
    sys.argv = [module, *arguments]
    try:
        return int(import_module(module).main(arguments) or 0)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001  # the log gets it, whatever it is
        import traceback

        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    main()
