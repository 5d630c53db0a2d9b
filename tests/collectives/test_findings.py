from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.collectives.report import analyze_collectives
from smon.report import Finding, JobReport
from smon.topology import Layout
from smon.trace.events import ProcessGroup, RankEvents
from smon.trace.load import load
from smon.trace.meta import Job
from tests.collectives.builders import Met, job_of, rank_of
from tests.collectives.fsdp import Fsdp
from tests.kineto_files import Ddp, write_ddp


def report_of(ranks: list[RankEvents]) -> JobReport:
    """Of ranks that were written by hand."""
    return analyze_collectives(ranks, Job("job", Layout(dp=len(ranks), pp=1)))


def ddp(folder: Path, **fields: Any) -> JobReport:  # noqa: ANN401
    """Of a data-parallel job with NCCL kernels."""
    trace = load(write_ddp(folder, Ddp(**fields)))
    return analyze_collectives(trace.events, trace.job)


def first(report: JobReport) -> Finding:
    """The dearest finding."""
    return report.findings[0]


def noisy(steps: int, ranks: int, seed: int = 0) -> np.ndarray:
    """Work of healthy ranks: 100 ms ± 1 %."""
    return 100.0 * (1.0 + 0.01 * np.random.default_rng(seed).standard_normal((steps, ranks)))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("steps, ranks", [(2, 8), (6, 2), (20, 4), (40, 16)])
def test_nobody_is_named_in_a_healthy_job(steps: int, ranks: int, seed: int) -> None:
    """Noise of 1 % makes somebody come last in every step."""
    report = report_of(job_of(noisy(steps, ranks, seed).tolist()))
    assert report.findings == ()
    assert report.verdict == "none"


@pytest.mark.parametrize("steps", [6, 24])
def test_a_rank_that_is_always_late_is_named(steps: int) -> None:
    """With fewer than 20 steps at most as a warning; the others are victims."""
    work = noisy(steps, 4)
    work[:, 2] *= 1.4
    finding = first(report_of(job_of(work.tolist())))
    assert (finding.verdict, finding.where.rank, finding.scope) == ("straggler", 2, "rank")
    assert finding.persistence.kind == "persistent"
    assert finding.severity == ("critical" if steps >= 20 else "warning")
    assert finding.excess_s == pytest.approx(0.040, rel=0.1)
    assert finding.victims is not None
    assert finding.victims.ranks == (0, 1, 3)
    assert finding.victims.wait_s == pytest.approx(0.040, rel=0.1)


def test_without_kernels_and_annotations_the_cause_is_open() -> None:
    """Who, since when and how much can be told; why not, and what would tell is listed."""
    work = noisy(8, 4)
    work[:, 2] *= 1.4
    finding = first(report_of(job_of(work.tolist())))
    assert finding.cause == "unknown"
    assert {one.cause for one in finding.candidates} == {
        "slow_gpu", "host_contention", "dataloader",
    }  # fmt: skip


def test_an_onset_is_dated() -> None:
    """A fault that starts at step 12."""
    work = noisy(30, 4)
    work[12:, 1] *= 1.3
    finding = first(report_of(job_of(work.tolist())))
    assert finding.where.rank == 1
    assert (finding.persistence.kind, finding.persistence.onset_step) == ("onset", 12)


def test_another_rank_each_time_names_nobody() -> None:
    """The job loses time, but no rank is at fault."""
    work = noisy(24, 6)
    work[np.arange(24), np.random.default_rng(3).integers(0, 6, 24)] *= 1.5
    report = report_of(job_of(work.tolist()))
    (finding,) = report.findings
    assert (finding.verdict, finding.cause, finding.scope) == ("none", "unknown", "job")
    assert finding.where.rank is None
    assert finding.excess_share > 0.15


def test_one_step_has_numbers_but_no_finding() -> None:
    """It cannot tell a slow rank from a slow moment."""
    report = report_of(job_of([[10.0, 20.0, 10.0]]))
    assert report.verdict == "insufficient_data"
    assert report.findings == ()
    assert report.slowdown.paper is not None
    assert report.collectives[0].last_rank == 1


