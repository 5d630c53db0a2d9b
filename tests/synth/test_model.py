from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from smon.errors import CycleError, UnpairedError
from smon.ops import P2P, STREAM_COMPUTE, OpType
from smon.synth.model import run_step
from smon.synth.plan import make_plan
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.synth.schedule import BACKWARD, FORWARD, WEIGHT, Compute, Schedule, Shape
from smon.synth.timing import Durations, Noise, SlowCompute
from tests.synth.builders import PIPELINE_ONLY, ends_ns, pick, quiet, spans_ms

AG, RS = OpType.PARAMS_ALL_GATHER, OpType.GRADS_REDUCE_SCATTER
CLIP, EMBEDDING = OpType.OPTIMIZER_CLIP_MAIN_GRAD, OpType.EMBEDDING_GRADS_ALL_REDUCE
LAYERNORM, SEPARATE = OpType.LAYERNORM_GRADS_ALL_REDUCE, OpType.SEPARATE_GRADS_ALL_REDUCE


def test_gpipe_of_two_stages_gives_the_times_worked_out_by_hand() -> None:
    """GPipe, PP 2, 2 microbatches, one replica: F 10, B 20, P2P 1 ms."""
    made = quiet(schedule="gpipe", pp=2, microbatches=2)
    table = made.table
    assert spans_ms(table, FORWARD, stage=0) == [(0, 10), (10, 20)]
    assert spans_ms(table, OpType.FORWARD_SEND, stage=0) == [(10, 11), (20, 22)]
    assert spans_ms(table, OpType.FORWARD_RECV, stage=1) == [(0, 11), (21, 22)]
    assert spans_ms(table, FORWARD, stage=1) == [(11, 21), (22, 32)]
    assert spans_ms(table, BACKWARD, stage=1) == [(32, 52), (52, 72)]
    assert spans_ms(table, OpType.BACKWARD_SEND, stage=1) == [(52, 53), (72, 74)]
    assert spans_ms(table, OpType.BACKWARD_RECV, stage=0) == [(10, 53), (73, 74)]
    assert spans_ms(table, BACKWARD, stage=0) == [(53, 73), (74, 94)]
    assert spans_ms(table, LAYERNORM) == [(94, 95), (72, 73)]
    assert spans_ms(table, EMBEDDING) == [(95, 98), (73, 98)]
    assert spans_ms(table, CLIP) == [(98, 100), (98, 100)]
    assert spans_ms(table, OpType.OPTIMIZER) == [(100, 107), (100, 107)]
    assert made.step_seconds.tolist() == [0.107]


def _one_stage(*, overlap: bool = False) -> Synthetic:
    """Two replicas of one stage, one microbatch; replica 1 computes at half speed."""
    slow = SlowCompute(stage=0, dp=1, forward=2, backward=2)
    return quiet(dp=2, pp=1, microbatches=1, faults=(slow,), overlap=overlap)


def test_gradients_are_reduced_by_all_replicas_together_after_the_slowest() -> None:
    """Without overlap: layernorm, embedding, reduce-scatter, clip, optimizer; DP ops meet."""
    table = _one_stage().table
    assert spans_ms(table, AG) == [(0, 4), (0, 4)]
    assert spans_ms(table, BACKWARD) == [(14, 34), (24, 64)]
    assert spans_ms(table, LAYERNORM) == [(34, 35), (64, 65)]
    assert spans_ms(table, EMBEDDING) == [(35, 38), (65, 68)]
    assert spans_ms(table, RS) == [(38, 74), (68, 74)]
    assert spans_ms(table, CLIP) == [(74, 76), (74, 76)]
    assert spans_ms(table, OpType.OPTIMIZER) == [(76, 83), (76, 83)]


def test_overlapped_reduction_follows_the_last_gradient_and_holds_the_layernorm_op() -> None:
    """With overlap: reduce-scatter at once, layernorm after it, the separate all-reduce instead."""
    table = _one_stage(overlap=True).table
    assert spans_ms(table, RS) == [(34, 70), (64, 70)]
    assert spans_ms(table, OpType.GC) == [(34, 34), (64, 64)]
    assert spans_ms(table, LAYERNORM) == [(70, 71), (70, 71)]
    assert spans_ms(table, SEPARATE) == [(74, 79), (74, 79)]
    assert spans_ms(table, CLIP) == [(79, 81), (79, 81)]


def test_overlapped_reduction_takes_the_last_chunk_first() -> None:
    """The backward leaves the model's end first, so chunk 1 is reduced before chunk 0."""
    table = quiet(schedule="interleaved", dp=2, pp=2, vpp=2, microbatches=4, overlap=True).table
    assert pick(table, RS, dp=0, stage=0).chunk.tolist() == [1, 0]
    first, second = spans_ms(table, RS, dp=0, stage=0)
    chunk_1_done = max(end for _, end in spans_ms(table, BACKWARD, dp=0, stage=0, chunk=1))
    assert first[0] == chunk_1_done
    assert second[0] >= first[1]


