"""Kineto traces of a pipeline on NCCL with a known answer, one file per rank.

What each stage does is written down as Megatron-LM does it (1F1B, a send and the receive that
follows in one kernel), and run: messages meet, TP ranks meet inside of every layer, replicas meet
at the end of the step. Lengths of computes are those of a synthetic job. No annotation names an
op; the ops that were laid out are the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from smon.ops import STREAM_COMPUTE, OpType
from smon.synth.faults.base import Draft
from smon.synth.plan import make_plan
from smon.synth.spec import Scenario
from smon.synth.timing import apply_faults, draw_work
from smon.topology import Layout
from smon.trace.table import OpTable, make_table
from tests.kineto_files import write_json

Event = dict[str, Any]
Worker = tuple[int, int]

F, B = OpType.FORWARD_COMPUTE, OpType.BACKWARD_COMPUTE
FS, FR = OpType.FORWARD_SEND, OpType.FORWARD_RECV
BS, BR = OpType.BACKWARD_SEND, OpType.BACKWARD_RECV

#: The op at the other end of a message, and in which direction that is.
OTHER = {FS: (FR, 1), FR: (FS, -1), BS: (BR, -1), BR: (BS, 1)}

US = 1_000
BASE_NS = 1_790_000_000_000_000_000
LAYERS = 3
MESSAGE_NS, TP_NS, END_NS = 900 * US, 400 * US, 2_000 * US
COMPUTE_STREAM, TP_STREAM, PP_STREAM, DP_STREAM = 7, 20, 24, 28
MAIN_THREAD, AUTOGRAD_THREAD = 100, 101


@dataclass(frozen=True)
class Pipeline:
    """A job.

    Attributes
    ----------
    job
        Sizes, durations, noise and faults; of its schedule only the number of microbatches counts.
    tp
        Tensor-parallel size.
    slow_tp
        (dp, stage, tp, factor): one TP rank computes that much longer.
    gpipe
        All forwards come first.
    overlap
        With several model chunks (of the job): forwards and backwards have calls of their own.
    batched
        A send and the receive that follows are one kernel without arguments.
    named
        Kernels of messages have arguments, which takes one kernel for each.
    phases
        The trace shows what autograd launched.
    sizes
        Before each message its size is sent, and read on the host.
    """

    job: Scenario
    tp: int = 1
    slow_tp: tuple[int, int, int, float] | None = None
    gpipe: bool = False
    overlap: bool = False
    batched: bool = True
    named: bool = False
    phases: bool = True
    sizes: bool = False
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        """Sizes of the job."""
        return replace(self.job.layout, tp=self.tp)


@dataclass(frozen=True)
class Meeting:
    """A collective: its group, what it does, on which stream, on how many elements."""

    group: str
    name: str
    stream: int
    elements: int


#: What TP ranks do at the end of each layer.
LAYER = Meeting("TENSOR_MODEL_PARALLEL_GROUP", "allreduce", TP_STREAM, 4_000_000)


@dataclass(frozen=True)
class Made:
    """Files, and the ops that they were made of."""

    files: list[Path]
    table: OpTable


def write_pipeline(folder: Path, job: Pipeline) -> Made:
    """Write one file per rank."""
    folder.mkdir(parents=True, exist_ok=True)
    made = _Job(job)
    made.run()
    files = [
        write_json(folder / f"rank{rank.rank}.pt.trace.json.gz", _document(job, rank))
        for rank in made.ranks.values()
    ]
    return Made(files, _table(made.ops, job.layout))


# --- what each stage does ------------------------------------------------------------------------


def megatron_program(stages: int, stage: int, microbatches: int) -> Iterator[tuple[OpType, ...]]:
    """Computes and calls of one stage, as `forward_backward_pipelining_without_interleaving`."""
    warmup = min(stages - stage - 1, microbatches)
    remaining = microbatches - warmup
    for _ in range(warmup):
        yield from ((FR,), (F,), (FS,))
    if remaining:
        yield (FR,)
    for number in range(remaining):
        yield from ((F,), (FS, BR), (B,))
        yield (BS,) if number == remaining - 1 else (BS, FR)
    for _ in range(warmup):
        yield from ((BR,), (B,), (BS,))


def gpipe_program(microbatches: int) -> Iterator[tuple[OpType, ...]]:
    """Computes and calls of any stage: forwards, then backwards."""
    for _ in range(microbatches):
        yield from ((FR,), (F,), (FS,))
    for _ in range(microbatches):
        yield from ((BR,), (B,), (BS,))


def interleaved_program(
    stages: int, stage: int, microbatches: int, chunks: int, *, overlap: bool
) -> Iterator[tuple[OpType, ...]]:
    """Likewise with several chunks, as `forward_backward_pipelining_with_interleaving`."""
    total = microbatches * chunks
    warmup = min((stages - stage - 1) * 2 + (chunks - 1) * stages, total)

    def chunk(turn: int) -> int:
        return turn % (stages * chunks) // stages

    def call(send: OpType, turn: int, *, leads: bool, ends: bool) -> tuple[OpType, ...]:
        done = chunk(turn) == chunks - 1
        sends = () if ends and done else (send,)
        if turn == total - 1:
            return sends
        back = turn - stages + 1
        silent = leads and (back < 0 or chunk(back) == chunks - 1)
        return sends if silent else (*sends, FR if send is FS else BR)

    first, last = stage == 0, stage == stages - 1
    yield () if first else (FR,)
    for turn in range(warmup):
        yield (F,)
        sent = call(FS, turn, leads=first, ends=last)
        if turn < warmup - 1 or warmup == total or last:
            yield sent
        else:
            yield (*sent, BR)
    for turn in range(total - warmup):
        yield (F,)
        onwards, back = (
            call(FS, turn + warmup, leads=first, ends=last),
            call(BS, turn, leads=last, ends=first),
        )
        if overlap:
            yield from (onwards, (B,), back)
        else:
            yield from ((B,), (*onwards, *back))
    if warmup == total and not last:
        yield (BR,)
    for turn in range(total - warmup, total):
        yield from ((B,), call(BS, turn, leads=last, ends=first))


# --- the job -------------------------------------------------------------------------------------


class _Job:
    """Runs all steps; `ops` gets (step, rank, op, start, end, microbatch, chunk)."""

    def __init__(self, made: Pipeline) -> None:
        self.made = made
        layout = made.layout
        groups = _groups(layout)
        self.ranks = {
            rank: _Rank(rank, made, [group for group in groups if rank in group["ranks"]])
            for rank in range(layout.world_size)
        }
        self.ops: list[tuple[int, int, OpType, int, int, int, int]] = []
        self.work = _work(made.job)
        self.now = dict.fromkeys(product(range(layout.dp), range(layout.pp)), BASE_NS)

    def run(self) -> None:
        for place, step in enumerate(self.made.job.step_numbers):
            for rank in self.ranks.values():
                rank.begin_step()
            for dp in range(self.made.layout.dp):
                self._pipeline(dp, step, place)
            self._end_of_step(step)
            for rank in self.ranks.values():
                rank.end_step(step)

    def _pipeline(self, dp: int, step: int, place: int) -> None:
        """All stages of one replica, each until a message whose other end has not come."""
        stages = range(self.made.layout.pp)
        left = {stage: list(self._calls(stage)) for stage in stages}
        posted: dict[tuple[int, OpType, int], int] = {}
        counts = {stage: Counter[OpType]() for stage in stages}
        while any(left.values()):
            calls = sum(map(len, left.values()))
            self._round(dp, step, place, left, counts, posted)
            if calls == sum(map(len, left.values())):
                raise AssertionError(f"stages wait for each other: {left}")

    def _round(
        self, dp: int, step: int, place: int, left: dict[int, list[tuple[OpType, ...]]],
        counts: dict[int, Counter[OpType]], posted: dict[tuple[int, OpType, int], int],
    ) -> None:  # fmt: skip
        for stage, calls in left.items():
            while calls and self._do((dp, stage), step, place, calls[0], counts[stage], posted):
                calls.pop(0)

    def _calls(self, stage: int) -> Iterator[tuple[OpType, ...]]:
        stages, count = self.made.layout.pp, self.made.job.microbatches
        chunks = self.made.job.vpp
        if chunks > 1:
            program = interleaved_program(stages, stage, count, chunks, overlap=self.made.overlap)
            yield from (call for call in program if call)
            return
        ends = {FR, BS} if stage == 0 else set()
        ends |= {FS, BR} if stage == stages - 1 else set()
        program = (
            gpipe_program(count) if self.made.gpipe else megatron_program(stages, stage, count)
        )
        for call in program:
            real = tuple(op for op in call if op not in ends)
            if real:
                yield real

    def _do(
        self, worker: Worker, step: int, place: int, call: tuple[OpType, ...],
        counts: Counter[OpType], posted: dict[tuple[int, OpType, int], int],
    ) -> bool:  # fmt: skip
        """Run a compute, or messages if their other ends have come; whether it was done."""
        stage = worker[1]
        if call[0] in STREAM_COMPUTE:
            self._compute(worker, step, call[0], counts[call[0]], place)
            counts[call[0]] += 1
            return True
        for op in call:
            posted[stage, op, counts[op]] = self.now[worker]
        others = []
        for op in call:
            other, direction = OTHER[op]
            there = (stage + direction) % self.made.layout.pp
            others.append(posted.get((there, other, counts[op])))
        if None in others:
            return False
        self._message(worker, step, call, [other or 0 for other in others])
        counts.update(call)
        return True

    def _message(
        self, worker: Worker, step: int, call: tuple[OpType, ...], others: list[int]
    ) -> None:
        start = self.now[worker]
        ends = [max(start, other) + MESSAGE_NS for other in others]
        if self.made.batched:
            ends = [max(ends)] * len(ends)
        for rank in self._of(worker):
            for op, end in zip(call, ends, strict=True):
                self.ops.append((step, rank.rank, op, start, end, -1, -1))
            if self.made.batched:
                if self.made.sizes:
                    rank.batch(start, start + 20 * US)
                    rank.kernels(F, start + 30 * US, start + 40 * US, first=False)
                rank.batch(start + 50 * US if self.made.sizes else start, ends[0])
            else:
                for op, end in zip(call, ends, strict=True):
                    rank.message(op, start, end, worker[1])
        self.now[worker] = max(ends)

    def _compute(self, worker: Worker, step: int, op: OpType, number: int, place: int) -> None:
        """Layers, each with a collective of the TP ranks at its end."""
        dp, stage = worker
        length = int(self.work[op, stage, number][place, dp])
        begun = self.now[worker]
        now = begun
        for layer in range(LAYERS):
            share = length // LAYERS
            done = {}
            for tp, rank in enumerate(self._of(worker)):
                slow = self.made.slow_tp is not None and self.made.slow_tp[:3] == (dp, stage, tp)
                factor = self.made.slow_tp[3] if slow and self.made.slow_tp else 1.0
                done[rank.rank] = now + int(share * factor)
                rank.kernels(op, now, done[rank.rank], first=layer == 0)
            if self.made.tp > 1:
                end = max(done.values()) + TP_NS
                for rank in self._of(worker):
                    rank.collective(LAYER, done[rank.rank], end, backward=op is B)
                now = end
            else:
                now = max(done.values())
        chunk, microbatch = self._place_of(op, number)
        for rank in self._of(worker):
            rank.end_compute(op)
            self.ops.append((step, rank.rank, op, begun, now, microbatch, chunk))
        self.now[worker] = now

    def _place_of(self, op: OpType, number: int) -> tuple[int, int]:
        """Chunk and microbatch of the so-many-th forward or backward of a step."""
        chunks, stages = self.made.job.vpp, self.made.layout.pp
        group, turn = divmod(number, stages * chunks)
        chunk = turn // stages if op is F else chunks - 1 - turn // stages
        return (chunk, group * stages + turn % stages) if chunks > 1 else (0, number)

    def _end_of_step(self, step: int) -> None:
        layout = self.made.layout
        embedding = [worker for worker in self.now if worker[1] in (0, layout.pp - 1)]
        for dp in range(layout.dp):
            mine = [worker for worker in embedding if worker[0] == dp]
            self._meet(mine, step, OpType.EMBEDDING_GRADS_ALL_REDUCE, "EMBEDDING_GROUP")
        if layout.dp > 1:
            for stage in range(layout.pp):
                mine = [(dp, stage) for dp in range(layout.dp)]
                self._meet(mine, step, OpType.GRADS_REDUCE_SCATTER, "DATA_PARALLEL_GROUP_WITH_CP")
        for dp in range(layout.dp):
            mine = [(dp, stage) for stage in range(layout.pp)]
            self._meet(mine, step, OpType.OPTIMIZER_CLIP_MAIN_GRAD, "MODEL_PARALLEL_GROUP")
        for worker, start in self.now.items():
            end = start + 5 * END_NS
            for rank in self._of(worker):
                rank.optimizer(start, end)
                self.ops.append((step, rank.rank, OpType.OPTIMIZER, start, end, -1, -1))
            self.now[worker] = end
        if layout.dp > 1:
            for stage in range(layout.pp):
                mine = [(dp, stage) for dp in range(layout.dp)]
                self._meet(mine, step + 1, OpType.PARAMS_ALL_GATHER, "DATA_PARALLEL_GROUP_WITH_CP")

    def _meet(self, workers: list[Worker], step: int, op: OpType, group: str) -> None:
        name = {
            OpType.GRADS_REDUCE_SCATTER: "_reduce_scatter_base",
            OpType.PARAMS_ALL_GATHER: "_allgather_base",
        }.get(op, "allreduce")
        meeting = Meeting(group, name, DP_STREAM, 1_000_000)
        end = max(self.now[worker] for worker in workers) + END_NS
        for worker in workers:
            start = self.now[worker]
            for rank in self._of(worker):
                rank.collective(meeting, start, end, backward=False)
                if step in self.made.job.step_numbers:
                    self.ops.append((step, rank.rank, op, start, end, -1, -1))
            self.now[worker] = end

    def _of(self, worker: Worker) -> list[_Rank]:
        layout = self.made.layout
        return [self.ranks[layout.rank(*worker, tp)] for tp in range(layout.tp)]


def _work(job: Scenario) -> dict[tuple[OpType, int, int], np.ndarray]:
    """(steps, dp) ns of each compute, with the job's faults."""
    plan = make_plan(job.shape(job.first_step))
    steps = tuple(job.step_numbers)
    work = draw_work(plan, steps, job.durations, job.noise, job.seed)
    draft = Draft(plan, steps, job.seed, work, None)
    apply_faults(draft, job.all_faults)
    return {
        (op, stage, number): draft.work[plan.row(stage, op, number)]
        for op, stage, number in product((F, B), range(job.pp), range(job.microbatches * job.vpp))
    }


