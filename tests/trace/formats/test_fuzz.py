"""Mutants of real files: no crash, no hang, no wrong kind of error."""

from __future__ import annotations

import gzip
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from smon.collectives.report import analyze_collectives
from smon.errors import SMonError
from smon.trace.load import load
from tests.fuzz.mutants import mutants as mutants_of
from tests.kineto_files import Ddp, ddp_events, document, write_json

#: How many mutants of each file; a nightly run sets more.
MUTANTS = int(os.environ.get("SMON_FUZZ_MUTANTS", "60"))
MAX_SECONDS = 5.0


def mutants(seed: int, whole: bytes) -> Iterator[bytes]:
    """As many mutants of a file as this run wants."""
    return mutants_of(seed, whole, MUTANTS)


def survives(path: Path) -> None:
    """Read and analyse what a file has: a report or one clear line, in time."""
    begin, message = time.process_time(), ""
    try:
        trace = load([path])
        if trace.events:
            analyze_collectives(trace.events, trace.job)
    except SMonError as error:
        message = str(error)
    assert "\n" not in message
    assert time.process_time() - begin < MAX_SECONDS


def test_mutants_of_a_kineto_trace_are_survived(tmp_path: Path) -> None:
    """Plain text, so that every mutation hits JSON."""
    job = Ddp(ranks=2, steps=2)
    whole = write_json(tmp_path / "whole.json", document(job, 0, ddp_events(job)[0])).read_bytes()
    for mutant in mutants(1, whole):
        path = tmp_path / "mutant.json"
        path.write_bytes(mutant)
        survives(path)


@pytest.mark.parametrize(
    "name",
    [
        "dlrm-kineto-8rank/worker7_step_12.1694128201553.pt.trace.json.gz",
        "torch-gloo-2pp2dp/healthy/rank0.pt.trace.json.gz",
        "hta/with_gpu_user_annotation/step_based_trace_2543932.json.gz",
        "nccl-plugin-samples/inspector_v4.0_readme_1.json",
        "nccl-plugin-samples/inspector_v4.0_readme_0.json",
        "nsys/mock.sqlite",
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_mutants_of_public_files_are_survived(
    traces: Path, tmp_path: Path, name: str, *, packed: bool
) -> None:
    """Unpacked, and as they are: mutations of a gzip hit its own checks."""
    whole = (traces / name).read_bytes()
    if name.endswith(".gz") and not packed:
        whole = gzip.decompress(whole)
    path = tmp_path / ("mutant.json.gz" if packed else "mutant.json")
    for mutant in mutants(2 + packed, whole):
        path.write_bytes(mutant)
        survives(path)


def test_mutants_of_a_profile_with_collectives_are_survived(traces: Path, tmp_path: Path) -> None:
    """2.7 MB: mutations are many, but few."""
    whole = (traces / "nsys/mfu_2gpu_before.sqlite").read_bytes()
    path = tmp_path / "mutant.sqlite"
    for mutant in list(mutants(5, whole))[:15]:
        path.write_bytes(mutant)
        survives(path)
