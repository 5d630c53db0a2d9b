"""Causes that a trace of collectives can show, and no others.

A rank that always comes late, with what it does meanwhile if kernels or annotations say; a rank
that came late once; another rank each time; a communicator whose transfers are long beside
comparable ones. What remains is said to be unexplained, and nobody is named.

Flow: `smon.collectives.attribute` → **here** → `smon.collectives.report`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from smon.attribute.persistence import Kind, Persistence, vote
from smon.collectives.activity import Activity, Part
from smon.collectives.attribute import Study, evened, repaired
from smon.collectives.segments import Floats, Structure
from smon.collectives.simulate import LEAST_GROUPS
from smon.diagnose.thresholds import (
    CRITICAL_SHARE,
    CRITICAL_STEPS,
    DATA_CORRELATION,
    DATA_SPREAD,
    DEVICE_RATIO,
    DEVICE_SCORE,
    LINK_RATIO,
    MAX_DEVICE_SHARE,
    MIN_EXCESS_SHARE,
    MIN_NOISE,
    SAME_RATIO,
    UNKNOWN_SHARE,
    WARNING_SHARE,
)
from smon.nodes import drain, node_or
from smon.report import (
    MIN_STEPS,
    Candidate,
    Finding,
    PersistencePart,
    Victims,
    Where,
)

#: A cause is named if this share of a rank's lateness is spent on it.
_MOST: Final = 0.6
_MAX_RANKS: Final = 16
_LASTING: Final = (Kind.PERSISTENT, Kind.ONSET, Kind.RAMP)
#: Fewer pairs of forward and backward correlate by chance.
_LEAST_PAIRS: Final = 8
#: A part that holds less of a rank's lateness is not worth a word.
_LEAST_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """What the causes look at.

    Attributes
    ----------
    study, activity
        The simulated window; what ranks did in their segments.
    ranks, hosts
        Global rank and host of each position.
    """

    study: Study
    activity: Activity
    ranks: tuple[int, ...]
    hosts: tuple[str | None, ...]
    _cache: dict[str, Floats] = field(default_factory=dict)

    def busy(self) -> Floats:
        """(S, W) length of all segments of a step."""
        if "busy" not in self._cache:
            self._cache["busy"] = self.study.cube(lambda one: np.nansum(one.segment, axis=1))
        return self._cache["busy"]

    def wait(self) -> Floats:
        """(W,) mean ns per step in which a rank neither works nor transfers: it waits for others.

        Waiting behind which it computes is not in it.
        """
        if "wait" not in self._cache:
            transfers = self.study.cube(
                lambda one: (one.transfer[:, :, None] * one.members).sum(axis=1)
            )
            spare = self.study.simulated[:, None] - self.busy() - transfers
            self._cache["wait"] = np.maximum(spare, 0.0).mean(axis=0)
        return self._cache["wait"]

    def excess(self) -> Floats:
        """(S, W) ns that a rank's segments are longer than those of the typical other one."""
        if "excess" not in self._cache:
            self._cache["excess"] = _against_others(self.busy())
        return self._cache["excess"]


def findings_of(evidence: Evidence) -> tuple[Finding, ...]:
    """What was found, dearest first; nothing from fewer than two steps or ranks."""
    study = evidence.study
    if len(study.steps) < MIN_STEPS or study.ranks < MIN_STEPS:
        return ()
    late = _late_ranks(evidence)
    found = [finding for _, finding in late] + _slow_links(evidence)
    left = _unexplained(evidence, [at for at, _ in late])
    found += [] if left is None else [left]
    return tuple(sorted(found, key=lambda one: (one.verdict == "none", -one.excess_s)))


def _against_others(values: Floats) -> Floats:
    """(S, W) minus the median of the other ranks."""
    ranks = values.shape[1]
    others = [np.median(np.delete(values, at, axis=1), axis=1) for at in range(ranks)]
    return values - np.stack(others, axis=1)


# --- ranks that come late ---------------------------------------------------------------------


