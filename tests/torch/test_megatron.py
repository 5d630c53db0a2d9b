"""Schedules, timers and optimizer of megatron-core: what was done to them is what SMon says."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smon.report import MAX_SIMULATION_ERROR_RATIO
from tests.conftest import ROOT
from tests.system.server import ServerProcess
from tests.torch.megatron_plan import MegatronPlan
from tests.torch.trainers import Job, interpreter, run

#: Forwards of 20 ms: long beside what a busy test machine adds.
PLAN = MegatronPlan()

#: Compares `ingest_agents.recorder.interleaving` with megatron-core, for many sizes.
CHECK = """
from itertools import product
from types import SimpleNamespace
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
from ingest_agents.recorder.interleaving import Plan, Way

checked = 0
for stages, chunks, group, microbatches in product((2, 3, 4), (2, 3), (2, 3, 4, 5), (4, 6, 9, 16)):
    if not stages <= group <= microbatches:
        continue
    table = get_schedule_table(microbatches, chunks, group)
    for stage in range(stages):
        plan = Plan(stage, stages, chunks, microbatches, group)
        pp_group = SimpleNamespace(size=lambda: stages, rank=lambda: stage)
        p2p = SimpleNamespace(pp_group=pp_group, virtual_pipeline_model_parallel_size=chunks)
        total, _, warmup, _ = get_pp_rank_microbatches(
            microbatches, chunks, group, p2p_communicator=p2p
        )
        assert (plan.total, plan.warmup) == (total, warmup), plan
        for number, (microbatch, chunk) in enumerate(table):
            assert plan.turn(Way.FORWARD, number) == (microbatch, chunk), plan
            assert plan.turn(Way.BACKWARD, number) == (microbatch, chunks - 1 - chunk), plan
            checked += 1
print(checked)
"""


def report_of(name: str, plan: MegatronPlan, server: ServerProcess, folder: Path) -> dict[str, Any]:
    """The report of a run; the layout comes from Megatron-LM."""
    job = Job(name, "megatron_trainer", plan.document(), steps=plan.steps)
    return run(job, server, folder).report


def shown(report: dict[str, Any]) -> str:
    """What a failing test shows."""
    return str([report[name] for name in ("verdict", "slowdown", "quality", "findings")])


def check_quality(report: dict[str, Any], plan: MegatronPlan) -> None:
    """All steps were used, and the graph fits them."""
    assert report["window"]["first_step"] == plan.first, shown(report)
    assert report["window"]["last_step"] == plan.first + plan.steps - 1, shown(report)
    # The first are long where other work is in the way, and are left out then.
    reasons = {each["reason"] for each in report["window"]["skipped"]}
    assert reasons <= {"warm-up of the job"}, shown(report)
    error = report["quality"]["simulation_error_ratio"]
    assert error <= MAX_SIMULATION_ERROR_RATIO, shown(report)


def stragglers(report: dict[str, Any]) -> list[int | None]:
    """Ranks that are to blame."""
    found = [each for each in report["findings"] if each["verdict"] == "straggler"]
    return [each["where"]["rank"] for each in found]


def test_order_and_numbers_are_those_of_megatron_core() -> None:
    """Which microbatch and chunk comes when, and how many forwards come first."""
    done = subprocess.run(
        [interpreter(), "-c", CHECK], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000


@pytest.mark.parametrize("chunks", [1, 2])
def test_nobody_is_blamed_in_a_healthy_job(
    chunks: int, server: ServerProcess, tmp_path: Path
) -> None:
    """1F1B and interleaved, at the default log level: every step is used, the graph fits."""
    plan = replace(PLAN, chunks=chunks)
    report = report_of(f"megatron-healthy-{chunks}", plan, server, tmp_path)
    check_quality(report, plan)
    assert not stragglers(report), shown(report)


@pytest.mark.parametrize("chunks, overlap", [(1, ""), (2, ""), (2, "steady")])
def test_a_rank_that_works_longer_is_named(
    chunks: int, overlap: str, server: ServerProcess, tmp_path: Path
) -> None:
    """Half more work in each compute; from a checkpoint on, with timers that measure, too."""
    plan = replace(PLAN, chunks=chunks, overlap=overlap, first=100, log_level=2)
    plan = replace(plan, slow_rank=1, slow_ratio=0.5)
    name = f"megatron-slow-{chunks}{overlap}"
    report = report_of(name, plan, server, tmp_path)
    check_quality(report, plan)
    assert stragglers(report) == [1], shown(report)


def test_a_slow_loader_is_told_from_a_slow_rank(server: ServerProcess, tmp_path: Path) -> None:
    """One rank waits for its batches: that is no longer forward."""
    plan = replace(PLAN, loader_rank=1)
    report = report_of("megatron-loader", plan, server, tmp_path)
    check_quality(report, plan)
    assert not stragglers(report), shown(report)
    causes = [(each["cause"], each["where"]["rank"]) for each in report["findings"]]
    assert ("dataloader", 1) in causes or ("host_contention", 1) in causes, shown(report)
