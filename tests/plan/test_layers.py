from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.errors import ConfigError
from smon.ops import OpType
from smon.plan.fix import FixName
from smon.plan.layers import move_layers, with_split
from smon.plan.stages import measure_stages
from smon.simulate.cube import Changes
from smon.synth.faults import SlowCompute
from tests.builders import public_job
from tests.plan.jobs import evidence_of, made, step_ns

F, B = OpType.FORWARD_COMPUTE, OpType.BACKWARD_COMPUTE
NOTHING = Changes()

#: Stages of 8 layers; the loss costs as much as 8 layers forward, and 4 backward.
LAYERS = (8, 8, 8, 8)


def long_last_stage(split: tuple[int, ...] = LAYERS) -> dict[str, Any]:
    """Fields of a job with a loss layer, under a split."""
    factors = [
        SlowCompute(
            stage=stage,
            forward=count / 8 + (1.0 if stage == 3 else 0.0),
            backward=count / 8 + (0.5 if stage == 3 else 0.0),
        )
        for stage, count in enumerate(split)
    ]
    return {"microbatches": 16, "faults": tuple(factors)}


def test_the_published_split_gains_what_was_published(traces: Path) -> None:
    """ST: layers of 7.46 and 15.9 ms, loss 72.6 ms; 10/10/10/6 is +10.8 % (measured +9.9 %)."""
    evidence = evidence_of(*public_job(traces, "ST"))
    stages = measure_stages(evidence, NOTHING, (9, 9, 9, 9))
    assert stages is not None
    assert stages.layer[F] == pytest.approx(7.46e6, rel=0.01)
    assert stages.layer[B] == pytest.approx(15.9e6, rel=0.01)
    assert stages.loss[F] == pytest.approx(72.6e6, rel=0.01)
    fix = with_split(evidence, NOTHING, (9, 9, 9, 9), (10, 10, 10, 6))
    assert fix.speedup == pytest.approx(1.108, abs=0.005)
    assert fix.detail == "9/9/9/9 → 10/10/10/6 layers"


def test_a_search_beats_the_published_split(traces: Path) -> None:
    """ST: within today's memory by other stages, and beyond it with more on the first."""
    evidence = evidence_of(*public_job(traces, "ST"))
    inside, beyond = move_layers(evidence, NOTHING, layers=(9, 9, 9, 9))
    assert 1.108 < inside.speedup < beyond.speedup
    assert "no stage holds more activations" in inside.assumptions[1]
    assert "more activations than" in beyond.assumptions[1]


@pytest.mark.parametrize("split", [(9, 9, 9, 5), (8, 10, 9, 5), (10, 9, 9, 4)])
def test_a_split_takes_as_long_as_the_job_that_has_it(split: tuple[int, ...]) -> None:
    """Predicted within 1 % of the twin that was generated with this split."""
    fix = with_split(made(**long_last_stage()), NOTHING, LAYERS, split)
    assert fix.step_time_ns == pytest.approx(step_ns(**long_last_stage(split)), rel=0.01)


def test_layers_go_to_the_stages_that_have_time_and_memory() -> None:
    """The best split under the cap keeps stage 0 at its 8 layers, and no stage above the cap."""
    evidence = made(**long_last_stage())
    fix = move_layers(evidence, NOTHING, layers=LAYERS)[0]
    after = [int(count) for count in fix.detail.split("→")[1].split()[0].split("/")]
    assert sum(after) == sum(LAYERS)
    assert after[0] <= 8
    assert after[3] <= 5
    assert all(count * held <= 32 for count, held in zip(after, (4, 3, 2, 1), strict=True))


def test_more_memory_allows_more(traces: Path) -> None:
    """With a cap that no split reaches there is one answer, the best of all."""
    evidence = evidence_of(*public_job(traces, "ST"))
    fixes = move_layers(evidence, NOTHING, layers=(9, 9, 9, 9), most_activations=10_000)
    assert len(fixes) == 1
    assert "no stage holds more" in fixes[0].assumptions[1]


def test_shares_of_a_stage_if_nobody_knows_the_layers() -> None:
    """A long inner stage has more layers; it gives a share of them, and the twin agrees."""
    faults = (SlowCompute(stage=1, forward=2.0, backward=2.0),)
    fix = max(move_layers(made(microbatches=16, faults=faults), NOTHING), key=lambda f: f.speedup)
    assert "of its layers off stage 1" in fix.detail
    even = tuple(SlowCompute(stage=stage, forward=1.25, backward=1.25) for stage in range(4))
    assert fix.step_time_ns == pytest.approx(step_ns(microbatches=16, faults=even), rel=0.02)


def test_even_stages_have_nothing_to_move() -> None:
    """A healthy job gets no split that gains anything."""
    assert all(fix.speedup < 1.005 for fix in move_layers(made(), NOTHING, layers=LAYERS))


def test_a_slow_worker_is_not_a_long_stage() -> None:
    """One slow replica does not make its stage give layers away."""
    faults = (SlowCompute(stage=1, dp=2, forward=2.0, backward=2.0),)
    assert move_layers(made(faults=faults), NOTHING, layers=LAYERS) == []


@pytest.mark.parametrize("fields", [{"pp": 1}, {"schedule": "interleaved", "vpp": 2}])
def test_nothing_to_move(fields: dict[str, Any]) -> None:
    """One stage has nowhere to move to; several chunks per stage are not moved."""
    assert move_layers(made(**fields), NOTHING) == []


def test_a_split_that_does_not_fit_is_refused() -> None:
    """One number per stage, each at least 1, and the same sum."""
    evidence = made()
    with pytest.raises(ConfigError, match="expected the layers of 4 stages"):
        move_layers(evidence, NOTHING, layers=(8, 8, 8))
    with pytest.raises(ConfigError, match="expected 32 layers on 4 stages"):
        with_split(evidence, NOTHING, LAYERS, (8, 8, 8, 9))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_memory_is_what_the_schedule_holds(schedule: str) -> None:
    """1F1B holds PP − p microbatches on stage p, GPipe all of them."""
    stages = measure_stages(made(schedule=schedule), NOTHING, LAYERS)
    assert stages is not None
    expected = [8, 8, 8, 8] if schedule == "gpipe" else [4, 3, 2, 1]
    assert np.array_equal(stages.in_flight, expected)


def test_the_name_of_the_fix() -> None:
    """Every split is a `move_layers`, and does not touch the optimisation."""
    fix = with_split(made(), NOTHING, LAYERS, LAYERS)
    assert fix.fix is FixName.MOVE_LAYERS
    assert fix.speedup == pytest.approx(1.0)
    assert not fix.changes_optimisation
