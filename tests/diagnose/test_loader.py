"""Whose loader is late, where others are held up a little, too."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smon.analysis import Options, analyze
from smon.synth.faults import LoaderGap, When
from smon.synth.presets import scenario
from smon.synth.scenario import generate

LATE = LoaderGap(1.3, 0, 2, When(every=8, phase=7))


def held_up(dp: int, gap_s: float) -> LoaderGap:
    """Another rank of the first stage, in one step."""
    return LoaderGap(gap_s, 0, dp, When(first=20 + dp, every=64))


@pytest.mark.parametrize("gap_s", [0.03, 1.0])
def test_ranks_that_are_held_up_once_are_not_named(gap_s: float) -> None:
    """Rank 2 is late in 8 of 64 steps; three others are in one of them each."""
    faults = (LATE, *(held_up(dp, gap_s) for dp in (0, 4, 5)))
    made = generate(scenario("C08", faults=faults))
    found = analyze(made.table, made.job, Options()).findings[0]
    assert (found.cause, found.scope, found.where.rank) == ("dataloader", "rank", 2)


def test_all_who_are_late_are_named() -> None:
    """Six of eight ranks, each in other steps: the loader of the job."""
    faults = [LoaderGap(0.6 + 0.1 * dp, 0, dp, When(every=8, phase=dp)) for dp in range(6)]
    made = generate(scenario("C08", faults=tuple(faults)))
    found = analyze(made.table, made.job, Options()).findings[0]
    assert (found.cause, found.scope, found.where.rank) == ("dataloader", "job", None)


def test_of_two_replicas_the_one_that_stalls_is_measured_against_the_other() -> None:
    """In each step: the usual delay is the other's, not half way between them."""
    job = scenario("C08", dp=2, steps=32, causes=(), faults=(LoaderGap(0.3, 0, 1, When()),))
    made, clean = generate(job), generate(replace(job, faults=()))
    cost = float((made.step_seconds - clean.step_seconds).mean())
    found = analyze(made.table, made.job, Options()).findings[0]
    assert (found.cause, found.scope, found.where.dp) == ("dataloader", "rank", 1)
    assert found.excess_s == pytest.approx(cost, rel=0.1)