def _late_ranks(evidence: Evidence) -> list[tuple[int, Finding]]:
    """Ranks whose segments are long in most steps, or were in a few, and what that costs."""
    study, excess = evidence.study, evidence.excess()
    effect = excess / study.recorded[:, None]
    noise = max(_noise(effect), MIN_NOISE)
    found = []
    for at in range(study.ranks):
        lasting = _lasting(effect[:, at], noise, study)
        if lasting is None:
            continue
        cost = float((study.simulated - repaired(study, [at])).mean())
        if cost >= MIN_EXCESS_SHARE * study.recorded.mean():
            found.append((at, lasting, cost))
    found.sort(key=lambda one: -one[2])
    if len(found) > max(1, MAX_DEVICE_SHARE * study.ranks):
        return []
    return [(at, _late(evidence, at, lasting, cost)) for at, lasting, cost in found]


def _lasting(effect: Floats, noise: float, study: Study) -> Persistence | None:
    """How the lateness of a rank lasts; None if it is no more than noise."""
    # Two steps agree by chance: of 300 healthy windows of two steps, two had a rank that was 2.5 %
    # late in both.
    least = DEVICE_RATIO if len(effect) > MIN_STEPS else 2 * DEVICE_RATIO
    persistence = vote(effect, least, study.steps)
    if persistence is None:
        return None
    active = effect[effect > least]
    # Standard errors of the median.
    score = float(np.median(active)) / noise * float(np.sqrt(len(active))) / 1.2533
    return persistence if score >= DEVICE_SCORE else None


def _noise(effect: Floats) -> float:
    """Scatter over the steps of each rank; few steps lie closer to their own median."""
    steps = len(effect)
    return _spread(effect - np.median(effect, axis=0)) * float(np.sqrt(steps / (steps - 1)))


def _spread(values: Floats) -> float:
    return float(1.4826 * np.median(np.abs(values - np.median(values))))


def _late(evidence: Evidence, at: int, lasting: Persistence, cost: float) -> Finding:
    named = _named(evidence, at, lasting)
    rank, host = evidence.ranks[at], evidence.hosts[at]
    place = node_or(host, rank)
    where = Where(rank=rank, dp=rank, stage=0, node=host)
    stalls = named.verdict == "host_stall"
    return Finding(
        severity=_severity(evidence, cost),
        verdict=named.verdict,
        cause=named.cause,
        scope="rank",
        where=where,
        phase=named.phase,
        optypes=(),
        excess_s=cost / 1e9,
        excess_share=cost / float(evidence.study.recorded.mean()),
        persistence=_part(lasting),
        confidence=named.confidence,
        evidence=(_how_late(evidence, at, lasting), *named.evidence, *_last_share(evidence, at)),
        victims=_victims(evidence, at),
        candidates=tuple(
            Candidate(cause, where, apart) for cause, apart in named.candidates.items()
        ),
        next=(f"py-spy dump --pid <trainer of rank {rank}>  # on {place}",)
        if stalls
        else (
            drain(place, "smon_late_rank"),
            f"dcgmi diag -r 2  # on {place}, once no job is on it",
        ),
    )


def _how_late(evidence: Evidence, at: int, lasting: Persistence) -> str:
    excess = evidence.excess()[:, at]
    active = excess > DEVICE_RATIO * evidence.study.recorded
    typical = float(np.median(excess[active])) if active.any() else 0.0
    return (
        f"between collectives it takes {typical / 1e6:.1f} ms longer than the typical other rank, "
        f"in {lasting.share:.0%} of the steps"
    )


def _last_share(evidence: Evidence, at: int) -> tuple[str, ...]:
    takes_part = evidence.study.cube(
        lambda one: np.broadcast_to(one.members[:, at], one.transfer.shape).sum(axis=1)
    )
    last = evidence.study.cube(lambda one: (one.last() == at).sum(axis=1))
    share = float(last.sum() / max(takes_part.sum(), 1))
    return (f"it comes last in {share:.0%} of its collectives, and waits least there",)


