"""The ranks of a job, put together from the files of each.

Flow: `smon.trace.formats` → **here** → `smon.trace.load`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from smon.errors import TraceError
from smon.trace.events import RankEvents, concat_events


def gathered(parts: Iterable[RankEvents]) -> tuple[list[RankEvents], list[str]]:
    """One entry per rank, by rank, with notes; files of other steps of one rank are joined.

    A rank that comes twice with the same steps counts once: the first.

    Raises
    ------
    TraceError
        The files are of jobs of different size.
    """
    by_rank: dict[int, list[RankEvents]] = {}
    notes = []
    for part in parts:
        seen = {step.number for other in by_rank.get(part.rank, []) for step in other.steps}
        if part.rank in by_rank and (not part.steps or seen & {step.number for step in part.steps}):
            notes.append(f"left out: another file of rank {part.rank} with the same steps")
        else:
            by_rank.setdefault(part.rank, []).append(part)
    ranks = [concat_events(by_rank[rank]) for rank in sorted(by_rank)]
    world = _world_size(ranks)
    notes += list(dict.fromkeys(note for rank in ranks for note in rank.notes))
    missing = world - len(ranks)
    if missing > 0:
        notes.append(
            f"{missing:,} of {world:,} ranks have no file: who came last is told among those that "
            "have one"
        )
    return [replace(rank, world_size=world) for rank in ranks], notes


def _world_size(ranks: list[RankEvents]) -> int:
    declared = sorted({rank.world_size for rank in ranks} - {0})
    if len(declared) > 1:
        raise TraceError(
            f"expected files of one job, found those of jobs of {declared[0]} and {declared[-1]} "
            "ranks"
        )
    members = (max(group.ranks, default=0) + 1 for rank in ranks for group in rank.groups)
    highest = max((rank.rank + 1 for rank in ranks), default=0)
    world = declared[0] if declared else max(highest, *members, 0)
    if highest > world:
        raise TraceError(f"expected ranks below {world}, found rank {highest - 1}")
    return world
