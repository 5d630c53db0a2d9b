"""slow_link, flapping_link: transfers that take longer than those of comparable groups.

A slow collective names only its group. The worker behind it is named if its point-to-point
transfers are slow as well: it is then in all slow groups, and in no normal one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from smon.attribute.peers import peers
from smon.attribute.persistence import BURST_STEPS, Kind, Persistence, vote
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import COMPUTE, Evidence, Floats, nanmedian, nanquantile, spread
from smon.diagnose.place import node_of, place, places, workers_of
from smon.diagnose.side import Shown, beside_peers
from smon.diagnose.thresholds import (
    CONGESTION_PLACES,
    CONGESTION_SHARE,
    FLAP_FACTOR,
    LINK_RATIO,
    STAGE_RATIO,
)
from smon.ops import OpType
from smon.report import Candidate, Where
from smon.simulate.cube import Changes

_COLLECTIVES = (
    OpType.PARAMS_ALL_GATHER,
    OpType.GRADS_REDUCE_SCATTER,
    OpType.SEPARATE_GRADS_ALL_REDUCE,
)
#: Stage at the other end of a transfer, from its own.
_NEIGHBOUR = {
    OpType.FORWARD_SEND: 1,
    OpType.FORWARD_RECV: -1,
    OpType.BACKWARD_SEND: -1,
    OpType.BACKWARD_RECV: 1,
}
_P2P = (OpType.FORWARD_SEND, OpType.FORWARD_RECV, OpType.BACKWARD_SEND, OpType.BACKWARD_RECV)

#: Counters that go with a slow link.
_NIC_COUNTERS = (
    Shown("nic_errors", "network card errors", "per step"),
    Shown("nic_retransmits", "retransmits", "per step"),
    Shown("nic_link_downs", "links that went down", "per step"),
    Shown("nic_down", "ports that are down", ""),
    Shown("nic_rate_gbps", "slowest port", "Gbit/s"),
    Shown("nic_congestion", "congestion notices", "per step"),
    Shown("nvlink_crc", "NVLink CRC errors", "per step"),
)
#: How far outside of the usual scatter slow is.
_SCORE = 6.0
#: What is slow for so many of the steps does not come and go.
_MOSTLY = 0.5
#: Transfers are slow together if so much of one's slow time is the other's.
_TOGETHER = 0.8
#: And the worker behind a slow group has slow transfers in so much of the group's slow time: one
#: hiccup says nothing about a ring that is slow in all steps.
_WORKER_SHARE = 0.5
#: A ring that may just have more to carry; see `_perhaps_parameters`.
_PERHAPS_PARAMETERS = 0.4
#: Longer lists of candidates help nobody.
_MAX_CANDIDATES = 1024


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


def _usual(values: Floats, places_axis: int) -> Floats:
    """What a transfer usually takes: at its own place most of the time, and at comparable places.

    The lower quartile over time: what came to stay in the middle of the window is not usual.
    """
    own = np.broadcast_to(nanquantile(values, 0.25, 0)[None], values.shape)
    return np.fmin(own, peers(values, places_axis))


@dataclass(frozen=True, slots=True, eq=False)
class _Transfers:
    """Transfer times of comparable places over time, and when they are slow."""

    times: Floats
    usual: Floats
    active: NDArray[np.bool_]

    @staticmethod
    def of(times: Floats) -> _Transfers:
        usual = _usual(times, 1)
        with np.errstate(invalid="ignore", divide="ignore"):
            ratio = np.log(times / usual)
        ratio[~np.isfinite(ratio)] = np.nan
        # Scatter over time at each place: lasting slowness is no noise.
        noise = spread(ratio - nanmedian(ratio, 0)[None])
        limit = max(float(np.log1p(LINK_RATIO)), _SCORE * (0.0 if np.isnan(noise) else noise))
        with np.errstate(invalid="ignore"):
            active = ratio > limit
        return _Transfers(times, usual, active)

    def slow(self, optype: OpType, stage: int, dp: int) -> _Slow | None:
        at = (slice(None), stage) if dp < 0 else (slice(None), dp, stage)
        active = self.active[at]
        if not active.any():
            return None
        return _Slow(optype, stage, dp, active, _factor(self.times[at], self.usual[at], active))


def _slow_collectives(evidence: Evidence, optype: OpType) -> list[_Slow]:
    cube = evidence.work(optype)
    if cube.size == 0:
        return []
    times = nanmedian(cube, (1, 3))
    # A replica that is not in the trace may be the one that all others wait for.
    times[_incomplete(cube)] = np.nan
    transfers = _Transfers.of(times)
    found = [transfers.slow(optype, stage, -1) for stage in range(evidence.window.stages)]
    return [slow for slow in found if slow is not None]


def _incomplete(cube: Floats) -> NDArray[np.bool_]:
    """(steps,) steps with fewer replicas than others."""
    replicas = np.count_nonzero(~np.isnan(cube).all(axis=(2, 3)), axis=1)
    return np.asarray(replicas < replicas.max(initial=0))


def _slow_p2p(evidence: Evidence, optype: OpType) -> list[_Slow]:
    cube = evidence.work(optype)
    if cube.size == 0:
        return []
    transfers = _Transfers.of(nanmedian(cube, 3))
    found = [
        transfers.slow(optype, stage, dp)
        for dp, stage in workers_of(np.any(transfers.active, axis=0))
    ]
    return [slow for slow in found if slow is not None]


def _factor(times: Floats, usual: Floats, active: NDArray[np.bool_]) -> float:
    """How many times the usual, typically, while active."""
    known = active & (usual > 0)
    return float(np.median(times[known] / usual[known])) if known.any() else 1.0


def _workers_behind(stage: int, collectives: list[_Slow], p2p: list[_Slow]) -> list[int]:
    """DP ranks of a stage whose point-to-point transfers are slow in the same steps."""
    when = np.logical_or.reduce([slow.active for slow in collectives])
    together = [slow for slow in p2p if slow.stage == stage and _together(slow.active, when)]
    if not together:
        return []
    most = max(sum(slow.dp == dp for slow in together) for dp in {slow.dp for slow in together})
    return sorted({slow.dp for slow in together if sum(o.dp == slow.dp for o in together) == most})


def _together(worker: NDArray[np.bool_], group: NDArray[np.bool_]) -> bool:
    """Whether a worker's transfers are slow when those of its group are, and only then."""
    both = int((worker & group).sum())
    return both >= max(_TOGETHER * int(worker.sum()), _WORKER_SHARE * int(group.sum()))


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
        slow = replace(slow, factor=max(slow.factor, *(each.factor for each in mine)))
        more = f"so do the point-to-point transfers of DP rank {dp}, more than of any other"
        text = (*text, more, *_nic(evidence, dp, stage))
        draft = slow.draft("node", text, changes | _healed_p2p(evidence, mine))
        labels = (*draft.optypes, *sorted({each.optype.label for each in mine}))
        where = place(evidence, dp, stage)
        return replace(draft, where=where, optypes=labels, confidence=0.85)
    members = [(dp, stage) for dp in range(evidence.window.dp_ranks)]
    text = (*text, _why_only_the_group(evidence, behind))
    draft = _one_of(evidence, slow.draft("dp_group", text, changes), members)
    return _perhaps_parameters(evidence, draft, stage)


