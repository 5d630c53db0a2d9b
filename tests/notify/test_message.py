from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smon.config import Settings
from smon.notify.decide import Event, Wish
from smon.notify.message import Form, Message, escaped, message_of, trial_message
from smon.report import PersistencePart, Where
from smon.store.models import WorkState
from smon.store.notices import Subject, Told, Truth
from tests.notify.scene import LAYOUT, finding, seen

PAGE = Path(__file__).resolve().parents[2] / "docs" / "notify.md"

NOW = 1_800_000_000 * 10**9
SETTINGS = Settings(public_url="https://smon.example/", price_per_gpu_hour=2.0)
OPENED = Wish(Event.OPENED, "warning")

HOSTILE = [
    "<!channel>",
    "<@U123> & <https://evil.example|click>",
    "*bold* _it_ `code`",
    "line\nbreak\r\n\t\x00\x1b[31m",
    "\u202egnissim",
    "</script><script>alert(1)</script>",
    'quo"te\\',
    "ü😀",
    "x" * 10_000,
    "",
]


def subject(**changes: Any) -> Subject:  # noqa: ANN401  # of Subject
    """A slow GPU of a job of 64."""
    one = changes.pop("one", finding())
    row = {
        "id": "f1",
        "state": "open",
        "severity": one.severity,
        "verdict": one.verdict,
        "cause": one.cause,
        "scope": one.scope,
        "host": "node-2",
        "gpu_uuid": None,
        "excess_s": one.excess_s,
        "excess_share": one.excess_share,
        "onset_step": one.persistence.onset_step,
        "opened_step": 33,
        "opened_ns": NOW,
        "last_step": 40,
        "last_ns": NOW,
        "cleared_step": None,
        "cleared_ns": None,
    }
    plain = Subject(
        place=("t1", "j1", "key"),
        told=Told("n1", None, 0, 0, WorkState.RUNNING, None),
        truth=Truth(is_open=True, severity=one.severity),
        tenant="default",
        job="llama",
        finding={**row, **changes.pop("row", {})},
        document=seen("key", one).document,
        layout=LAYOUT,
        attempt=2,
        attempt_over=False,
        gpu_hours_per_day=153.6,
        came_back=1,
        changed_ns=NOW,
        coverage_ratio=1.0,
        aligned=True,
    )
    return replace(plain, **changes)


def told(wanted: Wish = OPENED, settings: Settings = SETTINGS, **changes: Any) -> Message:  # noqa: ANN401
    """The message about it."""
    return message_of(subject(**changes), wanted, settings, NOW)


