"""host_contention: launches are late all over a node, now and then."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smon.attribute.persistence import vote
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import COMPUTE, Evidence, F, Floats, nanmedian
from smon.diagnose.place import node_of, places, workers_of
from smon.diagnose.side import Shown, beside_peers
from smon.diagnose.thresholds import PAUSE_BACKWARD, STALL_NS, STALL_SHARE
from smon.report import Candidate
from smon.simulate.cube import Changes

#: Mean launch delay of a node against its peers.
_FACTOR = 5.0
#: Counters that go with a busy host.
_HOST_COUNTERS = (
    Shown("host_cpu_ratio", "CPU load of its host", ""),
    Shown("host_pressure_cpu_ratio", "waiting for a CPU", "of the time"),
    Shown("host_steal_ratio", "taken by the hypervisor", "of the time"),
    Shown("host_throttled_ratio", "CPU limit reached", "of the time"),
    Shown("host_pressure_memory_ratio", "waiting for memory", "of the time"),
    Shown("host_pressure_io_ratio", "waiting for disks", "of the time"),
    Shown("host_major_faults", "page faults from disk", "per step"),
)

#: Later starts than this share of a step come from many ops; a single one is a pause.
_OPS = 3


def find(evidence: Evidence) -> list[Draft]:
    """Workers whose computes start late many times within a step."""
    late = _late(evidence)
    if late is None:
        return []
    total, count = late
    floor = max(STALL_NS, STALL_SHARE * float(np.median(evidence.times.recorded)))
    # The lower quartile: on a small job one node can be half of the workers.
    usual = np.quantile(total, 0.25, axis=(1, 2), keepdims=True)
    # And over time: one node can be the whole job.
    usual = np.minimum(usual, np.quantile(total, 0.25, axis=0, keepdims=True))
    with np.errstate(invalid="ignore"):
        hit = (total > floor) & (total > _FACTOR * np.maximum(usual, 0.0)) & (count >= _OPS)
    workers = workers_of(np.any(hit, axis=0))
    hosts = {node_of(evidence, dp, stage) for dp, stage in workers}
    one_host = len(hosts) == 1 and None not in hosts
    if not workers or (len(workers) > hit[0].size // 2 and not one_host):
        return []
    persistence = vote(hit.any(axis=(1, 2)).astype(float), 0.5, evidence.steps)
    where = places(evidence, workers)
    return [
        Draft(
            verdict="host_stall",
            cause="host_contention",
            scope="rank" if len(workers) == 1 else "node" if where.node else "job",
            phase="launch",
            persistence=persistence,  # type: ignore[arg-type]
            where=where,
            optypes=tuple(op.label for op in COMPUTE),
            changes=_undone(evidence, hit),
            confidence=0.7,
            evidence=(
                f"computes start late {np.median(count[hit]):.0f} times a step there, "
                f"{np.median(total[hit]) / 1e6:.0f} ms in all, more than {_FACTOR:.0f} × elsewhere",
                *_host_cpu(evidence, workers),
            ),
            candidates=(
                Candidate("host_contention", where, "CPU load of the host"),
                Candidate("gc", where, "gc events"),
            ),
            next=("top, pidstat 1  # on that node: what else runs there", "numactl --show"),
        )
    ]


def _host_cpu(evidence: Evidence, workers: list[tuple[int, int]]) -> tuple[str, ...]:
    rank = evidence.layout.rank(*workers[0])
    return beside_peers(evidence, _HOST_COUNTERS, rank) or (
        "no CPU load of the hosts: it would make it sure",
    )


def _late(evidence: Evidence) -> tuple[Floats, Floats] | None:
    """(steps, dp_ranks, stages) sum of launch delays of computes, and how many are long."""
    parts = [evidence.delay(op) for op in COMPUTE]
    if any(part.size == 0 for part in parts):
        return None
    positive = [np.maximum(np.nan_to_num(part), 0.0) for part in parts]
    total = sum(part.sum(axis=3) for part in positive)
    count = sum((part > STALL_NS / 5).sum(axis=3) for part in positive)
    return np.asarray(total), np.asarray(count, float)


def _undone(evidence: Evidence, hit: NDArray[np.bool_]) -> Changes:
    """No late launches, and forwards (bound by launches) as long as those of its peers."""
    stall = {}
    for op in COMPUTE:
        cube = evidence.delay(op)
        usual = nanmedian(cube, (0, 1))[None, None]
        extra = np.maximum(np.nan_to_num(cube - usual), 0.0)
        stall[op] = np.where(hit[..., None], extra, 0.0)
    forward = evidence.work(F)
    calm = np.where(hit[..., None], np.nan, forward)
    typical = np.fmin(
        nanmedian(calm, (1, 3))[:, None, :, None], nanmedian(calm, (0, 1, 3))[:, None]
    )
    stretched = hit[..., None] & (forward > (1 + PAUSE_BACKWARD) * typical)
    return Changes({F: np.where(stretched, typical, forward)}, stall)
