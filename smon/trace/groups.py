"""Process groups as dimensions of the layout: names, and coordinates of a rank in them.

Flow: `smon.trace.events` → **here** → `smon.trace.annotated`, `smon.trace.pipeline`,
`smon.collectives`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import product
from typing import Final, Protocol

from smon.errors import MetaError, TopologyError
from smon.topology import Layout
from smon.trace.events import ProcessGroup


class GroupKind(StrEnum):
    """The dimension that the members of a group differ in."""

    WORLD = "world"
    DP = "dp"
    PP = "pp"
    TP = "tp"
    CP = "cp"
    EP = "ep"
    EMBEDDING = "embd"
    MODEL = "mp"


#: Descriptions of Megatron-LM, of DeviceMesh and of torchtitan's meshes. The first that fits
#: counts: the names of mixed groups contain those of plain ones. Groups of a DP kind may hold CP
#: ranks as well: gradients are reduced over both.
_NAMED: Final = (
    (GroupKind.EP, re.compile(r"EXPERT|mesh_(ep|etp|efsdp)$")),
    (GroupKind.EMBEDDING, re.compile(r"EMBEDDING_GROUP")),
    (GroupKind.TP, re.compile(r"^TENSOR_MODEL_PARALLEL_GROUP|mesh_tp")),
    (GroupKind.PP, re.compile(r"^PIPELINE_(MODEL_)?PARALLEL_GROUP|mesh_pp")),
    (GroupKind.CP, re.compile(r"^CONTEXT_PARALLEL_GROUP|mesh_cp")),
    (GroupKind.DP, re.compile(r"(?<!AND_)DATA_PARALLEL_GROUP|mesh_(dp|fsdp|ddp|batch|loss)")),
    (GroupKind.MODEL, re.compile(r"^MODEL_PARALLEL_GROUP")),
    (GroupKind.WORLD, re.compile(r"^(default_pg|world|mesh_world|mesh_default)$")),
)

#: Other groups of experts hold more dimensions than this one.
_EXPERT: Final = re.compile(r"^EXPERT_MODEL_PARALLEL_GROUP|mesh_ep$")


class Member(Protocol):
    """A rank and the groups it belongs to."""

    @property
    def rank(self) -> int:
        """Global rank."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""

    @property
    def groups(self) -> tuple[ProcessGroup, ...]:
        """Communicators."""


def kind_of(group: ProcessGroup) -> GroupKind | None:
    """What a group is for, by its description; None if that says nothing."""
    return next((kind for kind, name in _NAMED if name.search(group.description)), None)


def kind_by_members(group: ProcessGroup, layout: Layout) -> GroupKind | None:
    """What a group without a telling name is for: the dimensions that its members differ in.

    None if it has fewer than two members, or differs in dimensions that no group of SMon's does.
    """
    if len(group.ranks) < 2 or max(group.ranks) >= layout.world_size:  # noqa: PLR2004  # alone
        return None
    if len(group.ranks) == layout.world_size:
        return GroupKind.WORLD
    places = [layout.place(rank) for rank in group.ranks]
    varied = {
        name
        for name in ("tp", "cp", "dp", "stage")
        if len({getattr(place, name) for place in places}) > 1
    }
    if varied == {"stage"} and len(group.ranks) < layout.pp:
        return GroupKind.EMBEDDING
    return _BY_DIMENSIONS.get(frozenset(varied))


_BY_DIMENSIONS: Final = {
    frozenset({"tp"}): GroupKind.TP,
    frozenset({"cp"}): GroupKind.CP,
    frozenset({"dp"}): GroupKind.DP,
    frozenset({"dp", "cp"}): GroupKind.DP,
    frozenset({"stage"}): GroupKind.PP,
    frozenset({"stage", "tp"}): GroupKind.MODEL,
}


