"""How long each rank waits in tensor-parallel collectives: side evidence for the diagnosis.

At op level the TP ranks of a worker are one unit: they wait for each other inside forward and
backward, so all take equally long. The one that the others wait for waits least itself.

Flow: `smon.trace.events` → **here** → `smon.trace.context` → `smon.diagnose.tp`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.topology import Layout
from smon.trace.context import Context, Counters
from smon.trace.events import MEETINGS, Kind, ProcessGroup, RankEvents
from smon.trace.groups import GroupKind, kind_by_members, kind_of

Rows = NDArray[np.intp]

#: Counters, per step: what a rank waits in collectives of its TP group, and what they transfer.
TP_WAIT: Final = "tp_wait_s"
TP_COMM: Final = "tp_comm_s"


def tp_waits(ranks: Sequence[RankEvents], layout: Layout) -> Context:
    """The counters of all TP groups of which every rank has a file.

    The shortest duration of a collective over its members is the transfer: the last to arrive
    waits for nobody. What a member takes longer is its wait. Members are matched by sequence
    number, else by their order in the step if all have equally many.
    """
    found = [
        (step, rank, name, value)
        for group, members in _groups(ranks, layout).items()
        if len(members) == len(group.ranks)
        for step, rank, name, value in _of_group(list(members.values()))
    ]
    if not found:
        return Context()
    steps, numbers, names, values = zip(*found, strict=True)
    counters = Counters(
        step=np.array(steps, np.int64),
        rank=np.array(numbers, np.int32),
        name=np.array(names, np.str_),
        value=np.array(values, np.float64),
    )
    return replace(Context(), counters=counters)


def _groups(
    ranks: Sequence[RankEvents], layout: Layout
) -> Mapping[ProcessGroup, dict[int, RankEvents]]:
    """Collectives of each TP group, by member, in order."""
    found: dict[ProcessGroup, dict[int, RankEvents]] = defaultdict(dict)
    for rank in ranks:
        for number, group in enumerate(rank.groups):
            kind = kind_of(group) or kind_by_members(group, layout)
            if kind is not GroupKind.TP or rank.rank not in group.ranks:
                continue
            mine = rank.take(
                (rank.group == number) & (rank.kind == Kind.COLLECTIVE) & (rank.step >= 0)
                & np.isin(rank.collective, [int(each) for each in MEETINGS])
            )  # fmt: skip
            if len(mine):
                found[group][rank.rank] = mine
    return found


def _of_group(members: Sequence[RankEvents]) -> Iterator[tuple[int, int, str, float]]:
    """(step, rank, counter, seconds) of one group."""
    common = set(members[0].step.tolist()).intersection(*(each.step.tolist() for each in members))
    for step in sorted(common):
        durations = _matched([each.take(each.step == step) for each in members])
        if durations is None:
            continue
        transfer = durations.min(axis=0)
        waits = (durations - transfer).sum(axis=1) / 1e9
        for member, wait in zip(members, waits.tolist(), strict=True):
            yield step, member.rank, TP_WAIT, wait
            yield step, member.rank, TP_COMM, float(transfer.sum()) / 1e9


def _matched(members: Sequence[RankEvents]) -> NDArray[np.int64] | None:
    """(members, collectives) durations of what all take part in; None if that cannot be told."""
    numbered = all(
        each.seq.min() >= 0 and len(np.unique(each.seq)) == len(each) for each in members
    )
    if not numbered:
        same = len({len(each) for each in members}) == 1
        return np.stack([each.duration_ns for each in members]) if same else None
    common = members[0].seq
    for each in members[1:]:
        common = np.intersect1d(common, each.seq)
    if not len(common):
        return None
    picked: list[NDArray[np.int64]] = []
    for each in members:
        order = np.argsort(each.seq)
        picked.append(each.duration_ns[order][np.searchsorted(each.seq[order], common)])
    return np.stack(picked)
