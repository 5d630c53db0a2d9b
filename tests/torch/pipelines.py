"""Runs of the pipeline trainer, and what tests ask of their reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.system.server import ServerProcess
from tests.torch.plans import PipelinePlan
from tests.torch.trainers import Job, Ran, run

HEALTHY = PipelinePlan()


def ran(name: str, plan: PipelinePlan, server: ServerProcess, folder: Path) -> Ran:
    """The run of a plan."""
    layout = f"dp{plan.dp}-pp{plan.pp}"
    chunks = len(plan.layers) // plan.pp
    job = Job(
        name,
        "pipeline_trainer",
        plan.document(),
        steps=plan.steps,
        ranks=plan.dp * plan.pp,
        layout=layout if chunks == 1 else f"{layout}-vpp{chunks}",
    )
    return run(job, server, folder)


def told(report: dict[str, Any]) -> str:
    """What a failing test shows of a report."""
    parts = {name: report[name] for name in ("verdict", "slowdown", "step_time", "quality")}
    findings = [
        {name: each[name] for name in ("severity", "cause", "where", "excess_share", "evidence")}
        for each in report["findings"]
    ]
    return f"{parts}\n{findings}"


def first(report: dict[str, Any]) -> dict[str, Any]:
    """The first finding."""
    assert report["findings"], told(report)
    found: dict[str, Any] = report["findings"][0]
    return found
