"""Every schedule of torch gives ops that SMon can build its graph from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.system.server import ServerProcess
from tests.torch.pipelines import HEALTHY, ran, told

#: Above, a report says itself that nobody should rely on it.
MAX_ERROR = 0.05

#: The slow rank costs so many times what any other does.
CLEARLY = 4

SMALL = replace(HEALTHY, steps=12, slow_rank=1, slow_ratio=0.4)


@pytest.mark.parametrize(
    "schedule, layers",
    [
        ("ScheduleGPipe", (4, 4)),
        ("ScheduleInterleaved1F1B", (2, 2, 2, 2)),
        ("ScheduleLoopedBFS", (2, 2, 2, 2)),
        ("ScheduleInterleavedZeroBubble", (2, 2, 2, 2)),
        ("ScheduleZBVZeroBubble", (2, 2, 2, 2)),
        ("ScheduleDualPipeV", (2, 2, 2, 2)),
    ],
)
def test_the_time_of_a_slow_rank_is_its_own_under_every_schedule(
    schedule: str, layers: tuple[int, ...], server: ServerProcess, tmp_path: Path
) -> None:
    """No step is left out, the replay comes out right, and the rank costs most by far."""
    plan = replace(SMALL, schedule=schedule, layers=layers)
    report = ran(schedule, plan, server, tmp_path).report
    skipped = [each for each in report["window"]["skipped"] if "warm-up" not in each["reason"]]
    assert not skipped, told(report)
    assert report["quality"]["simulation_error_ratio"] < MAX_ERROR, told(report)
    worst, next_ = sorted(report["workers"], key=lambda worker: -worker["slowdown"])[:2]
    assert worst["rank"] == 1, told(report)
    assert worst["slowdown"] - 1 > CLEARLY * abs(next_["slowdown"] - 1), report["workers"]
