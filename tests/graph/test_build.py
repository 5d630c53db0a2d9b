from __future__ import annotations

from itertools import pairwise

import pytest

from smon.errors import CycleError, UnpairedError
from smon.graph.program import compile_programs
from smon.ops import OpType
from smon.topology import Layout
from tests.builders import Op, edges_of, graph_of, groups, groups_of, replicas_of, table_of

#: One microbatch through two stages, no end of step.
ONE_MICROBATCH = (
    Op("F", 0, 0, 10),
    Op("FS", 0, 10, 11),
    Op("BR", 0, 10, 31),
    Op("B", 0, 31, 51),
    Op("FR", 1, 0, 11),
    Op("F", 1, 11, 21),
    Op("B", 1, 21, 30),
    Op("BS", 1, 30, 31),
)

#: Two microbatches through two stages, all forwards first.
GPIPE = (
    *(Op("F", 0, 0, 10), Op("F", 0, 10, 20), Op("B", 0, 42, 52), Op("B", 0, 53, 63)),
    *(Op("FS", 0, 10, 11), Op("FS", 0, 20, 21), Op("BR", 0, 10, 42), Op("BR", 0, 52, 53)),
    *(Op("F", 1, 11, 21), Op("F", 1, 21, 31), Op("B", 1, 31, 41), Op("B", 1, 41, 51)),
    *(Op("FR", 1, 0, 11), Op("FR", 1, 20, 21), Op("BS", 1, 41, 42), Op("BS", 1, 51, 53)),
)

#: Forwards of one microbatch through two stages of two chunks each; no-ops at both ends.
INTERLEAVED = (
    *(Op("FR", 0, 0, 0), Op("F", 0, 0, 10, 0, 0), Op("FS", 0, 10, 11)),
    *(Op("FR", 0, 10, 22), Op("F", 0, 22, 32, 1, 2), Op("FS", 0, 32, 33)),
    *(Op("FR", 1, 0, 11), Op("F", 1, 11, 21, 0, 1), Op("FS", 1, 21, 22)),
    *(Op("FR", 1, 21, 33), Op("F", 1, 33, 43, 1, 3), Op("FS", 1, 43, 43)),
)


def _end(stage: int, at: float, *names: str, dp: int = 0) -> list[Op]:
    """Ops of the end of a step, one ms each."""
    return [Op(name, stage, at + i, at + i + 1, dp=dp) for i, name in enumerate(names)]


def test_one_microbatch_through_two_stages_gives_the_edges_worked_out_by_hand() -> None:
    """Rules 1, 3, 4 and 6; rule 5 does not apply with a single forward."""
    graph = graph_of(ONE_MICROBATCH, pp=2)
    assert edges_of(graph) == {
        *("F0@0 B0@0", "F0@0 FS0@0", "BR0@0 B0@0"),
        *("F0@1 B0@1", "FR0@1 F0@1", "B0@1 BS0@1"),
    }
    assert groups_of(graph) == groups("FS0@0 FR0@1", "BS0@1 BR0@0")
    assert graph.sync == {}


def test_two_microbatches_chain_streams_post_receives_and_hold_the_first_backward() -> None:
    """Rules 1 to 5 of GPipe: rule 5 points at the forward two places before the first backward."""
    graph = graph_of(GPIPE, pp=2)
    assert edges_of(graph) == {
        *("F0@0 F1@0", "F1@0 B0@0", "B0@0 B1@0"),
        *("FS0@0 FS1@0", "BR0@0 BR1@0", "F0@0 FS0@0", "F1@0 FS1@0"),
        *("BR0@0 B0@0", "BR1@0 B1@0", "B0@0 BR1@0"),
        "F0@0 BR0@0",
        *("F0@1 F1@1", "F1@1 B0@1", "B0@1 B1@1"),
        *("FR0@1 FR1@1", "BS0@1 BS1@1", "B0@1 BS0@1", "B1@1 BS1@1"),
        *("FR0@1 F0@1", "FR1@1 F1@1", "F0@1 FR1@1"),
        "F0@1 BS0@1",
    }
    assert groups_of(graph) == groups("FS0@0 FR0@1", "FS1@0 FR1@1", "BS0@1 BR0@0", "BS1@1 BR1@0")


