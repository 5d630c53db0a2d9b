"""Inside a slow worker: which of its tensor-parallel ranks, if the side evidence can tell.

At op level a worker is one unit. Its TP ranks wait for each other inside forward and backward, so
they all take equally long; the one that the others wait for waits least itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from smon.diagnose.evidence import COMPUTE, Evidence
from smon.diagnose.side import counter
from smon.diagnose.thresholds import DEVICE_RATIO, TP_COMM_RATIO, TP_WAIT_RATIO
from smon.trace.tp_waits import TP_COMM, TP_WAIT


@dataclass(frozen=True, slots=True)
class TpPeers:
    """What the TP ranks of one worker say.

    Attributes
    ----------
    suspect
        TP rank that waits least, by far; None if there is none or nobody knows.
    slow_links
        All of them transfer for longer than other TP groups do.
    """

    suspect: int | None = None
    slow_links: bool = False
    evidence: tuple[str, ...] = ()


def tp_peers(evidence: Evidence, dp: int, stage: int) -> TpPeers:
    """Compare the TP ranks of a slow worker."""
    size = evidence.layout.tp
    if size == 1:
        return TpPeers()
    comm, usual = _of_group(evidence, TP_COMM, dp, stage), _of_others(evidence, dp, stage)
    if usual and min(comm, default=np.nan) > TP_COMM_RATIO * usual:
        text = (
            f"TP transfers take {min(comm) / usual:.1f} × those of other groups, on all its ranks"
        )
        return TpPeers(slow_links=True, evidence=(text,))
    longest = _longest_kernels(evidence, dp, stage)
    if longest is not None:
        return longest
    wait = _of_group(evidence, TP_WAIT, dp, stage)
    if np.isnan(wait).any():
        return TpPeers(
            evidence=(
                "nothing tells its TP ranks apart; the wait of each in TP collectives "
                f"({TP_WAIT}) would tell which of its {size} ranks it is",
            )
        )
    least = int(np.argmin(wait))
    others = float(np.median(np.delete(wait, least)))
    if wait[least] > TP_WAIT_RATIO * others:
        return TpPeers(evidence=("all its TP ranks wait alike: no rank of the group stands out",))
    text = f"TP rank {least} waits {wait[least]:.3g} s a step, its peers {others:.3g} s"
    return TpPeers(suspect=least, evidence=(text,))


def _longest_kernels(evidence: Evidence, dp: int, stage: int) -> TpPeers | None:
    """The TP rank whose own computes take longest, where the trace has a row for each of them.

    None if it has not, or if all take alike: then their times hold the wait for each other.
    """
    busy = _busy_of_ranks(evidence, dp, stage)
    if np.isnan(busy).any():
        return None
    most = int(np.argmax(busy))
    ratio = float(busy[most] / np.median(np.delete(busy, most)))
    if ratio < 1 + DEVICE_RATIO:
        return None
    text = f"computes of TP rank {most} take {ratio:.3f} × those of its TP peers"
    return TpPeers(suspect=most, evidence=(text,))


def _busy_of_ranks(evidence: Evidence, dp: int, stage: int) -> np.ndarray:
    """(tp,) mean duration of the computes of each TP rank, NaN where it has no rows of its own."""
    busy = np.full(evidence.layout.tp, np.nan)
    table = evidence.table
    if table is None:
        return busy
    mine = (table.dp == dp) & (table.stage == stage) & np.isin(table.optype, COMPUTE)
    ranks, durations = table.rank[mine], table.duration_ns[mine]
    for tp in range(evidence.layout.tp):
        own = durations[ranks == evidence.layout.rank(dp, stage, tp)]
        if len(own):
            busy[tp] = own.mean()
    return busy


def _of_group(evidence: Evidence, name: str, dp: int, stage: int) -> np.ndarray:
    """(tp,) mean over steps of a counter, NaN where unknown."""
    values = np.full(evidence.layout.tp, np.nan)
    for tp in range(evidence.layout.tp):
        readings = counter(
            evidence.context, name, evidence.layout.rank(dp, stage, tp), evidence.steps
        )
        known = readings[~np.isnan(readings)]
        if len(known):
            values[tp] = known.mean()
    return values


def _of_others(evidence: Evidence, dp: int, stage: int) -> float:
    """Typical transfer time of the other groups of this stage; 0 if unknown."""
    others = [
        _of_group(evidence, TP_COMM, other, stage)
        for other in range(evidence.window.dp_ranks)
        if other != dp
    ]
    known = np.concatenate([*others, np.empty(0)])
    known = known[~np.isnan(known)]
    return float(np.median(known)) if len(known) else 0.0
