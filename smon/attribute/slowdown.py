"""Step times of the what-if runs, and the slowdowns made of them.

Source: Lin et al., OSDI 2025: S (Eq. 1), S_t (Eq. 2), S per DP rank and stage, S_w (Eq. 4). The
exact S_w of every worker goes beyond the paper: see `smon.simulate.engine.Engine.solo`.

Flow: `smon.simulate` → **here** → `smon.analysis`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.ops import OpType, metric_key
from smon.simulate.engine import Engine
from smon.simulate.ideal import Ideal
from smon.simulate.whatif import OnlySome, Recorded
from smon.simulate.window import Part, Window

Floats = NDArray[np.float64]

#: What-ifs run side by side until this many lanes: below it the interpreter costs more than the
#: arithmetic, above it the arrays fall out of the cache. Of 1,024, 2,048, 4,096 and 8,192 lanes,
#: the what-ifs of 16,384 GPUs (10 steps) took 1.36, 1.12, 1.05 and 0.94 s of CPU; those of 4,096
#: GPUs 0.21, 0.18, 0.14 and 0.16 s; those of the public traces the same.
_LANES_PER_RUN = 4096


@dataclass(frozen=True, slots=True, eq=False)
class StepTimes:
    """Step times in ns under each what-if.

    Attributes
    ----------
    recorded, replayed, simulated, ideal
        (steps,) as recorded; simulated with launch delays; T; T_ideal.
    by_optype, by_stage
        (steps,) with only this kind of op, or this stage, as recorded and all else ideal.
    by_dp_rank
        (dp_ranks, steps) with only this DP rank as recorded; NaN where it is absent.
    by_worker
        (dp_ranks, stages, steps) with only this worker as recorded; NaN where it is absent.
    """

    recorded: Floats
    replayed: Floats
    simulated: Floats
    ideal: Floats
    by_optype: dict[str, Floats]
    by_stage: Floats
    by_dp_rank: Floats
    by_worker: Floats


def slowdown(times: Floats, ideal: Floats) -> Floats:
    """mean(T) / mean(T_ideal) over the last axis, steps with NaN left out of both.

    Parameters
    ----------
    times
        (…, steps) step times.
    ideal
        (steps,) ideal step times.

    Returns
    -------
    array
        (…,) NaN where no step is left.
    """
    known = ~np.isnan(times)
    total = np.where(known, times, 0.0).sum(axis=-1)
    reference = np.where(known, ideal, 0.0).sum(axis=-1)
    ratio: Floats = np.full(total.shape, np.nan)
    np.divide(total, reference, out=ratio, where=reference > 0)
    return ratio


def simulate_all(
    window: Window, ideal: Ideal, engine: Engine, progress: Callable[[int, int], None]
) -> StepTimes:
    """Run every what-if of the report.

    Parameters
    ----------
    progress
        Called with (runs done, runs in all).
    """
    kinds = _optype_kinds(window.parts)
    total = 2 + len(kinds) + window.stages
    recorded = Recorded(window)
    replayed = engine.run(recorded, delays=recorded).step_ns[0]
    progress(1, total)
    run = engine.run(recorded)
    simulated = run.step_ns[0]
    by_dp_rank = _per_lane(window, engine.solo(run, recorded))[0]
    progress(2, total)
    by_optype: dict[str, Floats] = {}
    for batch in _batches(window, kinds):
        times = engine.run(_only(window, ideal, batch)).step_ns
        by_optype.update(zip([name for name, _ in batch], times, strict=True))
        progress(2 + len(by_optype), total)
    by_stage: list[Floats] = []
    by_worker: list[Floats] = []
    for batch in _batches(window, _stage_kinds(window)):
        durations = _only(window, ideal, batch)
        run = engine.run(durations)
        by_stage.extend(run.step_ns)
        by_worker.extend(_per_lane(window, engine.solo(run, durations)))
        progress(2 + len(kinds) + len(by_stage), total)
    return StepTimes(
        recorded=window.recorded(),
        replayed=replayed,
        simulated=simulated,
        ideal=engine.ideal_step_ns,
        by_optype=by_optype,
        by_stage=np.array(by_stage),
        by_dp_rank=by_dp_rank,
        by_worker=np.stack(by_worker, axis=1),
    )


#: A what-if by name: which ops of a structure keep what was recorded.
_Kind = tuple[str, Callable[[Part], NDArray[np.bool_]]]


def _optype_kinds(parts: Sequence[Part]) -> list[_Kind]:
    """The keys of ``by_optype`` that occur, with their ops."""
    codes = sorted({int(code) for part in parts for code in np.unique(part.graph.structure.optype)})
    types: dict[str, list[int]] = {}
    for code in codes:
        types.setdefault(metric_key(OpType(code)), []).append(code)
    return [
        (name, lambda part, codes=codes: np.isin(part.graph.structure.optype, codes))  # type: ignore[misc]
        for name, codes in types.items()
    ]


def _stage_kinds(window: Window) -> list[_Kind]:
    return [
        (str(stage), lambda part, stage=stage: part.graph.structure.stage == stage)  # type: ignore[misc]
        for stage in range(window.stages)
    ]


def _batches(window: Window, kinds: list[_Kind]) -> list[list[_Kind]]:
    lanes = sum(part.lanes for part in window.parts)
    size = max(1, _LANES_PER_RUN // max(lanes, 1))
    return [kinds[first : first + size] for first in range(0, len(kinds), size)]


def _only(window: Window, ideal: Ideal, batch: Sequence[_Kind]) -> OnlySome:
    keep = [np.array([ops(part) for _, ops in batch]) for part in window.parts]
    return OnlySome(window, ideal, keep)


def _per_lane(window: Window, times: Floats) -> Floats:
    """(what_ifs, dp_ranks, steps) from (what_ifs, lanes); NaN where a replica is absent."""
    result = np.full((len(times), window.dp_ranks, len(window.steps)), np.nan)
    dp = np.concatenate([part.dp for part in window.parts])
    step = np.concatenate([part.step for part in window.parts])
    result[:, dp, step] = times
    return result
