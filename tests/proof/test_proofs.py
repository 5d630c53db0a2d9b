"""Every proof works, in short; the page says what its lines say."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.conftest import TRACES
from tests.proof import alerts, network
from tests.proof.__main__ import KEPT, PAGE, SIZING, keep, kept, main, proof
from tests.proof.line import Form, Goal, Line, at_least, at_most, exactly, line_of
from tests.proof.page import ABOUT, NAMES, page
from tests.proof.sizing import BEGIN, END, table, written

#: What says what a proof lacks on this machine; empty: nothing.
LACKS: Mapping[str, Callable[[], str]] = {"network": network.lacks, "alerts": alerts.lacks}


@pytest.mark.parametrize("name", NAMES)
def test_a_proof_holds_in_short(name: str, tmp_path: Path) -> None:
    """All but what is about speed, which this machine shares."""
    if name == "readers" and not TRACES.is_dir():
        pytest.skip("NO TRACES: expected the public traces in ../shared/traces beside the project")
    if reason := LACKS.get(name, str)():
        pytest.skip(reason)
    line = proof(name)(Form.SHORT, tmp_path)
    assert line.proof == name
    assert line.holds, [goal for goal in line.goals if not goal.met]
    assert line_of(line.to_json()) == line


def test_a_goal_says_whether_it_is_met() -> None:
    """At the limit it is."""
    assert at_most("a", 2.0, 2).met
    assert not at_most("a", 2.0001, 2).met
    assert at_least("a", 2, 2).met
    assert not at_least("a", 1, 2).met
    assert exactly("a", 2, 2).met
    assert not exactly("a", 3, 2).met


def test_goals_about_speed_do_not_decide() -> None:
    """They stand on the page, with the machine."""
    slow, wrong = at_most("s", 3, 2, timed=True), exactly("lost", 1, 0)
    assert Line("log", Form.LONG, (slow,), {}, 1.0).holds
    assert not Line("log", Form.LONG, (slow, wrong), {}, 1.0).holds


def test_a_newer_line_takes_the_place_of_an_older_one(tmp_path: Path) -> None:
    """And lines stand in the order of the page."""
    path = tmp_path / "proof.jsonl"
    first, second = (Line("log", Form.LONG, (), {"n": n}, 1.0) for n in (1, 2))
    keep([first], path)
    keep([Line("scale", Form.LONG, (), {}, 1.0), second], path)
    assert [(line.proof, dict(line.figures)) for line in kept(path)] == [
        ("scale", {}),
        ("log", {"n": 2}),
    ]


def test_the_page_says_what_was_missed() -> None:
    """With what was measured, and the goal."""
    goals = (at_most("reading, s", 12.345, 10, timed=True), Goal("named", 3, "3", met=True))
    figures = {"records": 1234567, "runs": [{"run": "a", "p99_s": 0.25}, {"run": "b"}]}
    text = page([Line("log", Form.LONG, goals, figures, 61.0, "2026-01-02", "2 cores")])
    assert "1 proofs, 2 goals, 1 of them met." in text
    assert "| reading, s | 12.35 | ≤ 10 | **no**:" in text
    assert "| named | 3 | 3 | yes |" in text
    assert "2026-01-02; 2 cores; 61 s." in text
    assert "* records: 1,234,567" in text
    assert "| run | p99 s |" in text
    assert "| a | 0.25 |" in text


def test_an_unknown_proof_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the names of those that there are."""
    with pytest.raises(SystemExit) as caught:
        main(["--short", "magic"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert all(name in said for name in NAMES)


def test_the_committed_page_is_that_of_the_committed_lines() -> None:
    """Nobody edits it by hand; long forms only, of proofs that exist."""
    lines = kept(KEPT)
    sizing = SIZING.read_text(encoding="utf-8")
    assert sizing == written(sizing, lines)
    assert PAGE.read_text(encoding="utf-8") == page(lines)
    assert {line.proof for line in lines} <= set(ABOUT)
    assert all(line.form is Form.LONG for line in lines)
    assert all(json.loads(text) for text in KEPT.read_text(encoding="utf-8").splitlines())


def test_what_a_fleet_needs_is_reckoned_from_the_lines() -> None:
    """Ten times the GPUs, ten times the events, bytes and cores; at least one process of each."""
    sizes = {
        "bytes_per_event_sent": 10.0,
        "bytes_per_event_in_files_once_compacted": 5.0,
        "worker_cpu_us_per_event": 3.0,
        "result_bytes_per_worker_and_window": 600.0,
        "kib_per_window_in_the_database": 100.0,
    }
    jobs = [{"worker_cpu_us_per_event": 4.0}, {"worker_cpu_us_per_event": 7.0}]
    lines = [
        Line("sizes", Form.LONG, (), sizes, 1.0),
        Line("load", Form.LONG, (), {"runs": [{"server_cpu": 0.2, "events_per_s": 1e5}]}, 1.0),
        Line("live", Form.LONG, (), {"jobs": jobs}, 1.0),
    ]
    text = table(lines)
    assert "| events per second | 12,000 | 120,000 | 1,200,000 |" in text
    assert "| requests per second | 12 | 125 | 1,250 |" in text
    assert "| network, MB/s | 0.12 | 1.2 | 12 |" in text
    assert "| server processes | 1 | 1 | 5 |" in text
    # (7 + 3) µs × 1.2 M/s are 12 cores, half busy.
    assert "| worker processes | 1 | 3 | 24 |" in text
    assert "| event files, GB per day | 5.2 | 52 | 518 |" in text
    assert "7 µs of a worker" in text


def test_without_its_proofs_nothing_is_reckoned() -> None:
    """It says which are missing; a page without a place for the table is refused."""
    assert "`sizes`, `load` and `live`" in table([])
    page = f"a\n{BEGIN}old{END}\nb"
    assert written(page, []).startswith(f"a\n{BEGIN}\n\nThe proofs")
    with pytest.raises(ValueError, match="reckoned"):
        written("no place", [])
