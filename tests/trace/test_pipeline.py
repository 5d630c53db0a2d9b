from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.analysis import Options, analyze
from smon.errors import MetaError
from smon.ops import OpType
from smon.synth.faults import SlowCompute
from smon.synth.spec import Scenario
from smon.topology import Layout
from smon.trace.formats import kineto
from smon.trace.load import Trace, load
from smon.trace.table import OpTable
from tests.kineto_files import write_json
from tests.pipeline_kineto import AUTOGRAD_THREAD, LAYERS, Made, Pipeline, write_pipeline

JOB = Scenario(dp=2, pp=4, microbatches=6, steps=3)
CHUNKS = Scenario(dp=2, pp=4, vpp=2, schedule="interleaved", microbatches=8, steps=2)
SMALL = Scenario(dp=2, pp=2, microbatches=4, steps=3)


def ordered(table: OpTable) -> OpTable:
    """In one order, whoever made it."""
    return table.take(np.lexsort((table.seq, table.optype, table.rank, table.step)))


def assert_same_ops(found: OpTable, true: OpTable) -> None:
    """Every op with its type, microbatch and place; starts and durations to the nanosecond."""
    found, true = ordered(found), ordered(true)
    assert len(found) == len(true)
    for name in ("step", "dp", "stage", "rank", "optype", "seq", "chunk", "microbatch"):
        assert np.array_equal(found.columns[name], true.columns[name]), name
    assert np.array_equal(found.start_ns, true.start_ns)
    assert np.array_equal(found.duration_ns, true.duration_ns)


def made_and_loaded(folder: Path, job: Pipeline) -> tuple[Made, Trace]:
    """Files of a job, read."""
    made = write_pipeline(folder, job)
    return made, load(made.files)


@pytest.mark.parametrize(
    "job",
    [
        Pipeline(JOB),
        Pipeline(SMALL, tp=2),
        Pipeline(replace(JOB, microbatches=2)),
        Pipeline(replace(JOB, dp=1, pp=3)),
        Pipeline(JOB, batched=False),
        Pipeline(JOB, batched=False, named=True),
        Pipeline(JOB, gpipe=True),
        Pipeline(JOB, gpipe=True, batched=False, named=True),
        Pipeline(JOB, sizes=True),
        Pipeline(CHUNKS),
        Pipeline(replace(CHUNKS, vpp=3, microbatches=4, dp=1)),
        Pipeline(CHUNKS, overlap=True, batched=False, named=True),
        Pipeline(replace(CHUNKS, pp=2), overlap=True, batched=False, named=True),
    ],
    ids=[
        "1F1B", "TP", "fewer microbatches than stages", "one replica", "a kernel for each message",
        "messages with arguments", "GPipe", "GPipe with arguments",
        "sizes sent ahead", "chunks",
        "three chunks, no steady part", "chunks, overlapping messages", "chunks on two stages",
    ],
)  # fmt: skip
def test_the_ops_of_a_pipeline_are_those_that_were_laid_out(job: Pipeline, tmp_path: Path) -> None:
    """Nothing but kernels, messages and process groups is in the trace."""
    made, trace = made_and_loaded(tmp_path, job)
    assert not trace.events
    assert trace.job.layout == job.layout
    assert_same_ops(trace.table, made.table)
    assert any("no annotation names the ops" in note for note in trace.notes)


def test_the_report_is_that_of_the_op_trace(tmp_path: Path) -> None:
    """A slow worker: the same verdict, worker, slowdown and ledger."""
    job = replace(SMALL, steps=24, faults=(SlowCompute(dp=1, stage=1, forward=1.3, backward=1.3),))
    made, trace = made_and_loaded(tmp_path, Pipeline(job))
    found = analyze(trace.table, trace.job)
    true = analyze(made.table, trace.job)
    assert found.verdict == "straggler"
    assert found.findings[0].where.rank == 3
    assert found.findings[0].cause == "slow_gpu"
    assert _facts(found.to_json()) == _facts(true.to_json())


def _facts(text: str) -> dict[str, Any]:
    report = json.loads(text)
    return {key: value for key, value in report.items() if key not in ("created_at", "run")}


