"""Plain training loops under DDP and `fully_shard`: attached with one line, and told right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.system.server import ServerProcess
from tests.torch.plain_plan import PlainPlan, Wrapped
from tests.torch.trainers import Job, Ran, run

HEALTHY = PlainPlan()

#: Share of the step that recording may take.
GOAL = 0.005
BOTH = pytest.mark.parametrize("wrapped", list(Wrapped))


def ran(name: str, plan: PlainPlan, server: ServerProcess, folder: Path) -> Ran:
    """Train with this plan, and let SMon look at it."""
    done = run(Job(name, "plain_trainer", plan.document(), plan.steps), server, folder)
    assert [result["errors"] for result in done.results] == [0] * len(done.results)
    return done


def first(report: dict[str, Any]) -> dict[str, Any]:
    """The first finding."""
    assert report["findings"], report["verdict"]
    found: dict[str, Any] = report["findings"][0]
    return found


@BOTH
def test_nobody_is_named_in_a_healthy_job(
    wrapped: Wrapped, server: ServerProcess, tmp_path: Path
) -> None:
    """Nothing was done: no rank, and nothing to be warned of, whatever else the machine does."""
    plan = replace(HEALTHY, wrapped=wrapped)
    report = ran(f"plain-healthy-{wrapped}", plan, server, tmp_path).report
    assert {found["severity"] for found in report["findings"]} <= {"info"}, report["findings"]
    assert {found["where"]["rank"] for found in report["findings"]} <= {None}, report["findings"]


@BOTH
def test_a_slow_backward_is_told_from_its_victims(
    wrapped: Wrapped, server: ServerProcess, tmp_path: Path
) -> None:
    """+200 ms on rank 1: wall clocks of all ranks agree; the one that waits least is it."""
    plan = replace(HEALTHY, wrapped=wrapped, slow_rank=1, backward_s=0.2)
    done = ran(f"plain-backward-{wrapped}", plan, server, tmp_path)
    steps = [median(result["step_s"]) for result in done.results]
    assert max(steps) < 1.02 * min(steps)
    found = first(done.report)
    assert (found["cause"], found["where"]["rank"]) == ("slow_backward", 1), found
    assert found["excess_s"] == pytest.approx(0.2, rel=0.15), found
    victims = found["victims"]
    assert set(victims["ranks"]) == {0, 2, 3}, found
    assert victims["wait_s"] == pytest.approx(0.2, rel=0.15), found


@BOTH
def test_a_slow_forward_is_told(wrapped: Wrapped, server: ServerProcess, tmp_path: Path) -> None:
    """+60 ms on rank 2, with two microbatches in each step."""
    plan = replace(HEALTHY, wrapped=wrapped, microbatches=2, slow_rank=2, forward_s=0.06)
    found = first(ran(f"plain-forward-{wrapped}", plan, server, tmp_path).report)
    assert (found["cause"], found["where"]["rank"]) == ("slow_forward", 2), found
    # Less than it is, where other ranks are held up now and then.
    assert 0.06 <= found["excess_s"] <= 0.14, found


@BOTH
def test_a_slow_loader_is_told(wrapped: Wrapped, server: ServerProcess, tmp_path: Path) -> None:
    """Rank 3 waits 200 ms for each batch: its loader, and not its compute."""
    plan = replace(HEALTHY, wrapped=wrapped, loader_rank=3)
    found = first(ran(f"plain-loader-{wrapped}", plan, server, tmp_path).report)
    assert (found["cause"], found["where"]["rank"]) == ("dataloader", 3), found


@BOTH
def test_recording_costs_half_a_percent_at_most(
    wrapped: Wrapped, server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Attached and detached in turn, in one process: processor time of the training thread."""
    plan = replace(HEALTHY, wrapped=wrapped, steps=120, every_other=5)
    job = Job(f"plain-cost-{wrapped}", "plain_trainer", plan.document(), plan.steps // 2)
    costs = [cost(result, plan) for result in run(job, server, tmp_path).results]
    with capsys.disabled():
        print(f"\nrecording, {wrapped}: {median(costs):.2%} of the step (median of 4 ranks)")  # noqa: T201
    assert median(costs) <= GOAL, costs


def cost(result: dict[str, Any], plan: PlainPlan) -> float:
    """What recording adds to the thread's time, as a share of the step; blocks are pairs."""
    size = plan.every_other
    blocks = [
        median(result["thread_s"][begin : begin + size]) for begin in range(0, plan.steps, size)
    ]
    added = [on - off for off, on in zip(blocks[::2], blocks[1::2], strict=True)]
    share: float = median(added) / median(result["step_s"])
    return share
