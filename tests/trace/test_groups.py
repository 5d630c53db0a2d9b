from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import pytest

from smon.errors import MetaError, TopologyError
from smon.topology import Layout
from smon.trace.events import ProcessGroup
from smon.trace.groups import (
    GroupKind,
    agreed_layout,
    check_layout,
    expert_size,
    kind_by_members,
    kind_of,
    layout_of,
)


@dataclass(frozen=True)
class Rank:
    """A rank and its groups."""

    rank: int
    world_size: int
    groups: tuple[ProcessGroup, ...]


def job(sizes: Mapping[str, int], *meshes: Mapping[str, str]) -> list[Rank]:
    """Ranks of a job.

    Parameters
    ----------
    sizes
        Dimensions, the one that counts fastest first.
    meshes
        Names of groups, and the dimensions, joined by blanks, that their members differ in.
    """
    world = 1
    strides = {}
    for name, size in sizes.items():
        strides[name] = world
        world *= size
    return [
        Rank(rank, world, tuple(_groups(rank, sizes, strides, meshes))) for rank in range(world)
    ]


def _groups(
    rank: int,
    sizes: Mapping[str, int],
    strides: Mapping[str, int],
    meshes: tuple[Mapping[str, str], ...],
) -> Iterator[ProcessGroup]:
    for number, (name, dimensions) in enumerate(each for names in meshes for each in names.items()):
        base = rank - sum(rank // strides[one] % sizes[one] * strides[one]
                          for one in dimensions.split())  # fmt: skip
        ranges = [range(0, sizes[one] * strides[one], strides[one]) for one in dimensions.split()]
        members = tuple(sorted(base + sum(steps) for steps in product(*ranges)))
        yield ProcessGroup(str(number), name, members, len(members))


#: As Megatron-LM core 0.16 makes them, order tp-cp-ep-dp-pp; dp = inner dp × ep.
MEGATRON = {
    "default_pg": "tp cp ep dp pp",
    "DATA_PARALLEL_GROUP_WITH_CP": "cp ep dp",
    "DATA_PARALLEL_GROUP_WITH_CP_GLOO": "cp ep dp",
    "DATA_PARALLEL_GROUP": "ep dp",
    "DATA_PARALLEL_GROUP_GLOO": "ep dp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "MODEL_PARALLEL_GROUP": "tp pp",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EMBEDDING_GROUP": "pp",
    "POSITION_EMBEDDING_GROUP": "",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp cp ep dp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp ep dp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp cp",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "tp cp ep dp pp",
}
#: Experts have a mesh of their own: TP, EP, DP, PP; CP is part of the DP of experts.
EXPERTS = {
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "tp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp ep pp",
    "EXPERT_DATA_PARALLEL_GROUP": "dp",
}
MESH = {"mesh_pp": "pp", "mesh_cp": "cp", "mesh_tp": "tp", "mesh_dp_replicate": "replicate"}
#: Flattened meshes of torchtitan, before and since version 0.3.
FLAT = {"mesh_dp_shard": "shard", "mesh_dp": "shard replicate", "mesh_dp_shard_cp": "cp shard",
        "mesh_dp_cp": "cp shard replicate"}  # fmt: skip
VIEWS = {"mesh_world": "tp cp shard replicate pp", "mesh_batch": "shard replicate",
         "mesh_loss_mesh": "cp shard replicate", "mesh_fsdp": "cp shard",
         "mesh_efsdp": "cp shard", "mesh_ep": "tp"}  # fmt: skip

HYBRID = {"tp": 2, "cp": 2, "shard": 2, "replicate": 2, "pp": 2}