def test_the_slow_rank_of_a_tensor_parallel_group_is_named(tmp_path: Path) -> None:
    """TP2 × PP2 × DP2: all ranks of the worker take equally long, the slow one waits least."""
    job = Pipeline(replace(SMALL, steps=24), tp=2, slow_tp=(1, 0, 1, 1.3))
    _, trace = made_and_loaded(tmp_path, job)
    report = analyze(trace.table, trace.job, Options(), trace.context)
    where = report.findings[0].where
    assert report.verdict == "straggler"
    assert (where.rank, where.dp, where.stage, where.tp) == (3, 1, 0, 1)
    assert any("TP rank 1 waits" in text for text in report.findings[0].evidence)


def test_a_healthy_pipeline_has_no_finding(tmp_path: Path) -> None:
    """Nobody is named."""
    _, trace = made_and_loaded(tmp_path, Pipeline(replace(SMALL, steps=24)))
    report = analyze(trace.table, trace.job)
    assert (report.verdict, report.findings) == ("none", ())


# --- what does not come out -----------------------------------------------------------------


def changed(files: list[Path], change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
            only: int | None = None) -> None:  # fmt: skip
    """Change the events of all files, or of one."""
    for number, path in enumerate(files):
        if only in (None, number):
            reading = json.loads(_text(path))
            reading["traceEvents"] = change(reading["traceEvents"])
            write_json(path, reading)


