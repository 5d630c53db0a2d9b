"""The fix is tried for real: what SMon predicts from the run with the fault is what it brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.system.server import ServerProcess
from tests.torch.pipelines import HEALTHY, ran, told
from tests.torch.plans import Batches, Collect, PipelinePlan
from tests.torch.trainers import Ran

#: Points of the speed-up.
WITHIN = 0.05

#: The machine is shared: of so many runs, what is left where each step was at its best.
RUNS = 2


def step_s(runs: Sequence[Ran]) -> float:
    """Mean step time; of each step, the best of all runs, without the first two."""
    took: list[list[float]] = [run.results[0]["step_s"] for run in runs]
    best = [min(step) for step in zip(*took, strict=True)][2:]
    return float(sum(best)) / len(best)


def fix_of(report: dict[str, Any], name: str) -> dict[str, Any]:
    """The fix of this name."""
    found: list[dict[str, Any]] = [each for each in report["fixes"] if each["fix"] == name]
    assert found, told(report)
    return found[0]


def order_of(detail: str) -> str:
    """How the fix says that microbatches shall be run."""
    return next((order for order in ("longest", "shortest") if f"run the {order}" in detail), "")


def moved(plan: PipelinePlan, _fix: dict[str, Any]) -> PipelinePlan:
    """A layer moved from the last stage to the first."""
    first, last = plan.layers
    return replace(plan, layers=(first + 1, last - 1))


def dealt(plan: PipelinePlan, fix: dict[str, Any]) -> PipelinePlan:
    """Microbatches dealt by length, and run in the order that the fix names."""
    return replace(plan, batches=Batches.BALANCED, order=order_of(fix["detail"]))


def planned(plan: PipelinePlan, _fix: dict[str, Any]) -> PipelinePlan:
    """All ranks collect in the same step, each as often as before."""
    return replace(plan, collect=Collect.TOGETHER)


SHORT = replace(HEALTHY, steps=26)
#: Two ranks: more that collect at once would be in each other's way on a machine with two cores.
COLLECTING = replace(SHORT, dp=1, collect=Collect.ALONE, collect_every=4)

CASES = [
    pytest.param("move_layers", replace(SHORT, layers=(4, 6)), moved, id="layers"),
    pytest.param(
        "redistribute_microbatches", replace(SHORT, batches=Batches.PACKED), dealt, id="batches"
    ),
    pytest.param("plan_gc", COLLECTING, planned, id="collections"),
]


@pytest.mark.parametrize("name, faulty, apply", CASES)
def test_a_fix_brings_what_was_predicted(
    name: str,
    faulty: PipelinePlan,
    apply: Any,  # noqa: ANN401  # one of the functions above
    server: ServerProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Run, take the predicted speed-up, apply the fix, run again: within five points."""
    before: list[Ran] = []
    after: list[Ran] = []
    for number in range(RUNS):
        before.append(ran(f"{name}-before-{number}", faulty, server, tmp_path))
        fix = fix_of(before[0].report, name)
        fixed = apply(faulty, fix)
        after.append(ran(f"{name}-after-{number}", fixed, server, tmp_path))
    predicted = fix["speedup"]
    measured = step_s(before) / step_s(after)
    with capsys.disabled():
        print(f"\n{name}: {fix['detail']}: predicted {predicted:.3f}, measured {measured:.3f}")  # noqa: T201
    assert predicted > 1 + WITHIN, fix
    assert measured == pytest.approx(predicted, abs=WITHIN), (step_s(before), step_s(after))
