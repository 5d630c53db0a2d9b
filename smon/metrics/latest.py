"""The answer to a question that may take long, or fail: asked once for all who want it.

Flow: `smon.metrics.jobs` → **here** → the store. A scrape has a few seconds; a database that hangs
must cost one metric, not all of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar

from smon.errors import SMonError

_LOG: Final = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """Times in seconds.

    Attributes
    ----------
    fresh_s
        An answer is given again for so long.
    wait_s
        A question that takes longer has failed for now; it is not asked again before it ends.
    keep_s
        While questions fail, the last answer is given for so long.
    """

    fresh_s: float = 1.0
    wait_s: float = 2.0
    keep_s: float = 120.0


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What is known.

    Attributes
    ----------
    value
        None: nothing, or it is too old.
    failed
        The last question failed or takes too long.
    """

    value: T | None
    failed: bool


@dataclass(slots=True, eq=False)
class _Question(Generic[T]):
    """One question under way."""

    done: threading.Event = field(default_factory=threading.Event)
    value: T | None = None
    failed: bool = True


class Latest(Generic[T]):
    """The newest answer, from any thread.

    Parameters
    ----------
    ask
        Makes a new one; whatever it raises is a failure.
    clock
        Monotonic time, s.
    """

    def __init__(
        self,
        ask: Callable[[], T],
        patience: Patience | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._patience = patience or Patience()
        self._clock = clock
        self._lock = threading.Lock()
        self._question: _Question[T] | None = None
        self._value: T | None = None
        self._at = -float("inf")

    def get(self) -> Answer[T]:
        """The answer: a fresh one, or the last one if it is not too old."""
        with self._lock:
            if self._clock() - self._at < self._patience.fresh_s:
                return Answer(self._value, failed=False)
            question = self._question or self._begin()
        question.done.wait(self._patience.wait_s)
        with self._lock:
            failed = question.failed
            old = self._clock() - self._at > self._patience.keep_s
            return Answer(None if failed and old else self._value, failed=failed)

    def _begin(self) -> _Question[T]:
        question = self._question = _Question[T]()
        threading.Thread(target=self._run, args=(question,), name="metrics", daemon=True).start()
        return question

    def _run(self, question: _Question[T]) -> None:
        try:
            value = self._ask()
        except SMonError as error:
            _LOG.warning("metrics of jobs wait: %s", error)
            value = None
        except Exception:  # noqa: BLE001  # a defect must not end the scrapes
            _LOG.exception("metrics of jobs cannot be made")
            value = None
        with self._lock:
            if value is not None:
                self._value, self._at = value, self._clock()
                question.failed = False
            self._question = None
        question.done.set()