def test_a_slow_communicator_is_found_among_its_like() -> None:
    """Its members are all candidates; nobody comes late."""
    world = ProcessGroup("w", "world", tuple(range(8)), 8)
    pairs = [ProcessGroup(str(n), f"dp {n}", (2 * n, 2 * n + 1), 2) for n in range(4)]
    ranks = []
    for number in range(8):
        transfer = 24.0 if number // 2 == 1 else 8.0
        events = []
        for at in range(0, 600, 100):
            events.append(Met(at + 10, transfer, at // 100, group=1, size=1_000))
            events.append(Met(at + 10 + transfer, 26 - transfer, at // 100, group=0))
        ranks.append(rank_of(number, events, [world, pairs[number // 2]], world=8))
    (finding,) = report_of(ranks).findings
    assert (finding.verdict, finding.cause) == ("link", "slow_link")
    assert finding.where.ranks == (2, 3)
    assert [one.where.rank for one in finding.candidates] == [2, 3]


# --- why: data-parallel jobs with kernels -------------------------------------------------------


def test_a_healthy_job_loses_nothing(tmp_path: Path) -> None:
    """Clocks of the ranks differ by seconds."""
    report = ddp(tmp_path)
    assert report.verdict == "none"
    assert report.slowdown.paper == pytest.approx(1.0, abs=1e-6)
    assert report.quality.simulation_error_ratio == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("named", [True, False])
def test_200_ms_more_backward_on_one_rank(tmp_path: Path, *, named: bool) -> None:
    """Wall clocks cannot see it: all ranks have steps of one length. The others are victims.

    Gradients are reduced while the backward goes on, so victims compute behind their wait.
    """
    report = ddp(tmp_path, extra_backward=(1, 200.0), steps=24, named=named)
    finding = first(report)
    assert (finding.verdict, finding.cause) == ("straggler", "slow_backward")
    assert (finding.where.rank, finding.where.node) == (1, "node-1")
    assert finding.severity == "critical"
    assert finding.excess_s == pytest.approx(0.200, rel=0.03)
    assert "takes 200.0 ms longer" in finding.evidence[0]
    assert finding.victims is not None
    assert finding.victims.ranks == (0, 2, 3)
    assert finding.victims.wait_s == pytest.approx(0.200, rel=0.05)
    assert len(report.findings) == 1


def test_without_phases_a_busy_gpu_is_a_slow_gpu(tmp_path: Path) -> None:
    """Its kernels run all the time, whatever they are."""
    finding = first(ddp(tmp_path, extra_backward=(1, 200.0), phases=False))
    assert (finding.cause, finding.where.rank) == ("slow_gpu", 1)


def test_forward_and_backward_slow_alike_is_a_slow_gpu(tmp_path: Path) -> None:
    """As `docs/causes.md` tells devices from code."""
    job: dict[str, Any] = {"extra_forward": (3, 18.0), "extra_backward": (3, 37.2)}
    finding = first(ddp(tmp_path, **job))
    assert (finding.cause, finding.where.rank) == ("slow_gpu", 3)


def test_only_forward_is_slow_forward(tmp_path: Path) -> None:
    """A hook, or extra work in front of the loss."""
    finding = first(ddp(tmp_path, extra_forward=(0, 60.0)))
    assert (finding.cause, finding.where.rank) == ("slow_forward", 0)


def test_an_idle_gpu_is_the_host(tmp_path: Path) -> None:
    """No kernel runs while the others wait."""
    finding = first(ddp(tmp_path, idle=(2, 60.0)))
    assert (finding.verdict, finding.cause) == ("host_stall", "host_contention")
    assert finding.where.rank == 2
    assert finding.excess_s == pytest.approx(0.060, rel=0.1)


def test_once_is_said_to_be_once(tmp_path: Path) -> None:
    """An average over the window would call it a slow rank."""
    finding = first(ddp(tmp_path, idle=(2, 160.0), only_step=13))
    assert (finding.persistence.kind, finding.persistence.onset_step) == ("one_off", 13)


# --- fully sharded jobs: collectives overlap with compute and with each other --------------------


def test_a_healthy_sharded_job_has_no_straggler() -> None:
    """And the simulation reproduces it."""
    report = report_of(Fsdp(steps=12).traced())
    assert report.verdict == "none"
    assert report.quality.simulation_error_ratio == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("factor", [1.1, 1.3, 2.0])
def test_the_cost_of_a_slow_rank_of_a_sharded_job_is_the_true_one(factor: float) -> None:
    """Within 3 % of the same job without it: victims compute while they wait for the next layer."""
    slow, healthy = Fsdp(slow=(2, factor)), Fsdp()
    report = report_of(slow.traced())
    finding = first(report)
    assert (finding.cause, finding.where.rank) == ("slow_gpu", 2)
    true = (slow.step_ms - healthy.step_ms) / 1e3
    assert finding.excess_s == pytest.approx(true, rel=0.03)
    assert report.step_time.recorded_s == pytest.approx(slow.step_ms / 1e3, rel=0.01)
    assert report.quality.simulation_error_ratio == pytest.approx(0.0, abs=1e-3)
    assert set(report.by_optype) == {"segments", "all-gather", "reduce-scatter"}