def test_a_recv_after_the_last_compute_and_a_send_before_the_first_are_noops() -> None:
    """Rule 7a: they stay in their chain, but have no compute partner and no peer."""
    graph = graph_of((*ONE_MICROBATCH, Op("FR", 1, 15, 16), Op("BS", 1, 5, 6)), pp=2)
    assert edges_of(graph) == {
        *("F0@0 B0@0", "F0@0 FS0@0", "BR0@0 B0@0"),
        *("F0@1 B0@1", "FR0@1 F0@1", "B0@1 BS1@1"),
        *("FR0@1 FR1@1", "BS0@1 BS1@1"),
    }
    assert groups_of(graph) == groups("FS0@0 FR0@1", "BS1@1 BR0@0", "FR1@1", "BS0@1")


@pytest.mark.parametrize("late_ms, noops", [(0.049, 0), (0.051, 1)])
def test_a_recv_within_50_us_of_the_last_compute_is_real(late_ms: float, noops: int) -> None:
    """Rule 7a has a tolerance of 50 µs."""
    ops = [Op("F", 0, 11, 21), Op("FR", 0, 11 + late_ms, 12)]
    (replicas,) = replicas_of(table_of(ops), Layout(dp=1, pp=1))
    assert replicas.structure.noop.sum() == noops


@pytest.mark.parametrize("early_ms, noops", [(0.049, 0), (0.051, 1)])
def test_a_send_within_50_us_of_the_end_of_the_first_compute_is_real(
    early_ms: float, noops: int
) -> None:
    """Rule 7a has a tolerance of 50 µs."""
    ops = [Op("F", 0, 11, 21), Op("FS", 0, 12, 21 - early_ms)]
    (replicas,) = replicas_of(table_of(ops), Layout(dp=1, pp=1))
    assert replicas.structure.noop.sum() == noops


def test_interleaved_stages_wrap_around_and_leave_the_noops_of_both_model_ends_alone() -> None:
    """Rules 6 and 7b, VPP 2: the last stage's chunk 0 sends to the first stage's chunk 1."""
    graph = graph_of(INTERLEAVED, pp=2)
    for stage in (0, 1):
        mine = {edge for edge in edges_of(graph) if edge.endswith(f"@{stage}")}
        assert mine == {
            edge.replace("@", f"@{stage}")
            for edge in (
                "F0@ F1@", "FR0@ FR1@", "FS0@ FS1@", "F0@ FS0@", "F1@ FS1@",
                "FR0@ F0@", "FR1@ F1@", "F0@ FR1@",
            )
        }  # fmt: skip
    assert groups_of(graph) == groups("FS0@0 FR0@1", "FS0@1 FR1@0", "FS1@0 FR1@1", "FR0@0", "FS1@1")


def test_interleaved_noops_may_be_left_out_of_the_recording() -> None:
    """Rule 7: a profiler records all sends and receives, or only those that launch."""
    graph = graph_of([op for op in INTERLEAVED if op.start != op.end], pp=2)
    assert groups_of(graph) == groups("FS0@0 FR0@1", "FS0@1 FR0@0", "FS1@0 FR1@1")
    assert {"FR0@0 F1@0", "F0@0 FR0@0", "F0@1 FS0@1"} <= edges_of(graph)
    assert "FR0@0 F0@0" not in edges_of(graph)


def test_the_first_recv_of_the_first_stage_may_be_missing() -> None:
    """Rule 7: the receives left then serve the second compute onwards."""
    more = [Op("FR", 0, 10, 10), Op("FS", 1, 21, 21), Op("FS", 1, 31, 31)]
    graph = graph_of([*GPIPE, *more], pp=2)
    assert {"FR0@0 F1@0", "F0@0 FR0@0", "F0@1 FS0@1", "F1@1 FS1@1"} <= edges_of(graph)
    assert "FR0@0 F0@0" not in edges_of(graph)
    assert groups("FR0@0", "FS0@1", "FS1@1", "FS0@0 FR0@1") <= groups_of(graph)