def test_without_overlap_the_chunks_are_reduced_in_order() -> None:
    """One after the other, at the end of the step; each takes its share of the stage's time."""
    table = quiet(schedule="interleaved", dp=2, pp=2, vpp=2, microbatches=4).table
    assert pick(table, RS, dp=0, stage=0).chunk.tolist() == [0, 1]
    (start, middle), (next_start, end) = spans_ms(table, RS, dp=0, stage=0)
    assert (middle - start, next_start, end - next_start) == (3, middle, 3)


def test_the_first_forward_of_each_chunk_waits_for_its_own_all_gather() -> None:
    """Gathers of a stage are a chain; chunk 0 does not wait for the gather of chunk 1."""
    durations = Durations(all_gather_s=2.0)
    table = quiet(durations, schedule="interleaved", dp=2, pp=2, vpp=2, microbatches=2).table
    assert spans_ms(table, AG, dp=0, stage=0) == [(0, 1000), (1000, 2000)]
    chunks = [spans_ms(table, FORWARD, dp=0, stage=0, chunk=chunk)[0][0] for chunk in (0, 1)]
    assert chunks == [1000, 2000]


def test_one_replica_has_no_collectives_over_replicas() -> None:
    """DP 1 has no all-gather, reduce-scatter or separate all-reduce, overlapped or not."""
    for overlap in (False, True):
        assert len(pick(quiet(overlap=overlap).table, AG, RS, SEPARATE)) == 0


def test_first_and_last_stage_alone_reduce_the_embedding() -> None:
    """Middle stages have no such op; in a job of one stage it has no peer."""
    assert set(pick(quiet(pp=4).table, EMBEDDING).stage.tolist()) == {0, 3}
    assert len(pick(quiet(pp=1).table, EMBEDDING)) == 1