def megatron(tp: int, cp: int, ep: int, dp: int, pp: int) -> list[Rank]:
    """Ranks of a Megatron-LM job; `dp` holds the experts' ranks."""
    plain = {"tp": tp, "cp": cp, "ep": 1, "dp": dp, "pp": pp}
    expert = {"tp": tp, "ep": ep, "dp": dp * cp // ep, "pp": pp}
    return [
        Rank(one.rank, one.world_size, one.groups + other.groups)
        for one, other in zip(job(plain, MEGATRON), job(expert, EXPERTS), strict=True)
    ]


@pytest.mark.parametrize(
    "tp, cp, ep, dp, pp",
    [(2, 2, 1, 2, 2), (2, 2, 2, 4, 2), (1, 4, 1, 2, 4), (4, 2, 2, 2, 1), (1, 1, 1, 4, 2)],
)
def test_layouts_of_megatron_come_out_with_context_parallelism(
    tp: int, cp: int, ep: int, dp: int, pp: int
) -> None:
    """Groups for gradients hold the CP ranks, too: these must not count twice."""
    ranks = megatron(tp, cp, ep, dp, pp)
    assert layout_of(ranks) == Layout(dp=dp, pp=pp, tp=tp, cp=cp)
    assert expert_size(ranks) == ep


@pytest.mark.parametrize("names", [{}, FLAT, VIEWS], ids=["plain", "flattened", "views"])
def test_layouts_of_device_meshes_come_out(names: Mapping[str, str]) -> None:
    """Replicas × shards × CP × TP × PP: DP is what replicas and shards make together."""
    ranks = job(HYBRID, {**MESH, **(names or {"mesh_dp_shard": "shard"})})
    assert layout_of(ranks) == Layout(dp=4, pp=2, tp=2, cp=2)


@pytest.mark.parametrize("first", range(0, 16, 5))
def test_one_rank_tells_the_layout_of_megatron(first: int) -> None:
    """Its own groups have all dimensions."""
    assert layout_of(megatron(2, 2, 1, 2, 2)[first : first + 1]) == Layout(2, 2, tp=2, cp=2)


def test_context_parallelism_in_another_place_is_an_error() -> None:
    """The groups of gradients are the same ranks, those of CP are not."""
    ranks = job({"tp": 2, "ep": 1, "dp": 2, "cp": 2, "pp": 2}, MEGATRON)
    with pytest.raises(TopologyError, match=r"'DATA_PARALLEL_GROUP'|'CONTEXT_PARALLEL_GROUP'"):
        layout_of(ranks)


def test_a_declared_layout_has_the_sizes_and_members_of_the_groups() -> None:
    """TP 4 where groups of TP have two ranks; or the right sizes in another order."""
    ranks = megatron(2, 1, 1, 2, 2)
    check_layout(ranks, Layout(dp=2, pp=2, tp=2))
    with pytest.raises(TopologyError, match=r"groups of tp have 2 members, .* has 4"):
        check_layout(ranks, Layout(dp=1, pp=2, tp=4))
    with pytest.raises(TopologyError, match="another order"):
        check_layout(job({"tp": 2, "pp": 2, "dp": 2}, MESH_OF_THREE), Layout(2, 2, tp=2))


def test_expert_parallelism_must_agree_where_both_say_it() -> None:
    """EP 2 by the groups; the declared layout may leave it out, but not say 4."""
    ranks = megatron(2, 2, 2, 4, 2)
    plain = Layout(dp=4, pp=2, tp=2, cp=2)
    assert agreed_layout(ranks, plain) == plain
    assert agreed_layout(ranks, replace(plain, ep=2)) == replace(plain, ep=2)
    with pytest.raises(MetaError, match=r"ep4 and that of the process groups, .*ep2, differ"):
        agreed_layout(ranks, replace(plain, ep=4))


def test_context_parallelism_must_agree() -> None:
    """CP is a dimension of its own: DP 4 is not DP 2 with CP 2."""
    with pytest.raises(MetaError, match=r"dp4-pp2-tp2 and .* dp2-pp2-tp2-cp2, differ"):
        agreed_layout(megatron(2, 2, 1, 2, 2), Layout(dp=4, pp=2, tp=2))


MESH_OF_THREE = {"mesh_pp": "pp", "mesh_dp": "dp", "mesh_tp": "tp"}


@pytest.mark.parametrize(
    "members, kind",
    [
        ((0, 1), GroupKind.TP),
        ((0, 2), GroupKind.CP),
        ((0, 4), GroupKind.DP),
        ((0, 2, 4, 6), GroupKind.DP),
        ((0, 8, 16), GroupKind.PP),
        ((0, 16), GroupKind.EMBEDDING),
        ((0, 1, 8, 9, 16, 17), GroupKind.MODEL),
        (tuple(range(24)), GroupKind.WORLD),
        ((0, 1, 4, 5), None),
        ((3,), None),
        ((), None),
        ((0, 99), None),
    ],
)
def test_groups_without_a_name_are_told_by_their_members(
    members: tuple[int, ...], kind: GroupKind | None
) -> None:
    """By the dimensions that they differ in, of tp2-cp2-dp2-pp3."""
    layout = Layout(dp=2, pp=3, tp=2, cp=2)
    assert kind_by_members(ProcessGroup("7", "undefined", members), layout) is kind


@pytest.mark.parametrize(
    "description, kind",
    [
        ("mesh_batch", GroupKind.DP),
        ("mesh_loss_mesh", GroupKind.DP),
        ("mesh_fsdp", GroupKind.DP),
        ("mesh_dp_shard_cp", GroupKind.DP),
        ("mesh_efsdp", GroupKind.EP),
        ("mesh_world", GroupKind.WORLD),
        ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", None),
        ("DATA_PARALLEL_GROUP_WITH_CP_AG", GroupKind.DP),
        ("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", None),
    ],
)
def test_newer_names_are_known(description: str, kind: GroupKind | None) -> None:
    """Of Megatron-LM core 0.16 and torchtitan 0.3."""
    assert kind_of(ProcessGroup("1", description)) is kind
