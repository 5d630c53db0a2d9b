"""How fast an analysis is, from file to report, in one process; goals stand in the docstrings.

Run by ``make bench``. Nothing here is asserted in seconds: machines are shared and noisy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smon.analysis import Options, analyze
from smon.attribute.interval import bootstrap_interval
from smon.attribute.shares import approximate_workers, fixed_share, slowest_workers
from smon.attribute.slowdown import StepTimes, simulate_all
from smon.prepare import prepare
from smon.report import JobReport
from smon.synth.scenario import Scenario, generate
from smon.synth.write import write_trace
from smon.trace.load import load

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = ROOT.parent / "shared" / "traces" / "straggler-analysis"

#: (DP, PP, microbatches) of jobs with TP 8 and 10 steps.
SIZES = {
    "512 GPUs": (16, 4, 16),
    "4096 GPUs": (64, 8, 32),
    "16384 GPUs": (128, 16, 64),
}


@pytest.fixture(scope="module", params=list(SIZES))
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a synthetic job with 1 % noise."""
    dp, pp, microbatches = SIZES[request.param]
    made = generate(Scenario(dp=dp, pp=pp, tp=8, microbatches=microbatches, steps=10))
    folder = tmp_path_factory.mktemp("job")
    write_trace(made.table, made.job, folder)
    return folder


def file_to_report(path: Path) -> JobReport:
    """What `smon analyze` does before it prints."""
    trace = load([path])
    return analyze(trace.table, trace.job, Options(trace.notes))


def file_to_slowdowns(path: Path) -> StepTimes:
    """The part that the published analyser does too, and the exact slowdown of each worker."""
    trace = load([path])
    prepared = prepare(trace.table, trace.job)
    window, ideal, engine = prepared.window, prepared.ideal, prepared.engine
    times = simulate_all(window, ideal, engine, lambda _done, _total: None)
    approximate = approximate_workers(times)
    fixed_share(window, ideal, engine, times, slowest_workers(approximate))
    bootstrap_interval(times.simulated, times.ideal)
    return times


def public(name: str) -> Path:
    """A public trace; without it the benchmark is skipped."""
    path = PUBLIC / f"trace-{name}.parquet"
    if not path.exists():
        pytest.skip("NO TRACES: expected the public traces in ../shared/traces")
    return path


@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
def test_public_trace(benchmark: Any, name: str) -> None:  # noqa: ANN401
    """Verdict, ledger and fixes included."""
    report = benchmark(file_to_report, public(name))
    assert report.slowdown.paper > 1.1


@pytest.mark.parametrize("name", ["AR", "SE", "ST"])
def test_slowdowns_of_public_trace(benchmark: Any, name: str) -> None:  # noqa: ANN401
    """AR at most 0.15 s; the published analyser takes 2.5 s for it, without exact workers."""
    times = benchmark(file_to_slowdowns, public(name))
    assert times.simulated.mean() > times.ideal.mean()


def test_slowdowns_of_synthetic_job(benchmark: Any, job: Path) -> None:  # noqa: ANN401
    """4,096 GPUs: the published analyser takes 24.9 s."""
    times = benchmark.pedantic(file_to_slowdowns, (job,), rounds=3, warmup_rounds=1)
    assert times.simulated.mean() > 0


def test_synthetic_job(benchmark: Any, job: Path) -> None:  # noqa: ANN401
    """4,096 GPUs (0.93 M ops) at most 0.8 s, 16,384 GPUs (7.7 M ops) at most 8 s."""
    report = benchmark.pedantic(file_to_report, (job,), rounds=3, warmup_rounds=1)
    assert len(report.workers) == report.job.layout.dp * report.job.layout.pp


def test_reading(benchmark: Any, job: Path) -> None:  # noqa: ANN401
    """The part of the above that reads the file."""
    trace = benchmark.pedantic(load, ([job],), rounds=3, warmup_rounds=1)
    assert len(trace.table) > 0
