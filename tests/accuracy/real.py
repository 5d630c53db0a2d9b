"""What the diagnosis says of real traces, of which more or less is known.

Flow: the public traces beside the project → **here** → `tests.accuracy.page`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from smon.analysis import Options, analyze
from smon.render.words import verdict_lines
from smon.trace.load import load

#: What was done to the runs with gloo (their README).
_INJECTED: Final = {
    "healthy": "nothing",
    "slow_rank3": "rank 3: all computes take 1.6 times as long",
    "long_last_stage": "stage 1: all computes take 1.4 times as long",
    "gc_pause_rank1": "rank 1: one garbage collection of 223 ms inside a forward",
}


@dataclass(frozen=True, slots=True)
class RealTrace:
    """One trace: what is known of it, and what is said."""

    name: str
    known: str
    verdict: str
    lines: tuple[str, ...]


def real_traces(folder: Path) -> Iterator[RealTrace]:
    """All there are; none without the folder."""
    public = folder / "straggler-analysis"
    for path in sorted(public.glob("trace-*.parquet")):
        name = path.stem.removeprefix("trace-")
        published = json.loads((public / f"result-{name}.json").read_text(encoding="utf-8"))
        known = f"S = {published['blocking_slowdown']:.3f} (published)"
        yield _said(path, name, known)
    for name, known in _INJECTED.items():
        path = folder / "torch-gloo-2pp2dp" / name / "trace.parquet"
        if path.exists():
            yield _said(path, name, known)


def _said(path: Path, name: str, known: str) -> RealTrace:
    trace = load([path])
    report = analyze(trace.table, trace.job, Options(notes=trace.notes))
    return RealTrace(name, known, report.verdict, tuple(verdict_lines(report)))
