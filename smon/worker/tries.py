"""One try at a piece of work: what its errors mean, and when there is another.

Flow: `smon.worker.loop`, `smon.worker.flight` → **here** → `smon.store.work`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from smon.errors import ConfigError, FencedError, MissingError, StoreError, TaskLostError
from smon.store import work
from smon.store.work import Claim
from smon.worker.service import Service

_LOG: Final = logging.getLogger(__name__)

_NS: Final = 10**9

#: A try that failed unexpectedly is followed by the next one after so long, times the tries so far.
RETRY_S: Final = 1.0

#: Work that could not be done because the store was not there is tried again after so long; also
#: what came to a machine that is not set up for it.
STORE_RETRY_S: Final = 5.0


class Tries:
    """Tries of one worker."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def result(self, claim: Claim, do: Callable[[], str]) -> str:
        """What became of a claim: its state, or ``fenced``, ``retried``, ``failed``.

        Parameters
        ----------
        do
            Does the work, or waits for it, and gives the state.
        """
        name = claim.work.__tablename__
        try:
            return str(do())
        except FencedError as error:
            _LOG.info("%s", error)
            return "fenced"
        except MissingError as error:
            _LOG.info("%s", error)
            return self._again(claim, str(error), counts=True)
        except (StoreError, ConfigError) as error:
            _LOG.warning("%s %s waits: %s", name, claim.id, error)
            return self._again(claim, str(error), counts=self._counts(error))
        except TaskLostError as error:
            _LOG.warning("%s %s, try %d: %s", name, claim.id, claim.tries, error)
            return self._again(claim, f"given up: {error}", counts=True)
        except Exception as error:  # noqa: BLE001  # one piece of work must not end the others
            self._service.metrics.errors.labels(name).inc()
            _LOG.exception("%s %s failed, try %d", name, claim.id, claim.tries)
            reason = f"unexpected {type(error).__name__}: the log of worker {claim.owner} has more"
            return self._again(claim, reason, counts=True)

    def _counts(self, error: StoreError | ConfigError) -> bool:
        """Whether it was a try.

        A store that is away is waited for, and a machine that is not set up for the work costs it
        nothing; a file that is damaged or gone counts.
        """
        if isinstance(error, ConfigError):
            return False
        try:
            self._service.objects.size("results/there-is-none")
        except StoreError:
            return False
        return True

    def _again(self, claim: Claim, reason: str, *, counts: bool) -> str:
        """Give a claim back for another try, or give it up after the last one."""
        service = self._service
        now = service.clock()
        try:
            with service.database.write() as session:
                if counts and claim.tries >= service.settings.max_tries:
                    work.fail(session, claim, reason, now)
                    return "failed"
                pause_s = RETRY_S * claim.tries if counts else STORE_RETRY_S
                later = now + int(pause_s * _NS)
                work.release(session, claim, not_before_ns=later, counts=counts)
        except FencedError:
            return "fenced"
        except StoreError as error:
            _LOG.warning("%s cannot be given back, its lease will run out: %s", claim.id, error)
        return "retried"
