"""Send what is ready, and do what each answer asks for (``docs/reference/protocol.md``).

Flow: `ingest_agents.agent` gives streams → **here**, one thread per connection → server. Nothing
here waits for a pause to end: a stream that has to wait is given again later.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Final

from ingest_agents.config import AgentSettings
from ingest_agents.link import Link
from ingest_agents.pace import Pace, retry_after_s
from ingest_agents.payload import last_seq
from ingest_agents.shipping import Shipper
from ingest_agents.transport import Response, TransportError
from smon.wire.problems import TYPE_PREFIX, Problem

#: Tells people something: a name for it, and a sentence. The same one is not repeated.
Say = Callable[[str, str], None]

_OK: Final = 200
_MALFORMED: Final = frozenset({400, 422})
_TOKEN: Final = frozenset({401, 403})
_NOT_FOUND: Final = 404
_TIMEOUT: Final = 408
_CONFLICT: Final = 409
_RECODABLE: Final = frozenset({411, 415})
_TOO_LARGE: Final = 413
_SLOW_DOWN: Final = 429
#: The whole server, not one batch, is the reason.
_BUSY: Final = frozenset({502, 503, 504, 507})

#: How often a batch whose times are refused is sent again, and the first pause before that, in
#: which the clocks are compared.
_CLOCK_TRIES: Final = 3
_CLOCK_S: Final = 2.0

#: Batches of one stream, before another gets its turn.
_TURN: Final = 64

#: Without a limit from the server.
_DEFAULT_LIMIT_BYTES: Final = 4 << 20


class Sender:
    """Sends batches of one stream after another.

    Parameters
    ----------
    link
        To the server.
    pace
        Pauses that hold for the whole server.
    settings
        Of the agent.
    say
        For people.
    clock_state
        (offset to the server's clock, its error), ns, if known; given how often the batch is sent.

    Attributes
    ----------
    body_limit
        Largest body that the server takes, as it said.
    sent, events
        Batches and events that were acknowledged.
    wants_clock
        Whether the clocks should be compared soon.
    """

    def __init__(
        self,
        link: Link,
        pace: Pace,
        settings: AgentSettings,
        say: Say,
        clock_state: Callable[[int], tuple[int, int] | None],
    ) -> None:
        self.body_limit = _DEFAULT_LIMIT_BYTES
        self.sent = self.events = 0
        self.wants_clock = False
        self._link, self._pace, self._settings = link, pace, settings
        self._say, self._clock_state = say, clock_state
        self._lock = threading.Lock()

    def ship(self, shipper: Shipper, go_on: Callable[[], bool]) -> bool:
        """Send what is there, until the stream or the server has to pause, or its turn is over.

        Parameters
        ----------
        go_on
            Asked before each batch.

        Returns
        -------
        bool
            Whether there may be more.
        """
        for _ in range(_TURN):
            waits = self._pace.wait_s or shipper.pace.wait_s
            if waits or shipper.wants_hello or shipper.blocked or not go_on():
                return False
            message = shipper.message()
            if message is None or shipper.stream_id is None:
                return False
            try:
                response = self._link.put(
                    shipper.stream_id,
                    shipper.numbering.epoch,
                    message,
                    attempt=shipper.tries,
                    clock=self._clock_state(shipper.tries),
                )
            except TransportError as error:
                self._pace.failed()
                self._say("server", f"the server cannot be reached: {error}; trying again")
                return False
            self._judge(shipper, response)
            shipper.save_some()
        return True

    def _judge(self, shipper: Shipper, response: Response) -> None:
        status = response.status
        if status == _OK:
            self._accepted(shipper, response.document())
        elif status in _MALFORMED:
            self._bury(shipper, response)
        elif status in _TOKEN:
            self.refused_token(response)
        elif status == _CONFLICT:
            shipper.conflict()
        elif status == _NOT_FOUND:
            shipper.wants_hello = True
            shipper.pace.failed()
        elif status in _RECODABLE:
            if not shipper.recode():
                self._bury(shipper, response)
        elif status == _TOO_LARGE:
            if not shipper.split(self.body_limit):
                self._bury(shipper, response)
        else:
            self.postpone(shipper.pace, response)

    def postpone(self, stream: Pace, response: Response) -> None:
        """The answer says: later. Pause the stream, or all of them if it is the server."""
        status = response.status
        if status == _SLOW_DOWN:
            self._pace.pause(retry_after_s(response.headers, 1.0))
            return
        whole = status in _BUSY and slug_of(response) != Problem.DECODER_DIED
        pace = self._pace if whole else stream
        pace.failed(retry_after_s(response.headers, 0.0))
        self._say("server", f"the server answered {named(response)}; trying again")

    def refused_token(self, response: Response) -> None:
        """The token is wrong: keep everything, and try again in a while."""
        seconds = self._settings.auth_retry_s
        self._pace.pause(seconds)
        self._say(
            "token",
            f"the server refuses the token ({named(response)}); data stay in the spool, "
            f"trying every {seconds:.0f} s",
        )

    def _accepted(self, shipper: Shipper, document: dict[str, Any]) -> None:
        next_seq = document.get("next_seq")
        message = shipper.pending
        if message is None or not isinstance(next_seq, int):
            # 200 from something that is no SMon server, such as a captive portal.
            shipper.pace.failed()
            self._say("server", "the server answered 200, but not as SMon does; trying again")
            return
        with self._lock:
            self.sent += 1
            self.events += message.events
        self._pace.succeeded()
        self._say("server", "")
        self._say("token", "")
        shipper.acknowledged(next_seq)

    def _clock_may_be_why(self, shipper: Shipper, response: Response) -> bool:
        """Whether the batch should be sent again when the clocks were compared anew.

        If the server's clock was set, times that are right lie outside of what it takes, until it
        is told the new offset; if this host's was, those of before need the old one.
        """
        spec = shipper.spec
        timed = spec.mode == "live" and spec.time == "unix"
        if not timed or slug_of(response) != Problem.WRONG_VALUES or shipper.tries > _CLOCK_TRIES:
            return False
        self.wants_clock = True
        shipper.pace.pause(_CLOCK_S * shipper.tries)
        return True

    def _bury(self, shipper: Shipper, response: Response) -> None:
        if self._clock_may_be_why(shipper, response):
            return
        message = shipper.pending
        shipper.refused(response.status, slug_of(response))
        if message is not None:
            self._say(
                f"refused {shipper.folder.name}",
                f"batch {message.seq} to {last_seq(message)} of {shipper.spec.host}, "
                f"{message.events} events, is refused for good ({named(response)}); "
                "it is kept in dead/",
            )


def slug_of(response: Response) -> str:
    """Name of the problem in an answer; empty if it names none."""
    kind = response.document().get("type")
    if not isinstance(kind, str) or not kind.startswith(TYPE_PREFIX):
        return ""
    slug = kind.removeprefix(TYPE_PREFIX)
    return slug if slug.replace("-", "").isalnum() and slug.isascii() else ""


def named(response: Response) -> str:
    """Status and problem of an answer, for people."""
    slug = slug_of(response)
    return f"{response.status} {slug}" if slug else str(response.status)


class Crew:
    """Threads that send; a stream is with one of them at a time.

    Parameters
    ----------
    size
        Number of threads; 0: the caller's own.
    work
        What to do with a stream; says whether there is more to do. An exception is passed to
        `failed`, and the thread goes on.
    """

    def __init__(
        self, size: int, work: Callable[[Shipper], bool], failed: Callable[[Exception], None]
    ) -> None:
        self._resting = False
        self._work, self._failed = work, failed
        self._queue: SimpleQueue[Shipper | None] = SimpleQueue()
        self._busy: set[str] = set()
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._threads = [
            threading.Thread(target=self._run, name=f"smon-sender-{number}", daemon=True)
            for number in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def give(self, shipper: Shipper) -> bool:
        """Have a stream sent; False if it is being sent already."""
        name = shipper.folder.name
        with self._lock:
            if name in self._busy:
                return False
            self._busy.add(name)
        if self._threads:
            self._queue.put(shipper)
        else:
            self._do(shipper)
        return True

    def is_busy(self, shipper: Shipper) -> bool:
        """Whether it is being sent: then nobody else may touch it."""
        with self._lock:
            return shipper.folder.name in self._busy

    def wait_idle(self, seconds: float) -> bool:
        """Wait until nothing is being sent; whether that is so."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._busy, seconds)

    @contextmanager
    def rest(self, seconds: float) -> Iterator[None]:
        """Send nothing for as long as the block takes; begins after so long in any case."""
        self._resting = True
        try:
            self.wait_idle(seconds)
            yield
        finally:
            self._resting = False

    def close(self) -> None:
        """Let the threads end after what they are doing."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (shipper := self._queue.get()) is not None:
            self._do(shipper)

    def _do(self, shipper: Shipper) -> None:
        more = False
        try:
            more = self._work(shipper)
            while more and not self._threads:
                more = self._work(shipper)
        except Exception as error:  # noqa: BLE001  # a stream that fails must not stop the others
            shipper.pace.failed()
            self._failed(error)
        if more and not self._resting:
            # Behind the others that wait.
            self._queue.put(shipper)
            return
        with self._idle:
            self._busy.discard(shipper.folder.name)
            self._idle.notify_all()