def _groups(layout: Layout) -> list[Event]:
    """Process groups as Megatron-LM makes them."""
    dps, stages, tps = range(layout.dp), range(layout.pp), range(layout.tp)
    rank = layout.rank
    ends = sorted({0, layout.pp - 1})
    found = [("default_pg", list(range(layout.world_size)))]
    for name in ("DATA_PARALLEL_GROUP_WITH_CP", "DATA_PARALLEL_GROUP"):
        found += [(name, [rank(d, s, t) for d in dps]) for s, t in product(stages, tps)]
    found += [("MODEL_PARALLEL_GROUP", [rank(d, s, t) for s in stages for t in tps]) for d in dps]
    found += [
        ("TENSOR_MODEL_PARALLEL_GROUP", [rank(d, s, t) for t in tps])
        for s, d in product(stages, dps)
    ]
    for name, members in (("PIPELINE_MODEL_PARALLEL_GROUP", stages), ("EMBEDDING_GROUP", ends)):
        found += [(name, [rank(d, s, t) for s in members]) for d, t in product(dps, tps)]
    return [
        {"pg_name": str(number), "pg_desc": name, "pg_size": len(ranks), "ranks": ranks}
        for number, (name, ranks) in enumerate(found)
    ]


def _table(ops: list[tuple[int, int, OpType, int, int, int, int]], layout: Layout) -> OpTable:
    seen: Counter[tuple[int, int, OpType]] = Counter()
    rows = []
    for step, rank, op, start, end, microbatch, chunk in sorted(ops, key=lambda op: (op[3], op[5])):
        place, key = layout.place(rank), (step, rank, op)
        rows.append((step, place.dp, place.stage, rank, op, start, end - start, seen[key], chunk,
                     microbatch))  # fmt: skip
        seen[key] += 1
    names = ("step", "dp", "stage", "rank", "optype", "start_ns", "duration_ns", "seq", "chunk",
             "microbatch")  # fmt: skip
    values = np.array(rows, np.int64)
    return make_table({name: values[:, at] for at, name in enumerate(names)})


