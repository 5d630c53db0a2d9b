from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from smon.plan.tail import forecast
from smon.render.plan import print_plan
from smon.report import FixPart
from tests.plan.jobs import made

FIX = FixPart(
    fix="move_layers",
    detail="9/9/9/9 → 10/10/10/6 layers",
    step_time_s=1.96,
    speedup=1.108,
    gpu_hours_per_day=1234.5,
    cost_per_day=None,
    assumptions=("layers cost the same",),
)
NOTHING: tuple[list[int], list[float], list[float], list[float]] = ([], [], [], [])


def printed(
    *fixes: FixPart,
    series: tuple[list[int], list[float], list[float], list[float]] = NOTHING,
    assumptions: tuple[str, ...] = (),
) -> str:
    """What a terminal of 200 columns shows."""
    out = StringIO()
    console = Console(file=out, width=200, highlight=False, emoji=False, markup=False)
    print_plan(fixes, series, assumptions, console)
    return out.getvalue()


def test_a_fix_has_its_gain_its_step_time_and_what_it_assumes() -> None:
    """The gain first, then what is to be done."""
    first, second, third, *_ = printed(FIX).splitlines()
    assert first == "+10.8%  move layers: 9/9/9/9 → 10/10/10/6 layers"
    assert second.strip() == "1.96 s per step; saves 1,234 GPU-hours per day"
    assert third.strip() == "assumes: layers cost the same"


def test_money_and_a_change_of_training_are_said() -> None:
    """Each only where it is so."""
    changed = FixPart("backup_workers", "x", 1.0, 1.5, 10.0, 25.0, changes_optimisation=True)
    text = printed(changed)
    assert "saves 10 GPU-hours, $25 per day; changes how the model is trained" in text
    assert "trained" not in printed(FIX)


def test_no_fix_is_said() -> None:
    """A job that loses too little has none."""
    assert printed().startswith("No fix: this job loses too little.")


@pytest.mark.parametrize("dp", [2, 4])
def test_the_forecast_has_a_row_for_every_size(dp: int) -> None:
    """Half to sixteen times the DP ranks, and what the numbers assume."""
    expected = forecast(made(dp=dp))
    text = printed(series=expected.series(), assumptions=expected.assumptions)
    for size in (dp // 2, dp, 2 * dp, 4 * dp, 8 * dp, 16 * dp):
        assert f"DP {size} " in text
    assert text.count("█\n") + text.count("█ ") >= 6
    assert all(line in text for line in expected.assumptions)


def test_one_replica_has_no_forecast_and_says_why() -> None:
    """There is nothing to learn the scatter from."""
    expected = forecast(made(dp=1))
    text = printed(series=expected.series(), assumptions=expected.assumptions)
    assert "one replica shows no scatter" in text
    assert "DP 1" not in text
