"""What recording costs: switched on and off in turn in one run."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from tests.system.server import ServerProcess
from tests.torch.pipelines import HEALTHY, ran

#: Share of the step. The goal is half of it; this is for a machine that does other things, too,
#: whose caches are cold after each sleep.
LIMIT = 0.01


def test_recording_costs_next_to_nothing(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps with and without, in turn, so that what else the machine does meets both alike."""
    plan = replace(HEALTHY, steps=61, every_other=True)
    results = ran("overhead", plan, server, tmp_path).results
    took = results[0]["step_s"][1:]
    pairs = zip(took[0::2], took[1::2], strict=True)
    costs = [recorded / bare - 1 for recorded, bare in pairs]
    cost = statistics.median(costs)
    with capsys.disabled():
        print(f"\nrecording: {cost:.2%} of the step (median of {len(costs)} pairs)")  # noqa: T201
    assert cost <= LIMIT