def _victims(evidence: Evidence, at: int) -> Victims | None:
    others = [other for other in range(len(evidence.ranks)) if other != at]
    waits = evidence.wait()[others]
    if not others:
        return None
    ranks = tuple(evidence.ranks[other] for other in others[:_MAX_RANKS])
    return Victims(len(others), ranks, float(np.median(waits)) / 1e9)


def _part(lasting: Persistence) -> PersistencePart:
    return PersistencePart(str(lasting.kind), lasting.share, lasting.onset_step, lasting.period)


def _severity(evidence: Evidence, cost: float) -> str:
    share = cost / float(evidence.study.recorded.mean())
    if share >= CRITICAL_SHARE and len(evidence.study.steps) >= CRITICAL_STEPS:
        return "critical"
    return "warning" if share >= WARNING_SHARE else "info"


# --- why --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Named:
    """A cause as far as the trace tells."""

    verdict: str
    cause: str
    phase: str
    confidence: float
    evidence: tuple[str, ...] = ()
    candidates: Mapping[str, str] = field(default_factory=dict)


_COULD_BE: Final = {
    "slow_gpu": "kernels in the trace",
    "host_contention": "CPU load of the host",
    "dataloader": "annotations around the data loader",
}


def _named(evidence: Evidence, at: int, lasting: Persistence) -> _Named:
    """What the rank does while the others wait."""
    excess = _excess_of_parts(evidence, at)
    total = sum(max(value, 0.0) for value in excess.values())
    if total <= 0.0:
        return _untold()
    share = {part: max(value, 0.0) / total for part, value in excess.items()}
    shown = ", ".join(
        f"{part} {value / 1e6:+.1f} ms"
        for part, value in sorted(excess.items(), key=lambda item: -item[1])
        if share[part] >= _LEAST_SHARE
    )
    text = (f"of what it takes longer: {shown}",)
    if share[Part.DATA] >= _MOST:
        return _Named("host_stall", "dataloader", "data loading", 0.85, text)
    if share[Part.IDLE] >= _MOST:
        return _Named(
            "host_stall",
            "host_contention",
            "idle GPU",
            0.6,
            (*text, "its GPU has no kernel meanwhile: the host comes late"),
            {"host_contention": "CPU load of the host", "gc": "gc events", "dataloader":
             "annotations around the data loader"},
        )  # fmt: skip
    halves = share[Part.FORWARD] + share[Part.BACKWARD]
    if evidence.activity.phases and halves >= _MOST:
        return _of_phases(evidence, at, text, lasting)
    if share[Part.KERNELS] + halves + share[Part.OPTIMIZER] >= _MOST:
        return _Named(
            "straggler", "slow_gpu", "compute", 0.7,
            (*text, "its GPU is busy all that time"),
        )  # fmt: skip
    return _untold(*text) if evidence.activity.phases else _untold()


def _untold(*text: str) -> _Named:
    return _Named(
        "straggler",
        "unknown",
        "between collectives",
        0.5,
        text
        or ("the trace does not tell what it does there: it has no kernels and no annotations",),
        _COULD_BE,
    )


def _excess_of_parts(evidence: Evidence, at: int) -> dict[Part, float]:
    """Mean ns per slow step that each part takes longer than on the typical other rank."""
    slow = evidence.excess()[:, at] > DEVICE_RATIO * evidence.study.recorded
    chosen = slow if slow.any() else np.ones(len(slow), bool)
    return {
        part: float(_against_others(values)[chosen, at].mean())
        for part, values in evidence.activity.parts.items()
    }


