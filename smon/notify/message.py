"""One message: what a program reads, and what a person reads.

Flow: `smon.store.notices.Subject` → **here** → `smon.notify.post`. The sentence is the one of pages
and command line; the numbers are those of the stored finding. ``docs/notify.md`` has the schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final
from urllib.parse import quote

from smon.config import Settings
from smon.errors import StoreError
from smon.metrics.links import pages_url, runbooks_url
from smon.notify.decide import Event, Wish
from smon.render.bare import bare_report
from smon.render.words import CAUSES, headline, place, printable
from smon.report import Finding
from smon.store.notices import Subject
from smon.store.queries.reports import read_finding

SCHEMA: Final = "smon.notice/1"

#: Names come from other people's files: what a person reads has bounds. A block of Slack takes
#: 3,000 characters, and a character that is escaped becomes five.
_MAX_NAME: Final = 200
_MAX_TEXT: Final = 590
_MAX_LINES: Final = 8

_MESSAGE: Final = {Event.SEVERITY: "more severe", Event.CLEARED: "cleared"}


class Form(StrEnum):
    """How a message is written."""

    JSON = "webhook"
    SLACK = "slack"


@dataclass(frozen=True, slots=True)
class Links:
    """Where a person goes from a message; None if no address is known."""

    job: str | None
    runbook: str | None


@dataclass(frozen=True, slots=True)
class Message:
    """What is sent, in either form.

    Attributes
    ----------
    id
        The same for every try at it.
    document
        For programs.
    lines
        For people: the sentence first.
    """

    id: str
    document: Mapping[str, Any]
    lines: tuple[str, ...]
    links: Links

    def body(self, form: Form) -> bytes:
        """The bytes to send."""
        document = self._slack() if form is Form.SLACK else self.document
        return json.dumps(document, allow_nan=False).encode()

    def _slack(self) -> dict[str, Any]:
        """A block for each line: the text of one has a bound."""
        first, *rest = (escaped(line) for line in self.lines)
        named = (("Job page", self.links.job), ("Runbook", self.links.runbook))
        links = " · ".join(f"<{url}|{name}>" for name, url in named if url is not None)
        texts = [f"*{first}*", *rest, *([links] if links else [])]
        blocks = [{"type": "section", "text": {"type": "mrkdwn", "text": one}} for one in texts]
        return {"text": first, "blocks": blocks}


def escaped(text: str) -> str:
    """Text that Slack shows as it is: no link, no mention of a person or a channel."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def message_of(subject: Subject, wanted: Wish, settings: Settings, now: int) -> Message:
    """The message that tells of a finding."""
    message_id = f"{subject.told.id}-{subject.told.messages}"
    links = _links(subject, settings)
    lines = tuple(_lines(subject, wanted, settings))
    document = {
        "schema": SCHEMA,
        "id": message_id,
        "event": str(wanted.event),
        "time_s": now / 1e9,
        "tenant": subject.tenant,
        "text": "\n".join(lines),
        "job": {
            "id": subject.place[1],
            "name": subject.job,
            "attempt": subject.attempt,
            "url": links.job,
        },
        "finding": _finding(subject),
        "previous_severity": subject.told.severity,
        "came_back": subject.came_back if subject.told.opened_ns else 0,
        "cost": _cost(subject, settings.price),
        "runbook_url": links.runbook,
    }
    return Message(message_id, document, lines, links)


def trial_message(message_id: str, now: int) -> Message:
    """A message that only shows that messages arrive."""
    lines = ("SMon: a test message. Messages about findings arrive here.",)
    document = {
        "schema": SCHEMA,
        "id": message_id,
        "event": str(Event.TEST),
        "time_s": now / 1e9,
        "text": lines[0],
    }
    return Message(message_id, document, lines, Links(None, None))


def _links(subject: Subject, settings: Settings) -> Links:
    pages, cause = pages_url(settings), quote(str(subject.finding["cause"]), safe="")
    job = f"{pages}/jobs/{subject.place[1]}" if pages else None
    runbook = f"{runbooks_url(settings)}/{cause}"
    return Links(job, runbook if "://" in runbook else None)


