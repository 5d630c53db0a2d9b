from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.diagnose.causes import device, link, loader, pause
from smon.diagnose.evidence import F
from smon.diagnose.found import Found, own_changes
from smon.plan.fix import FixName
from smon.plan.pauses import plan_collections
from smon.plan.undo import replace_workers, undo, undo_each
from smon.simulate.cube import Changes
from smon.synth.faults import GcPauses, LoaderGap, SlowCollective, SlowCompute, When
from tests.builders import public_job
from tests.plan.jobs import evidence_of, made, step_ns

SLOW = SlowCompute(stage=1, dp=2, forward=1.5, backward=1.5)


def test_a_new_machine_in_the_public_job(traces: Path) -> None:
    """AR without its slow worker: 2.021 × (2.03 was measured on hardware)."""
    fix = replace_workers(evidence_of(*public_job(traces, "AR")), [(0, 0)])
    assert fix is not None
    assert fix.speedup == pytest.approx(2.021, abs=0.001)


@pytest.mark.parametrize("by", ["peers", "finding"])
def test_a_new_machine_makes_the_healthy_job(by: str) -> None:
    """Predicted within 1 % of the twin without the slow worker."""
    evidence = made(faults=(SLOW,))
    (draft,) = device.find(evidence)
    found = Found("slow_gpu", "rank 6", draft.changes)
    fix = replace_workers(evidence, [(2, 1)]) if by == "peers" else undo(evidence, found)
    assert fix is not None
    assert fix.fix is FixName.REPLACE_WORKERS
    assert fix.step_time_ns == pytest.approx(step_ns(), rel=0.01)


def test_all_suspects_together() -> None:
    """Two slow workers: replacing one buys little, replacing both the healthy job."""
    other = SlowCompute(stage=2, dp=0, forward=1.4, backward=1.4)
    evidence = made(faults=(SLOW, other))
    drafts = device.find(evidence)
    findings = [Found("slow_gpu", f"worker {n}", d.changes) for n, d in enumerate(drafts)]
    fixes = undo_each(evidence, findings)
    assert len(findings) == 2
    assert fixes[-1].detail == "all of: worker 0; worker 1"
    assert fixes[-1].step_time_ns == pytest.approx(step_ns(), rel=0.01)
    assert all(fix.speedup < fixes[-1].speedup for fix in fixes[:-1])


def test_stalls_that_go_away() -> None:
    """The step time now contains the stalls; with the fix it is the twin's."""
    gap = LoaderGap(gap_s=0.5, stage=0, dp=2, when=When(every=4))
    evidence = made(faults=(gap,))
    (draft,) = loader.find(evidence)
    fix = undo(evidence, Found("dataloader", "rank 2", draft.changes))
    assert fix is not None
    assert fix.fix is FixName.REMOVE_STALLS
    assert fix.step_time_ns == pytest.approx(step_ns(), rel=0.01)
    assert fix.step_time_ns * fix.speedup == pytest.approx(step_ns(faults=(gap,)), rel=0.01)


def test_a_healed_group() -> None:
    """Collectives of one stage twice as long: healed, the twin's step time."""
    fields: dict[str, Any] = {"dp": 4, "pp": 4, "steps": 12}
    slow = SlowCollective(stage=1, factor=3.0)
    evidence = made(faults=(slow,), **fields)
    (draft,) = link.find(evidence)
    fix = undo(evidence, Found("slow_link", "stage 1", draft.changes))
    assert fix is not None
    assert fix.fix is FixName.HEAL_LINK
    assert fix.step_time_ns == pytest.approx(step_ns(**fields), rel=0.01)


def test_planned_collections() -> None:
    """No pauses: the healthy job. All ranks at once: one pause per period on top of it."""
    fields: dict[str, Any] = {"dp": 16, "steps": 48, "microbatches": 16}
    evidence = made(faults=(GcPauses(every=24, pause_s=0.35),), **fields)
    (draft,) = pause.find(evidence)
    extra = evidence.work(F) - draft.changes.work[F]
    removed, planned = plan_collections(evidence, extra)
    healthy = step_ns(**fields)
    assert removed.step_time_ns == pytest.approx(healthy, rel=0.01)
    assert planned.step_time_ns == pytest.approx(healthy + 0.35e9 / 24, rel=0.01)
    assert "every 24 steps" in planned.detail


def test_no_pauses_no_fix() -> None:
    """Without pauses there is nothing to plan."""
    evidence = made()
    assert plan_collections(evidence, np.zeros_like(evidence.work(F))) == []


def test_what_cannot_be_undone() -> None:
    """No fix for a cause that nothing undoes, for no changes, or for workers without peers."""
    evidence = made(dp=1)
    assert undo(evidence, Found("checkpoint", "", Changes({F: evidence.work(F)}))) is None
    assert undo(evidence, Found("slow_gpu", "")) is None
    alone = replace_workers(evidence, [(0, 1)])
    assert alone is not None
    assert alone.speedup == pytest.approx(1.0)


def test_own_changes_leave_out_what_was_found_before() -> None:
    """A cause that looks after another returns both changes; its own are its factors alone."""
    evidence = made(faults=(SLOW,))
    recorded = evidence.recorded_work(F)
    scaled = partial(np.multiply, recorded)
    before = Changes({F: scaled(0.5)})
    later = scaled(0.5).copy()
    later[:, 0] *= 0.8
    own = own_changes(evidence, before, Changes({F: later}))
    assert np.allclose(own.work[F][:, 0], recorded[:, 0] * 0.8)
    assert np.allclose(own.work[F][:, 1:], recorded[:, 1:])