def _perhaps_parameters(evidence: Evidence, draft: Draft, stage: int) -> Draft:
    """On a stage that may have more parameters, a ring that is always slow may be a healthy one.

    An embedding or the loss layer makes collectives of the first or last stage longer, a longer
    stage those of any; neither comes and goes.
    """
    may_have_more = stage in (0, evidence.window.stages - 1) or _is_long(evidence, stage)
    if evidence.window.stages == 1 or not may_have_more:
        return draft
    if draft.persistence.kind is not Kind.PERSISTENT:
        return draft
    more = Candidate(
        "stage_partition", Where(stage=stage), "parameters per stage, or bytes per collective"
    )
    text = f"stage {stage} may have more parameters: then its collectives are longer, and well"
    return replace(
        draft,
        confidence=_PERHAPS_PARAMETERS,
        evidence=(*draft.evidence, text),
        candidates=(more, *draft.candidates),
        next=(f"compare the parameters of stage {stage} with those of the others", *draft.next),
    )


def _is_long(evidence: Evidence, stage: int) -> bool:
    """Whether a stage computes for longer than the others, as recorded."""
    forward, backward = (nanmedian(evidence.recorded_work(op), (0, 1, 3)) for op in COMPUTE)
    total = forward + backward
    return bool(total[stage] > (1 + STAGE_RATIO) * nanmedian(np.delete(total, stage), 0))


