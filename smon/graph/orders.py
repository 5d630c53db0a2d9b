"""Grouping lanes by the order or the values of their ops, with holes where ops are missing."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def group_by_value(
    values: NDArray[np.integer], *, unknown: int | None = None
) -> list[NDArray[np.intp]]:
    """Lanes whose columns are equal; `unknown` agrees with everything.

    Parameters
    ----------
    values
        (k, L) one column per lane.

    Returns
    -------
    list
        Lane indices of each group, ascending. A lane with unknowns joins the first group that it
        agrees with; groups are led by the lanes that know most.
    """
    lanes = values.shape[1]
    if lanes == 0:
        return []
    same = values == values[:, :1]
    if bool(same.all()):
        return [np.arange(lanes)]
    holes = values == unknown if unknown is not None else np.zeros(values.shape, bool)
    groups = []
    left = np.arange(lanes)
    while len(left):
        part, gaps = values[:, left], holes[:, left]
        lead = int(np.argmin(gaps.sum(axis=0)))
        agree = (part == part[:, [lead]]) | gaps | gaps[:, [lead]]
        match = agree.all(axis=0)
        groups.append(left[match])
        left = left[~match]
    return groups


def group_by_order(
    start: NDArray[np.float64], kinds: NDArray[np.intp]
) -> tuple[NDArray[np.intp], list[NDArray[np.intp]]]:
    """Lanes whose ops of one stream stand in the same order.

    Ops are sorted by (start, sequence number, op type), as in ``docs/method.md`` section 2.

    Parameters
    ----------
    start
        (k, L) start times, NaN where an op is missing: it may stand anywhere.
    kinds
        (k,) number of the op type, in alphabetical order of the types; ops of one type are
        consecutive and by sequence number.

    Returns
    -------
    ids, orders
        (L,) number of each lane's order, and the orders as (k,) indices.
    """
    ids = np.zeros(start.shape[1], np.intp)
    orders: list[NDArray[np.intp]] = []
    tie = _tie_break(kinds)
    left = np.arange(start.shape[1])
    while len(left):
        part = start if len(left) == start.shape[1] else start[:, left]
        order = _lead_order(part, kinds, tie)
        match = _in_order(part, order, tie)
        ids[left[match]] = len(orders)
        orders.append(order)
        left = left[~match]
    return ids, orders


def _tie_break(kinds: NDArray[np.intp]) -> NDArray[np.intp]:
    """(k,) rank by (sequence number, op type) for ops that start together."""
    seq = np.arange(len(kinds)) - np.searchsorted(kinds, kinds)
    tie = np.empty(len(kinds), np.intp)
    tie[np.lexsort((kinds, seq))] = np.arange(len(kinds))
    return tie


def _lead_order(
    start: NDArray[np.float64], kinds: NDArray[np.intp], tie: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Order of the lane that misses least; its missing ops stand where other lanes have them."""
    holes = np.isnan(start).sum(axis=0)
    lead = int(np.argmin(holes))
    times = start[:, lead]
    if holes[lead]:
        times = _completed(start, times, np.argsort(holes, kind="stable"), kinds)
    return np.lexsort((tie, times))


def _completed(
    start: NDArray[np.float64],
    times: NDArray[np.float64],
    lanes: NDArray[np.intp],
    kinds: NDArray[np.intp],
) -> NDArray[np.float64]:
    """`times` with its holes filled from other lanes, the first of `lanes` that have the op.

    What stands between two ops in one lane is put between the same two here. Lanes differ in
    pace and are late in different places, so a mean over several would mix up the order.
    """
    filled = times.copy()
    for lane in lanes:
        left = np.isnan(filled)
        here = ~np.isnan(start[:, lane])
        if not left.any():
            return filled
        if (left & here).any() and (here & ~np.isnan(times)).any():
            filled[left & here] = _placed(start[:, lane], times, left & here)
    for kind in np.unique(kinds[np.isnan(filled)]):
        # In no lane at all: evenly between its neighbours of the same type.
        slots = np.flatnonzero(kinds == kind)
        known = slots[~np.isnan(filled[slots])]
        if len(known):
            filled[slots] = np.interp(slots, known, filled[known])
    return filled


def _placed(
    other: NDArray[np.float64], times: NDArray[np.float64], ops: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Times of `ops`, which only the other lane has, between their neighbours in both lanes."""
    both = np.flatnonzero(~np.isnan(other) & ~np.isnan(times))
    both = both[np.argsort(other[both], kind="stable")]
    there, here = other[both], np.maximum.accumulate(times[both])
    missing = other[ops]
    early, late = np.minimum(missing - there[0], 0.0), np.maximum(missing - there[-1], 0.0)
    placed: NDArray[np.float64] = np.interp(missing, there, here) + early + late
    return placed


def _in_order(
    start: NDArray[np.float64], order: NDArray[np.intp], tie: NDArray[np.intp]
) -> NDArray[np.bool_]:
    """(L,) lanes whose present ops stand in this order."""
    times = start[order]
    before = times[:-1]
    if np.isnan(times).any():
        before = np.fmax.accumulate(times, axis=0)[:-1]
    wrong: NDArray[np.bool_] = np.any(times[1:] < before, axis=0)
    swapped = np.diff(tie[order]) < 0
    if swapped.any():
        tied = times[1:][swapped] == times[:-1][swapped]
        wrong = np.logical_or(wrong, tied.any(axis=0))
    return np.logical_not(wrong)
