from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dashboards.web.views.captured import (
    MAX_COLLECTIVES,
    collectives_view,
    series_view,
    without_numbers,
)
from dashboards.web.views.job import small_report
from dashboards.web.views.trust import rests_on
from smon.report import ReportOptions
from smon.reports import report_without_ops
from smon.trace.load import load
from tests.kineto_files import Ddp, write_ddp


def document_of(*paths: Path) -> dict[str, Any]:
    """The report of files without ops, as it is stored."""
    trace = load(paths)
    report = report_without_ops(trace, ReportOptions(trace.notes))
    assert report is not None
    return dict(report.to_dict())


@pytest.fixture(scope="module")
def collectives(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a job whose rank 1 is late in step 12 alone."""
    folder = tmp_path_factory.mktemp("ddp")
    write_ddp(folder, Ddp(steps=24, extra_backward=(1, 40.0), only_step=12))
    return document_of(folder)


@pytest.fixture
def dumps(traces: Path) -> dict[str, Any]:
    """Of a hang."""
    return document_of(traces / "nvrx-flight-recorder" / "lock_gil_2nd")


@pytest.fixture
def series(traces: Path) -> dict[str, Any]:
    """Of a log of step times."""
    (path,) = (traces / "megatron-step-times").glob("deepseekv3*golden_values*.json*")
    return document_of(path)


def test_the_collectives_that_were_waited_for_most_are_shown(collectives: dict[str, Any]) -> None:
    """With who came last, in the order of their calls."""
    view = collectives_view(collectives)
    assert view is not None
    assert (len(view.lines), view.count) == (MAX_COLLECTIVES, 72)
    places = [(line.step, line.index) for line in view.lines]
    assert places == sorted(places)
    most = max(view.lines, key=lambda line: line.late_s)
    assert (most.step, most.last_rank) == (12, 1)
    assert most.late_s == pytest.approx(0.04)
    assert without_numbers(collectives) == ""
    assert series_view(collectives) is None


def test_a_report_of_dumps_says_why_it_has_no_numbers(dumps: dict[str, Any]) -> None:
    """Nothing is shown in place of what is not known."""
    assert "dumps say who has called which collective" in without_numbers(dumps)
    assert collectives_view(dumps) is None
    assert rests_on(small_report(dumps)) == "no steps, coverage 100.0 %"


def test_step_times_of_a_whole_job_have_their_distribution_and_bursts(
    series: dict[str, Any],
) -> None:
    """As the report has them."""
    view = series_view(series)
    assert view is not None
    facts = dict(view.facts)
    assert facts["longest"].endswith(f"step {series['series']['max_step']}")
    bursts = [line for line in view.stretches if line.what == "burst"]
    assert [(one.first_step, one.last_step) for one in bursts] == [
        (one["first_step"], one["last_step"]) for one in series["series"]["bursts"]
    ]
    assert "step times of the whole job" in without_numbers(series)
