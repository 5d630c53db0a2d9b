"""Dumps of Flight Recorder, as PyTorch writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smon.hangs.report import analyze_hang
from smon.report import JobReport
from smon.trace.dumps import RankDump
from smon.trace.formats import flight_recorder
from smon.trace.load import load

Document = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """A process group, its number in ``pg_status``, and what it is for."""

    name: str
    ranks: tuple[int, ...]
    number: int
    description: str = "DATA_PARALLEL_GROUP"


WORLD = Group("0", (0, 1, 2, 3), 0, "default_pg")


def entry(group: Group, seq: int, name: str = "nccl:all_reduce", **values: object) -> Document:
    """One collective of a group; a message if its name has an arrow."""
    message = "->" in name or "<-" in name
    return {
        "record_id": group.number * 100_000 + seq,
        "pg_id": group.number,
        "process_group": [group.name, group.description],
        "collective_seq_id": 0 if message else seq,
        "p2p_seq_id": seq if message else 0,
        "op_id": seq,
        "profiling_name": name,
        "time_created_ns": 1_758_610_505_000_000_000 + seq * 1_000_000,
        "input_sizes": [[4096, 5120]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4096, 5120]],
        "output_dtypes": ["BFloat16"],
        "state": "scheduled",
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        "timeout_ms": 180_000,
        "is_p2p": message,
        **values,
    }


def dump(
    *entries: Document,
    groups: Sequence[Group] = (WORLD,),
    status: Mapping[str, tuple[int, int]] | None = None,
    version: str = "2.9",
) -> Document:
    """A dump; `status` has (last called, last finished) by the group's number."""
    return {
        "version": version,
        "pg_config": {
            group.name: {
                "name": group.name,
                "desc": group.description,
                "ranks": str(list(group.ranks)),
            }
            for group in groups
        },
        "nccl_version": "2.27.3",
        "pg_status": {
            number: {
                "last_enqueued_collective": called,
                "last_started_collective": -1,
                "last_completed_collective": finished,
            }
            for number, (called, finished) in (status or {}).items()
        },
        "entries": list(entries),
    }


def write(folder: Path, documents: Mapping[int, Document]) -> Path:
    """One JSON file per rank; gives the folder."""
    folder.mkdir(exist_ok=True)
    for rank, document in documents.items():
        (folder / f"nccl_trace_rank_{rank}").write_text(json.dumps(document))
    return folder


def read(path: Path, content: object) -> RankDump:
    """The dump of a file with this content."""
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert flight_recorder.recognises(path.read_bytes(), path)
    (found,) = flight_recorder.read(path).dumps
    return found


def report(folder: Path, documents: Mapping[int, Document]) -> JobReport:
    """What the dumps of a job say."""
    trace = load([write(folder, documents)])
    return analyze_hang(trace.dumps, trace.job)
