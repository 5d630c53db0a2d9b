"""A replica that is slow as a whole: its data or its host, and no single device.

The same microbatches pass all stages of a replica. If all of them are slow alike, or if there is
only one, long data explains it as well as slow devices do; sequence lengths tell them apart.

Flow: `smon.diagnose.suspects` → **here** → `smon.diagnose.causes.device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from smon.diagnose.draft import Draft
from smon.diagnose.evidence import COMPUTE, Evidence, Floats, nanmedian
from smon.diagnose.place import places
from smon.diagnose.side import sum_len2
from smon.diagnose.suspects import Suspect
from smon.diagnose.thresholds import LENGTHS_EXPLAIN, LENGTHS_SPEAK_AGAINST
from smon.report import Candidate, Where
from smon.simulate.cube import Changes

#: Suspects on more than this part of the stages of a replica, and on two at least.
_MOST = 0.5
_SEVERAL = 2
#: Its least slow stage is at least so slow, against the slowest one.
_ALIKE = 0.5
#: Lengths that vary less than this (standard deviation over mean) show no slope.
_VARIED = 0.01
_UNKNOWN_CONFIDENCE = 0.4
_LENGTHS_CONFIDENCE = 0.9
#: What would tell.
LENGTHS = "tokens and Σlen² per microbatch"


@dataclass(frozen=True, slots=True, eq=False)
class Replica:
    """A replica all of whose stages are slow alike, by its suspects."""

    dp: int
    suspects: tuple[Suspect, ...]

    @property
    def excess(self) -> float:
        """Typical excess of forward and backward over its stages."""
        return float(np.median([suspect.ratio[op] for suspect in self.suspects for op in COMPUTE]))


def whole_replicas(suspects: Sequence[Suspect], effect: Floats) -> list[Replica]:
    """Replicas in which the suspects stand for all stages.

    Parameters
    ----------
    effect
        (steps, dp_ranks, stages) excess of each worker.
    """
    by_dp: dict[int, list[Suspect]] = {}
    for suspect in suspects:
        by_dp.setdefault(suspect.dp, []).append(suspect)
    return [
        Replica(dp, tuple(mine)) for dp, mine in by_dp.items() if _all_alike(mine, effect[:, dp])
    ]


def _all_alike(suspects: Sequence[Suspect], effect: Floats) -> bool:
    stages = effect.shape[1]
    if len(suspects) < max(_SEVERAL, int(_MOST * stages) + 1):
        return False
    when = np.logical_or.reduce([suspect.active for suspect in suspects])
    typical = nanmedian(effect[when], 0)
    return bool(typical.min() > _ALIKE * typical.max())


def data_share(evidence: Evidence, dp: int, excess: float) -> float | None:
    """Share of a replica's excess that its sequence lengths explain; None if nobody knows them.

    Time grows with Σlen² as on the other replicas, and where theirs are all alike, at most in
    proportion to it.
    """
    lengths = sum_len2(evidence.context, evidence.steps, evidence.window.dp_ranks)
    if lengths is None or excess <= 0 or evidence.window.dp_ranks == 1:
        return None
    length, time = nanmedian(lengths, 2), _time(evidence)
    others = np.delete(length, dp, axis=1), np.delete(time, dp, axis=1)
    both = ~(np.isnan(others[0]) | np.isnan(others[1]))
    mine = length[:, dp][~np.isnan(length[:, dp])]
    if not both.any() or len(mine) == 0 or not others[0][both].mean() > 0:
        return None
    slope = _slope(others[0][both], others[1][both])
    return slope * (float(mine.mean() / others[0][both].mean()) - 1.0) / excess


def _time(evidence: Evidence) -> Floats:
    """(steps, dp_ranks) forward and backward of a typical microbatch, over the stages."""
    typical = [evidence.typical(op, (3,)) for op in COMPUTE]
    time: Floats = np.asarray(np.mean(typical[0] + typical[1], axis=2))
    return time


def _slope(lengths: Floats, times: Floats) -> float:
    """Relative growth of the time per relative growth of the length, from 0 to 1."""
    one, other = lengths / lengths.mean() - 1.0, times / times.mean() - 1.0
    if one.std() < _VARIED:
        return 1.0
    return float(np.clip((one * other).mean() / (one * one).mean(), 0.0, 1.0))


def lengths_line(share: float | None) -> str:
    """What sequence lengths say of an excess, in one sentence."""
    if share is None:
        return f"no sequence lengths: {LENGTHS} would tell whether it is its data"
    return f"its sequence lengths explain {min(max(share, 0.0), 1.0):.0%} of it"


def draft_of(evidence: Evidence, replica: Replica, changes: Changes) -> Draft:
    """A finding about a replica: its data if lengths say so, else its data or its host.

    Parameters
    ----------
    changes
        What undoes its suspects.
    """
    share = data_share(evidence, replica.dp, replica.excess)
    forward, backward = (
        1 + float(np.median([suspect.ratio[op] for suspect in replica.suspects])) for op in COMPUTE
    )
    which = "all stages" if evidence.window.stages > 1 else "the only stage"
    draft = Draft(
        verdict="none",
        cause="unknown",
        scope="pp_group",
        phase="compute",
        persistence=replica.suspects[0].persistence,
        where=Where(dp=replica.dp),
        optypes=tuple(op.label for op in COMPUTE),
        changes=changes,
        evidence=(
            f"forward {forward:.3f} ×, backward {backward:.3f} × the other DP ranks, on {which} "
            f"of DP rank {replica.dp} alike: no single device",
            lengths_line(share),
        ),
    )
    if share is not None and share >= LENGTHS_EXPLAIN:
        return _long_data(evidence, draft, replica)
    data_is_out = share is not None and share <= LENGTHS_SPEAK_AGAINST
    return replace(
        draft,
        confidence=_UNKNOWN_CONFIDENCE,
        candidates=(*(() if data_is_out else (data_of(replica.dp),)), _host(evidence, replica.dp)),
        next=(
            f"compare the data that DP rank {replica.dp} gets with that of the others: {LENGTHS}",
        ),
    )


def data_of(dp: int) -> Candidate:
    """The data of one DP rank, as what it could be instead."""
    return Candidate("sequence_length", Where(dp=dp), LENGTHS)


def _host(evidence: Evidence, dp: int) -> Candidate:
    members = [(dp, stage) for stage in range(evidence.window.stages)]
    return Candidate(
        "slow_gpu", places(evidence, members), "its host: give its data to another DP rank"
    )


def _long_data(evidence: Evidence, draft: Draft, replica: Replica) -> Draft:
    """The replica always gets more work than the others: no machine is to blame."""
    return replace(
        draft,
        verdict="imbalance",
        cause="sequence_length",
        changes=_dealt_out(evidence, replica),
        confidence=_LENGTHS_CONFIDENCE,
        next=(
            f"DP rank {replica.dp} always gets longer sequences: balance them over DP ranks by "
            "the sum of squared lengths",
        ),
    )


def _dealt_out(evidence: Evidence, replica: Replica) -> Changes:
    """The same total work, the replica's surplus spread over all."""
    work = {}
    for op in COMPUTE:
        load = np.ones(evidence.window.dp_ranks)
        load[replica.dp] += float(np.median([suspect.ratio[op] for suspect in replica.suspects]))
        work[op] = evidence.work(op) * (load.mean() / load)[None, :, None, None]
    return Changes(work)
