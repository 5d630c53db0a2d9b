from __future__ import annotations

import numpy as np
import pytest

from smon.errors import ConfigError
from smon.synth.presets import PRESETS, scenario
from smon.synth.scenario import generate
from smon.synth.schedule import BACKWARD, FORWARD
from tests.synth.builders import pick


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_named_scenario_makes_a_job_of_that_name(name: str) -> None:
    """The command line offers these names."""
    made = generate(scenario(name, steps=1))
    assert made.job.job_id == name
    assert len(made.table) > 0
    assert PRESETS[name].summary


def test_the_demo_job_has_one_slow_worker() -> None:
    """DP 8, PP 4, TP 8, 16 microbatches, 12 steps; worker (5,2) computes 1.5 times as long."""
    demo = scenario("slow-worker")
    sizes = (demo.dp, demo.pp, demo.tp, demo.microbatches, demo.steps)
    assert sizes == (8, 4, 8, 16, 12)
    made = generate(demo)
    for kind, seconds in ((FORWARD, 0.060), (BACKWARD, 0.120)):
        ops = pick(made.table, kind)
        slow = (ops.dp == 5) & (ops.stage == 2)
        assert np.mean(ops.duration_ns[slow]) == pytest.approx(1.5e9 * seconds, rel=0.005)
        assert np.mean(ops.duration_ns[~slow]) == pytest.approx(1e9 * seconds, rel=0.005)
    healthy = generate(scenario("healthy"))
    assert made.step_seconds.mean() > 1.3 * healthy.step_seconds.mean()


def test_fields_of_a_named_scenario_can_be_replaced() -> None:
    """What is not replaced stays as it was."""
    changed = scenario("interleaved", dp=2, name="mine")
    assert (changed.dp, changed.name, changed.vpp) == (2, "mine", 2)


def test_other_faults_take_the_place_of_all_that_goes_wrong() -> None:
    """The causes of the scenario go with its faults, unless others are given, too."""
    assert scenario("slow-worker", dp=4, faults=()).all_faults == ()
    causes = scenario("C05").causes
    assert scenario("slow-worker", faults=(), causes=causes).causes == causes


def test_an_unknown_scenario_lists_the_known_ones() -> None:
    """The message has every name to choose from."""
    with pytest.raises(ConfigError, match=r"gpipe, 1f1b, .*, C01, .*, found 'sick': choose one"):
        scenario("sick")


def test_an_unknown_field_lists_the_known_ones() -> None:
    """A typing error is a configuration error, not a crash."""
    with pytest.raises(ConfigError, match=r"microbatches, .* found microbatch: correct"):
        scenario("1f1b", microbatch=3)


def test_values_that_do_not_go_together_are_refused() -> None:
    """Replacing a size can take away the worker that a fault names."""
    with pytest.raises(ConfigError, match="dp of a fault"):
        scenario("slow-worker", dp=4)
