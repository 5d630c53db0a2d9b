"""Slow devices: slow_gpu, thermal, slow_forward, slow_backward.

A worker that is slower than its peers in the same way in most steps. Not uneven data, which
rotates, and not a long stage, which is long on every replica.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.attribute.persistence import Kind, Persistence, vote
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import COMPUTE, B, Evidence, F, Floats, nanmedian
from smon.diagnose.place import node_of, place, workers_of
from smon.diagnose.side import Shown, beside_peers, change_against_peers, more_than_peers
from smon.diagnose.thresholds import (
    CLOCK_FALL,
    DEVICE_LASTING_RATIO,
    DEVICE_LASTING_SCORE,
    DEVICE_LEANING_SHARE,
    DEVICE_MIN_SHARE,
    DEVICE_RATIO,
    DEVICE_SCORE,
    MAX_DEVICE_SHARE,
    MIN_NOISE,
    SAME_RATIO,
)
from smon.diagnose.tp import tp_peers
from smon.diagnose.workers import Slowness, slowness
from smon.nodes import drain, node_or
from smon.ops import OpType
from smon.report import MIN_STEPS
from smon.simulate.cube import Changes

#: More standard errors than this say nothing more.
_ENOUGH = 100.0

#: Counters that go with a slow device.
_GPU_COUNTERS = (
    Shown("gpu_clock_mhz", "GPU clock", "MHz"),
    Shown("gpu_temperature_c", "GPU temperature", "°C"),
    Shown("gpu_throttle_thermal", "thermal throttling", ""),
    Shown("gpu_throttle_power", "power throttling", ""),
    Shown("gpu_throttle_hw", "hardware slowdown", ""),
    Shown("gpu_throttle_setting", "clock held by a setting", ""),
    Shown("gpu_power_w", "GPU power", "W"),
    Shown("gpu_ecc_corrected", "corrected ECC errors", "per step"),
    Shown("gpu_ecc_uncorrected", "uncorrected ECC errors", "per step"),
    Shown("pcie_width", "PCIe width", "lanes"),
    Shown("pcie_replays", "PCIe replays", "per step"),
    Shown("host_throttled_ratio", "CPU limit reached", "of the time"),
)

_LASTING = (Kind.PERSISTENT, Kind.ONSET, Kind.RAMP)


@dataclass(frozen=True, slots=True, eq=False)
class _Suspect:
    dp: int
    stage: int
    persistence: Persistence
    ratio: dict[OpType, float]
    score: float


def find(evidence: Evidence) -> list[Draft]:
    """Workers that are slow for longer than a moment."""
    kinds = {op: slowness(evidence, op) for op in COMPUTE}
    suspects = _suspects(evidence, kinds)
    workers = int(np.count_nonzero(~np.isnan(kinds[F].typical())))
    if len(suspects) > max(1, MAX_DEVICE_SHARE * workers):
        return []
    return [_draft(evidence, kinds, suspect) for suspect in suspects]


def _combined(evidence: Evidence, kinds: dict[OpType, Slowness]) -> tuple[Floats, float]:
    """(steps, dp, stages) relative excess of forward and backward together, and its noise."""
    total = np.zeros_like(kinds[F].effect)
    weight, noise = 0.0, 0.0
    for op, kind in kinds.items():
        share = float(np.nansum(nanmedian(evidence.work(op), (0, 1, 3))))
        if np.isnan(kind.effect).all() or np.isnan(share):
            continue
        total = total + share * np.expm1(kind.effect)
        noise += (share * kind.noise) ** 2
        weight += share
    if not weight:
        return np.full_like(kinds[F].effect, np.nan), np.nan
    return total / weight, float(np.sqrt(noise) / weight)


def _suspects(evidence: Evidence, kinds: dict[OpType, Slowness]) -> list[_Suspect]:
    effect, noise = _combined(evidence, kinds)
    found = []
    for dp, stage in workers_of(_possible(effect)):
        series = effect[:, dp, stage]
        persistence = _lasting(series, noise, evidence.steps)
        if persistence is None:
            continue
        active = series > DEVICE_RATIO / 2
        score = _score(series[active], noise)
        if score < DEVICE_LASTING_SCORE or active.sum() < MIN_STEPS:
            continue
        ratio = {
            op: float(np.expm1(np.nanmedian(kind.effect[active, dp, stage])))
            for op, kind in kinds.items()
        }
        found.append(_Suspect(dp, stage, persistence, ratio, score))
    return sorted(found, key=lambda suspect: -max(suspect.ratio.values()))


def _score(effects: Floats, noise: float) -> float:
    """Standard errors of the median effect."""
    if len(effects) == 0:
        return 0.0
    return float(np.median(effects) / max(noise, MIN_NOISE) * np.sqrt(len(effects)) / 1.2533)


def _lasting(series: Floats, noise: float, steps: NDArray[np.int64]) -> Persistence | None:
    """How a worker's slowness lasts; None if it does not.

    Among noise a single step proves nothing, so an effect that is sure over all steps counts as
    persistent if most steps lean its way.
    """
    persistence = vote(series, DEVICE_RATIO, steps)
    slow = series[series > DEVICE_RATIO]
    if (
        persistence is not None
        and persistence.kind in _LASTING
        and (_score(slow, noise) >= DEVICE_SCORE)
    ):
        return persistence
    known = series[~np.isnan(series)]
    typical = float(np.median(known)) if len(known) else 0.0
    if typical < DEVICE_LASTING_RATIO or _score(known, noise) < DEVICE_LASTING_SCORE:
        return None
    share = float(np.mean(known > 0.0))
    return Persistence(Kind.PERSISTENT, share) if share >= DEVICE_LEANING_SHARE else None


def _possible(effect: Floats) -> NDArray[np.bool_]:
    """Workers above the threshold in a fair share of the steps: the rest need no closer look."""
    with np.errstate(invalid="ignore"):
        votes = (effect > DEVICE_RATIO / 2).sum(axis=0)
    possible: NDArray[np.bool_] = votes >= max(1, len(effect) // 4)
    return possible


def _cause(evidence: Evidence, suspect: _Suspect) -> tuple[str, str]:
    """(cause, phase)."""
    forward, backward = suspect.ratio[F], suspect.ratio[B]
    larger, smaller = max(forward, backward), min(forward, backward)
    if larger - smaller <= SAME_RATIO or smaller > larger / 2:
        return ("thermal" if _is_hot(evidence, suspect) else "slow_gpu"), "compute"
    if backward > forward:
        return "slow_backward", "backward compute"
    return "slow_forward", "forward compute"


def _is_hot(evidence: Evidence, suspect: _Suspect) -> bool:
    """Whether it is throttled by heat more than others, or its clock falls while it slows down."""
    rank = evidence.layout.rank(suspect.dp, suspect.stage)
    if more_than_peers(evidence, "gpu_throttle_thermal", rank):
        return True
    ramp = suspect.persistence.kind is Kind.RAMP
    return ramp and change_against_peers(evidence, "gpu_clock_mhz", rank) < CLOCK_FALL


def _draft(evidence: Evidence, kinds: dict[OpType, Slowness], suspect: _Suspect) -> Draft:
    cause, phase = _cause(evidence, suspect)
    peers = tp_peers(evidence, suspect.dp, suspect.stage)
    if peers.slow_links:
        cause, phase = "nvlink", "TP communication"
    slow = [op for op in COMPUTE if suspect.ratio[op] > DEVICE_RATIO] or list(COMPUTE)
    where = place(evidence, suspect.dp, suspect.stage, peers.suspect)
    rank = evidence.layout.rank(suspect.dp, suspect.stage)
    host = node_or(node_of(evidence, suspect.dp, suspect.stage), rank)
    return Draft(
        verdict="link" if cause == "nvlink" else "straggler",
        cause=cause,
        scope="rank" if evidence.layout.tp == 1 or where.tp is not None else "tp_group",
        phase=phase,
        persistence=suspect.persistence,
        where=where,
        optypes=tuple(op.label for op in slow),
        changes=_as_peers(evidence, kinds, suspect),
        confidence=min(0.95, 0.5 + suspect.score / 100.0),
        min_share=DEVICE_MIN_SHARE,
        evidence=(
            f"forward {1 + suspect.ratio[F]:.3f} ×, backward {1 + suspect.ratio[B]:.3f} × the "
            f"other DP ranks of stage {suspect.stage}",
            f"slow in {suspect.persistence.share:.0%} of the steps, "
            f"{min(suspect.score, _ENOUGH):.0f} or more standard errors from its peers",
            *peers.evidence,
            *_counters(evidence, suspect),
        ),
        next=(
            drain(host, f"smon_{cause}"),
            f"dcgmi diag -r 2  # on {host}, once no job is on it",
        ),
    )


def _counters(evidence: Evidence, suspect: _Suspect) -> tuple[str, ...]:
    rank = evidence.layout.rank(suspect.dp, suspect.stage)
    return beside_peers(evidence, _GPU_COUNTERS, rank) or (
        "no counters: clock, temperature, throttle reasons and PCIe width of its GPU would tell",
    )


def _as_peers(evidence: Evidence, kinds: dict[OpType, Slowness], suspect: _Suspect) -> Changes:
    """Its computes divided by how much slower they are than its peers'."""
    work = {}
    for op in COMPUTE:
        cube = evidence.work(op).copy()
        effect = kinds[op].effect[:, suspect.dp, suspect.stage]
        active = effect > 0 if suspect.persistence.kind is Kind.RAMP else _active(evidence, suspect)
        factor = (
            effect
            if suspect.persistence.kind is Kind.RAMP
            else np.full(len(effect), np.log1p(suspect.ratio[op]))
        )
        scale = np.where(active & ~np.isnan(factor), np.exp(-np.maximum(factor, 0.0)), 1.0)
        cube[:, suspect.dp, suspect.stage] *= scale[:, None]
        work[op] = cube
    return Changes(work)


def _active(evidence: Evidence, suspect: _Suspect) -> NDArray[np.bool_]:
    onset = suspect.persistence.onset_step
    since: NDArray[np.bool_] = evidence.steps >= (evidence.steps[0] if onset is None else onset)
    return since
