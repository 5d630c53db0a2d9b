"""Kineto traces of a synthetic data-parallel job with a known answer, one file per rank.

Each rank computes forward and backward; gradients are reduced in buckets, each as soon as it is
ready and the one before has ended, on a stream of its own. Clocks of the ranks differ by seconds,
and the GPU runs behind its host, so that neither wall clocks nor the times of kernels show who is
late.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]

#: The host is so far ahead of the GPU, µs.
AHEAD = 30_000.0
BUCKETS = 3
COMPUTE_STREAM, NCCL_STREAM = 7, 20
MAIN_THREAD, AUTOGRAD_THREAD = 100, 101


@dataclass(frozen=True)
class Ddp:
    """A job; times in ms.

    Attributes
    ----------
    extra_backward, extra_forward, idle
        (rank, ms): one rank takes longer in each step, computing or with an idle GPU.
    only_step
        The step in which it does; None: all.
    named
        NCCL kernels have arguments: group, sequence number, size.
    phases
        The trace shows which kernels are backward.
    """

    ranks: int = 4
    steps: int = 6
    forward: float = 45.0
    backward: float = 93.0
    transfer: float = 4.0
    optimizer: float = 10.0
    extra_backward: tuple[int, float] | None = None
    extra_forward: tuple[int, float] | None = None
    idle: tuple[int, float] | None = None
    only_step: int | None = None
    named: bool = True
    phases: bool = True
    first_step: int = 10
    base_ns: int = 1_790_000_000_000_000_000
    skew_ms: float = 1_300.0
    info: dict[str, Any] = field(default_factory=dict)


def write_ddp(folder: Path, job: Ddp, *, packed: bool = True) -> list[Path]:
    """Write one file per rank; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        write_json(
            folder / f"rank{rank}.pt.trace.json{'.gz' if packed else ''}",
            document(job, rank, events),
        )
        for rank, events in enumerate(ddp_events(job))
    ]


def write_json(path: Path, value: object) -> Path:
    """A JSON document, gzipped if the name says so."""
    text = json.dumps(value).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return path


def document(job: Ddp, rank: int, events: list[Event]) -> dict[str, Any]:
    """The whole file of a rank."""
    group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": job.ranks}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
        "distributedInfo": {
            "backend": "nccl",
            "rank": rank,
            "world_size": job.ranks,
            "pg_count": 1,
            "pg_config": [{**group, "ranks": list(range(job.ranks))}],
            **job.info,
        },
        "host_name": f"node-{rank}",
        "baseTimeNanoseconds": job.base_ns,
        "traceEvents": events,
    }


def ddp_events(job: Ddp) -> list[list[Event]]:
    """Events of each rank, in µs on its own clock."""
    writers = [_Rank(job, rank) for rank in range(job.ranks)]
    for step in range(job.first_step, job.first_step + job.steps):
        ready = [writer.forward(step) for writer in writers]
        for bucket in range(BUCKETS):
            ready = [writer.backward(step, bucket) for writer in writers]
            starts = [max(at, writer.reduced) for at, writer in zip(ready, writers, strict=True)]
            end = max(starts) + job.transfer * 1e3
            for writer, start in zip(writers, starts, strict=True):
                writer.reduce(step, bucket, start, end)
        for writer in writers:
            writer.finish(step)
    return [writer.events for writer in writers]