def layout_of(ranks: Sequence[Member]) -> Layout | None:
    """The layout that the groups of a job describe; None if they do not name its dimensions.

    Sizes of TP, CP and PP are those of their groups. DP has groups of several kinds (replicas and
    shards; with CP and without): its size is what they and the CP groups reach together, over CP.

    Raises
    ------
    TopologyError
        They do, but not in the order tp-cp-dp-pp, or their sizes are not those of the world.
    """
    kinds = (GroupKind.TP, GroupKind.CP, GroupKind.PP)
    tp, cp, pp = (_size(ranks, kind) for kind in kinds)
    block = _largest_block(ranks)
    if (tp, cp, pp, block) == (None, None, None, 0):
        return None
    layout = Layout(dp=max(block // (cp or 1), 1), pp=pp or 1, tp=tp or 1, cp=cp or 1)
    world = max(rank.world_size for rank in ranks)
    if layout.world_size != world:
        raise TopologyError(
            f"the process groups describe {layout}, {layout.world_size} ranks, but the job has "
            f"{world}: give --layout"
        )
    check_layout(ranks, layout)
    return layout


def agreed_layout(ranks: Sequence[Member], declared: Layout | None) -> Layout | None:
    """The declared layout, or that of the process groups.

    Raises
    ------
    MetaError
        They differ, or the declared one has another number of ranks.
    """
    world = max(rank.world_size for rank in ranks)
    if declared is not None and declared.world_size != world:
        raise MetaError(
            f"layout {declared} has {declared.world_size} ranks, the trace is of a job of {world}: "
            "correct --layout or the meta file"
        )
    try:
        found = layout_of(ranks)
    except TopologyError as error:
        if declared is None:
            raise MetaError(str(error)) from error
        found = None
    if declared is None:
        return found
    experts = expert_size(ranks)
    if found is not None:
        # Sizes that one of the two does not say are the other's.
        ep = declared.ep if 1 in (experts, declared.ep) else experts
        found = replace(found, ep=ep, vpp=declared.vpp)
    if found not in (None, declared):
        raise MetaError(
            f"the declared layout {declared} and that of the process groups, {found}, differ: "
            "leave one out, or correct it"
        )
    try:
        check_layout(ranks, declared)
    except TopologyError as error:
        raise MetaError(f"the declared layout {declared} cannot be: {error}") from error
    return declared


def expert_size(ranks: Sequence[Member]) -> int:
    """Expert-parallel size; 1 if no group is for that."""
    groups = (group for rank in ranks for group in rank.groups)
    return max(
        (len(group.ranks) for group in groups if _EXPERT.search(group.description)), default=1
    )


def check_layout(ranks: Sequence[Member], layout: Layout) -> None:
    """Compare a layout with the members of the groups that are named after a dimension.

    Raises
    ------
    TopologyError
        A group has members that the layout puts elsewhere, or the largest has another size.
    """
    sizes = {GroupKind.TP: layout.tp, GroupKind.CP: layout.cp, GroupKind.PP: layout.pp}
    for kind, size in sizes.items():
        found = _size(ranks, kind)
        if found not in (None, size):
            raise TopologyError(
                f"the process groups of {kind} have {found} members, {layout} has {size}: "
                "correct the layout, or leave it out"
            )
    for rank in ranks:
        if rank.rank >= layout.world_size:
            continue
        for group in _of_kind(rank, *_CHECKED):
            expected = _peers(layout, rank.rank, kind_of(group))
            if not set(group.ranks) <= expected:
                raise TopologyError(
                    f"group {group.description!r} of rank {rank.rank} has the ranks "
                    f"{_shown(group.ranks)}; in the order tp-cp-dp-pp of {layout} its peers are "
                    f"{_shown(sorted(expected))}: it is another layout, or ranks are dealt out in "
                    "another order, which SMon does not know"
                )


#: Which coordinates the members of a group of each kind may differ in.
_CHECKED: Final = {
    GroupKind.TP: ("tp",),
    GroupKind.CP: ("cp",),
    GroupKind.DP: ("dp", "cp"),
    GroupKind.PP: ("stage",),
}

_MAX_SHOWN: Final = 8


def _peers(layout: Layout, rank: int, kind: GroupKind | None) -> set[int]:
    """Ranks that differ from one in the coordinates of a kind only."""
    place = layout.place(rank)
    varied = _CHECKED[kind] if kind is not None else ()
    spans = [
        range(size) if name in varied else (getattr(place, name),)
        for name, size in (
            ("dp", layout.dp), ("stage", layout.pp), ("tp", layout.tp), ("cp", layout.cp),
        )
    ]  # fmt: skip
    return {layout.rank(dp, stage, tp, cp) for dp, stage, tp, cp in product(*spans)}


def _shown(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:_MAX_SHOWN]))
    return f"{shown} …" if len(ranks) > _MAX_SHOWN else shown


def _of_kind(rank: Member, *kinds: GroupKind) -> Iterable[ProcessGroup]:
    """Groups of these kinds that a rank is a member of."""
    return (group for group in rank.groups if kind_of(group) in kinds and rank.rank in group.ranks)


def _size(ranks: Sequence[Member], kind: GroupKind) -> int | None:
    """Largest group of a kind; None if there is none with members."""
    return max((len(group.ranks) for rank in ranks for group in _of_kind(rank, kind)), default=None)


def _largest_block(ranks: Sequence[Member]) -> int:
    """How many ranks the groups of DP and CP reach from one to the next, at most; 0: none."""
    groups = {group.ranks for rank in ranks for group in _of_kind(rank, GroupKind.DP, GroupKind.CP)}
    block: dict[int, set[int]] = {}
    for members in groups:
        joined = set(members).union(*(block[rank] for rank in members if rank in block))
        block.update(dict.fromkeys(joined, joined))
    return max(map(len, block.values()), default=0)