def paths(value: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401  # JSON
    """The path of every key, down to what the report describes."""
    for key, item in value.items():
        inner = f"{path}.{key}" if path else key
        yield inner
        if isinstance(item, dict) and inner not in {"finding.where", "finding.persistence"}:
            yield from paths(item, inner)


def test_a_message_says_who_why_how_much_since_when_and_where_to_look() -> None:
    """In words, the sentence of the page first; and in numbers, those of the finding."""
    message = told()
    assert message.lines == (
        "WARNING: job llama: Rank 17 (DP rank 2, stage 0, node-2): slow GPU, "
        "+17.4 ms per step (10.0%), since step 30",
        "Costs 154 GPU-hours, $307 per day while it lasts; confidence 93%",
        "Next: dcgmi diag -r 2  # on node-2",
    )
    document = message.document
    assert document["text"] == "\n".join(message.lines)
    assert document["job"]["url"] == "https://smon.example/jobs/j1"
    assert document["runbook_url"] == "https://smon.example/runbooks/slow_gpu"
    assert document["finding"]["excess_s"] == 0.0174
    assert document["finding"]["where"]["rank"] == 17
    assert document["cost"] == {
        "gpu_hours_per_day": 153.6,
        "cost_per_day": 307.2,
        "price_per_gpu_hour": 2.0,
    }


def test_without_a_price_there_is_no_money() -> None:
    """And without an address no link to this machine for people on others."""
    message = told(settings=Settings(host="0.0.0.0"))  # noqa: S104  # a setting
    assert message.lines[1] == "Costs 154 GPU-hours per day while it lasts; confidence 93%"
    assert message.document["cost"]["cost_per_day"] is None
    assert message.document["job"]["url"] is None
    assert message.document["runbook_url"] is None
    assert "|Job page>" not in message.body(Form.SLACK).decode()


def test_the_first_step_is_said_even_if_no_onset_is_known() -> None:
    """What is new is seen before it is known when it began."""
    lasting = PersistencePart("persistent", 1.0, None, None)
    message = told(one=finding(persistence=lasting))
    assert "Seen since step 33" in message.lines
    assert not any("Seen since" in line for line in told().lines)


def test_a_graver_finding_says_so() -> None:
    """And how grave it was said to be."""
    known = Told("n1", "warning", NOW - 10, 1, WorkState.RUNNING, None)
    message = told(Wish(Event.SEVERITY, "critical"), told=known, one=finding("critical"))
    assert message.lines[0].startswith("CRITICAL, MORE SEVERE: job llama: Rank 17")
    assert message.document["previous_severity"] == "warning"
    assert message.id == "n1-1"
    assert not any("come back" in line for line in message.lines)


@pytest.mark.parametrize(
    "step, words",
    [(55, "not there since step 55"), (None, "over with the attempt")],
)
def test_a_cleared_finding_is_one_line(step: int | None, words: str) -> None:
    """Nothing is to be done any more."""
    message = told(Wish(Event.CLEARED, "warning"), row={"cleared_step": step, "state": "cleared"})
    (line,) = message.lines
    assert line == (
        "CLEARED: job llama: Rank 17 (DP rank 2, stage 0, node-2): slow GPU, "
        f"{words}; it was there from step 30"
    )


def test_a_hang_has_no_cost_per_step() -> None:
    """The job stands."""
    one = finding(
        "critical",
        verdict="hang",
        cause="hang",
        persistence=PersistencePart("one_off", 1, 41, None),
    )
    message = told(Wish(Event.OPENED, "critical"), one=one)
    assert message.lines[0].endswith("hangs in step 41")
    assert not any("GPU-hours" in line for line in message.lines)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_do_no_harm(name: str) -> None:
    """Whatever a job or a host is called: no mention, no link, no control character, no flood."""
    one = finding(where=Where(rank=17, dp=2, stage=0, node=name), next=(f"drain {name}",))
    message = told(one=one, job=name, tenant=name, row={"host": name, "cause": "slow_gpu"})
    slack = json.loads(message.body(Form.SLACK))
    text = "\n".join(block["text"]["text"] for block in slack["blocks"])
    links = re.findall(r"<([^>]*)>", text)
    assert links == [
        "https://smon.example/jobs/j1|Job page",
        "https://smon.example/runbooks/slow_gpu|Runbook",
    ]
    assert "<" not in slack["text"]
    assert all(line.isprintable() for line in message.lines)
    plain = json.loads(message.body(Form.JSON))
    assert (plain["job"]["name"], plain["finding"]["host"]) == (name, name)


def test_a_long_name_is_cut_for_people() -> None:
    """A message that Slack would refuse for its length helps nobody."""
    one = finding(where=Where(rank=17, dp=2, stage=0, node="&" * 9_000), next=("&" * 9_000,))
    slack = json.loads(told(one=one, job="&" * 9_000).body(Form.SLACK))
    assert max(len(block["text"]["text"]) for block in slack["blocks"]) <= 3_000


def test_slack_reads_three_characters() -> None:
    """Those that begin links and mentions."""
    assert escaped("<a> & b") == "&lt;a&gt; &amp; b"


def test_a_document_that_cannot_be_read_still_gives_a_message() -> None:
    """The row has the cause and the numbers."""
    message = told(document={})
    assert message.lines[0] == "WARNING: job llama: slow GPU"
    assert message.document["finding"]["where"] is None


def test_the_schema_is_documented() -> None:
    """The page has every key of a message, in order, and no other."""
    rows = re.findall(r"^\| `([\w.]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    keys = [row for row in rows if not row.startswith(("SMON_", "smon_"))]
    assert keys == list(paths(dict(told().document)))


def test_the_test_message_says_that_it_is_one() -> None:
    """Nobody shall look for a job."""
    message = trial_message("test-1", NOW)
    assert message.document["event"] == "test"
    assert set(message.document) <= set(told().document)
    assert "test" in json.loads(message.body(Form.SLACK))["text"]
