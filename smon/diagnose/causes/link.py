"""slow_link, flapping_link: transfers that take longer than those of comparable groups.

A slow collective names only its group. The worker behind it is named if its point-to-point
transfers are slow as well: it is then in all slow groups, and in no normal one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from smon.attribute.persistence import BURST_STEPS, Kind, Persistence, vote
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import Evidence, Floats, nanmedian, peers
from smon.diagnose.place import place, places
from smon.diagnose.thresholds import FLAP_FACTOR, LINK_RATIO
from smon.ops import OpType
from smon.report import Candidate
from smon.simulate.cube import Changes

_COLLECTIVES = (
    OpType.PARAMS_ALL_GATHER,
    OpType.GRADS_REDUCE_SCATTER,
    OpType.SEPARATE_GRADS_ALL_REDUCE,
)
_P2P = (OpType.FORWARD_SEND, OpType.FORWARD_RECV, OpType.BACKWARD_SEND, OpType.BACKWARD_RECV)

#: Steps that show the usual scatter, and how far outside of it slow is.
_QUIET_STEPS = 5
_SCORE = 6.0
#: Longer lists of candidates help nobody.
_MAX_CANDIDATES = 64


@dataclass(frozen=True, slots=True, eq=False)
class _Slow:
    """One op type of one stage (and replica) whose transfers are slow.

    Attributes
    ----------
    dp
        Replica of a point-to-point op, -1 for a collective of the stage.
    active
        (steps,) when.
    factor
        How many times the usual, typically, while active.
    """

    optype: OpType
    stage: int
    dp: int
    active: NDArray[np.bool_]
    factor: float


def find(evidence: Evidence) -> list[Draft]:
    """Slow groups, each set of steps and stage once."""
    collectives = [slow for op in _COLLECTIVES for slow in _slow_collectives(evidence, op)]
    p2p = [slow for op in _P2P for slow in _slow_p2p(evidence, op)]
    drafts = []
    for stage in sorted({slow.stage for slow in collectives}):
        mine = [slow for slow in collectives if slow.stage == stage]
        workers = _workers_behind(stage, mine, p2p)
        drafts.append(_draft(evidence, stage, mine, workers, p2p))
    blamed = {worker for draft in drafts for worker in _blamed(draft)}
    drafts.extend(_alone(evidence, p2p, blamed))
    return drafts


def _usual(values: Floats, stages_axis: int) -> Floats:
    """What a transfer usually takes: over time for its own place, and over comparable places."""
    own = np.broadcast_to(nanmedian(values, 0)[None], values.shape)
    return np.fmin(own, peers(values, stages_axis))


def _slow_collectives(evidence: Evidence, optype: OpType) -> list[_Slow]:
    cube = evidence.work(optype)
    if cube.size == 0:
        return []
    times = nanmedian(cube, (1, 3))
    usual = _usual(times, 1)
    return [
        _Slow(optype, stage, -1, active, _factor(times[:, stage], usual[:, stage], active))
        for stage in range(times.shape[1])
        if (active := _active(times[:, stage], usual[:, stage])).any()
    ]


def _slow_p2p(evidence: Evidence, optype: OpType) -> list[_Slow]:
    cube = evidence.work(optype)
    if cube.size == 0:
        return []
    times = nanmedian(cube, 3)
    usual = _usual(times, 1)
    found = []
    with np.errstate(invalid="ignore"):
        possible = np.argwhere((times > (1 + LINK_RATIO) * usual).any(axis=0))
    for dp, stage in possible.tolist():
        active = _active(times[:, dp, stage], usual[:, dp, stage])
        if active.any():
            factor = _factor(times[:, dp, stage], usual[:, dp, stage], active)
            found.append(_Slow(optype, stage, dp, active, factor))
    return found


def _active(times: Floats, usual: Floats) -> NDArray[np.bool_]:
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = times / usual - 1.0
        active: NDArray[np.bool_] = (ratio > LINK_RATIO) & (usual > 0)
    # Noise: its own scatter around the usual, seen where it is not slow.
    quiet = ratio[~active & np.isfinite(ratio)]
    if len(quiet) >= _QUIET_STEPS and active.any():
        limit = _SCORE * 1.4826 * float(np.median(np.abs(quiet - np.median(quiet))))
        active &= ratio > limit
    return active


def _factor(times: Floats, usual: Floats, active: NDArray[np.bool_]) -> float:
    """How many times the usual, typically, while active."""
    known = active & (usual > 0)
    return float(np.median(times[known] / usual[known])) if known.any() else 1.0


def _workers_behind(stage: int, collectives: list[_Slow], p2p: list[_Slow]) -> list[int]:
    """DP ranks of a stage whose point-to-point transfers are slow in the same steps."""
    when = np.logical_or.reduce([slow.active for slow in collectives])
    together = [
        slow
        for slow in p2p
        if slow.stage == stage and (slow.active & when).sum() >= 0.8 * slow.active.sum()
    ]
    if not together:
        return []
    most = max(sum(slow.dp == dp for slow in together) for dp in {slow.dp for slow in together})
    return sorted({slow.dp for slow in together if sum(o.dp == slow.dp for o in together) == most})


def _draft(
    evidence: Evidence,
    stage: int,
    collectives: list[_Slow],
    behind: list[int],
    p2p: list[_Slow],
) -> Draft:
    slow = _Group(
        evidence,
        np.logical_or.reduce([each.active for each in collectives]),
        max(each.factor for each in collectives),
        tuple(each.optype.label for each in collectives),
    )
    changes = _healed(evidence, stage, collectives)
    text = tuple(
        f"{each.optype.label} of stage {stage} takes {each.factor:.1f} ×" for each in collectives
    )
    if len(behind) == 1:
        dp = behind[0]
        mine = [each for each in p2p if each.dp == dp and _touches(evidence, each, stage)]
        more = f"so do the point-to-point transfers of DP rank {dp}, and of no other"
        draft = slow.draft("node", (*text, more), changes | _healed_p2p(evidence, mine))
        labels = (*draft.optypes, *sorted({each.optype.label for each in mine}))
        where = place(evidence, dp, stage)
        return replace(draft, where=where, optypes=labels, confidence=0.85)
    members = [(dp, stage) for dp in range(evidence.window.dp_ranks)]
    normal = "point-to-point transfers of its members are normal: one ring names only the group"
    return _one_of(evidence, slow.draft("dp_group", (*text, normal), changes), members)


@dataclass(frozen=True, slots=True, eq=False)
class _Group:
    """Slow transfers that belong together: when, how many times the usual, of which types."""

    evidence: Evidence
    active: NDArray[np.bool_]
    factor: float
    labels: tuple[str, ...]

    def _flaps(self) -> bool:
        """Whether it comes in several short bursts, and takes many times the usual."""
        edges = np.diff(np.concatenate([[0], self.active.astype(np.int8), [0]]))
        lengths = np.flatnonzero(edges == -1) - np.flatnonzero(edges == 1)
        several = len(lengths) > 1 and int(lengths.max()) <= BURST_STEPS
        return several and self.factor > FLAP_FACTOR

    def draft(self, scope: str, text: tuple[str, ...], changes: Changes) -> Draft:
        """A finding without its place."""
        lasting = vote(self.active.astype(float), 0.5, self.evidence.steps)
        return Draft(
            verdict="link",
            cause="flapping_link" if self._flaps() else "slow_link",
            scope=scope,
            phase="communication",
            persistence=lasting or Persistence(Kind.ONE_OFF, 0.0),
            optypes=self.labels,
            changes=changes,
            confidence=0.6,
            evidence=(*text, "compute of the members is normal"),
            next=(
                "all_reduce_perf -b 64M -e 1G -f 2 -g 1  # nccl-tests, over the nodes of the group",
                "ibstat, ethtool -S: error and retransmit counters of their network cards",
            ),
        )


def _touches(evidence: Evidence, slow: _Slow, stage: int) -> bool:
    """Whether a transfer has this stage at one of its ends."""
    step = {
        OpType.FORWARD_SEND: 1,
        OpType.FORWARD_RECV: -1,
        OpType.BACKWARD_SEND: -1,
        OpType.BACKWARD_RECV: 1,
    }[slow.optype]
    return stage in (slow.stage, (slow.stage + step) % evidence.window.stages)


def _one_of(evidence: Evidence, draft: Draft, members: list[tuple[int, int]]) -> Draft:
    """A draft about a whole group: every member is a candidate."""
    candidates = tuple(
        Candidate(draft.cause, place(evidence, *member), "nccl-tests between pairs of the members")
        for member in members[:_MAX_CANDIDATES]
    )
    return replace(draft, where=places(evidence, members), candidates=candidates)


def _healed(evidence: Evidence, stage: int, slows: list[_Slow]) -> Changes:
    work: dict[OpType, Floats] = {}
    for slow in slows:
        cube = work.get(slow.optype, evidence.work(slow.optype)).copy()
        usual = _usual(nanmedian(cube, (1, 3)), 1)[:, stage]
        usual = np.where(np.isnan(usual), np.inf, usual)
        healed = np.fmin(cube[:, :, stage], usual[:, None, None])
        cube[slow.active, :, stage] = healed[slow.active]
        work[slow.optype] = cube
    return Changes(work)


def _healed_p2p(evidence: Evidence, slows: list[_Slow]) -> Changes:
    work: dict[OpType, Floats] = {}
    for slow in slows:
        cube = work.get(slow.optype, evidence.work(slow.optype)).copy()
        usual = _usual(nanmedian(cube, 3), 1)[:, slow.dp, slow.stage]
        usual = np.where(np.isnan(usual), np.inf, usual)
        healed = np.fmin(cube[:, slow.dp, slow.stage], usual[:, None])
        cube[slow.active, slow.dp, slow.stage] = healed[slow.active]
        work[slow.optype] = cube
    return Changes(work)


def _blamed(draft: Draft) -> list[tuple[int, int]]:
    where = draft.where
    return [(where.dp, where.stage)] if where.dp is not None and where.stage is not None else []


def _alone(
    evidence: Evidence,
    p2p: list[_Slow],
    blamed: set[tuple[int, int]],
) -> list[Draft]:
    """Slow point-to-point transfers that no collective explains, by replica."""
    left = [
        slow
        for slow in p2p
        if not any(slow.dp == dp and _touches(evidence, slow, stage) for dp, stage in blamed)
    ]
    found = []
    for dp in sorted({slow.dp for slow in left}):
        mine = [slow for slow in left if slow.dp == dp]
        group = _Group(
            evidence,
            np.logical_or.reduce([slow.active for slow in mine]),
            max(slow.factor for slow in mine),
            tuple(sorted({slow.optype.label for slow in mine})),
        )
        ends = _ends(evidence, mine)
        text = (
            f"point-to-point transfers of DP rank {dp} between stages "
            f"{', '.join(map(str, ends))} take {group.factor:.1f} ×",
        )
        draft = group.draft("pp_group", text, _healed_p2p(evidence, mine))
        found.append(_one_of(evidence, draft, [(dp, stage) for stage in ends]))
    return found


def _ends(evidence: Evidence, slows: list[_Slow]) -> list[int]:
    return sorted(
        stage
        for stage in range(evidence.window.stages)
        if any(_touches(evidence, slow, stage) for slow in slows)
    )
