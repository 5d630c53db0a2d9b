from __future__ import annotations

from collections import Counter

import pytest

from smon.errors import ConfigError
from smon.synth.sample import random_scenario
from smon.synth.scenario import generate
from smon.synth.truth import CauseName, Verdict

#: They change what is recorded, or the step that never ends: no step takes longer.
WITHOUT_COST = {CauseName.HANG, CauseName.CLOCK, CauseName.LOST_DATA}


def test_a_seed_gives_one_scenario_and_another_seed_another() -> None:
    """All that is random comes from the seed."""
    assert random_scenario(3) == random_scenario(3)
    assert random_scenario(3) != random_scenario(4)


def test_random_jobs_have_none_one_or_two_causes_and_many_shapes() -> None:
    """From 4 to 1,024 workers, 1 to 16 stages, 10 to 60 steps."""
    scenarios = [random_scenario(seed) for seed in range(400)]
    numbers = Counter(len(scenario.causes) for scenario in scenarios)
    assert numbers[0] == pytest.approx(60, abs=25)
    assert numbers[2] == pytest.approx(100, abs=35)
    assert numbers.total() == sum(numbers[number] for number in (0, 1, 2))
    names = Counter(cause.name for scenario in scenarios for cause in scenario.causes)
    assert set(names) == set(CauseName)
    workers = [scenario.dp * scenario.pp for scenario in scenarios]
    assert min(workers) >= 4
    assert 500 < max(workers) <= 1040
    assert {scenario.pp for scenario in scenarios} == {1, 2, 3, 4, 6, 8, 12, 16}
    assert all(10 <= scenario.steps <= 60 for scenario in scenarios)
    assert all(scenario.dp >= 2 for scenario in scenarios)


@pytest.mark.parametrize("name", list(CauseName))
def test_every_cause_costs_about_what_was_asked_for(name: CauseName) -> None:
    """The mean of 8 jobs lies within a factor of 2 of the severity; the truth names the cause."""
    shares = []
    for seed in range(8):
        truth = generate(random_scenario(seed, causes=[name], severity=0.1)).truth
        assert [answer.cause for answer in truth.answers] == [name]
        shares.append(truth.excess_s / truth.healthy_step_s)
    expected = 0.0 if name in WITHOUT_COST else 0.1
    assert sum(shares) / len(shares) == pytest.approx(expected, abs=expected / 2)


def test_a_job_without_causes_can_be_asked_for() -> None:
    """Healthy jobs of the same shapes as sick ones."""
    truth = generate(random_scenario(5, causes=[])).truth
    assert truth.verdict is Verdict.NONE


def test_two_causes_have_different_places() -> None:
    """A worker has one of them at most."""
    for seed in range(20):
        pair = random_scenario(seed, causes=[CauseName.SLOW_GPU, CauseName.THERMAL]).causes
        assert len({(cause.dp, cause.stage) for cause in pair}) == 2


def test_a_worse_severity_costs_more() -> None:
    """With all else equal."""
    costs = [
        generate(random_scenario(1, causes=[CauseName.SLOW_GPU], severity=severity)).truth.excess_s
        for severity in (0.05, 0.2)
    ]
    assert costs[1] > 2 * costs[0]


def test_what_cannot_be_drawn_is_refused() -> None:
    """The same cause twice, and numbers out of range."""
    with pytest.raises(ConfigError, match="different causes, found gc, gc"):
        random_scenario(0, causes=[CauseName.GC, CauseName.GC])
    with pytest.raises(ConfigError, match="severity must be"):
        random_scenario(0, causes=[], severity=-1.0)
    with pytest.raises(ConfigError, match="max_ops must be"):
        random_scenario(0, max_ops=5)