def test_a_v_shaped_placement_copies_within_the_stage_at_its_turn() -> None:
    """Global chunks 0, 3 on stage 0 and 1, 2 on stage 1: no message between 1 and 2."""
    ops = (
        *(Op("F", 0, 0, 10, 0, 0), Op("FS", 0, 10, 11), Op("FR", 0, 10, 32)),
        *(Op("F", 0, 32, 42, 1, 3), Op("FR", 1, 0, 11), Op("F", 1, 11, 21, 0, 1)),
        *(Op("F", 1, 21, 31, 1, 2), Op("FS", 1, 31, 32)),
    )
    graph = graph_of(ops, pp=2)
    assert edges_of(graph) == {
        *("F0@0 F1@0", "F0@0 FS0@0", "FR0@0 F1@0", "F0@0 FR0@0"),
        *("F0@1 F1@1", "FR0@1 F0@1", "F1@1 FS0@1"),
    }
    assert groups_of(graph) == groups("FS0@0 FR0@1", "FS0@1 FR0@0")


@pytest.mark.parametrize("forwards, held", [(1, None), (2, "F0@0"), (3, "F1@0")])
def test_rule_5_needs_two_forwards_before_the_first_backward(
    forwards: int, held: str | None
) -> None:
    """The first backward-recv waits for the compute two places before the first backward."""
    ops = [Op("F", 0, 10 * i, 10 * i + 10) for i in range(forwards)]
    ops += [Op("FS", 0, 10 * i + 10, 10 * i + 11) for i in range(forwards)]
    ops += [Op("B", 0, 100 + 10 * i, 110 + 10 * i) for i in range(forwards)]
    ops += [Op("BR", 0, 10 + 10 * i, 100 + 10 * i) for i in range(forwards)]
    other = {"F": "B", "FS": "FR", "B": "F", "BR": "BS"}
    ops += [Op("F", 1, 11 + 10 * i, 21 + 10 * i) for i in range(forwards)]
    ops += [Op("B", 1, 60 + 10 * i, 70 + 10 * i) for i in range(forwards)]
    ops += [Op(other["FS"], 1, 10 * i, 10 * i + 11) for i in range(forwards)]
    ops += [Op(other["BR"], 1, 70 + 10 * i, 100 + 10 * i) for i in range(forwards)]
    found = {edge for edge in edges_of(graph_of(ops, pp=2)) if edge.endswith(" BR0@0")}
    assert found == ({f"{held} BR0@0"} if held else set())


def _data_parallel(*middle: Op, end: tuple[str, ...]) -> list[Op]:
    """Two replicas of one stage: an all-gather, one microbatch, `middle`, and an end."""
    one = [Op("AG", 0, 0, 4), Op("F", 0, 4, 14), Op("B", 0, 14, 34), *middle, *_end(0, 40, *end)]
    return [
        Op(op.name, op.stage, op.start, op.end, op.chunk, op.global_chunk, dp)
        for op in one
        for dp in (0, 1)
    ]


def test_without_overlap_the_reduce_scatter_stands_in_the_chain_of_the_end() -> None:
    """Rules 8, 9 and 10 with DP 2, PP 1: AG before the forward, RS after the embedding."""
    ops = _data_parallel(end=("GC", "LN", "EMB", "RS", "CLIP", "OPT"))
    graph = graph_of(ops, pp=1, dp=2)
    assert edges_of(graph) == {
        *("AG0@0 F0@0", "AG0@0 RS0@0", "F0@0 B0@0", "B0@0 GC0@0", "GC0@0 LN0@0"),
        *("LN0@0 EMB0@0", "EMB0@0 RS0@0", "RS0@0 CLIP0@0", "CLIP0@0 OPT0@0"),
    }
    assert groups_of(graph) == groups("AG0@0", "RS0@0", "EMB0@0", "CLIP0@0")
    assert sorted(graph.sync.values()) == [
        (OpType.PARAMS_ALL_GATHER, 0, 0),
        (OpType.GRADS_REDUCE_SCATTER, 0, 0),
        (OpType.OPTIMIZER_CLIP_MAIN_GRAD, -1, 0),
    ]


