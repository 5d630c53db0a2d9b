"""Counters of agents on the page of a rank: every one has words, and the figure stays readable."""

from __future__ import annotations

from dashboards.web.views.rank import _MAX_PANELS, _drawn, counter_words
from ingest_agents.sources.counters.catalogue import ALL, Kind
from smon.store.queries.evidence import MAX_COUNTERS, CounterSeries


def series(name: str, *values: float, elsewhere: float = 1.0) -> CounterSeries:
    """A counter over steps, beside others that stay where they are."""
    steps = tuple(range(len(values)))
    return CounterSeries(name, steps, values, (elsewhere,) * len(values), 7)


def test_every_counter_of_the_agent_has_words() -> None:
    """Facts aside, which are said once and then are no series."""
    names = [name for name, each in ALL.items() if each.kind is not Kind.FACT]
    assert not [name for name in names if counter_words(name) == name.replace("_", " ")]
    assert len(ALL) <= MAX_COUNTERS


def test_the_figure_has_the_counters_that_tell_something() -> None:
    """Of too many, those that move or differ from elsewhere; of few, all."""
    still = [series(f"still_{number}", 1.0, 1.0) for number in range(30)]
    moves, differs = series("moves", 1.0, 2.0), series("differs", 3.0, 3.0)
    drawn = _drawn([*still, moves, differs])
    assert drawn[:2] == [moves, differs]
    assert len(drawn) == _MAX_PANELS
    assert _drawn(still[:3]) == still[:3]
