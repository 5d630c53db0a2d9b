"""hang: the last step does not end, because one op never does."""

from __future__ import annotations

from smon.attribute.persistence import Kind, Persistence
from smon.diagnose.draft import Draft
from smon.diagnose.evidence import Evidence
from smon.diagnose.place import places
from smon.graph.stuck import Stuck

_ALWAYS = -1.0
_MAX_NAMED = 4


def find(evidence: Evidence) -> list[Draft]:
    """The op that everything missing in the last step waits for."""
    stuck = evidence.stuck
    if stuck is None:
        return []
    where = places(evidence, stuck.workers)
    who = ", ".join(f"DP rank {dp} stage {stage}" for dp, stage in stuck.workers[:_MAX_NAMED])
    more = f" and {len(stuck.workers) - _MAX_NAMED} more" if len(stuck.workers) > _MAX_NAMED else ""
    one = len(stuck.workers) == 1
    return [
        Draft(
            verdict="hang",
            cause="hang",
            scope=_scope(evidence, stuck),
            phase=stuck.optype.label,
            persistence=Persistence(Kind.ONE_OFF, 1.0 / (len(evidence.steps) + 1), stuck.step),
            where=where,
            optypes=(stuck.optype.label,),
            confidence=0.8 if one else 0.6,
            evidence=(
                f"{stuck.optype.label} {stuck.seq} of step {stuck.step} on {who}{more} had all it "
                f"needs, and has not ended while others went on for {stuck.silent_ns / 1e6:.0f} ms",
                f"{stuck.waiting} workers lack ops of this step and wait for it",
            ),
            next=(
                f"py-spy dump --pid <trainer of rank {where.rank}>"
                if one
                else "TORCH_NCCL_TRACE_BUFFER_SIZE=20000: Flight Recorder dumps of all ranks",
                "dmesg, nvidia-smi -q: Xid errors on that node",
            ),
            min_share=_ALWAYS,
            severity="critical",
        )
    ]


def _scope(evidence: Evidence, stuck: Stuck) -> str:
    if len(stuck.workers) == 1:
        return "rank" if evidence.layout.tp == 1 else "tp_group"
    if len({stage for _, stage in stuck.workers}) == 1:
        return "dp_group"
    return "pp_group" if len({dp for dp, _ in stuck.workers}) == 1 else "job"
