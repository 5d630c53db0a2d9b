from __future__ import annotations

from typing import Any

import pytest

from smon.errors import MissingError
from smon.store.queries.chosen import MAX_WORKERS, Role, choose, step_of, steps_in

NOWHERE: dict[str, Any] = {"rank": None, "dp": None, "stage": None, "ranks": []}


def document(
    dp: int,
    stages: int,
    *findings: dict[str, Any],
    slow: dict[tuple[int, int], float] | None = None,
) -> dict[str, Any]:
    """What a report says of workers and findings."""
    slow = slow or {}
    workers = [
        {
            "dp": d,
            "stage": s,
            "rank": d + dp * s,
            "host": None,
            "slowdown": slow.get((d, s), 1.0 + (d % 7) / 1000),
        }
        for d in range(dp)
        for s in range(stages)
    ]
    return {"workers": workers, "findings": list(findings)}


def finding(victims: list[int] | None = None, **where: Any) -> dict[str, Any]:  # noqa: ANN401
    """A finding somewhere."""
    waiting = None if victims is None else {"count": 99, "ranks": victims, "wait_s": 0.1}
    return {"where": {**NOWHERE, **where}, "victims": waiting}


def places(report: dict[str, Any], role: Role) -> list[tuple[int, int]]:
    """(dp, stage) of the workers with a role, by row."""
    return [(one.dp, one.stage) for one in choose(report, (), ()).workers if one.role is role]


def test_a_small_job_is_shown_whole() -> None:
    """The suspect in the first row, and who waits for it next."""
    chosen = choose(document(4, 2, finding(rank=5, dp=1, stage=1, victims=[0, 2])), (), ())
    assert len(chosen.workers) == chosen.asked == 8
    first, second, third = chosen.workers[:3]
    assert (first.rank, first.role) == (5, Role.SUSPECT)
    assert {second.rank, third.rank} == {0, 2}
    assert second.role is third.role is Role.VICTIM
    assert len({(one.dp, one.stage) for one in chosen.workers}) == 8


def test_of_a_large_job_suspects_victims_and_usual_peers_are_shown() -> None:
    """The pipeline around the suspect too; never more than a screen holds."""
    report = document(
        128,
        16,
        finding(rank=645, dp=5, stage=5, victims=[7, 8, 9]),
        slow={(5, 5): 1.4, (9, 5): 1.2},
    )
    assert places(report, Role.SUSPECT) == [(5, 5)]
    assert places(report, Role.VICTIM) == [(7, 0), (8, 0), (9, 0)]
    assert {dp for dp, _ in places(report, Role.PIPELINE)} == {5}
    assert {stage for _, stage in places(report, Role.PIPELINE)} == {3, 4, 6, 7}
    peers = places(report, Role.PEER)
    assert {stage for _, stage in peers} == {5}
    assert (9, 5) not in peers
    assert len(choose(report, (), ()).workers) <= MAX_WORKERS


def test_a_slow_stage_or_group_shows_its_slowest_workers() -> None:
    """A finding that names no single worker; those listed by rank, or all of a stage."""
    stage = document(32, 4, finding(stage=2), slow={(9, 2): 1.3, (3, 2): 1.2})
    suspects = places(stage, Role.SUSPECT)
    assert {one for _, one in suspects} == {2}
    assert {(9, 2), (3, 2)} <= set(suspects)
    ranks = document(32, 4, finding(rank=1, ranks=[33, 34]))
    assert sorted(places(ranks, Role.SUSPECT)) == [(1, 0), (1, 1), (2, 1)]


def test_without_a_suspect_nobody_is_called_one() -> None:
    """The slowest are shown as just that."""
    report = document(64, 4, finding(), slow={(3, 1): 1.02})
    chosen = choose(report, (), ())
    assert {one.role for one in chosen.workers} == {Role.SLOWEST, Role.PIPELINE, Role.PEER}
    assert (3, 1) in places(report, Role.SLOWEST)


def test_asked_workers_are_shown_and_bounded() -> None:
    """By DP rank, by stage, by both; the first ones if they are many, with how many there are."""
    report = document(64, 4, finding(rank=2, dp=2, stage=0))
    both = choose(report, (2, 3), (0, 1))
    assert [(one.dp, one.stage) for one in both.workers] == [(2, 0), (3, 0), (2, 1), (3, 1)]
    assert [one.role for one in both.workers] == [Role.SUSPECT, *[Role.CHOSEN] * 3]
    many = choose(report, (), (1,))
    assert (len(many.workers), many.asked) == (MAX_WORKERS, 64)
    assert choose(report, (99,), ()).workers == ()


def test_the_worst_step_is_shown_first() -> None:
    """Among those analysed; steps left out can be asked for, with their reason."""
    report = {
        "per_step": [
            {"step": step, "recorded_s": 2.0, "ideal_s": 1.0, "slowdown": slowdown}
            for step, slowdown in ((5, 1.1), (6, 1.9), (7, 1.9))
        ],
        "window": {"skipped": [{"step": 4, "reason": "warm-up of the job"}]},
    }
    steps = steps_in(report)
    assert [one.step for one in steps] == [4, 5, 6, 7]
    assert step_of(steps, None).step == 6
    assert step_of(steps, 4).reason == "warm-up of the job"
    with pytest.raises(MissingError, match="4 to 7, found 99"):
        step_of(steps, 99)
    with pytest.raises(MissingError):
        step_of([], None)
