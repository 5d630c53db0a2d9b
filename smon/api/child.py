"""The worker process beside a server: started, watched, started again, stopped.

Flow: `smon.api.serve` → **here** → ``smon worker``. Analysis keeps a core busy for seconds; in a
process of its own it does not hold up a single acknowledgement.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

_log = logging.getLogger(__name__)

#: Pause before the second start; doubles up to the last.
_FIRST_PAUSE_S = 0.5
_LAST_PAUSE_S = 30.0
#: A process that lived for so long had a good start.
_GOOD_LIFE_S = 60.0
_POLL_S = 0.2


def worker_command() -> Sequence[str]:
    """The command line of a worker with this interpreter."""
    return (sys.executable, "-m", "smon.cli", "worker")


class ChildProcess:
    """A command that is kept running until it is stopped.

    Parameters
    ----------
    command, environ
        What to run.
    stop_timeout_s
        Time between SIGTERM and SIGKILL.
    """

    __slots__ = ("_command", "_environ", "_process", "_stop", "_stop_timeout_s", "_thread")

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], stop_timeout_s: float
    ) -> None:
        self._command = tuple(command)
        self._environ = dict(environ)
        self._stop_timeout_s = stop_timeout_s
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="smon-worker-watch", daemon=True)

    def start(self) -> None:
        """Run the command."""
        self._thread.start()

    def stop(self) -> None:
        """End it: SIGTERM, and SIGKILL if it does not go."""
        self._stop.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(self._stop_timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._thread.join(self._stop_timeout_s)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set():
            begun = time.monotonic()
            self._process = subprocess.Popen(self._command, env=self._environ)  # noqa: S603  # our own
            code = self._wait(self._process)
            if self._stop.is_set():
                return
            lived_s = time.monotonic() - begun
            pause_s = _FIRST_PAUSE_S if lived_s > _GOOD_LIFE_S else min(pause_s * 2, _LAST_PAUSE_S)
            _log.error("the worker ended with code %s; starting it again in %.1f s", code, pause_s)
            self._stop.wait(pause_s)

    def _wait(self, process: subprocess.Popen[bytes]) -> int | None:
        while not self._stop.is_set():
            code = process.poll()
            if code is not None:
                return code
            self._stop.wait(_POLL_S)
        return process.poll()