class _Rank:
    """Writes one rank; `now` is the end of what its compute stream has been given, µs."""

    def __init__(self, job: Ddp, rank: int) -> None:
        self.job, self.rank = job, rank
        self.events: list[Event] = list(_names(rank))
        self.offset = rank * job.skew_ms * 1e3
        self.now = AHEAD + 1_000.0
        self.reduced = 0.0
        self.begin = 0.0
        self._id = 1

    def forward(self, step: int) -> float:
        self.begin = self.now - AHEAD
        self._gap(self._extra(self.job.idle, step))
        self._compute(self.job.forward + self._extra(self.job.extra_forward, step), "forward")
        return self.now

    def backward(self, step: int, bucket: int) -> float:
        extra = self._extra(self.job.extra_backward, step) if bucket == 0 else 0.0
        self._compute(self.job.backward / BUCKETS + extra, "backward")
        del step
        return self.now

    def reduce(self, step: int, bucket: int, start: float, end: float) -> None:
        number = (step - self.job.first_step) * BUCKETS + bucket
        args: Event = {}
        if self.job.named:
            args = {
                "Collective name": "allreduce",
                "In msg nelems": 6_000_000,
                "Out msg nelems": 6_000_000,
                "Group size": self.job.ranks,
                "dtype": "Float",
                "Process Group Name": "0",
                "Process Group Description": "default_pg",
                "Process Group Ranks": str(list(range(self.job.ranks))),
                "Seq": number,
            }
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self._kernel(name, NCCL_STREAM, start, end, args)
        self.reduced = end

    def finish(self, step: int) -> None:
        """Optimizer, once the gradients are there; then the step marker of the host."""
        self.now = max(self.now, self.reduced)
        self._compute(self.job.optimizer, "optimizer")
        end = self.now - AHEAD
        self._host(f"ProfilerStep#{step}", self.begin, end, "user_annotation", MAIN_THREAD)

    def _extra(self, of: tuple[int, float] | None, step: int) -> float:
        slow = of is not None and of[0] == self.rank and self.job.only_step in (None, step)
        return of[1] if slow and of is not None else 0.0

    def _gap(self, ms: float) -> None:
        self.now += ms * 1e3

    def _compute(self, ms: float, phase: str) -> None:
        begin = self.now
        for _ in range(4):
            self._kernel(
                "void cutlass::Kernel2<...>(Params)", COMPUTE_STREAM, self.now,
                self.now + ms * 250.0, {}, AUTOGRAD_THREAD if phase == "backward" else MAIN_THREAD,
            )  # fmt: skip
            self.now += ms * 250.0
        spans = {
            "forward": ("DistributedDataParallel.forward", "user_annotation", MAIN_THREAD),
            "backward": (
                "autograd::engine::evaluate_function: MmBackward0",
                "cpu_op",
                AUTOGRAD_THREAD,
            ),
            "optimizer": ("Optimizer.step#AdamW.step", "user_annotation", MAIN_THREAD),
        }
        if self.job.phases:
            name, cat, thread = spans[phase]
            self._host(name, begin - AHEAD, self.now - AHEAD - 5.0, cat, thread)

    def _kernel(
        self, name: str, stream: int, start: float, end: float, args: Event,
        thread: int = AUTOGRAD_THREAD,
    ) -> None:  # fmt: skip
        self._id += 1
        linked = {"correlation": self._id, "External id": self._id, "stream": stream, **args}
        self.events.append(
            {
                "ph": "X",
                "cat": "kernel",
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": round(start + self.offset, 3),
                "dur": round(end - start, 3),
                "args": linked,
            }
        )
        launched = start - AHEAD if stream == COMPUTE_STREAM else self.now - AHEAD - 10.0
        launch = {"correlation": self._id}
        self._host("cudaLaunchKernel", launched, launched + 4.0, "cuda_runtime", thread, launch)

    def _host(
        self, name: str, start: float, end: float, cat: str, thread: int,
        args: Event | None = None,
    ) -> None:  # fmt: skip
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 4_000 + self.rank,
                "tid": thread,
                "ts": round(start + self.offset, 3),
                "dur": round(end - start, 3),
                "args": args or {},
            }
        )


def _names(rank: int) -> Iterator[Event]:
    """Names of processes and threads, as real files begin."""
    for thread in (MAIN_THREAD, AUTOGRAD_THREAD):
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": 4_000 + rank,
            "tid": thread,
            "ts": 0,
            "args": {"name": f"thread {thread} (python)"},
        }