def _text(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def test_a_message_too_many_in_one_step_leaves_that_step_out(tmp_path: Path) -> None:
    """The other steps are analysed, and the note names the one."""
    made = write_pipeline(tmp_path, Pipeline(SMALL))

    def without_one(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows = [event for event in events if "SendRecv" in event["name"]]
        return [event for event in events if event is not rows[-1]]

    changed(made.files, without_one, only=0)
    trace = load(made.files)
    assert sorted(set(trace.table.step.tolist())) == [0, 1]
    assert any("1 step does not show the whole schedule" in note and note.endswith(": 2")
               for note in trace.notes)  # fmt: skip


def test_messages_that_fit_no_schedule_leave_the_collectives(tmp_path: Path) -> None:
    """The note says what was found on each stage, and what was expected."""
    made = write_pipeline(tmp_path, Pipeline(SMALL))

    def without_some(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        rows = [event for event in events if "SendRecv" in event["name"]]
        return [event for event in events if not any(event is row for row in rows[::5])]

    changed(made.files, without_some, only=0)
    trace = load(made.files)
    assert len(trace.table) == 0
    assert len(trace.events) == 4
    note = next(note for note in trace.notes if "its ops cannot be told" in note)
    assert "0: 4/5, 1: 5" in note
    assert "m + stages − 1" in note


def test_forwards_and_backwards_that_nothing_tells_apart_are_not_guessed(tmp_path: Path) -> None:
    """On the last stage no message lies between them; without autograd it stays open."""
    _, trace = made_and_loaded(tmp_path, Pipeline(SMALL, phases=False))
    assert len(trace.table) == 0
    assert any("autograd, which tells backward kernels" in note for note in trace.notes)


def test_a_pipeline_of_which_a_stage_is_missing_is_not_modelled(tmp_path: Path) -> None:
    """Who sends to it cannot be simulated."""
    made = write_pipeline(tmp_path, Pipeline(SMALL))
    trace = load(made.files[:3])
    assert len(trace.table) == 0
    assert any("1 of 4 workers of dp2-pp2 have no file" in note for note in trace.notes)


def test_ranks_of_a_worker_may_be_missing(tmp_path: Path) -> None:
    """One rank of each TP group shows the pipeline; who of them waits is then unknown."""
    made = write_pipeline(tmp_path, Pipeline(SMALL, tp=2))
    trace = load(made.files[::2])
    assert_same_ops(trace.table, made.table.take(made.table.rank % 2 == 0))
    assert not len(trace.context.counters)


@pytest.mark.parametrize("name", ["healthy", "slow_rank3"])
def test_a_pipeline_on_gloo_without_annotations_is_not_guessed(
    name: str, traces: Path, tmp_path: Path
) -> None:
    """Its sends and receives have neither kernels nor groups: the note says what to do."""
    for path in sorted((traces / "torch-gloo-2pp2dp" / name).glob("rank*.json.gz")):
        reading = json.loads(_text(path))
        reading["traceEvents"] = [
            event for event in reading["traceEvents"] if "smon::" not in event.get("name", "")
        ]
        write_json(tmp_path / path.name, reading)
    trace = load([tmp_path])
    assert len(trace.table) == 0
    assert len(trace.events) == 4
    assert any("with gloo, none has): annotate the ops" in note for note in trace.notes)


def test_a_declared_layout_that_the_groups_contradict_is_an_error(tmp_path: Path) -> None:
    """Two truths about one job."""
    made = write_pipeline(tmp_path, Pipeline(SMALL))
    with pytest.raises(MetaError, match=r"declared layout dp1-pp4 and .* dp2-pp2, differ"):
        load(made.files, layout=Layout(dp=1, pp=4))


def test_losses_and_token_counts_are_no_gradients(tmp_path: Path) -> None:
    """What replicas reduce after the backward, of four bytes."""
    made = write_pipeline(tmp_path, Pipeline(SMALL))

    def with_scalars(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            if event["args"].get("Collective name") == "_reduce_scatter_base":
                event["args"]["In msg nelems"] = event["args"]["Out msg nelems"] = 1
        return events

    changed(made.files, with_scalars)
    assert not (load(made.files).table.optype == OpType.GRADS_REDUCE_SCATTER).any()


def test_launches_are_in_the_order_of_the_program(tmp_path: Path) -> None:
    """A message of one stream may start before a compute of another that was launched earlier."""
    made = write_pipeline(tmp_path, Pipeline(SMALL))
    events = kineto.read(made.files[0]).events[0]
    assert (events.launch_ns[events.kind != 3] >= 0).all()
    assert (events.launch_ns < events.start_ns).all()


def test_hosts_of_the_ranks_are_side_evidence(tmp_path: Path) -> None:
    """The trace names them; a name that all machines have is none."""
    made = write_pipeline(tmp_path, Pipeline(SMALL))
    assert load(made.files).context.hosts == dict.fromkeys(range(4), "node-0")
    for path in made.files:
        write_json(path, {**json.loads(_text(path)), "host_name": "localhost"})
    assert load(made.files).context.hosts == {}


def test_one_time_in_two_places_of_the_evidence_counts_once(tmp_path: Path) -> None:
    """What stands beside the files and what is in them is one context."""
    _, trace = made_and_loaded(tmp_path, Pipeline(SMALL, tp=2))
    counters = trace.context.counters
    assert len(counters) == 3 * 8 * 2
    assert len(trace.evidence(trace.context).counters) == len(counters)
    assert trace.evidence(None).hosts == trace.context.hosts


@pytest.mark.parametrize("place, reductions", [(-1, 4 * 3), (-LAYERS * 2 - 1, 0)])
def test_gradients_reduced_beside_the_last_backward_are_ops(
    place: int, reductions: int, tmp_path: Path
) -> None:
    """Launched within the last backward they are; within an earlier one, they are part of it."""
    made = write_pipeline(tmp_path, Pipeline(SMALL))

    def earlier(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
        launches = {each["args"]["correlation"]: each for each in events
                    if each["name"] == "cudaLaunchKernel"}  # fmt: skip
        for event in events:
            if event["args"].get("Collective name") == "_reduce_scatter_base":
                launch = launches[event["args"]["correlation"]]
                backward = [
                    each["ts"]
                    for each in launches.values()
                    if each["tid"] == AUTOGRAD_THREAD and each["ts"] < launch["ts"]
                ]
                launch["ts"] = backward[place] - 1.0
        return events

    changed(made.files, earlier)
    table = load(made.files).table
    assert np.count_nonzero(table.optype == OpType.GRADS_REDUCE_SCATTER) == reductions
    others = made.table.take(made.table.optype != OpType.GRADS_REDUCE_SCATTER)
    assert_same_ops(table.take(table.optype != OpType.GRADS_REDUCE_SCATTER), others)
