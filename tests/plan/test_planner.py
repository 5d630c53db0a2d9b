from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.diagnose.causes import data, device, pause, stage
from smon.diagnose.found import Found
from smon.ops import OpType
from smon.plan.fix import MIN_GAIN, Fix, FixName, worthwhile
from smon.plan.planner import plan
from smon.plan.tail import forecast
from smon.simulate.cube import Changes
from smon.synth.faults import GcPauses, PackedSequences, SlowCompute
from tests.builders import public_job
from tests.plan.jobs import elastic, evidence_of, made

SLOW = SlowCompute(stage=1, dp=2, forward=1.5, backward=1.5)


def names(fixes: tuple[Fix, ...]) -> list[str]:
    """What is to be done, in order."""
    return [str(fix.fix) for fix in fixes]


def test_fixes_are_ranked_by_what_they_gain() -> None:
    """Best first; those below half a percent are left out."""
    fixes = [Fix(FixName.HEAL_LINK, "", 1.0, gain) for gain in (1.1, 1.0049, 1.3, 0.9)]
    assert [fix.speedup for fix in worthwhile(fixes)] == [1.3, 1.1]


def test_money() -> None:
    """Twice as fast saves half of the GPU-hours."""
    fix = Fix(FixName.HEAL_LINK, "", 1.0, 2.0)
    assert fix.priced(100, 3.0).gpu_hours_per_day == pytest.approx(1200.0)
    assert fix.priced(100, 3.0).cost_per_day == pytest.approx(3600.0)
    assert fix.priced(100, None).cost_per_day is None


def test_the_best_fix_of_each_public_job(traces: Path) -> None:
    """AR: the worker; SE: the microbatches; ST: the layers."""
    ar = evidence_of(*public_job(traces, "AR"))
    best = plan(ar, [Found("slow_gpu", "rank 0", workers=((0, 0),))], price=2.0)[0]
    assert best.fix is FixName.REPLACE_WORKERS
    assert best.cost_per_day == pytest.approx((1 - 1 / 2.021) * 64 * 24 * 2.0, rel=0.01)
    se, st = (evidence_of(*public_job(traces, name)) for name in ("SE", "ST"))
    assert plan(se)[0].fix is FixName.REDISTRIBUTE_MICROBATCHES
    assert {fix.fix for fix in plan(st, layers=(9, 9, 9, 9))} == {FixName.MOVE_LAYERS}


def test_a_healthy_job_needs_no_fix() -> None:
    """Noise alone offers nothing."""
    assert plan(made(dp=8, steps=20)) == ()


def test_a_slow_worker_is_replaced_and_not_dealt_around() -> None:
    """No layers or microbatches move because one worker is slow."""
    evidence = made(dp=8, faults=(SLOW,))
    (draft,) = device.find(evidence)
    fixes = plan(evidence, [Found("slow_gpu", "rank 10", draft.changes, ((2, 1),))])
    assert names(fixes)[0] == "replace_workers"
    assert not {"move_layers", "redistribute_microbatches"} & set(names(fixes))


def test_pauses_are_planned() -> None:
    """A gc finding gives both fixes, the upper bound first."""
    evidence = made(dp=16, steps=48, faults=(GcPauses(every=24),))
    (draft,) = pause.find(evidence)
    fixes = plan(evidence, [Found("gc", "", draft.changes)])
    assert names(fixes)[:2] == ["remove_pauses", "plan_gc"]


def test_an_upper_bound_where_a_fix_cannot_be_simulated() -> None:
    """Interleaved jobs get the even data or even stages of the finding instead."""
    fields: dict[str, Any] = {"schedule": "interleaved", "vpp": 2, "pp": 2, "dp": 8, "steps": 20}
    uneven = made(faults=(PackedSequences(),), **fields)
    found = [Found(d.cause, "", d.changes) for d in data.find(uneven)]
    assert "balance_data" in names(plan(uneven, found))
    long = made(faults=(SlowCompute(stage=1, forward=1.5, backward=1.5),), **fields)
    found = [Found(d.cause, "", d.changes) for d in stage.find(long)]
    assert names(plan(long, found))[0] == "balance_stages"


def test_a_finding_that_nothing_undoes_gives_no_fix() -> None:
    """Planned pauses and job-wide slowness are not the planner's."""
    evidence = made()
    work = evidence.work(OpType.FORWARD_COMPUTE) * 0.5
    changes = Changes({OpType.FORWARD_COMPUTE: work})
    assert plan(evidence, [Found("checkpoint", "", changes), Found("job_wide", "")]) == ()


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("steps", [1, 3])
def test_no_impossible_fix_for_small_jobs(dp: int, pp: int, microbatches: int, steps: int) -> None:
    """One replica has nobody to wait for, one stage nowhere to move layers to."""
    faults = (PackedSequences(), SlowCompute(stage=0, dp=0, forward=1.5, backward=1.5))
    evidence = made(dp=dp, pp=pp, microbatches=microbatches, steps=steps, faults=faults)
    fixes = plan(evidence, [Found("slow_gpu", "rank 0", workers=((0, 0),))])
    assert all(fix.speedup >= 1 + MIN_GAIN and fix.step_time_ns > 0 for fix in fixes)
    assert "backup_workers" not in names(fixes)
    if dp == 1:
        forbidden = {"replace_workers", "redistribute_microbatches", "sync_less_often"}
        assert not forbidden & set(names(fixes))
    if pp == 1:
        assert "move_layers" not in names(fixes)
    assert forecast(evidence).now_ns > 0


def test_a_plan_for_a_job_of_changing_size() -> None:
    """Absent replicas and steps of another size: every number stays finite."""
    faults = (PackedSequences(), SLOW)
    dropped = np.zeros((12, 4), bool)
    dropped[3, 1] = dropped[7, :3] = True
    evidence = elastic(made(step_microbatches={5: 4}, faults=faults), dropped)
    fixes = plan(evidence, [Found("slow_gpu", "rank 6", workers=((2, 1),))])
    assert names(fixes)
    assert all(np.isfinite(fix.step_time_ns) for fix in fixes)
