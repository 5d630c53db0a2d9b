from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.errors import MetaError, TopologyError
from smon.ops import OP_TYPES
from smon.topology import Layout
from smon.trace.annotated import names_ops, op_table
from smon.trace.events import Kind, ProcessGroup, RankEvents, StepSpan, event_columns
from smon.trace.groups import GroupKind, kind_of, layout_of
from smon.trace.load import load
from tests.kineto_files import Ddp, write_ddp

PLAIN = Layout(dp=1, pp=1)


def rank_of(
    names: list[str], rank: int = 0, groups: tuple[ProcessGroup, ...] = (), world: int = 1
) -> RankEvents:
    """One annotation of 5 ns for each name, 10 ns apart, in step 3."""
    distinct = list(dict.fromkeys(names))
    columns: dict[str, Any] = event_columns(
        {
            "start_ns": 10**18 + 10 * np.arange(len(names)),
            "duration_ns": np.full(len(names), 5),
            "step": np.full(len(names), 3),
            "kind": np.full(len(names), Kind.ANNOTATION),
            "name": np.array([distinct.index(name) for name in names], np.int32),
        },
        Counter(),
    )
    return RankEvents(
        rank=rank,
        world_size=world,
        **columns,
        names=tuple(distinct),
        groups=groups,
        steps=(StepSpan(3, 10**18, 1000),),
    )


def test_every_op_type_can_be_annotated() -> None:
    """By its label, with or without the prefix."""
    for prefix in ("", "smon::"):
        table = op_table([rank_of([prefix + op.label for op in OP_TYPES])], PLAIN)
        assert table.optype.tolist() == [int(op) for op in OP_TYPES]


def test_numbers_behind_a_name_are_microbatch_and_chunk() -> None:
    """Only of computes; the sequence number counts by start."""
    names = ["forward-compute|mb=2|chunk=1", "forward-compute|mb=3", "forward-send|mb=2|peer=1"]
    table = op_table([rank_of(names)], PLAIN)
    assert table.microbatch.tolist() == [2, 3, -1]
    assert table.chunk.tolist() == [1, -1, -1]
    assert table.seq.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "name", ["forward", "Optimizer.step#AdamW.step", "my-forward-compute", "forward-compute|x", ""]
)
def test_other_annotations_are_no_ops(name: str) -> None:
    """Nothing is guessed from a name that only looks alike."""
    assert len(op_table([rank_of([name, "gc"])], PLAIN)) == 1


def test_the_pipeline_model_needs_computes_of_all_ranks_and_messages() -> None:
    """Otherwise the trace is analysed by its collectives."""
    computes = ["forward-compute", "backward-compute"]
    assert names_ops([rank_of(computes)], PLAIN)
    assert not names_ops([rank_of(computes), rank_of(computes[:1])], PLAIN)
    assert not names_ops([rank_of(computes)], Layout(dp=1, pp=2))
    assert names_ops([rank_of([*computes, "forward-send"])], Layout(dp=1, pp=2))
    assert not names_ops([], PLAIN)


def test_a_trace_whose_annotations_name_no_ops_has_none(tmp_path: Path) -> None:
    """It has events, and an empty table."""
    trace = load(write_ddp(tmp_path, Ddp()))
    assert len(trace.table) == 0
    assert len(trace.events) == 4
    assert (trace.job.layout.dp, trace.job.layout.pp) == (4, 1)


# --- process groups -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "description, kind",
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", GroupKind.TP),
        ("PIPELINE_MODEL_PARALLEL_GROUP", GroupKind.PP),
        ("DATA_PARALLEL_GROUP_WITH_CP", GroupKind.DP),
        ("INTRA_PARTIAL_DATA_PARALLEL_GROUP", GroupKind.DP),
        ("DATA_PARALLEL_GROUP_GLOO", GroupKind.DP),
        ("CONTEXT_PARALLEL_GROUP", GroupKind.CP),
        ("EXPERT_MODEL_PARALLEL_GROUP", GroupKind.EP),
        ("EXPERT_DATA_PARALLEL_GROUP", GroupKind.EP),
        ("POSITION_EMBEDDING_GROUP", GroupKind.EMBEDDING),
        ("MODEL_PARALLEL_GROUP", GroupKind.MODEL),
        ("mesh_dp_shard", GroupKind.DP),
        ("mesh_pp", GroupKind.PP),
        ("default_pg", GroupKind.WORLD),
        ("undefined", None),
    ],
)
def test_groups_are_told_by_their_description(description: str, kind: GroupKind | None) -> None:
    """Names of Megatron-LM and of DeviceMesh."""
    assert kind_of(ProcessGroup("1", description)) is kind


def of_layout(layout: Layout, order: str = "tp dp pp") -> list[RankEvents]:
    """Ranks with the groups that Megatron-LM would make."""
    names = {
        "tp": "TENSOR_MODEL_PARALLEL_GROUP",
        "dp": "DATA_PARALLEL_GROUP",
        "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    }
    sizes = {"tp": layout.tp, "dp": layout.dp, "pp": layout.pp}
    stride, strides = 1, {}
    for name in order.split():
        strides[name] = stride
        stride *= sizes[name]
    ranks = []
    for rank in range(layout.world_size):
        groups = []
        for name, size in sizes.items():
            own = rank // strides[name] % size
            members = tuple(rank + (other - own) * strides[name] for other in range(size))
            groups.append(ProcessGroup(name, names[name], members, size))
        ranks.append(rank_of([], rank, tuple(groups), layout.world_size))
    return ranks


@pytest.mark.parametrize("layout", [Layout(dp=2, pp=2), Layout(dp=2, pp=4, tp=2), Layout(4, 1)])
def test_the_layout_follows_from_the_groups(layout: Layout) -> None:
    """Sizes from the groups; a coordinate is the rank's place in its group."""
    assert layout_of(of_layout(layout)) == layout


def test_another_order_of_ranks_is_an_error() -> None:
    """Every coordinate would be wrong."""
    with pytest.raises(TopologyError, match="another order"):
        layout_of(of_layout(Layout(dp=2, pp=2, tp=2), order="dp tp pp"))


def test_sizes_that_do_not_make_the_world_are_an_error() -> None:
    """A dimension is missing."""
    groups = (ProcessGroup("1", "mesh_tp", (0, 1), 2),)
    with pytest.raises(TopologyError, match="2 ranks, but the job has 8"):
        layout_of([rank_of([], 0, groups, world=8)])


def test_no_named_group_is_no_layout() -> None:
    """Only the declared one counts then."""
    assert layout_of([rank_of([], 0, (ProcessGroup("0", "default_pg", (0, 1), 2),), 2)]) is None


def test_a_declared_layout_of_another_size_is_an_error(tmp_path: Path) -> None:
    """Two truths about one job."""
    paths = write_ddp(tmp_path, Ddp())
    with pytest.raises(MetaError, match="has 8 ranks, the trace is of a job of 4"):
        load(paths, layout=Layout(dp=4, pp=2))