# --- one file ------------------------------------------------------------------------------------


class _Rank:
    """Writes one rank. The host launches in the order of the program, far ahead of the GPU."""

    def __init__(self, rank: int, made: Pipeline, groups: list[Event]) -> None:
        self.rank, self.made, self.groups = rank, made, groups
        self.events: list[Event] = []
        self.host = BASE_NS - 40_000_000
        self.begun = self.host
        self._id = 0
        self._seq: Counter[str] = Counter()
        self._compute_begun = 0

    def begin_step(self) -> None:
        self.begun = self.host

    def end_step(self, step: int) -> None:
        self._host(f"ProfilerStep#{step}", "user_annotation", self.begun, self.host, MAIN_THREAD)
        self.host += 20 * US

    def kernels(self, op: OpType, start: int, end: int, *, first: bool) -> None:
        if first:
            self._compute_begun = self.host
        middle = (start + end) // 2
        for begin, stop in ((start, middle), (middle + US, end)):
            self._kernel("void cutlass::Kernel2<...>(Params)", COMPUTE_STREAM, begin, stop, {}, op)

    def end_compute(self, op: OpType) -> None:
        if op is B and self.made.phases:
            name = "autograd::engine::evaluate_function: MmBackward0"
            begun = self._compute_begun
            self._host(name, "cpu_op", begun, self.host + US, AUTOGRAD_THREAD)
            self.host += 2 * US

    def optimizer(self, start: int, end: int) -> None:
        begun = self.host
        self._kernel("multi_tensor_apply_kernel", COMPUTE_STREAM, start, end, {}, F)
        name = "Optimizer.step#FusedAdam.step"
        self._host(name, "user_annotation", begun, self.host, MAIN_THREAD)
        self.host += US

    def batch(self, start: int, end: int) -> None:
        name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        self._kernel(name, PP_STREAM, start, end, {}, F)

    def message(self, op: OpType, start: int, end: int, stage: int) -> None:
        sends = op in (FS, BS)
        args: Event = {}
        if self.made.named:
            args = self._args("PIPELINE_MODEL_PARALLEL_GROUP", "send" if sends else "recv", 1 << 20)
            ranks = json_list(args["Process Group Ranks"])
            there = (stage + OTHER[op][1]) % len(ranks)
            args["Dst Rank" if sends else "Src Rank"] = ranks[there]
        name = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
        self._kernel(name, PP_STREAM + 1 + int(op), start, end, args, F)

    def collective(self, meeting: Meeting, start: int, end: int, *, backward: bool) -> None:
        args = self._args(meeting.group, meeting.name, meeting.elements)
        kind = _KERNELS[meeting.name]
        kernel = f"ncclDevKernel_{kind}_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self._kernel(kernel, meeting.stream, start, end, args, B if backward else F)

    def _args(self, group: str, name: str, elements: int) -> Event:
        mine = next(each for each in self.groups if each["pg_desc"] == group)
        self._seq[mine["pg_name"]] += 1
        return {
            "Collective name": name, "dtype": "Float", "In msg nelems": elements,
            "Out msg nelems": elements, "Group size": mine["pg_size"],
            "Process Group Name": mine["pg_name"], "Process Group Description": group,
            "Process Group Ranks": str(mine["ranks"]), "Seq": self._seq[mine["pg_name"]],
        }  # fmt: skip

    def _kernel(
        self, name: str, stream: int, start: int, end: int, args: Event, op: OpType
    ) -> None:
        self._id += 1
        self.host = max(self.host + 5 * US, start - 40_000_000)
        linked = {"correlation": self._id, "External id": self._id, "stream": stream, **args}
        self._write(name, "kernel", (start, end), (0, stream), linked)
        thread = AUTOGRAD_THREAD if op is B else MAIN_THREAD
        launch = {"correlation": self._id}
        self._host("cudaLaunchKernel", "cuda_runtime", self.host, self.host + US, thread, launch)

    def _host(
        self, name: str, cat: str, start: int, end: int, thread: int, args: Event | None = None
    ) -> None:
        self._write(name, cat, (start, end), (4_000 + self.rank, thread), args or {})

    def _write(
        self, name: str, cat: str, span: tuple[int, int], where: tuple[int, int], args: Event
    ) -> None:
        (start, end), (pid, tid) = span, where
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": (start - BASE_NS) / 1e3,
                "dur": (end - start) / 1e3,
                "args": args,
            }
        )


_KERNELS = {
    "allreduce": "AllReduce",
    "_reduce_scatter_base": "ReduceScatter",
    "_allgather_base": "AllGather",
}


def json_list(text: str) -> list[int]:
    """The numbers of a list written as text."""
    return [int(part) for part in text.strip("[]").split(",")]


def _document(made: Pipeline, rank: _Rank) -> Event:
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
        "distributedInfo": {
            "backend": "nccl",
            "rank": rank.rank,
            "world_size": made.layout.world_size,
            "pg_count": len(rank.groups),
            "pg_config": rank.groups,
            **made.info,
        },
        "host_name": f"node-{rank.rank // 8}",
        "baseTimeNanoseconds": BASE_NS,
        "traceEvents": rank.events,
    }