def _why_only_the_group(evidence: Evidence, behind: list[int]) -> str:
    """Why no member of a slow ring can be named."""
    if evidence.window.stages == 1:
        return "without pipeline stages nothing tells which member of the ring it is"
    if behind:
        ranks = ", ".join(map(str, behind))
        return f"point-to-point transfers of DP ranks {ranks} are slow too: none stands out"
    return "point-to-point transfers of its members are normal: one ring names only the group"


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
        brief = float(np.median(lengths)) <= BURST_STEPS and self.active.mean() < _MOSTLY
        return brief and self.factor > FLAP_FACTOR

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
            evidence=text,
            next=(
                "all_reduce_perf -b 64M -e 1G -f 2 -g 1  # nccl-tests, over the nodes of the group",
                "ibstat, ethtool -S: error and retransmit counters of their network cards",
            ),
        )


def _touches(evidence: Evidence, slow: _Slow, stage: int) -> bool:
    """Whether a transfer has this stage at one of its ends."""
    step = _NEIGHBOUR[slow.optype]
    return stage in (slow.stage, (slow.stage + step) % evidence.window.stages)


def _nic(evidence: Evidence, dp: int, stage: int) -> tuple[str, ...]:
    rank = evidence.layout.rank(dp, stage)
    return beside_peers(evidence, _NIC_COUNTERS, rank) or (
        "no counters of its network card: errors and retransmits would make it sure",
    )


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
    found = _congested(evidence, left)
    if found:
        return found
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


def _congested(evidence: Evidence, slows: list[_Slow]) -> list[Draft]:
    """One finding for a leaf switch, if most slow transfers cross it, from many places."""
    crossed = [leaf for slow in slows for leaf in _leaves(evidence, slow)]
    if not crossed:
        return []
    leaf = max(sorted(set(crossed)), key=crossed.count)
    mine = [slow for slow in slows if leaf in _leaves(evidence, slow)]
    several = len({(slow.dp, slow.stage) for slow in mine}) >= CONGESTION_PLACES
    if not several or len(mine) < CONGESTION_SHARE * len(slows) or len({s.dp for s in mine}) == 1:
        return []
    group = _Group(
        evidence,
        np.logical_or.reduce([slow.active for slow in mine]),
        float(np.median([slow.factor for slow in mine])),
        tuple(sorted({slow.optype.label for slow in mine})),
    )
    text = f"{len(mine)} of {len(slows)} slow kinds of transfers cross leaf switch {leaf}"
    draft = group.draft("leaf", (text,), _healed_p2p(evidence, mine))
    return [replace(draft, cause="congestion", where=Where(leaf=leaf), confidence=0.7)]


def _leaves(evidence: Evidence, slow: _Slow) -> set[str]:
    """Leaf switches of a transfer that crosses from one to another; none if it does not."""
    ends = [slow.stage, (slow.stage + _NEIGHBOUR[slow.optype]) % evidence.window.stages]
    hosts = [node_of(evidence, slow.dp, stage) for stage in ends]
    leaves = {evidence.context.switches.get(host or "", "") for host in hosts}
    return leaves if len(leaves) > 1 and "" not in leaves else set()


def _ends(evidence: Evidence, slows: list[_Slow]) -> list[int]:
    return sorted(
        stage
        for stage in range(evidence.window.stages)
        if any(_touches(evidence, slow, stage) for slow in slows)
    )