@pytest.mark.parametrize("pp,microbatches", [(1, 3), (2, 2), (4, 8), (8, 4)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_without_noise_has_the_step_time_of_the_closed_form(
    schedule: str, pp: int, microbatches: int
) -> None:
    """(M + PP - 1)(F + B): the work of one stage and PP - 1 bubbles."""
    made = quiet(PIPELINE_ONLY, schedule=schedule, pp=pp, microbatches=microbatches)
    assert made.step_seconds.tolist() == [pytest.approx((microbatches + pp - 1) * 0.180)]


@pytest.mark.parametrize("pp,vpp,microbatches", [(2, 2, 4), (4, 2, 8), (4, 3, 12)])
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(
    pp: int, vpp: int, microbatches: int
) -> None:
    """M (F + B) + (PP - 1)(F + B) / VPP (Narayanan et al. 2021, section 2.2)."""
    made = quiet(PIPELINE_ONLY, schedule="interleaved", pp=pp, vpp=vpp, microbatches=microbatches)
    expected = (microbatches + (pp - 1) / vpp) * 0.180
    assert made.step_seconds.tolist() == [pytest.approx(expected)]


def test_zero_bubble_of_two_stages_gives_the_times_worked_out_by_hand() -> None:
    """F = B = W = 10 ms, 2 microbatches, free messages: 70 ms where 1F1B takes 90."""
    durations = replace(PIPELINE_ONLY, forward_s=0.010, backward_s=0.020)
    made = quiet(durations, schedule="zero-bubble", pp=2, microbatches=2)
    assert spans_ms(made.table, BACKWARD, stage=0) == [(30, 40), (50, 60)]
    assert spans_ms(made.table, WEIGHT, stage=0) == [(40, 50), (60, 70)]
    assert spans_ms(made.table, BACKWARD, stage=1) == [(20, 30), (40, 50)]
    assert spans_ms(made.table, WEIGHT, stage=1) == [(50, 60), (60, 70)]
    assert made.step_seconds.tolist() == [0.070]


@pytest.mark.parametrize("pp,microbatches", [(2, 4), (4, 8), (8, 16)])
def test_zero_bubble_has_a_third_of_the_bubble(pp: int, microbatches: int) -> None:
    """ZB-H1 with F = B = W: bubble (PP - 1)(F + B - W) (Qi et al. 2023, table 2)."""
    made = quiet(PIPELINE_ONLY, schedule="zero-bubble", pp=pp, microbatches=microbatches)
    expected = microbatches * 0.180 + (pp - 1) * 0.060
    assert made.step_seconds.tolist() == [pytest.approx(expected)]


def test_the_last_weight_gradient_releases_the_overlapped_reduction() -> None:
    """With a split backward the gradients of a chunk are there after its last W."""
    table = quiet(schedule="zero-bubble", dp=2, pp=2, microbatches=4, overlap=True).table
    last = max(end for _, end in spans_ms(table, WEIGHT, dp=0, stage=1))
    assert spans_ms(table, RS, dp=0, stage=1)[0][0] == last


def test_the_first_backward_receive_is_posted_two_places_before_the_first_backward() -> None:
    """1F1B, PP 4: stage 1 runs F0 F1 F2 B0, so the receive is posted as F1 ends."""
    table = quiet(pp=4).table
    posted = spans_ms(table, OpType.BACKWARD_RECV, stage=1)[0][0]
    assert posted == spans_ms(table, FORWARD, stage=1)[1][1]


def test_with_one_forward_before_it_the_first_backward_receive_is_posted_at_once() -> None:
    """GPipe with a single microbatch has one forward only: the receive starts with the step."""
    table = quiet(schedule="gpipe", pp=2, microbatches=1).table
    assert spans_ms(table, OpType.BACKWARD_RECV, stage=0)[0][0] == 0


def test_sends_of_one_type_are_a_chain() -> None:
    """A send waits for the one before it, which waits for the receiver; compute goes on."""
    slow = SlowCompute(stage=1, forward=5.0)
    table = quiet(schedule="gpipe", pp=2, microbatches=3, faults=(slow,)).table
    assert spans_ms(table, FORWARD, stage=0) == [(0, 10), (10, 20), (20, 30)]
    assert spans_ms(table, OpType.FORWARD_SEND, stage=0) == [(10, 11), (20, 62), (62, 113)]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Small jobs of every kind, with noise, launch delays and faults."""
    schedule = draw(st.sampled_from(Schedule))
    interleaved = schedule is Schedule.INTERLEAVED
    pp, dp = draw(st.integers(2 if interleaved else 1, 4)), draw(st.integers(1, 3))
    slow = SlowCompute(
        stage=draw(st.integers(0, pp - 1)), dp=draw(st.integers(0, dp - 1)), backward=1.7
    )
    return Scenario(
        schedule=schedule,
        dp=dp,
        pp=pp,
        vpp=draw(st.integers(2, 3)) if interleaved else 1,
        microbatches=draw(st.integers(1, 3)) * (pp if interleaved else 1),
        steps=draw(st.integers(1, 2)),
        seed=draw(st.integers(0, 1000)),
        overlap=draw(st.booleans()),
        record_noops=interleaved and draw(st.booleans()),
        noise=Noise(0.05, 0.05, launch_delay_s=draw(st.sampled_from([0.0, 0.002]))),
        faults=(slow,) if draw(st.booleans()) else (),
    )


@given(scenarios())
def test_a_worker_computes_one_op_at_a_time(scenario: Scenario) -> None:
    """On the compute stream of a worker each op starts after the end of the one before."""
    table = generate(scenario).table
    for rank in np.unique(table.rank):
        ops = pick(table, *STREAM_COMPUTE, rank=int(rank))
        ops = ops.take(np.argsort(ops.start_ns, kind="stable"))
        assert np.all(ops.start_ns[1:] >= ends_ns(ops)[:-1])


@given(scenarios())
def test_the_ends_of_a_group_coincide_after_its_latest_start(scenario: Scenario) -> None:
    """A DP collective ends at one time on all replicas, the clip on all workers."""
    table = generate(scenario).table
    for step in scenario.step_numbers:
        groups = [pick(table, CLIP, step=step)]
        for stage in range(scenario.pp):
            ops = pick(table, AG, RS, SEPARATE, step=step, stage=stage)
            groups += [
                ops.take((ops.optype == optype) & (ops.seq == seq))
                for optype, seq in {*zip(ops.optype.tolist(), ops.seq.tolist(), strict=True)}
            ]
        for group in groups:
            assert len(set(ends_ns(group).tolist())) == 1
            assert ends_ns(group)[0] > group.start_ns.max()


@given(scenarios())
def test_real_sends_and_receives_pair_up_in_order_and_end_together(scenario: Scenario) -> None:
    """The k-th send of a stage ends with the k-th receive of its neighbour, no-ops left out."""
    made = generate(replace(scenario, record_noops=False, steps=1))
    directions = (
        (OpType.FORWARD_SEND, OpType.FORWARD_RECV, 1),
        (OpType.BACKWARD_SEND, OpType.BACKWARD_RECV, -1),
    )
    for send, receive, towards in directions:
        for stage in range(scenario.pp):
            peer = (stage + towards) % scenario.pp
            sent = pick(made.table, send, stage=stage)
            received = pick(made.table, receive, stage=peer)
            assert ends_ns(sent).tolist() == ends_ns(received).tolist()
            assert np.all(ends_ns(sent) > np.maximum(sent.start_ns, received.start_ns))


@given(scenarios())
def test_sequence_numbers_count_the_ops_of_a_type_by_start(scenario: Scenario) -> None:
    """Per step, worker and op type: 0, 1, 2 …, with starts that never go back."""
    table = generate(scenario).table
    key = np.stack([table.step, table.rank, table.optype])
    same = np.all(key[:, 1:] == key[:, :-1], axis=0)
    assert np.array_equal(table.seq[1:], np.where(same, table.seq[:-1] + 1, 0))
    assert np.all(np.diff(table.start_ns)[same] >= 0)


@given(pp=st.integers(2, 4), vpp=st.integers(2, 3), seed=st.integers(0, 1000))
def test_recording_no_ops_changes_no_other_op(pp: int, vpp: int, seed: int) -> None:
    """Without the rows that have no peer, the table is the same as if they were not recorded."""
    bare = Scenario("interleaved", pp=pp, vpp=vpp, microbatches=2 * pp, steps=2, seed=seed)
    without, full = generate(bare), generate(replace(bare, record_noops=True))
    noop = _noops(full, bare)
    assert np.array_equal(full.table.start_ns[~noop], without.table.start_ns)
    assert np.array_equal(full.table.duration_ns[~noop], without.table.duration_ns)
    assert set(full.table.duration_ns[noop].tolist()) == {1000}


def _noops(made: Synthetic, scenario: Scenario) -> NDArray[np.bool_]:
    """Mask of sends and receives whose compute, the one of the same number, is at a model end."""
    table = made.table
    ends = (
        (OpType.FORWARD_RECV, FORWARD, 0),
        (OpType.FORWARD_SEND, FORWARD, scenario.pp * scenario.vpp - 1),
        (OpType.BACKWARD_SEND, BACKWARD, 0),
        (OpType.BACKWARD_RECV, BACKWARD, scenario.pp * scenario.vpp - 1),
    )
    noop = np.zeros(len(table), bool)
    for optype, kind, model_end in ends:
        noop[table.optype == optype] = pick(table, kind).global_chunk == model_end
    return noop


def test_no_ops_keep_the_number_of_sends_equal_to_the_number_of_computes() -> None:
    """With no-ops recorded, every compute of a worker has its four-type share of messages."""
    made = quiet(schedule="interleaved", pp=2, vpp=2, microbatches=4, record_noops=True)
    for stage in range(2):
        counts = {len(pick(made.table, optype, stage=stage)) for optype in P2P}
        assert counts == {8}


def test_a_launch_delay_postpones_ops_and_leaves_their_work_alone() -> None:
    """Compute takes as long as without delays, and no op starts before it could."""
    scenario = Scenario(dp=2, pp=2, noise=Noise(0.05, 0.05))
    prompt = generate(scenario)
    late = generate(replace(scenario, noise=Noise(0.05, 0.05, launch_delay_s=0.003)))
    compute = np.isin(prompt.table.optype, list(STREAM_COMPUTE))
    assert np.array_equal(prompt.table.duration_ns[compute], late.table.duration_ns[compute])
    assert np.all(late.step_seconds > prompt.step_seconds)
    ops = pick(late.table, *STREAM_COMPUTE, step=0, dp=0, stage=0)
    order = np.argsort(ops.start_ns)
    gaps = [
        ops.start_ns[after] - ends_ns(ops)[before] for before, after in pairwise(order.tolist())
    ]
    assert min(gaps) > 0


def _run(programs: tuple[str, str]) -> None:
    """Run two stages whose programs are spelt out, e.g. ``F0 B0``."""
    plan = make_plan(Shape(Schedule.ONE_F_ONE_B, 1, 2, 1, 2, overlap=False))
    kinds = {"F": FORWARD, "B": BACKWARD}
    spelt = tuple(
        tuple(Compute(kinds[word[0]], 0, int(word[1:])) for word in text.split())
        for text in programs
    )
    run_step(replace(plan, programs=spelt), np.ones((len(plan), 1, 1), np.int64), None, 0)


def test_programs_that_wait_for_each_other_are_an_error() -> None:
    """Stage 0 cannot run a backward before the forward that it comes from."""
    with pytest.raises(CycleError, match="B0 of stage 0, F0 of stage 1"):
        _run(("B0 F0 F1 B1", "F0 B0 F1 B1"))


def test_stages_that_order_their_messages_differently_are_an_error() -> None:
    """The first message sent must be the first one that is received."""
    with pytest.raises(UnpairedError, match="send and receive in one order"):
        _run(("F1 F0 B0 B1", "F0 B0 F1 B1"))
