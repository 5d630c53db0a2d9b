"""What an agent says that it takes."""

from __future__ import annotations

from ingest_agents.usage import Usage


def test_cpu_is_that_since_the_last_time() -> None:
    """A tenth of a core first, then half of one; memory is that of this process."""
    cpu, clock = [0.0], [100.0]
    usage = Usage(lambda: cpu[0], lambda: clock[0])
    cpu[0], clock[0] = 1.0, 110.0
    first = usage.since_last()
    cpu[0], clock[0] = 6.0, 120.0
    second = usage.since_last()
    assert (first["cpu_ratio"], second["cpu_ratio"]) == (0.1, 0.5)
    assert first["rss_bytes"] > 5e6


def test_two_questions_at_one_moment_do_not_divide_by_nothing() -> None:
    """The second has no ratio, and the next counts from the first."""
    usage = Usage(lambda: 1.0, lambda: 5.0)
    assert "cpu_ratio" not in usage.since_last()