def _of_phases(evidence: Evidence, at: int, text: tuple[str, ...], lasting: Persistence) -> _Named:
    """Slow in forward, backward or both: as `smon.diagnose.causes.device` tells them apart."""
    ratio = {part: _ratio(evidence, at, part) for part in (Part.FORWARD, Part.BACKWARD)}
    forward, backward = ratio[Part.FORWARD], ratio[Part.BACKWARD]
    larger, smaller = max(forward, backward), min(forward, backward)
    told = (*text, f"forward {1 + forward:.3f} ×, backward {1 + backward:.3f} × the other ranks")
    confidence = 0.9 if lasting.kind in _LASTING else 0.6
    if larger - smaller <= SAME_RATIO or smaller > larger / 2:
        return _Named("straggler", "slow_gpu", "compute", confidence, told)
    if backward > forward:
        return _Named("straggler", "slow_backward", "backward compute", confidence, told)
    if lasting.kind in _LASTING or evidence.activity.kernels:
        # A pause of the host leaves the GPU idle: kernels that are long are no pause.
        return _Named("straggler", "slow_forward", "forward compute", confidence, told)
    return _Named(
        "host_stall",
        "gc",
        "forward compute",
        confidence,
        (*told, "no gc events: gc.callbacks in the trainer would make it sure"),
        {"gc": "gc events", "host_contention": "CPU load of the host"},
    )


def _ratio(evidence: Evidence, at: int, part: Part) -> float:
    """How much longer a part takes than on the typical other rank, in the slow steps."""
    values = evidence.activity.parts[part]
    slow = evidence.excess()[:, at] > DEVICE_RATIO * evidence.study.recorded
    others = np.median(np.delete(values, at, axis=1), axis=1)
    usable = slow & (others > 0)
    if not usable.any():
        return 0.0
    return float(np.median(values[usable, at] / others[usable])) - 1.0


# --- slow communicators -----------------------------------------------------------------------


def _slow_links(evidence: Evidence) -> list[Finding]:
    """Communicators whose transfers are long beside those of the same kind, size and payload."""
    study = evidence.study
    found = []
    for group in sorted({place.communicator for one in study.structures for place in one.places}):
        ratio = _transfer_ratio(study, group)
        if ratio is None or np.median(ratio) <= 1.0 + LINK_RATIO:
            continue
        lasting = vote(ratio - 1.0, LINK_RATIO, study.steps)
        cost = float((study.simulated - _healed(study, group)).mean())
        if lasting is not None and cost >= MIN_EXCESS_SHARE * study.recorded.mean():
            found.append(_link(evidence, group, lasting, ratio=float(np.median(ratio)), cost=cost))
    return found


def _transfer_ratio(study: Study, group: int) -> Floats | None:
    """(S,) transfers of a communicator over typical ones; None without comparable others."""
    own, ideal = np.zeros(len(study.steps)), np.zeros(len(study.steps))
    at = 0
    for structure, typical in zip(study.structures, study.ideals, strict=True):
        mine = [
            number
            for number, place in enumerate(structure.places)
            if place.communicator == group and typical.compared[number] >= LEAST_GROUPS
        ]
        rows = slice(at, at + len(structure.steps))
        own[rows] = structure.transfer[:, mine].sum(axis=1)
        ideal[rows] = typical.transfer[:, mine].sum()
        at = rows.stop
    if not (ideal > 0).all():
        return None
    steps = np.concatenate([one.steps for one in study.structures])
    ratio: Floats = (own / ideal)[np.argsort(steps, kind="stable")]
    return ratio


def _healed(study: Study, group: int) -> Floats:
    """(S,) step times with the transfers of a communicator as typical ones."""

    def durations(at: int, structure: Structure) -> tuple[Floats, Floats]:
        mine = np.array([place.communicator == group for place in structure.places])
        return structure.segment, np.where(mine, study.ideals[at].transfer, structure.transfer)

    return study.times(durations)


