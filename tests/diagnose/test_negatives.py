"""Healthy jobs: nobody is named, whatever the random draws are."""

from __future__ import annotations

import pytest

from smon.analysis import Options, analyze
from smon.report import JobReport
from smon.synth.catalogue import CATALOGUE
from smon.synth.presets import scenario
from smon.synth.scenario import generate

NAMES = [name for name in CATALOGUE if name.startswith("N-")]
PAUSES = ("C09", "C09-events")

#: What is said of nothing but a fault.
ACCUSATIONS = {"straggler", "imbalance", "link", "host_stall", "job_wide", "hang"}


def _report(name: str, seed: int) -> JobReport:
    made = generate(scenario(name, seed=seed))
    return analyze(made.table, made.job, Options(), made.context)


def _is_silent(name: str, seed: int) -> None:
    """No accusation; of a healthy job nothing at all, of checkpoints that they are planned."""
    report = _report(name, seed)
    said = [finding.verdict for finding in report.findings]
    assert not ACCUSATIONS.intersection(said)
    assert said == (["planned_pause"] if name in PAUSES else [])
    one_step = name == "N-1-step"
    expected = "insufficient_data" if one_step else "planned_pause" if name in PAUSES else "none"
    assert report.verdict == expected


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("name", [*NAMES, "C10b", "C11", *PAUSES])
def test_a_healthy_job_is_not_accused(name: str, seed: int) -> None:
    """Of many shapes; with a change that is too small; with wrong clocks; with checkpoints."""
    _is_silent(name, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", [*NAMES, "C10b", "C11", *PAUSES])
def test_a_healthy_job_is_not_accused_whatever_the_noise_is(name: str, seed: int) -> None:
    """Twenty draws of each: somebody is always the slowest, and it says nothing."""
    _is_silent(name, seed)


@pytest.mark.parametrize("name", ["C01", "C05", "C12"])
def test_one_step_is_too_little_for_any_finding(name: str) -> None:
    """Even with a real fault in it: one step cannot tell a slow worker from a slow moment."""
    made = generate(scenario(name, steps=1))
    report = analyze(made.table, made.job, Options(), made.context)
    assert report.verdict == "insufficient_data"
    assert report.findings == ()
    assert any("one usable step" in note for note in report.quality.notes)


@pytest.mark.parametrize("name", ["C01", "C05", "C12"])
def test_two_steps_are_enough_for_a_fault_of_that_size(name: str) -> None:
    """The silence over one step is about the number of steps."""
    made = generate(scenario(name, steps=2))
    report = analyze(made.table, made.job, Options(), made.context)
    assert report.verdict == made.truth.verdict
