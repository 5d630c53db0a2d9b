"""Mutants of dumps: no crash, no hang, nothing run, no wrong kind of error."""

from __future__ import annotations

import gzip
import pickle
import time
from pathlib import Path

import pytest

from smon.errors import SMonError
from smon.hangs.report import analyze_hang
from smon.trace.load import load
from tests.hangs.builders import WORLD, Group, dump, entry
from tests.trace.formats.test_fuzz import MAX_SECONDS, mutants

NVRX = "nvrx-flight-recorder"
PIPE = Group("9", (0, 1, 2, 3), 3, "PIPELINE_MODEL_PARALLEL_GROUP")


def survives(folder: Path, name: str, content: bytes, beside: bytes) -> None:
    """A mutant beside a sound dump of another rank: a report or one clear line, in time."""
    (folder / name).write_bytes(content)
    (folder / "_dump_1").write_bytes(beside)
    begin, message = time.process_time(), ""
    try:
        trace = load([folder])
        if trace.dumps:
            analyze_hang(trace.dumps, trace.job).to_json()
    except SMonError as error:
        message = str(error)
    assert message.isprintable()
    assert time.process_time() - begin < MAX_SECONDS


def test_mutants_of_a_small_dump_are_survived(tmp_path: Path) -> None:
    """As pickle: every byte is an instruction, a length or a note's number."""
    raw = dump(
        entry(WORLD, 4, retired=True),
        entry(WORLD, 5),
        entry(PIPE, 9, "nccl:send 0->1"),
        groups=(WORLD, PIPE),
        status={"0": (5, 4), "3": (9, 8)},
    )
    whole = pickle.dumps(raw, 2)
    for content in mutants(1, whole):
        survives(tmp_path, "_dump_0", content, whole)


@pytest.mark.parametrize("rank", [0, 10, 14])
def test_mutants_of_real_pickles_are_survived(traces: Path, tmp_path: Path, rank: int) -> None:
    """Of ranks that wait, that list nothing, and that stopped."""
    folder = traces / NVRX / ("lock_gil_2nd" if rank == 10 else "gpu_error_1st")
    beside = (folder / "_dump_1").read_bytes()
    for content in mutants(rank, (folder / f"_dump_{rank}").read_bytes()):
        survives(tmp_path, f"_dump_{rank}", content, beside)


def test_mutants_of_json_are_survived(traces: Path, tmp_path: Path) -> None:
    """The dumps of all ranks in one file."""
    whole = gzip.decompress((traces / NVRX / "lock_gil_2nd.json.gz").read_bytes())
    beside = (traces / NVRX / "lock_gil_2nd" / "_dump_1").read_bytes()
    for content in mutants(99, whole):
        survives(tmp_path, "all.json", content, beside)
