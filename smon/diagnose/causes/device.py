"""Slow devices: slow_gpu, thermal, slow_forward, slow_backward.

A worker that is slower than its peers in the same way in most steps. Not uneven data, which
rotates, and not a long stage, which is long on every replica.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from smon.attribute.persistence import Kind
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import COMPUTE, B, Evidence, F, Floats
from smon.diagnose.place import node_of, place
from smon.diagnose.replica import (
    Replica,
    data_of,
    data_share,
    draft_of,
    lengths_line,
    whole_replicas,
)
from smon.diagnose.side import Shown, beside_peers, change_against_peers, more_than_peers
from smon.diagnose.suspects import SOMETIMES, Suspect, combined, suspects_of
from smon.diagnose.thresholds import (
    CLOCK_FALL,
    DEVICE_MIN_SHARE,
    DEVICE_RATIO,
    LENGTHS_EXPLAIN,
    LENGTHS_SPEAK_AGAINST,
    MAX_DEVICE_SHARE,
    MIN_EXCESS_SHARE,
)
from smon.diagnose.tp import tp_peers
from smon.diagnose.workers import Slowness, slowness
from smon.nodes import drain, node_or
from smon.ops import OpType
from smon.report import Candidate, Where
from smon.simulate.cube import Changes

#: With fewer replicas or stages, medians over them depend on a single one.
_FEW = 4
#: So many devices are undone one by one; more are not reported anyway.
_MOST = 16
#: That a device was slow is sure; that it is the device, and not what it had to do, is not.
_WAS_SLOW = 0.4
#: The first sentences of a finding say how slow it is, the others what goes with it.
_RATIOS = 2
#: Without other stages, and without lengths, nothing acquits the data.
_DATA_OR_DEVICE = 0.6
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


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """One look at all workers: their slowness by op type and together, and who is suspect."""

    kinds: dict[OpType, Slowness]
    effect: Floats
    suspects: list[Suspect]

    @property
    def workers(self) -> int:
        """How many have peers."""
        return int(np.count_nonzero(~np.isnan(self.kinds[F].typical())))


def find(evidence: Evidence) -> list[Draft]:
    """Workers that are slow for longer than a moment, and replicas that are as a whole."""
    seen = _look(evidence)
    few = min(evidence.window.dp_ranks, evidence.window.stages) < _FEW
    if few and any(kind.by_device for kind in seen.kinds.values()):
        return _one_by_one(evidence, seen)
    replicas = whole_replicas(seen.suspects, seen.effect)
    whole = {replica.dp for replica in replicas}
    single = [suspect for suspect in seen.suspects if suspect.dp not in whole]
    if _too_many(len(single), seen.workers):
        single = []
    if _too_many(len(replicas), evidence.window.dp_ranks):
        replicas = []
    return [
        *(_alone(evidence, seen.kinds, suspect) for suspect in single),
        *(_together(evidence, seen.kinds, replica) for replica in replicas),
    ]


def _look(evidence: Evidence) -> _Seen:
    kinds = {op: slowness(evidence, op) for op in COMPUTE}
    effect, noise = combined(evidence, kinds)
    return _Seen(kinds, effect, suspects_of(effect, noise, kinds, evidence.steps))


def _one_by_one(evidence: Evidence, seen: _Seen) -> list[Draft]:
    """The slowest device, then the next with that one well, as long as there are any.

    Where a median is that of two or three, a slow device makes the other stages of its replica look
    fast, and the same stages of other replicas slow. Only who is suspect at first can be named:
    undoing too much of one device would make its neighbour look slow.
    """
    left = {suspect.worker for suspect in seen.suspects}
    drafts: list[Draft] = []
    now = evidence
    suspects = seen.suspects
    while suspects and len(drafts) < _MOST:
        left.remove(suspects[0].worker)
        drafts.append(_alone(evidence, seen.kinds, suspects[0]))
        now = replace(now, explained=now.explained | drafts[-1].changes)
        seen = _look(now)
        suspects = [suspect for suspect in seen.suspects if suspect.worker in left]
    return [] if _too_many(len(drafts) + len(suspects), seen.workers) else drafts


def _too_many(count: int, places: int) -> bool:
    """More than a set of slow devices: something that many have in common."""
    return count > max(1, MAX_DEVICE_SHARE * places)


def _together(evidence: Evidence, kinds: dict[OpType, Slowness], replica: Replica) -> Draft:
    """A replica all of whose stages are slow alike."""
    changes = Changes()
    for suspect in replica.suspects:
        changes |= _as_peers(evidence, kinds, suspect)
    return draft_of(evidence, replica, changes)


def _alone(evidence: Evidence, kinds: dict[OpType, Slowness], suspect: Suspect) -> Draft:
    """A slow device; without other stages that acquit its data, perhaps its data."""
    draft = _draft(evidence, kinds, suspect)
    if suspect.is_well_again:
        return _was_slow(evidence, draft, suspect)
    if evidence.window.stages > 1 or draft.cause != "slow_gpu" or draft.where.tp is not None:
        return draft
    replica = Replica(suspect.dp, (suspect,))
    share = data_share(evidence, suspect.dp, replica.excess)
    if share is not None and share >= LENGTHS_EXPLAIN:
        return draft_of(evidence, replica, draft.changes)
    text = draft.evidence
    draft = replace(draft, evidence=(*text[:_RATIOS], lengths_line(share), *text[_RATIOS:]))
    if share is not None and share <= LENGTHS_SPEAK_AGAINST:
        return draft
    return replace(
        draft,
        confidence=min(draft.confidence, _DATA_OR_DEVICE),
        candidates=(
            Candidate("slow_gpu", draft.where, "swap the device, or its data"),
            data_of(suspect.dp),
        ),
    )


def _was_slow(evidence: Evidence, draft: Draft, suspect: Suspect) -> Draft:
    """What a device that is well again has cost: it is a candidate, and nobody is to be drained."""
    steps = evidence.steps[suspect.active]
    return replace(
        draft,
        verdict="none",
        cause="unknown",
        scope="job",
        where=Where(),
        confidence=_WAS_SLOW,
        evidence=(*draft.evidence, f"slow from step {steps[0]} to {steps[-1]}, and well again"),
        candidates=(Candidate(draft.cause, draft.where, "whether it happens again"),),
        next=("look at what happened to that rank and its host in these steps",),
        min_share=MIN_EXCESS_SHARE,
    )


def _cause(evidence: Evidence, suspect: Suspect) -> tuple[str, str]:
    """(cause, phase)."""
    forward, backward = suspect.ratio[F], suspect.ratio[B]
    if suspect.alike:
        return ("thermal" if _is_hot(evidence, suspect) else "slow_gpu"), "compute"
    if backward > forward:
        return "slow_backward", "backward compute"
    return "slow_forward", "forward compute"


def _is_hot(evidence: Evidence, suspect: Suspect) -> bool:
    """Whether it is throttled by heat more than others, or its clock falls while it slows down."""
    rank = evidence.layout.rank(suspect.dp, suspect.stage)
    if more_than_peers(evidence, "gpu_throttle_thermal", rank):
        return True
    ramp = suspect.persistence.kind is Kind.RAMP
    return ramp and change_against_peers(evidence, "gpu_clock_mhz", rank) < CLOCK_FALL


def _draft(evidence: Evidence, kinds: dict[OpType, Slowness], suspect: Suspect) -> Draft:
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


def _counters(evidence: Evidence, suspect: Suspect) -> tuple[str, ...]:
    rank = evidence.layout.rank(suspect.dp, suspect.stage)
    return beside_peers(evidence, _GPU_COUNTERS, rank) or (
        "no counters: clock, temperature, throttle reasons and PCIe width of its GPU would tell",
    )


def _as_peers(evidence: Evidence, kinds: dict[OpType, Slowness], suspect: Suspect) -> Changes:
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


def _active(evidence: Evidence, suspect: Suspect) -> NDArray[np.bool_]:
    if suspect.persistence.kind in SOMETIMES:
        return suspect.active
    onset = suspect.persistence.onset_step
    since: NDArray[np.bool_] = evidence.steps >= (evidence.steps[0] if onset is None else onset)
    return since