def test_a_reduce_scatter_that_comes_before_other_reductions_stands_before_them() -> None:
    """Rule 9 as Megatron-LM runs it today: RS, then LN, then EMB."""
    ops = [
        Op("F", 0, 0, 5),
        Op("B", 0, 5, 10),
        Op("RS", 0, 10, 14),
        Op("LN", 0, 14, 15),
        Op("EMB", 0, 15, 17),
        Op("CLIP", 0, 17, 18),
        Op("OPT", 0, 18, 20),
    ]
    chain = ["B0@0", "RS0@0", "LN0@0", "EMB0@0", "CLIP0@0", "OPT0@0"]
    expected = {f"{before} {after}" for before, after in pairwise(chain)}
    assert edges_of(graph_of(ops, pp=1)) == {"F0@0 B0@0", *expected}


def test_a_separate_all_reduce_means_overlap_and_layernorm_waits_for_the_last_reduction() -> None:
    """Rules 8 and 9 with overlap: RS after the last backward, SEP in the chain instead of RS."""
    ops = _data_parallel(Op("RS", 0, 34, 38), end=("GC", "LN", "EMB", "SEP", "CLIP", "OPT"))
    graph = graph_of(ops, pp=1, dp=2)
    assert edges_of(graph) == {
        *("AG0@0 F0@0", "AG0@0 RS0@0", "F0@0 B0@0", "B0@0 RS0@0", "B0@0 GC0@0", "GC0@0 LN0@0"),
        *("RS0@0 LN0@0", "LN0@0 EMB0@0", "EMB0@0 SEP0@0", "SEP0@0 CLIP0@0", "CLIP0@0 OPT0@0"),
    }
    assert groups_of(graph) == groups("AG0@0", "RS0@0", "SEP0@0", "EMB0@0", "CLIP0@0")


def test_a_reduction_that_starts_before_the_last_compute_ended_overlaps() -> None:
    """Rule 8 without a separate all-reduce: the observed times say that it overlaps."""
    ops = _data_parallel(Op("RS", 0, 33, 38), end=("LN", "EMB", "CLIP", "OPT"))
    assert "EMB0@0 RS0@0" not in edges_of(graph_of(ops, pp=1, dp=2))
    assert {"B0@0 RS0@0", "RS0@0 LN0@0", "EMB0@0 CLIP0@0"} <= edges_of(graph_of(ops, pp=1, dp=2))


def test_each_chunk_waits_for_its_own_gathers_and_reduces_after_its_own_backward() -> None:
    """Rule 8 with two chunks: the last gather of each counts, and the later half of a backward."""
    one = (
        *(Op("AG", 0, 0, 1, 0), Op("AG", 0, 1, 2, 0), Op("AG", 0, 2, 3, 1)),
        *(Op("F", 0, 3, 4, 0, 0), Op("F", 0, 4, 5, 1, 1)),
        *(Op("B", 0, 5, 6, 1, 1), Op("B", 0, 6, 7, 0, 0)),
        *(Op("W", 0, 7, 8, 1, 1), Op("W", 0, 8, 9, 0, 0)),
        *(
            Op("RS", 0, 8, 10, 1),
            Op("RS", 0, 10, 11, 0),
            Op("SEP", 0, 12, 13),
            Op("OPT", 0, 13, 14),
        ),
    )
    graph = graph_of(one, pp=1)
    assert edges_of(graph) == {
        *("AG0@0 AG1@0", "AG1@0 AG2@0", "AG2@0 RS0@0", "RS0@0 RS1@0"),
        *("AG1@0 F0@0", "AG2@0 F1@0"),
        *("F0@0 F1@0", "F1@0 B0@0", "B0@0 B1@0", "B1@0 W0@0", "W0@0 W1@0"),
        *("W0@0 RS0@0", "W1@0 RS1@0", "W1@0 SEP0@0", "SEP0@0 OPT0@0"),
        "RS1@0 SEP0@0",
    }


