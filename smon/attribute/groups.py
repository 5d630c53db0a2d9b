"""Communication groups: how long their transfers take beside their peers', and who comes last.

Transfer time is what remains of an op once its last member has arrived (``docs/method.md``
section 3). Flow: `smon.diagnose.evidence` → **here** → `smon.analysis`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.attribute.peers import peers
from smon.ops import BACKWARD_P2P, DP_COLLECTIVES, OpType, metric_key
from smon.simulate.cube import cube_of
from smon.simulate.window import Window
from smon.topology import Layout

Floats = NDArray[np.float64]
#: (steps, dp_ranks, stages, positions) transfer times of an op type.
Transfers = Callable[[OpType], Floats]

#: A report names so many groups: those that are slowest beside their peers.
MAX_GROUPS: Final = 64

#: Fewer replicas have no collective.
_LEAST: Final = 2

#: Of each group so many members are named.
MAX_RANKS: Final = 16

_TAIL: Final = 0.99


@dataclass(frozen=True, slots=True)
class Group:
    """One communicator over the window; times in ns.

    Attributes
    ----------
    kind
        As the keys of ``by_optype``.
    dp, stage
        Of a collective over DP ranks: the stage. Of a link between stages: the DP rank, and the
        stage that receives.
    ranks
        Members, by their first GPU.
    p50, p99
        Transfer time, over all transfers of the window.
    peers_p50
        Median p50 of the comparable groups; None without any.
    last, last_share
        Member that comes last most often, and in which part of the transfers; None where it cannot
        be told.
    """

    kind: str
    dp: int | None
    stage: int
    ranks: tuple[int, ...]
    p50: float
    p99: float
    peers_p50: float | None
    last: int | None
    last_share: float | None

    @property
    def excess(self) -> float:
        """What a transfer typically takes longer than one of comparable groups; 0 without any."""
        return 0.0 if self.peers_p50 is None else self.p50 - self.peers_p50


def groups_of(window: Window, layout: Layout, transfers: Transfers) -> list[Group]:
    """All groups of a window whose clocks are aligned, slowest beside their peers first."""
    found = [
        group
        for optype in sorted(DP_COLLECTIVES)
        for group in _collectives(window, layout, optype, transfers(optype))
    ]
    for send, receive in (
        (OpType.FORWARD_SEND, OpType.FORWARD_RECV),
        (OpType.BACKWARD_SEND, OpType.BACKWARD_RECV),
    ):
        found.extend(_links(window, layout, (send, receive), transfers(receive)))
    return sorted(found, key=lambda group: -group.excess)


def _starts(window: Window, optype: OpType) -> Floats:
    return cube_of(window, optype, lambda part: part.start)


# --- collectives over the DP ranks of a stage -------------------------------------------------


def _collectives(window: Window, layout: Layout, optype: OpType, times: Floats) -> Iterator[Group]:
    if times.size == 0 or window.dp_ranks < _LEAST:
        return
    # (stages, steps × positions): what all members saw of one transfer, in the middle.
    whole = _flat(_median(times, 1), 1)
    p50, p99 = _quantiles(whole)
    usual = peers(p50, 0)
    starts = _starts(window, optype)
    for stage in np.flatnonzero(np.isfinite(p50)).tolist():
        last, share = _latest(starts[:, :, stage])
        yield Group(
            kind=metric_key(optype),
            dp=None,
            stage=stage,
            ranks=tuple(layout.rank(dp, stage) for dp in range(window.dp_ranks)),
            p50=float(p50[stage]),
            p99=float(p99[stage]),
            peers_p50=_known(usual[stage]),
            last=None if last is None else layout.rank(last, stage),
            last_share=share,
        )


def _latest(starts: Floats) -> tuple[int | None, float | None]:
    """Of (steps, members, positions) starts: who starts last most often, and how often.

    Where several start last at the same time, as at the start of a step, nobody does.
    """
    complete = np.moveaxis(starts, 1, 2)[~np.isnan(starts).any(axis=1)]
    alone = complete[np.count_nonzero(complete == complete.max(axis=1)[:, None], axis=1) == 1]
    if not len(alone):
        return None, None
    counts = np.bincount(np.argmax(alone, axis=1), minlength=starts.shape[1])
    return int(counts.argmax()), float(counts.max() / len(complete))


# --- links between neighbouring stages --------------------------------------------------------


def _links(
    window: Window, layout: Layout, optypes: tuple[OpType, OpType], times: Floats
) -> Iterator[Group]:
    if times.size == 0:
        return
    send, receive = optypes
    step = -1 if receive in BACKWARD_P2P else 1
    stages = times.shape[2]
    # (dp_ranks, stages, steps × positions)
    p50, p99 = _quantiles(_flat(times, 2))
    later = _sender_share(_starts(window, send), _starts(window, receive), step, layout)
    usual = peers(p50, 0)
    for dp, stage in np.argwhere(np.isfinite(p50)).tolist():
        sender = (stage - step) % stages
        ends = layout.rank(dp, sender), layout.rank(dp, stage)
        share = _known(later[dp, stage])
        sends = share is not None and share >= 1.0 - share
        yield Group(
            kind=metric_key(receive),
            dp=dp,
            stage=stage,
            ranks=ends,
            p50=float(p50[dp, stage]),
            p99=float(p99[dp, stage]),
            peers_p50=_known(usual[dp, stage]),
            last=None if share is None else ends[0 if sends else 1],
            last_share=None if share is None else max(share, 1.0 - share),
        )


def _sender_share(send: Floats, receive: Floats, step: int, layout: Layout) -> Floats:
    """(dp_ranks, stages) part of the transfers to a stage whose sender comes last.

    Of interleaved schedules the order of sends and receives differs: NaN.
    """
    if layout.vpp > 1 or send.shape != receive.shape:
        return np.full(receive.shape[1:3], np.nan)
    sent = np.roll(send, step, axis=2)
    known = ~np.isnan(sent) & ~np.isnan(receive)
    later = np.count_nonzero(known & (sent > receive), axis=(0, 3))
    count = np.count_nonzero(known, axis=(0, 3))
    share: Floats = np.full(count.shape, np.nan)
    np.divide(later, count, out=share, where=count > 0)
    return share


# --- arrays with gaps -------------------------------------------------------------------------


def _flat(values: Floats, places: int) -> Floats:
    """Steps and positions, the first and the last axis, as one: last."""
    moved = np.moveaxis(values, 0, -1)
    flat: Floats = moved.reshape(*moved.shape[:places], -1)
    return flat


def _quantiles(values: Floats) -> tuple[Floats, Floats]:
    """Median and tail along the last axis, NaN left out."""
    ordered = np.sort(values, axis=-1)  # NaN last
    known = np.count_nonzero(~np.isnan(values), axis=-1)
    return _at(ordered, known, 0.5), _at(ordered, known, _TAIL)


def _at(ordered: Floats, known: NDArray[np.intp], quantile: float) -> Floats:
    """The value below which this part of the known ones lies."""
    place = np.maximum(np.ceil(quantile * known).astype(np.intp) - 1, 0)
    found = np.take_along_axis(ordered, place[..., None], -1)[..., 0]
    return np.where(known > 0, found, np.nan)


def _median(values: Floats, axis: int) -> Floats:
    ordered = np.sort(values, axis=axis)
    known = np.count_nonzero(~np.isnan(values), axis=axis)
    return _at(np.moveaxis(ordered, axis, -1), known, 0.5)


def _known(value: np.float64) -> float | None:
    return None if np.isnan(value) else float(value)
