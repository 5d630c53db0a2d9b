"""Tells one channel what changes: looks for what there is to say, and says it.

Flow: `smon.worker.loop` (a thread for each channel) → **here** → `smon.store.notices`,
`smon.notify.post`. A round first notes what is to be told, then sends what is due. Several workers
do this side by side: whoever claims a row sends its message (`smon.store.work`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from smon.config import SECRET_URLS, Settings, masked_url
from smon.errors import FencedError
from smon.notify import post as posting
from smon.notify.address import Target, target_of
from smon.notify.decide import SEVERITIES, Event, Rules, Wish, to_queue, wish, withheld
from smon.notify.message import Form, message_of
from smon.notify.metrics import NotifyMetrics, Result
from smon.notify.post import Reply
from smon.store import notices, work
from smon.store.database import Database
from smon.store.models import Notice, WorkState
from smon.store.notices import Subject
from smon.store.work import Claim

_LOG: Final = logging.getLogger(__name__)

#: A message is tried so often, with pauses that double from the first to the last: for 25 minutes.
MAX_TRIES: Final = 12
FIRST_PAUSE_S: Final = 1.0
LAST_PAUSE_S: Final = 300.0

#: A receiver that fails is left alone by this worker for so long at most, whatever else is due.
MAX_REST_S: Final = 30.0

#: What is withheld is looked at again after so long.
WITHHELD_S: Final = 5.0

#: A worker that is silent for so long has lost the message that it was sending: four times the
#: longest time limit of one, so that looking up a name may take its time too.
LEASE_S: Final = 60.0

#: Changes are looked for so far back: clocks of workers differ, and a commit takes its time.
OVERLAP_S: Final = 30.0

#: All findings are compared with what was said so often; between, those that have changed.
FULL_S: Final = 60.0

#: Messages of one round; the next round looks for changes first.
MAX_MESSAGES: Final = 20

_NS: Final = 10**9

#: Sends bytes to a receiver under the id of a message.
Post = Callable[[Target, bytes, str], Reply]


@dataclass(frozen=True, slots=True)
class Channel:
    """Somebody who is told."""

    form: Form
    target: Target
    shown: str

    @property
    def name(self) -> str:
        """In tables and metrics."""
        return str(self.form)


def channels_of(settings: Settings) -> list[Channel]:
    """The channels that the settings name.

    Raises
    ------
    ConfigError
        An address cannot be used.
    """
    found = []
    for form in Form:
        name = f"notify_{form}_url"
        if name not in SECRET_URLS:
            raise LookupError(f"{name} is no setting that is kept secret")
        url = getattr(settings, name)
        if url:
            found.append(Channel(form, target_of(url), masked_url(url)))
    return found


def poster(settings: Settings) -> Post:
    """Sends over the network, on the terms of the settings."""
    terms = posting.Terms(settings.notify_timeout_s, bool(settings.notify_private))

    def send(target: Target, body: bytes, message_id: str) -> Reply:
        return posting.post(target, body, message_id, terms)

    return send


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all notifiers of a worker work with; see `smon.worker.service.Service`."""

    settings: Settings
    database: Database
    name: str
    clock: Callable[[], int]
    metrics: NotifyMetrics
    post: Post