def _finding(subject: Subject) -> dict[str, Any]:
    """The stored finding: life and place from its row, what it rests on from its document."""
    row, document = subject.finding, subject.document
    kept = ("severity", "verdict", "cause", "scope", "host", "gpu_uuid", "excess_s")
    steps = ("excess_share", "onset_step", "opened_step", "last_step", "cleared_step")
    parts = ("where", "phase", "persistence", "confidence", "evidence", "next")
    return {
        "id": row["id"],
        "state": row["state"],
        **{name: row[name] for name in (*kept, *steps)},
        **{name: document.get(name) for name in parts},
    }


def _cost(subject: Subject, price: float | None) -> dict[str, float | None]:
    hours = subject.gpu_hours_per_day
    return {
        "gpu_hours_per_day": hours,
        "cost_per_day": None if price is None else hours * price,
        "price_per_gpu_hour": price,
    }


# --- for people -------------------------------------------------------------------------------


def _lines(subject: Subject, wanted: Wish, settings: Settings) -> list[str]:
    said = _MESSAGE.get(wanted.event, "")
    state = f"{wanted.severity}, {said}" if wanted.event is Event.SEVERITY else said
    begin = (state or wanted.severity).upper()
    finding = _read(subject)
    first = f"{begin}: job {_short(subject.job)}: {_sentence(subject, finding, wanted)}"
    if wanted.event is Event.CLEARED:
        return [_cut(first)]
    rest = [_costs(subject, finding, settings.price), _since(subject, finding), _back(subject)]
    rest += [f"Next: {printable(finding.next[0])}"] if finding and finding.next else []
    return [_cut(line) for line in (first, *rest) if line][:_MAX_LINES]


def _read(subject: Subject) -> Finding | None:
    try:
        return read_finding(subject.document)
    except StoreError:
        return None


def _sentence(subject: Subject, finding: Finding | None, wanted: Wish) -> str:
    cause = str(subject.finding["cause"])
    words = CAUSES.get(cause, cause.replace("_", " "))
    if finding is None:
        return words
    report = bare_report(subject.layout)
    if wanted.event is Event.CLEARED:
        return f"{place(report, finding)}: {words}, {_gone(subject)}"
    return headline(report, finding)


def _first_step(subject: Subject) -> int:
    onset, opened = subject.finding["onset_step"], subject.finding["opened_step"]
    return int(opened if onset is None else onset)


def _since(subject: Subject, finding: Finding | None) -> str:
    """Where the sentence itself does not say it."""
    said = finding is not None and finding.persistence.onset_step is not None
    return "" if said else f"Seen since step {_first_step(subject)}"


def _gone(subject: Subject) -> str:
    since, step = _first_step(subject), subject.finding["cleared_step"]
    if step is None:
        return f"over with the attempt; it was there from step {since}"
    return f"not there since step {step}; it was there from step {since}"


def _costs(subject: Subject, finding: Finding | None, price: float | None) -> str:
    hours = subject.gpu_hours_per_day
    parts = [f"costs {hours:,.3g} GPU-hours" if hours < _WHOLE else f"costs {hours:,.0f} GPU-hours"]
    parts += [] if price is None else [f"${hours * price:,.0f}"]
    line = ", ".join(parts) + " per day while it lasts"
    if finding is None or finding.verdict == "hang":
        return ""
    return line[0].upper() + line[1:] + f"; confidence {finding.confidence:.0%}"


#: From here on, three significant digits would round to tens.
_WHOLE: Final = 100.0


def _back(subject: Subject) -> str:
    if not subject.told.opened_ns or subject.came_back < 1 or subject.told.severity is not None:
        return ""
    times = "once" if subject.came_back == 1 else f"{subject.came_back} times"
    return f"It has come back {times} since it was told before"


def _short(name: str) -> str:
    shown = printable(name)
    return shown if len(shown) <= _MAX_NAME else shown[: _MAX_NAME - 1] + "…"


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_TEXT else line[: _MAX_TEXT - 1] + "…"
