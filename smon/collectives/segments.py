"""The steps of a job as segments between collectives.

A *segment* is what a rank does before it arrives at a collective; its length is measured inside the
rank. The *transfer* of a collective is its shortest duration over the members: the last to arrive
waits for nobody. Both need no common clock.

A collective depends on every earlier one that has ended, on all members of both and in all steps,
before it began: what overlaps in some step cannot depend on each other. A segment counts from the
end of the collectives that the next one depends on, or from the rank's arrival at the collective
before, if that may still run. Where kernels run beside that one (gradients are reduced while the
backward goes on), it counts from the arrival, without the time in which the rank only waited: or
else a rank that waits would seem to have less to compute than the one that it waits for.

Flow: `smon.collectives.matching` → **here** → `smon.collectives.simulate`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.collectives.coverage import Coverage
from smon.collectives.matching import Matched, Place, Rows
from smon.trace.events import Collective, Kind, RankEvents
from smon.trace.words import AUTOGRAD

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

#: Ends and starts of one rank are compared with this tolerance: profilers stamp a kernel's end up
#: to a few microseconds late.
TOLERANCE_NS: Final = 10_000.0

#: So many collectives before one are looked at for what it depends on; earlier ones are reached
#: through them.
_LOOK_BACK: Final = 64

#: Kernels run beside a collective if, in the typical step of some rank, they cover so much of it.
_BESIDE_SHARE: Final = 0.02
_BESIDE_NS: Final = 20_000.0


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """Steps with the same collectives; ``S`` steps, ``J`` collectives, ``W`` ranks.

    Attributes
    ----------
    steps
        (S,) step numbers.
    places
        The collectives, in an order that respects `before`.
    members
        (J, W) who takes part.
    before
        Per collective, the earlier ones that it depends on, directly.
    start, duration
        (S, J, W) ns; starts on each rank's own clock; NaN where a rank is no member.
    beside
        (J,) whether kernels run beside the collective before it: segments count from its start.
    apart
        (J, W) whether it depends on the rank's arrival at the collective before, which may still
        run, instead of on its end.
    previous
        (J, W) the collective before on each rank, -1 for the first of the step.
    lag
        (J,) ns that always lie between the end of what it depends on and its start.
    since
        (S, J, W) begin of the segment, on each rank's own clock.
    segment
        (S, J, W) ns of work before the arrival, see the module.
    transfer
        (S, J) shortest duration of the members.
    recorded
        (S,) step time, from the end of the step before, in the middle of the ranks; NaN where that
        step is not in the trace.
    size_bytes
        (J,) payload, -1 where unknown.
    """

    steps: NDArray[np.int64]
    places: tuple[Place, ...]
    members: Mask
    before: tuple[tuple[int, ...], ...]
    beside: Mask
    apart: Mask
    previous: NDArray[np.intp]
    lag: Floats
    start: Floats
    duration: Floats
    since: Floats
    segment: Floats
    transfer: Floats
    recorded: Floats
    size_bytes: NDArray[np.int64]

    def last(self) -> NDArray[np.intp]:
        """(S, J) the rank, by position, that came last: it waits least."""
        shortest = np.where(np.isnan(self.duration), np.inf, self.duration)
        found: NDArray[np.intp] = np.argmin(shortest, axis=2)
        return found


def structures_of(matched: Matched) -> list[Structure]:
    """The steps, grouped by the collectives that they have; larger groups first."""
    by_places: dict[tuple[Place, ...], list[int]] = defaultdict(list)
    for step, places in matched.steps.items():
        if places:
            by_places[tuple(sorted(places, key=_key))].append(step)
    ends = _Ends(matched)
    found = [_structure(matched, places, steps, ends) for places, steps in by_places.items()]
    return sorted(found, key=lambda structure: -len(structure.steps))


def _key(place: Place) -> tuple[int, int, int]:
    return place.communicator, int(place.collective), place.index


class _Ends:
    """When each rank had ended the collectives of each step, on its own clock."""

    def __init__(self, matched: Matched) -> None:
        self._origin = [_origin(rank) for rank in matched.ranks]
        self.last = {
            step: self._last(matched, list(places.values()))
            for step, places in matched.steps.items()
            if places
        }

    def _last(self, matched: Matched, rows: list[Rows]) -> Floats:
        last = np.full(len(matched.ranks), np.nan)
        for at, rank in enumerate(matched.ranks):
            mine = np.array([row[at] for row in rows if row[at] >= 0], np.intp)
            if len(mine):
                last[at] = float((rank.end_ns[mine] - self._origin[at]).max())
        return last

    def busy(self, matched: Matched, places: tuple[Place, ...]) -> list[Coverage | None]:
        """When each rank computed, whatever collectives ran; None where the trace does not say.

        Kernels of a GPU wait for nothing. On the host, the nodes of autograd may wait inside; but
        not if all collectives are the reductions of one group, which are not waited for there.
        """
        reduces = {place.collective for place in places} == {Collective.ALL_REDUCE}
        alone = reduces and len({place.communicator for place in places}) == 1
        return [
            Coverage.of(computing, origin) if len(computing) else None
            for computing, origin in zip(
                (_computing(rank, autograd=alone) for rank in matched.ranks),
                self._origin,
                strict=True,
            )
        ]

    def meeting(self, matched: Matched, rows: NDArray[np.intp]) -> list[Coverage]:
        """When each rank was in one of these collectives."""
        return [
            Coverage.of(rank.take(np.unique(rows[:, :, at][rows[:, :, at] >= 0])), origin)
            for at, (rank, origin) in enumerate(zip(matched.ranks, self._origin, strict=True))
        ]

    def since_origin(self, at: int, times: NDArray[np.int64]) -> Floats:
        """Times of a rank as float64, exact: since its first event."""
        since: Floats = (times - self._origin[at]).astype(np.float64)
        return since

    def marker(self, at: int, rank: RankEvents, steps: list[int]) -> Floats:
        """(steps,) begin of the steps by their markers; NaN where there is none."""
        begin = {step.number: float(step.start_ns - self._origin[at]) for step in rank.steps}
        return np.array([begin.get(step, np.nan) for step in steps])


def _computing(rank: RankEvents, *, autograd: bool) -> RankEvents:
    """Kernels; of a trace without them the nodes of autograd, if these count, else nothing."""
    compute = rank.of_kind(Kind.COMPUTE)
    if rank.on_gpu:
        return compute
    named = [number for number, name in enumerate(rank.names) if autograd and name == AUTOGRAD]
    return compute.take(np.isin(compute.name, named))


def _origin(rank: RankEvents) -> int:
    return int(rank.start_ns.min()) if len(rank) else 0


def _structure(
    matched: Matched, places: tuple[Place, ...], steps: list[int], ends: _Ends
) -> Structure:
    shape = len(steps), len(places), len(matched.ranks)
    start, duration = np.full(shape, np.nan), np.full(shape, np.nan)
    size = np.full(len(places), -1, np.int64)
    rows = np.array([[matched.steps[step][place] for place in places] for step in steps])
    for at, rank in enumerate(matched.ranks):
        mine = rows[:, :, at]
        member = mine >= 0
        start[:, :, at][member] = ends.since_origin(at, rank.start_ns[mine[member]])
        duration[:, :, at][member] = rank.duration_ns[mine[member]]
        known = np.where(member, rank.size_bytes[mine], -1)
        size = np.maximum(size, known.max(axis=0))
    order = _order(start)
    start, duration, size = start[:, order], duration[:, order], size[order]
    members = ~np.isnan(duration[0])
    before, settled = _before(start, start + duration, members)
    first = _since_step(matched, steps, ends, start=start, duration=duration)
    work = _Work(start, duration, before, _apart(settled, members))
    since, segment = work.segments(first, ends.busy(matched, places), ends.meeting(matched, rows))
    return Structure(
        steps=np.array(steps, np.int64),
        places=tuple(places[at] for at in order.tolist()),
        members=members,
        before=before,
        beside=work.beside,
        apart=work.apart,
        previous=work.previous,
        lag=work.lag,
        start=start,
        duration=duration,
        since=since,
        segment=segment,
        transfer=np.nanmin(duration, axis=2),
        recorded=_recorded(steps, ends),
        size_bytes=size,
    )


def _order(start: Floats) -> NDArray[np.intp]:
    """Collectives by their typical start since the first of the step on each rank."""
    since = start - np.nanmin(start, axis=1, keepdims=True)
    known = ~np.isnan(since)
    mean = np.where(known, since, 0.0).sum(axis=(0, 2)) / known.sum(axis=(0, 2))
    return np.argsort(mean, kind="stable")


def _before(
    start: Floats, end: Floats, members: Mask
) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """Of each collective, the latest earlier ones that had always ended; see the module.

    And all that had, as far as they were looked at: bits of their numbers.
    """
    reached: list[int] = []
    settled: list[int] = []
    before: list[tuple[int, ...]] = []
    # Members as bits: most pairs have none in common, and are passed over quickly.
    ranks = [sum(1 << at for at in np.flatnonzero(row).tolist()) for row in members]
    for now in range(start.shape[1]):
        chosen: list[int] = []
        covered = direct = 0
        for earlier in range(now - 1, max(now - 1 - _LOOK_BACK, -1), -1):
            if not ranks[now] & ranks[earlier] or covered >> earlier & 1:
                continue
            common = members[now] & members[earlier]
            gap = start[:, now, common] - end[:, earlier, common]
            if float(gap.min()) >= -TOLERANCE_NS:
                chosen.append(earlier)
                direct |= 1 << earlier
                # Only what all of this one's members went through is settled by it.
                if not ranks[now] & ~ranks[earlier]:
                    covered |= reached[earlier] | 1 << earlier
        before.append(tuple(chosen))
        reached.append(covered)
        settled.append(covered | direct)
    return tuple(before), settled


def _previous(members: Mask) -> NDArray[np.intp]:
    previous = np.full(members.shape, -1, np.intp)
    last = np.full(members.shape[1], -1, np.intp)
    for now, row in enumerate(members):
        previous[now, row] = last[row]
        last[row] = now
    return previous


def _apart(settled: list[int], members: Mask) -> tuple[NDArray[np.intp], Mask]:
    """(J, W) the collective before on each rank, and whether it may still run."""
    previous = _previous(members)
    apart = np.zeros(members.shape, bool)
    for now, earlier in enumerate(settled):
        for rank in np.flatnonzero(previous[now] >= 0).tolist():
            apart[now, rank] = not earlier >> int(previous[now, rank]) & 1
    return previous, apart


class _Work:
    """What each rank does before each collective; shapes as in `Structure`."""

    def __init__(
        self,
        start: Floats,
        duration: Floats,
        before: tuple[tuple[int, ...], ...],
        order: tuple[NDArray[np.intp], Mask],
    ) -> None:
        self.start, self.end = start, start + duration
        self.previous, self.apart = order
        ready = self._ready(before)
        gap = np.where(np.isneginf(ready), np.nan, start - ready)
        known = np.where(np.isnan(gap), np.inf, gap).min(axis=(0, 2))
        self.lag: Floats = np.where(np.isinf(known), 0.0, np.maximum(known, 0.0))
        for now, rank in np.argwhere(self.apart).tolist():
            arrived = start[:, self.previous[now, rank], rank]
            ready[:, now, rank] = np.maximum(ready[:, now, rank], arrived)
        self.ready = ready
        self.beside = np.zeros(start.shape[1], bool)

    def _ready(self, before: tuple[tuple[int, ...], ...]) -> Floats:
        """(S, J, W) latest end of what it depends on; -inf where nothing."""
        ready = np.full(self.start.shape, -np.inf)
        for now, earlier in enumerate(before):
            for one in earlier:
                ready[:, now] = np.fmax(ready[:, now], self.end[:, one])
        return ready

    def segments(
        self, first: Floats, busy: list[Coverage | None], meeting: list[Coverage]
    ) -> tuple[Floats, Floats]:
        """(S, J, W) begin and length of the segments; `first` where nothing came before."""
        own = np.where(np.isneginf(self.ready), first, np.maximum(self.start - self.ready, 0.0))
        since = self.start - own
        for at, covered in enumerate(busy):
            if covered is not None:
                self.beside |= self._runs_beside(at, covered)
        for at, covered in enumerate(busy):
            if covered is not None:
                self._from_arrival(at, since, own, busy=covered, meeting=meeting[at])
        own[np.isnan(self.start)] = np.nan
        since[np.isnan(self.start)] = np.nan
        return since, own

    def _runs_beside(self, at: int, covered: Coverage) -> Mask:
        """(J,) whether kernels of a rank ran during the collective before, in its typical step."""
        beside = np.zeros(self.start.shape[1], bool)
        follows = self.previous[:, at] >= 0
        earlier = self.previous[follows, at]
        begin, end = self.start[:, earlier, at], self.end[:, earlier, at]
        hidden = np.median(covered.within(begin, end), axis=0)
        least = np.maximum(_BESIDE_SHARE * np.median(end - begin, axis=0), _BESIDE_NS)
        beside[follows] = hidden > least
        return beside

    def _from_arrival(
        self, at: int, since: Floats, own: Floats, *, busy: Coverage, meeting: Coverage
    ) -> None:
        """Segments of a rank that count from its arrival at the collective before, in place."""
        now = np.flatnonzero(self.beside & (self.previous[:, at] >= 0))
        begin, end = self.start[:, self.previous[now, at], at], self.start[:, now, at]
        waits = meeting.within(begin, end)
        # Kernels inside of collectives: what is covered by both.
        hidden = np.minimum(waits, _both(busy, meeting, begin, end))
        since[:, now, at] = begin
        own[:, now, at] = np.maximum(end - begin - waits + hidden, 0.0)


def _both(busy: Coverage, meeting: Coverage, begin: Floats, end: Floats) -> Floats:
    """What both cover, in ns: by inclusion and exclusion of their union."""
    union = busy.joined(meeting)
    both: Floats = busy.within(begin, end) + meeting.within(begin, end) - union.within(begin, end)
    return both


def _since_step(
    matched: Matched, steps: list[int], ends: _Ends, *, start: Floats, duration: Floats
) -> Floats:
    """(S, J, W) arrival since the begin of the step.

    A step begins where the rank's last collective of the step before ended. If that step is not
    in the trace, clocks would have to be compared; instead the lateness is what the others waited,
    on top of the shortest way from a step marker to the collective.
    """
    markers = np.stack(
        [ends.marker(at, rank, steps) for at, rank in enumerate(matched.ranks)], axis=1
    )
    previous = np.stack([ends.last.get(step - 1, np.full(markers.shape[1], np.nan))
                         for step in steps])  # fmt: skip
    follows = np.maximum(start - previous[:, None, :], 0.0)
    late = np.nanmax(duration, axis=2, keepdims=True) - duration
    base = _shortest_way(follows, np.maximum(start - markers[:, None, :], 0.0))
    since: Floats = np.where(np.isnan(follows), base + late, follows)
    return since


def _shortest_way(follows: Floats, own: Floats) -> Floats:
    """(S, J, 1) the first rank's way to each collective: as in the steps that follow another.

    Where there is none, from the step markers.
    """
    known = np.where(np.isnan(follows), np.inf, follows).min(axis=2)
    followed = np.isfinite(known).all(axis=1)
    if followed.any():
        typical: Floats = np.median(known[followed], axis=0)
        return np.broadcast_to(typical[None, :, None], (*known.shape, 1))
    marked = np.where(np.isnan(own), np.inf, own).min(axis=2, keepdims=True)
    way: Floats = np.where(np.isinf(marked), 0.0, marked)
    return way


def _recorded(steps: list[int], ends: _Ends) -> Floats:
    recorded = np.full(len(steps), np.nan)
    for at, step in enumerate(steps):
        if step - 1 in ends.last:
            lengths = ends.last[step] - ends.last[step - 1]
            known = lengths[~np.isnan(lengths)]
            recorded[at] = float(np.median(known)) if len(known) else np.nan
    return recorded