class Notifier:
    """Tells one channel.

    Parameters
    ----------
    around
        Of the worker.
    """

    def __init__(self, channel: Channel, around: Surroundings) -> None:
        self.channel = channel
        self._around = around
        settings = around.settings
        self._rules = Rules(settings.notify_severity, settings.notify_cooldown_s)
        self._full_ns = 0
        self._since_ns = 0
        self._rest_until_ns = 0
        self._failures = 0
        _LOG.info(
            "findings from %s on are told to %s (%s)",
            settings.notify_severity,
            channel.name,
            channel.shown,
        )

    def run(self) -> bool:
        """Look once for what there is to say, and say what is due; whether there was anything.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        noted = self._look()
        sent = 0
        while sent < MAX_MESSAGES and self._send_one():
            sent += 1
        if sent or noted:
            with self._around.database.read() as session:
                waiting = notices.waiting(session, self.channel.name)
            self._around.metrics.waiting.labels(self.channel.name).set(waiting)
        return sent > 0

    # --- what there is to say -----------------------------------------------------------------

    def _look(self) -> int:
        """Note what is to be told; how much that is."""
        now, name = self._around.clock(), self.channel.name
        afresh = not self._full_ns
        full = now >= self._full_ns
        with self._around.database.read() as session:
            places = notices.places_changed(session, self._since_ns or now)
            if full:
                places |= notices.places_open(session, name)
            standings = notices.standings(session, name, places)
        wanted = [
            (standing, found)
            for standing in standings
            if (found := to_queue(standing, self._rules, afresh=afresh)) is not None
        ]
        if wanted:
            with self._around.database.write() as session:
                for standing, found in wanted:
                    notices.queue(session, name, standing, found.not_before_ns, now)
        # Only now: what a failure has left out is looked for again.
        self._since_ns = now - int(OVERLAP_S * _NS)
        self._full_ns = now + int(FULL_S * _NS) if full else self._full_ns
        return len(wanted)

    # --- saying it ----------------------------------------------------------------------------

    def _send_one(self) -> bool:
        """Deal with one message that is due; False if none is, or the receiver is left alone."""
        around = self._around
        now = around.clock()
        if now < self._rest_until_ns:
            return False
        terms = work.Terms(LEASE_S, MAX_TRIES)
        mine = Notice.channel == self.channel.name
        with around.database.write() as session:
            claim = work.claim(session, Notice, around.name, now, terms, mine)
        if claim is None:
            return False
        try:
            self._deal_with(claim, now)
        except FencedError as error:
            _LOG.info("%s", error)
        return True

    def _deal_with(self, claim: Claim, now: int) -> None:
        with self._around.database.read() as session:
            subject = notices.subject(session, claim.id)
        wanted = None if subject is None else wish(subject.told, subject.truth, self._rules)
        if subject is None or wanted is None:
            gone = {"told_severity": None} if subject is None else {}
            self._finish(claim, gone)
        elif wanted.not_before_ns > now:
            self._later(claim, wanted.not_before_ns)
        elif (reason := withheld(subject)) is not None:
            _LOG.debug("message %s waits: %s", claim.id, reason)
            self._around.metrics.withheld.labels(self.channel.name).inc()
            self._later(claim, now + int(WITHHELD_S * _NS))
        else:
            self._send(claim, subject, wanted)

    def _send(self, claim: Claim, subject: Subject, wanted: Wish) -> None:
        around = self._around
        message = message_of(subject, wanted, around.settings, around.clock())
        reply = around.post(self.channel.target, message.body(self.channel.form), message.id)
        now = around.clock()
        if not reply.delivered:
            self._failed(claim, wanted, reply, now)
            return
        self._failures = 0
        self._finish(claim, _told(subject, wanted, now))
        self._count(Result.DELIVERED)
        delay_s = max(now - subject.changed_ns, 0) / _NS
        around.metrics.delay.labels(self.channel.name).observe(delay_s)

    def _failed(self, claim: Claim, wanted: Wish, reply: Reply, now: int) -> None:
        self._failures += 1
        rest_s = min(FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 8), MAX_REST_S)
        self._rest_until_ns = now + int(max(rest_s, reply.retry_after_s) * _NS)
        self._count(Result.FAILED)
        _LOG.warning(
            "a message to %s was not taken, try %d of %d: %s",
            self.channel.name,
            claim.tries,
            MAX_TRIES,
            reply.reason,
        )
        if claim.tries >= MAX_TRIES:
            self._give_up(claim, wanted, reply.reason, now)
            return
        pause_s = min(FIRST_PAUSE_S * 2.0 ** (claim.tries - 1), LAST_PAUSE_S)
        not_before_ns = now + int(max(pause_s, reply.retry_after_s) * _NS)
        self._later(claim, not_before_ns, counts=True)

    def _give_up(self, claim: Claim, wanted: Wish, reason: str, now: int) -> None:
        """Until the finding changes, or a worker starts: with it, perhaps, another address."""
        self._count(Result.GIVEN_UP)
        with self._around.database.write() as session:
            work.progress(session, claim, {"given_up": wanted.name})
            work.fail(session, claim, reason, now)

    # --- rows ---------------------------------------------------------------------------------

    def _finish(self, claim: Claim, values: dict[str, Any]) -> None:
        """What has changed since this worker looked last, it finds when it looks again."""
        done = {"state": WorkState.DONE.value, "given_up": None, "error": None}
        finished = {**done, "finished_ns": self._around.clock(), **values}
        with self._around.database.write() as session:
            work.finish(session, claim, finished)

    def _later(self, claim: Claim, not_before_ns: int, *, counts: bool = False) -> None:
        with self._around.database.write() as session:
            work.release(session, claim, not_before_ns=not_before_ns, counts=counts)

    def _count(self, result: Result) -> None:
        self._around.metrics.messages.labels(self.channel.name, str(result)).inc()


def _told(subject: Subject, wanted: Wish, now: int) -> dict[str, Any]:
    """What the channel knows after a message."""
    values: dict[str, Any] = {"told_ns": now, "messages": subject.told.messages + 1}
    if wanted.event is Event.CLEARED:
        return {**values, "told_severity": None}
    if wanted.event is Event.OPENED:
        values["opened_ns"] = now
    return {**values, "told_severity": _graver(subject.told.severity, wanted.severity)}


def _graver(before: str | None, now: str) -> str:
    if before is None:
        return now
    return max(before, now, key=SEVERITIES.index)
