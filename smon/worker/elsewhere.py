"""A claimed window that is analysed in another process, perhaps on another machine.

Flow: `smon.worker.flight` → `Reference` → **here** → `Outcome`. What travels is where things are;
database and event files are opened where the work is done, and the result is written from there,
under the claim of the worker that sent it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from smon.config import SECRET_URLS, Settings
from smon.errors import ConfigError, FencedError
from smon.store import work
from smon.store.database import Database
from smon.store.models import Window, WindowState
from smon.store.objects import Objects
from smon.store.work import Claim
from smon.worker.analyse import analyse
from smon.worker.leases import RENEWALS
from smon.worker.service import Counts, Metrics, Service
from smon.worker.windows import CODE_VERSION


@dataclass(frozen=True, slots=True)
class Reference:
    """A claimed window.

    Attributes
    ----------
    settings
        See `settings_elsewhere`.
    owner
        The worker that has claimed it, and renews the lease.
    code_version
        Of that worker.
    """

    settings: Settings
    window_id: str
    owner: str
    fence: int
    tries: int
    code_version: str = CODE_VERSION

    @property
    def claim(self) -> Claim:
        """The claim under which the result is written."""
        return Claim(Window, self.window_id, self.owner, self.fence, self.tries)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a window, and what is to be counted."""

    state: WindowState
    counts: Counts


def settings_elsewhere(settings: Settings) -> Settings:
    """The settings that another process needs: places in full, and no addresses of messages."""
    nowhere: dict[str, Any] = dict.fromkeys(SECRET_URLS, "")
    root = settings.traces
    return replace(
        settings,
        database_url=settings.database,
        trace_url=root if "://" in root else str(Path(root).absolute()),
        data_dir=settings.data_dir.absolute(),
        **nowhere,
    )


def analyse_elsewhere(reference: Reference) -> Outcome:
    """Analyse a window that another process has claimed.

    Raises
    ------
    ConfigError
        This machine cannot do it: it has another version of SMon, or lacks something.
    FencedError
        Another worker has taken over; nothing is written.
    StoreError
        The database or an object cannot be used, or the window does not exist any more.
    """
    if reference.code_version != CODE_VERSION:
        raise ConfigError(
            f"expected SMon {reference.code_version}, as the worker has, found {CODE_VERSION}"
        )
    database, objects = _opened(reference.settings.database, reference.settings.traces)
    settings = _with_own_folder(reference.settings)
    metrics = Metrics(CollectorRegistry())
    service = Service(settings, database, objects, reference.owner, time.time_ns, metrics)
    state = analyse(service, reference.claim, ClaimCheck(service, reference.claim))
    return Outcome(state, metrics.counts())


@lru_cache(maxsize=4)
def _opened(database: str, traces: str) -> tuple[Database, Objects]:
    """Once in each process."""
    return Database(database), Objects(traces)


def _with_own_folder(settings: Settings) -> Settings:
    """Large files lie in the data folder for a while; where there is none, as others do."""
    if settings.data_dir.is_dir():
        return settings
    return replace(settings, data_dir=Path(tempfile.gettempdir()) / "smon")


class ClaimCheck:
    """Called as an analysis goes on: ends it if its claim is lost.

    Parameters
    ----------
    clock
        Seconds.
    """

    def __init__(
        self, service: Service, claim: Claim, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._service, self._claim, self._clock = service, claim, clock
        self._pause_s = service.settings.lease_s / RENEWALS
        self._next_s = clock() + self._pause_s

    def __call__(self, *_progress: object) -> None:
        """Look at the claim, as often as a lease is renewed.

        Raises
        ------
        FencedError
            It is lost.
        """
        if self._clock() < self._next_s:
            return
        self._next_s = self._clock() + self._pause_s
        with self._service.database.read() as session:
            if not work.holds(session, self._claim):
                raise FencedError("the lease is lost, so the work is given up")
