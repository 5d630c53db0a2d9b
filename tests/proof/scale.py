"""From a file to a report with findings and fixes: how long, how much memory, how it grows.

Jobs of 16 stages, TP 8 and 64 microbatches with one slow worker, of more and more replicas, are
written to Parquet and analysed by ``smon analyze --json`` in a process of its own.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tests.proof.child import Took, smon
from tests.proof.line import Form, Goal, Line, at_most, exactly

TP: Final = 8


@dataclass(frozen=True, slots=True)
class Size:
    """A job; its GPUs are dp × pp × 8."""

    dp: int
    pp: int
    microbatches: int
    steps: int

    @property
    def gpus(self) -> int:
        """World size."""
        return self.dp * self.pp * TP


@dataclass(frozen=True, slots=True)
class Measured:
    """One analysis of one job."""

    size: Size
    ops: int
    took: Took
    report: dict[str, Any]

    @property
    def figures(self) -> dict[str, float]:
        """For the line."""
        return {
            "gpus": self.size.gpus,
            "steps": self.size.steps,
            "ops": self.ops,
            "wall_s": round(self.took.wall_s, 2),
            "cpu_s": round(self.took.cpu_s, 2),
            "peak_mib": self.took.peak_bytes >> 20,
            "fixes": len(self.report["fixes"]),
        }


#: The job that is asked for, and those that show how the cost grows.
_LARGE: Final = {
    Form.SHORT: Size(dp=8, pp=4, microbatches=16, steps=12),
    Form.LONG: Size(dp=128, pp=16, microbatches=64, steps=40),
}
_GROWING: Final = {
    Form.SHORT: [Size(dp, 4, 16, 10) for dp in (8, 32)],
    Form.LONG: [Size(dp, 16, 64, 10) for dp in (8, 32, 128, 512)],
}


def prove(form: Form, folder: Path) -> Line:
    """Measure the large job, and how the cost grows with ops."""
    begin = time.monotonic()
    large = analysed(_LARGE[form], folder)
    growing = [analysed(size, folder) for size in _GROWING[form]]
    slope = growth(growing)
    right = [named_the_slow_worker(each) for each in (large, *growing)]
    goals = (
        exactly("jobs whose slow worker is named first", sum(right), len(right)),
        exactly("workers of the large job with an exact slowdown", exact(large), workers(large)),
        _fixes(large),
        at_most("file to report, large job, s", large.took.wall_s, 60, timed=True),
        at_most("memory of the large job, GiB", _gib(large), 6),
        at_most("memory of the job with most GPUs, GiB", _gib(growing[-1]), 12),
        at_most("CPU grows as ops to the power of", slope, 1.1, timed=True),
    )
    figures = {
        "slope": round(slope, 3),
        "bytes_per_op": round(_per_op(growing)),
        "large": large.figures,
        "growing": [each.figures for each in growing],
    }
    return Line("scale", form, goals, figures, round(time.monotonic() - begin, 1))


def analysed(size: Size, folder: Path) -> Measured:
    """Write the job, analyse it, and remove it again."""
    target = folder / f"{size.gpus}-{size.steps}"
    sizes = {"dp": size.dp, "pp": size.pp, "tp": TP, "microbatches": size.microbatches}
    options = [f"--{name}={value}" for name, value in {**sizes, "steps": size.steps}.items()]
    smon(["synth", "slow-worker", *options, "--out", str(target)]).checked()
    path = target / "slow-worker"
    # The answer lies beside it, for us alone.
    truth = json.loads((path / "truth.json").read_bytes())
    took = smon(["analyze", str(path), "--json"]).checked()
    rows = _rows(path / "trace.parquet")
    shutil.rmtree(target)
    report = json.loads(took.output)
    return Measured(size, rows, took, {**report, "truth": truth})


def _rows(path: Path) -> int:
    from pyarrow import parquet

    return int(parquet.read_metadata(path).num_rows)


def named_the_slow_worker(measured: Measured) -> bool:
    """Whether the first finding is the fault that was put in, at its place."""
    report, truth = measured.report, measured.report["truth"]
    if not report["findings"]:
        return False
    first = report["findings"][0]
    where = {name: first["where"].get(name) for name in truth["where"]}
    return bool(first["cause"] == truth["cause"] and where == truth["where"])


def exact(measured: Measured) -> int:
    """Workers with an exact slowdown in the report."""
    return sum(worker["slowdown"] is not None for worker in measured.report["workers"])


def workers(measured: Measured) -> int:
    """Workers of the job."""
    return measured.size.dp * measured.size.pp


def _fixes(measured: Measured) -> Goal:
    count = len(measured.report["fixes"])
    return Goal("fixes of the large job in its report", count, "≥ 1", met=count >= 1)


def _gib(measured: Measured) -> float:
    return measured.took.peak_bytes / (1 << 30)


def _per_op(measured: Sequence[Measured]) -> float:
    """Memory that one more op takes, from the first to the last job."""
    first, last = measured[0], measured[-1]
    return (last.took.peak_bytes - first.took.peak_bytes) / (last.ops - first.ops)


def growth(measured: Sequence[Measured]) -> float:
    """The power of ops with which CPU time grows, the start of the process left out."""
    start = smon(["--version"]).checked().cpu_s
    ops = np.log([each.ops for each in measured])
    cpu = np.log([max(each.took.cpu_s - start, 1e-3) for each in measured])
    return float(np.polyfit(ops, cpu, 1)[0])
