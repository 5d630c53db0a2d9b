"""Findings about a hang: one for each rank that the job hangs on.

Flow: `smon.hangs.waits` → **here** → `smon.hangs.report`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from smon.hangs.attendance import Behind, Stall
from smon.hangs.waits import Waits
from smon.report import Candidate, Finding, PersistencePart, Victims, Where
from smon.topology import Layout
from smon.trace.dumps import RankDump
from smon.trace.events import ProcessGroup

#: How sure each kind of evidence is: an order of trust, not measured shares. The four faulty ranks
#: of the two public sets are found in this order.
_SILENT: Final = 0.9
_MISSING: Final = 0.8
_MISSING_AND_BEHIND: Final = 0.9
_ODD: Final = 0.8
_BEHIND: Final = 0.6
_UNDUMPED: Final = 0.6
_MESSAGES: Final = 0.5
_CIRCLE: Final = 0.5
_ALL_THERE: Final = 0.3

#: If more of the ranks are behind their peers, the dumps were made one after the other.
_MAX_BEHIND_SHARE: Final = 0.5

MAX_FINDINGS: Final = 16
_MAX_RANKS: Final = 16
_MAX_NAMED: Final = 4
_MAX_GROUPS: Final = 3

_NODE: Final = "dmesg, nvidia-smi -q on its node: Xid errors, ECC, NVLink"


@dataclass(frozen=True, slots=True)
class Hang:
    """What the findings are made from; `by_rank` has the dumps."""

    waits: Waits
    by_rank: dict[int, RankDump]
    layout: Layout


def findings_of(hang: Hang) -> list[Finding]:
    """Ranks that the job hangs on, the surest first; else a circle, else what nobody finishes.

    Empty if the dumps list nothing unfinished.
    """
    found = [_of_rank(hang, rank) for rank in _suspects(hang)]
    if not found:
        found = [_of_messages(hang, rank) for rank in hang.waits.message_roots()]
    if not found and (circle := hang.waits.circle()):
        found = [_of_circle(hang, circle)]
    if not found and hang.waits.stalls:
        found = [_all_there(hang)]
    return sorted(found, key=lambda one: (-one.confidence, one.where.rank or 0))


def _suspects(hang: Hang) -> list[int]:
    """Who does not come though waiting for nobody, who stopped early, who calls something else."""
    waits = hang.waits
    odd = {rank for stall in waits.stalls for rank, _ in stall.odd}
    stopped = waits.behind if len(waits.behind) <= _MAX_BEHIND_SHARE * len(hang.by_rank) else ()
    return sorted({*waits.roots(), *stopped, *odd})


# --- one rank -----------------------------------------------------------------------------------


def _of_rank(hang: Hang, rank: int) -> Finding:
    stalls, behind = hang.waits.stalls_at(rank), hang.waits.behind.get(rank, ())
    odd = [stall for stall in hang.waits.stalls if any(one == rank for one, _ in stall.odd)]
    first = stalls[0] if stalls else odd[0] if odd else None
    label = first.call.label if first is not None else _clearest(behind).label
    return _finding(
        hang,
        rank,
        label=label,
        confidence=_confidence(hang, rank, missing=bool(stalls), odd=bool(odd)),
        evidence=(
            *_absence(hang, rank, stalls),
            *(_called_else(stall, rank) for stall in odd[:1]),
            *_stopped_early(behind),
        ),
        next_steps=_next_steps(hang, rank, stopped=bool(behind), odd=bool(odd)),
    )


def _confidence(hang: Hang, rank: int, *, missing: bool, odd: bool) -> float:
    dump = hang.by_rank.get(rank)
    if dump is None:
        return _UNDUMPED
    if missing and dump.silent:
        return _SILENT
    behind = rank in hang.waits.behind
    if missing:
        return _MISSING_AND_BEHIND if behind else _MISSING
    return _ODD if odd else _BEHIND


def _absence(hang: Hang, rank: int, stalls: Sequence[Stall]) -> list[str]:
    """Which collectives wait for it, and what its own dump says."""
    if not stalls:
        return []
    first = stalls[0]
    lines = [
        f"has not called {_collective(first)}: {_ranks(first.arrived)} "
        f"{'has' if len(first.arrived) == 1 else 'have'} and {_wait(first.arrived)}"
    ]
    dump = hang.by_rank.get(rank)
    if dump is None:
        lines.append("left no dump, so it may have ended, or its node may be gone")
    elif dump.silent:
        most = max(other.entries for other in hang.by_rank.values())
        lines.append(
            f"its dump lists nothing, those of others up to {most:,} calls: nothing was "
            "unfinished when it stopped calling"
        )
    if rank in first.last:
        lines.append(f"the last one that it called there is {first.last[rank]:,}")
    if len(stalls) > 1:
        names = dict.fromkeys(stall.group.description for stall in stalls[1:])
        shown = ", ".join(list(names)[:_MAX_GROUPS])
        lines.append(f"{len(stalls) - 1} more of its groups wait for it: {shown}")
    return lines


def _stopped_early(behind: Sequence[Behind]) -> list[str]:
    """What it lists as unfinished that its peers have finished."""
    if not behind:
        return []
    most = _clearest(behind)
    numbers = (
        f"{most.label} {most.first:,} is" if most.first == most.last else
        f"{most.label} {most.first:,} to {most.last:,} are"
    )  # fmt: skip
    return [
        f"{numbers} unfinished here, in {_group(most.group)}, though {_ranks(most.peers)} "
        "finished: its GPU, or what watches it, stopped"
    ]


def _clearest(behind: Sequence[Behind]) -> Behind:
    """What most peers have finished."""
    return max(behind, key=lambda one: (len(one.peers), one.last - one.first))


def _called_else(stall: Stall, rank: int) -> str:
    called = dict(stall.odd)[rank]
    usual = next(one for one in stall.arrived if one not in dict(stall.odd))
    return (
        f"called {called} as number {stall.seq:,} of {_group(stall.group)}, where others, such as "
        f"rank {usual}, called something else: the ranks do not run the same program"
    )


def _next_steps(hang: Hang, rank: int, *, stopped: bool, odd: bool) -> tuple[str, ...]:
    if rank not in hang.by_rank:
        return (
            f"the log of rank {rank}, and dmesg of its node: did the process end (OOM, signal)?",
            _NODE,
        )
    spy = f"py-spy dump --pid <trainer of rank {rank}>"
    if odd:
        return (f"{spy}: compare with a rank beside it", "look for branches that depend on data")
    if stopped:
        return (_NODE, spy)
    if hang.by_rank[rank].silent:
        return (f"{spy} --native: who holds the interpreter's lock?", _NODE)
    return (spy, _NODE)


# --- nobody in particular -----------------------------------------------------------------------


def _of_messages(hang: Hang, rank: int) -> Finding:
    """A rank that others wait for with a message only."""
    found = [message for message in hang.waits.messages if message.absent == rank]
    lines = [
        f"rank {one.waiter} lists {one.count} {one.kind.label} of {_group(one.group)} more than "
        "this rank has the other end of"
        for one in found[:_MAX_NAMED]
    ]
    return _finding(
        hang,
        rank,
        label=found[0].kind.label,
        confidence=_MESSAGES,
        evidence=(*lines, "sends and receives have no common number: they are counted by peer"),
        next_steps=_next_steps(hang, rank, stopped=False, odd=False),
    )


def _of_circle(hang: Hang, circle: tuple[int, ...]) -> Finding:
    """Ranks that wait for each other."""
    lines = []
    for waiter, absent in zip(circle, (*circle[1:], circle[0]), strict=True):
        stalls = [one for one in hang.waits.stalls_at(absent) if waiter in one.arrived]
        what = _collective(stalls[0]) if stalls else "a message"
        lines.append(f"rank {waiter} waits for rank {absent} in {what}")
    return _of_many(
        hang,
        ranks=circle,
        label="collectives in another order",
        confidence=_CIRCLE,
        evidence=tuple(lines[:_MAX_RANKS]),
        next_steps=("py-spy dump on these ranks: who calls collectives in another order?",),
    )


def _all_there(hang: Hang) -> Finding:
    """The oldest collective that everybody has called and nobody finishes."""
    stall = min(hang.waits.stalls, key=lambda one: one.call.created_ns)
    return _of_many(
        hang,
        ranks=stall.arrived,
        label=stall.call.label,
        confidence=_ALL_THERE,
        evidence=(
            f"{_collective(stall)} is unfinished though {_ranks(stall.arrived)} have called it: "
            "no rank can be named",
            "if the dumps were made while the job ran, that is nothing unusual",
        ),
        next_steps=("NCCL's log and the counters of NICs and links on these nodes", _NODE),
    )


def _of_many(
    hang: Hang,
    *,
    ranks: Sequence[int],
    label: str,
    confidence: float,
    evidence: tuple[str, ...],
    next_steps: tuple[str, ...],
) -> Finding:
    shown = tuple(ranks)[:_MAX_RANKS]
    return Finding(
        severity="warning",
        verdict="hang",
        cause="hang",
        scope="job",
        where=Where(ranks=shown),
        phase=label,
        optypes=(),
        excess_s=0.0,
        excess_share=0.0,
        persistence=PersistencePart("one_off", 1.0, None, None),
        confidence=confidence,
        evidence=evidence,
        victims=None,
        candidates=tuple(Candidate("hang", _where(hang.layout, rank)) for rank in shown),
        next=next_steps,
    )


def _finding(
    hang: Hang,
    rank: int,
    *,
    label: str,
    confidence: float,
    evidence: tuple[str, ...],
    next_steps: tuple[str, ...],
) -> Finding:
    waiting = hang.waits.waiting_for(rank)
    return Finding(
        severity="critical",
        verdict="hang",
        cause="hang",
        scope="rank",
        where=_where(hang.layout, rank),
        phase=label,
        optypes=(),
        excess_s=0.0,
        excess_share=0.0,
        persistence=PersistencePart("one_off", 1.0, None, None),
        confidence=confidence,
        evidence=evidence,
        victims=Victims(len(waiting), waiting[:_MAX_RANKS], None) if waiting else None,
        candidates=(),
        next=next_steps,
    )


# --- words --------------------------------------------------------------------------------------


def _where(layout: Layout, rank: int) -> Where:
    if rank >= layout.world_size:
        return Where(rank=rank)
    place = layout.place(rank)
    return Where(rank=rank, dp=place.dp, stage=place.stage, tp=place.tp)


def _collective(stall: Stall) -> str:
    size = f", {stall.call.shape}" if stall.call.shape else ""
    return f"{stall.call.label} {stall.seq:,} of {_group(stall.group)}{size}"


def _group(group: ProcessGroup) -> str:
    what = group.description or "a group"
    return f"{what} ({group.name}: {_ranks(group.ranks)})"


def _ranks(ranks: Sequence[int]) -> str:
    """E.g. ``ranks 8, 9, 11``."""
    shown = ", ".join(map(str, ranks[:_MAX_NAMED]))
    more = f" and {len(ranks) - _MAX_NAMED:,} more" if len(ranks) > _MAX_NAMED else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"


def _wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