def _link(
    evidence: Evidence, group: int, lasting: Persistence, *, ratio: float, cost: float
) -> Finding:
    members = next(
        structure.members[number]
        for structure in evidence.study.structures
        for number, place in enumerate(structure.places)
        if place.communicator == group
    )
    ranks = tuple(evidence.ranks[at] for at in np.flatnonzero(members).tolist())
    return Finding(
        severity=_severity(evidence, cost),
        verdict="link",
        cause="slow_link",
        scope="dp_group",
        where=Where(stage=0, ranks=ranks[:_MAX_RANKS]),
        phase="communication",
        optypes=(),
        excess_s=cost / 1e9,
        excess_share=cost / float(evidence.study.recorded.mean()),
        persistence=_part(lasting),
        confidence=0.6,
        evidence=(
            f"once all {len(ranks)} members have come, transfers take {ratio:.2f} × as long as in "
            "comparable groups; one group alone does not tell which member",
        ),
        victims=None,
        candidates=tuple(
            Candidate("slow_link", Where(rank=rank, dp=rank, stage=0), "other groups of its host")
            for rank in ranks[:_MAX_RANKS]
        ),
        next=("ibstat; ethtool -S  # on the hosts of the group: errors, link width and speed",),
    )


# --- what is left -----------------------------------------------------------------------------


def _unexplained(evidence: Evidence, named: list[int]) -> Finding | None:
    """What ranks that come at different times still cost when the named ones are like their peers.

    Uneven data if forward and backward say so, else no cause, and nobody is named.
    """
    study = evidence.study
    left = float((repaired(study, named) - evened(study, named)).mean())
    recorded = float(study.recorded.mean())
    if left < UNKNOWN_SHARE * recorded:
        return None
    correlation = _lengths_agree(evidence, named)
    uneven = correlation >= DATA_CORRELATION
    rank, share = _most_often_last(evidence)
    return Finding(
        severity=_severity(evidence, left) if uneven else "info",
        verdict="imbalance" if uneven else "none",
        cause="sequence_length" if uneven else "unknown",
        scope="job",
        where=Where(),
        phase="compute" if uneven else "between collectives",
        optypes=(),
        excess_s=left / 1e9,
        excess_share=left / recorded,
        persistence=PersistencePart(str(Kind.ROTATING), 1.0, None, None),
        confidence=0.7 if uneven else 0.2,
        evidence=(
            f"that ranks arrive at different times costs {left / 1e6:.1f} ms per step, and none "
            f"is late for long: rank {rank} comes last most often, in {share:.0%} of the "
            "collectives",
            *(
                (f"forward and backward of a rank are long in the same steps: {correlation:.3f}",)
                if uneven
                else ()
            ),
        ),
        victims=None,
        candidates=()
        if uneven
        else (
            Candidate("sequence_length", Where(), "annotations of forward and backward"),
            Candidate("host_contention", Where(), "kernels in the trace"),
            Candidate("gc", Where(), "gc events"),
        ),
        next=(
            "balance microbatches over DP ranks by the sum of squared lengths"
            if uneven
            else "annotate forward and backward, or attach the recorder (docs/sources.md)",
        ),
    )


def _lengths_agree(evidence: Evidence, named: list[int]) -> float:
    """Correlation of forward and backward over steps and ranks, each rank against itself.

    0 where phases are not told apart, or too little differs.
    """
    if not evidence.activity.phases:
        return 0.0
    logs = []
    for part in (Part.FORWARD, Part.BACKWARD):
        values = np.delete(evidence.activity.parts[part], named, axis=1)
        if values.size < _LEAST_PAIRS or not (values > 0).all():
            return 0.0
        log = np.log(values)
        logs.append((log - np.median(log, axis=0)).reshape(-1))
    if min(_spread(log) for log in logs) < DATA_SPREAD:
        return 0.0
    return float(np.corrcoef(logs[0], logs[1])[0, 1])


def _most_often_last(evidence: Evidence) -> tuple[int, float]:
    """Rank that comes last most often, and in which part of the collectives."""
    ranks = len(evidence.ranks)
    counts = sum(
        np.bincount(one.last().reshape(-1), minlength=ranks) for one in evidence.study.structures
    )
    counts = np.asarray(counts)
    return evidence.ranks[int(counts.argmax())], float(counts.max() / counts.sum())