def test_first_and_last_stage_share_the_embedding_and_all_stages_the_clip() -> None:
    """Rules 9 and 10 with PP 3, DP 1: the middle stage has no embedding, no reduction at all."""
    ops: list[Op] = []
    for stage in range(3):
        embedding = ("EMB",) if stage != 1 else ()
        ops += [Op("F", stage, 11 * stage, 11 * stage + 10)]
        ops += [Op("FS", stage, 11 * stage + 10, 11 * stage + 11)] if stage < 2 else []
        ops += [Op("FR", stage, 0, 11 * stage)] if stage else []
        ops += _end(stage, 40, "LN", *embedding, "CLIP", "OPT")
    graph = graph_of(ops, pp=3)
    assert groups("EMB0@0 EMB0@2", "CLIP0@0 CLIP0@1 CLIP0@2") <= groups_of(graph)
    assert {"LN0@0 EMB0@0", "EMB0@0 CLIP0@0", "LN0@1 CLIP0@1"} <= edges_of(graph)
    layernorm = graph.structure.optype == OpType.LAYERNORM_GRADS_ALL_REDUCE
    assert (graph.group[layernorm] == -1).all()


def test_computes_that_start_together_stand_in_order_of_number_then_type() -> None:
    """Section 2: the observed order is by (start, sequence number, op type)."""
    ops = [Op("F", 0, 0, 5), Op("B", 0, 5, 5), Op("F", 0, 5, 9), Op("B", 0, 9, 10)]
    assert edges_of(graph_of(ops, pp=1)) == {"F0@0 B0@0", "B0@0 F1@0", "F1@0 B1@0"}


def test_a_cycle_is_an_error_that_names_its_ops() -> None:
    """A backward that is seen before the forward that it needs: none of them can start."""
    early = {"B": Op("B", 0, 0, 20), "BR": Op("BR", 0, 0, 31)}
    ops = [early.get(op.name, op) if op.stage == 0 else op for op in ONE_MICROBATCH]
    ops = [Op("F", 0, 5, 10) if (op.name, op.stage) == ("F", 0) else op for op in ops]
    with pytest.raises(CycleError, match="wait for each other") as caught:
        compile_programs([graph_of(ops, pp=2)])
    assert {"forward-compute 0 of stage 0", "backward-compute 0 of stage 0"} <= set(
        caught.value.ops
    )


def test_a_send_without_a_receive_is_an_error_that_names_it() -> None:
    """Stage 0 sends twice, stage 1 receives and computes once."""
    ops = [op for op in GPIPE if op.name in ("F", "FS", "FR")]
    ops = [op for op in ops if op.stage == 0 or op.start < 20]
    with pytest.raises(UnpairedError, match="forward-send 1 of stage 0") as caught:
        graph_of(ops, pp=2)
    assert caught.value.ops == ("forward-send 1 of stage 0",)


def test_receives_that_fit_no_compute_are_an_error_that_names_them() -> None:
    """Three computes with neighbours, one receive: which one is missing cannot be told."""
    ops = [Op("F", s, 10 * i + 11 * s, 10 * i + 11 * s + 9) for s in (0, 1) for i in range(3)]
    ops += [Op("FS", 0, 10 * i + 9, 10 * i + 11) for i in range(3)] + [Op("FR", 1, 0, 11)]
    with pytest.raises(UnpairedError, match="stage 1 has 1 forward-recv ops for 3") as caught:
        graph_of(ops, pp=2)
    assert caught.value.ops == ("forward-recv 0 of stage 1",)
