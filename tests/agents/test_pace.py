"""Pauses between tries."""

from __future__ import annotations

from ingest_agents.pace import Pace, retry_after_s
from tests.agents.builders import Clock


def pauses(count: int, chance: float) -> list[float]:
    """So many pauses after failures in a row."""
    clock, found = Clock(), []
    pace = Pace(0.5, 60.0, clock, lambda: chance)
    for _ in range(count):
        pace.failed()
        found.append(pace.wait_s)
        clock.now += 100.0
    return found


def test_pauses_double_up_to_a_minute() -> None:
    """From half a second; the longest is a minute, for ever."""
    assert pauses(9, 1.0) == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    assert pauses(2000, 1.0)[-1] == 60.0


def test_jitter_is_full() -> None:
    """Any part of the pause, none included: agents that failed together come back spread out."""
    assert pauses(3, 0.0) == [0, 0, 0]
    assert pauses(3, 0.5) == [0.25, 0.5, 1.0]


def test_the_server_may_ask_for_more() -> None:
    """Retry-After is the least, whatever chance says."""
    clock = Clock()
    pace = Pace(0.5, 60.0, clock, lambda: 0.0)
    pace.failed(12.0)
    assert pace.wait_s == 12.0
    clock.now += 12.0
    assert pace.wait_s == 0.0


def test_success_begins_anew() -> None:
    """The next failure is the first again."""
    clock = Clock()
    pace = Pace(0.5, 60.0, clock, lambda: 1.0)
    for _ in range(5):
        pace.failed()
    clock.now += 100
    pace.succeeded()
    pace.failed()
    assert pace.wait_s == 0.5


def test_a_shorter_pause_does_not_end_a_longer_one() -> None:
    """Two threads fail at once: the longer pause counts."""
    clock = Clock()
    pace = Pace(0.5, 60.0, clock)
    pace.pause(60.0)
    pace.pause(1.0)
    assert pace.wait_s == 60.0


def test_retry_after_is_read_strictly() -> None:
    """Whole seconds, at most an hour; anything else is the default."""
    assert retry_after_s({"retry-after": " 7 "}, 1.0) == 7.0
    assert retry_after_s({"retry-after": "1" * 40}, 1.0) == 3600.0
    for text in ("", "-1", "soon", "1.5", "٣", "Wed, 21 Oct 2026 07:28:00 GMT"):
        assert retry_after_s({"retry-after": text}, 1.0) == 1.0
