"""A slow device among uneven data: put into each worker of the public trace SE, one at a time.

Its computes are made longer in the parts of the window (`Part.work`): what `device.find` looks at,
and all of it. Nothing is simulated anew, because that test compares durations, not times.

Measured, of 64 workers:

=====================  =====  ======  =====  =====  =====
slower by                2 %   2.5 %    3 %    4 %    5 %
named, and it first       38      50     60     64     64
largest typical excess                   60            64
=====================  =====  ======  =====  =====  =====

Nobody else is ever named: what is missed is missed in silence.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from smon.analysis import analyze, study
from smon.attribute.slowdown import simulate_all
from smon.diagnose.causes import device
from smon.diagnose.evidence import COMPUTE, Evidence, nanmedian
from smon.diagnose.suspects import combined
from smon.diagnose.verdict import diagnose
from smon.diagnose.workers import slowness
from smon.prepare import prepare
from smon.simulate.engine import Engine
from smon.simulate.ideal import measure_ideal
from smon.simulate.window import Part
from smon.synth import causes
from smon.synth.faults.data import PackedSequences
from smon.synth.scenario import generate
from smon.synth.spec import Scenario
from smon.synth.timing import Noise
from tests.builders import public_job

WORKERS = [(dp, stage) for dp in range(32) for stage in range(2)]

Worker = tuple[int, int]


@cache
def _evidence(traces: Path) -> Evidence:
    return study(prepare(*public_job(traces, "SE"))).evidence


def _slower(evidence: Evidence, worker: Worker, factor: float) -> Evidence:
    """The window with all computes of one worker longer."""
    parts = tuple(_slower_part(part, worker, factor) for part in evidence.window.parts)
    return replace(evidence, window=replace(evidence.window, parts=parts))


def _slower_part(part: Part, worker: Worker, factor: float) -> Part:
    dp, stage = worker
    structure = part.graph.structure
    ops = np.isin(structure.optype, COMPUTE) & (structure.stage == stage)
    work = part.work.copy()
    work[np.ix_(ops, part.dp == dp)] *= factor
    return replace(part, work=work)


def _named(evidence: Evidence) -> list[Worker | None]:
    """Workers that are named as slow devices, in order."""
    drafts = device.find(evidence)
    return [
        None
        if draft.where.dp is None or draft.where.stage is None
        else (draft.where.dp, draft.where.stage)
        for draft in drafts
    ]


@cache
def _found(traces: Path, factor: float) -> int:
    """In how many workers a device of that kind is found, and ranked first."""
    clean = _evidence(traces)
    return sum(_named(_slower(clean, worker, factor))[:1] == [worker] for worker in WORKERS)


def test_nobody_is_slow_in_the_clean_trace(traces: Path) -> None:
    """Uneven data alone makes no suspect."""
    assert device.find(_evidence(traces)) == []


def test_a_device_that_is_slower_by_3_percent_is_found_in_9_of_10_workers(traces: Path) -> None:
    """Measured 60 of 64, ranked first; healthy workers of SE differ by up to 1.6 %."""
    assert _found(traces, 1.03) >= 0.90 * len(WORKERS)


def test_a_device_that_is_slower_by_5_percent_is_found_in_99_of_100_workers(traces: Path) -> None:
    """Measured 64 of 64."""
    assert _found(traces, 1.05) >= 0.99 * len(WORKERS)


@pytest.mark.parametrize("factor, least", [(1.03, 0.9), (1.05, 1.0)])
def test_the_largest_typical_excess_is_that_of_the_slow_device(
    traces: Path, factor: float, least: float
) -> None:
    """Measured 60 of 64 at 3 %, and all at 5 %."""
    clean = _evidence(traces)
    right = 0
    for worker in WORKERS:
        slow = _slower(clean, worker, factor)
        effect, _ = combined(slow, {op: slowness(slow, op) for op in COMPUTE})
        typical = nanmedian(effect, 0)
        right += int(np.argmax(typical)) == int(np.ravel_multi_index(worker, typical.shape))
    assert right >= least * len(WORKERS)


@pytest.mark.parametrize("factor", [1.02, 1.03, 1.05])
def test_no_other_worker_is_ever_named(traces: Path, factor: float) -> None:
    """A slow device among uneven data makes nobody else a suspect."""
    clean = _evidence(traces)
    for worker in WORKERS:
        assert _named(_slower(clean, worker, factor)) in ([], [worker])


@pytest.mark.parametrize("worker", [(0, 0), (5, 1), (17, 0), (31, 1)])
def test_the_whole_diagnosis_names_the_device_beside_the_data(traces: Path, worker: Worker) -> None:
    """5 %: data and stage first, as without it; then the device, and no other."""
    slow = _slower(_evidence(traces), worker, 1.05)
    engine = Engine(slow.window, measure_ideal(slow.window.parts))
    times = simulate_all(slow.window, engine.reference, engine, lambda _done, _total: None)
    found = diagnose(replace(slow, engine=engine, times=times)).findings
    assert [one.cause for one in found] == ["sequence_length", "stage_partition", "slow_gpu"]
    assert (found[2].where.dp, found[2].where.stage) == worker
    assert 0.005 < found[2].excess_share < 0.05


@pytest.mark.parametrize("slope", [0.02, 0.04, 0.08])
def test_with_two_by_two_workers_slightly_uneven_data_hides_no_slow_device(slope: float) -> None:
    """The other stage cannot tell which of both is slow; the other replica can."""
    uneven = PackedSequences(slope, slope)
    for seed in range(3):
        job = Scenario(
            dp=2,
            pp=2,
            microbatches=4,
            steps=26,
            seed=seed,
            noise=Noise(0.004, 0.01),
            causes=(causes.slow_gpu(1, 0, 1.3),),
            faults=(uneven,),
        )
        made = generate(job)
        found = analyze(made.table, made.job).findings[0]
        assert (found.cause, found.where.rank) == ("slow_gpu", 1)
