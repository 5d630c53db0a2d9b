from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from smon.synth.catalogue import CATALOGUE
from smon.synth.presets import scenario
from smon.synth.scenario import Synthetic, generate
from smon.synth.truth import CauseName, Pattern, Scope, Verdict

#: Mean step, healthy and with the fault, ms: the column of docs/causes.md.
STEPS_MS = {
    "C01": (33_013, 33_897),
    "C02": (1_644, 2_135),
    "C03": (3_662, 3_996),
    "C04": (5_002, 6_185),
    "C05": (4_864, 6_142),
    "C06": (3_661, 4_114),
    "C07a": (4_154, 4_551),
    "C07b": (4_154, 4_599),
    "C08": (2_375, 2_537),
    "C09": (3_659, 3_959),
    "C10": (4_489, 4_644),
    "C11": (3_659.5, 3_659.5),
    "C12": (180.4, 379.1),
    "C13": (3_660, 4_596),
}

#: Where only the draws decide when it pauses and how long sequences are: 20 seeds spread as much.
DRAWN = {"C03": 0.02, "C04": 0.03}

ANSWERS: dict[str, tuple[Verdict, CauseName, Scope, Pattern, dict[str, Any]]] = {
    "C01": (
        Verdict.STRAGGLER,
        CauseName.SLOW_GPU,
        Scope.RANK,
        Pattern.PERSISTENT,
        {"rank": 43, "dp": 3, "stage": 5},
    ),
    "C02": (
        Verdict.STRAGGLER,
        CauseName.THERMAL,
        Scope.RANK,
        Pattern.RAMP,
        {"rank": 9, "dp": 9, "stage": 0},
    ),
    "C03": (Verdict.HOST_STALL, CauseName.GC, Scope.JOB, Pattern.ROTATING, {}),
    "C04": (Verdict.IMBALANCE, CauseName.SEQUENCE_LENGTH, Scope.JOB, Pattern.ROTATING, {}),
    "C05": (
        Verdict.IMBALANCE,
        CauseName.STAGE_PARTITION,
        Scope.STAGE,
        Pattern.PERSISTENT,
        {"stage": 3},
    ),
    "C06": (
        Verdict.LINK,
        CauseName.FLAPPING_LINK,
        Scope.NODE,
        Pattern.INTERMITTENT,
        {"rank": 21, "dp": 5, "stage": 2, "node": "node-0021"},
    ),
    "C07a": (
        Verdict.LINK,
        CauseName.SLOW_LINK,
        Scope.DP_GROUP,
        Pattern.PERSISTENT,
        {"stage": 1},
    ),
    "C07b": (
        Verdict.LINK,
        CauseName.SLOW_LINK,
        Scope.NODE,
        Pattern.PERSISTENT,
        {"rank": 14, "dp": 6, "stage": 1, "node": "node-0014"},
    ),
    "C08": (
        Verdict.HOST_STALL,
        CauseName.DATALOADER,
        Scope.RANK,
        Pattern.PERIODIC,
        {"rank": 2, "dp": 2, "stage": 0, "node": "node-0002"},
    ),
    "C09": (Verdict.PLANNED_PAUSE, CauseName.CHECKPOINT, Scope.JOB, Pattern.PERIODIC, {}),
    "C10": (Verdict.JOB_WIDE, CauseName.JOB_WIDE, Scope.JOB, Pattern.ONSET, {}),
    "C12": (
        Verdict.STRAGGLER,
        CauseName.SLOW_BACKWARD,
        Scope.RANK,
        Pattern.PERSISTENT,
        {"rank": 1, "dp": 1, "stage": 0},
    ),
    "C13": (
        Verdict.IMBALANCE,
        CauseName.MOE_LOAD,
        Scope.EP_GROUP,
        Pattern.ROTATING,
        {"stage": 2},
    ),
    "C14": (Verdict.HOST_STALL, CauseName.GC, Scope.JOB, Pattern.ROTATING, {}),
}


@pytest.fixture(scope="module")
def jobs() -> dict[str, Synthetic]:
    """Every scenario with a cause, generated once."""
    return {name: generate(scenario(name)) for name in CATALOGUE if name.startswith("C")}


@pytest.mark.parametrize("name", list(STEPS_MS))
def test_steps_take_as_long_as_the_catalogue_says(name: str, jobs: dict[str, Synthetic]) -> None:
    """Within 1 %, healthy and with the fault; the excess within 10 %, where the text decides."""
    truth = jobs[name].truth
    healthy_ms, faulty_ms = STEPS_MS[name]
    assert truth.healthy_step_s * 1e3 == pytest.approx(healthy_ms, rel=0.01)
    assert truth.faulty_step_s * 1e3 == pytest.approx(faulty_ms, rel=DRAWN.get(name, 0.01))
    if name not in DRAWN:
        assert truth.excess_s * 1e3 == pytest.approx(faulty_ms - healthy_ms, rel=0.1)


@pytest.mark.parametrize("name", list(ANSWERS))
def test_the_truth_is_the_answer_of_the_catalogue(name: str, jobs: dict[str, Synthetic]) -> None:
    """Verdict, cause, scope, pattern in time, place."""
    truth = jobs[name].truth
    assert truth.main is not None
    main = truth.main
    found = (truth.verdict, main.cause, main.scope, main.persistence.kind, dict(main.where))
    assert found == ANSWERS[name]
    assert main.excess_s == pytest.approx(truth.excess_s)
    assert main.gain_s == pytest.approx(truth.excess_s)


def test_shares_onsets_and_periods_are_those_of_the_catalogue(jobs: dict[str, Synthetic]) -> None:
    """How it goes in time."""
    found = {
        name: answer.persistence
        for name, job in jobs.items()
        if (answer := job.truth.main) is not None
    }
    shares = {"C01": 1.0, "C06": 0.15, "C08": 0.125, "C09": 0.05, "C10": 0.5}
    assert {name: found[name].share for name in shares} == pytest.approx(shares)
    assert (found["C02"].onset_step, found["C10"].onset_step) == (11, 20)
    assert [found[name].period for name in ("C03", "C08", "C09", "C13", "C14")] == [
        24,
        8,
        20,
        12,
        12,
    ]
    assert (found["C03"].grows, found["C14"].grows) == (False, True)


def test_equal_suspects_and_victims_are_listed(jobs: dict[str, Synthetic]) -> None:
    """One ring names only its members; a slow worker's peers are victims."""
    ring, slow, node = (jobs[name].truth.main for name in ("C07a", "C12", "C07b"))
    assert ring is not None
    assert slow is not None
    assert node is not None
    assert (ring.candidates, ring.victims) == (tuple(range(8, 16)), ())
    assert (slow.candidates, slow.victims) == ((1,), (0, 2, 3))
    assert (node.candidates, len(node.victims)) == ((14,), 31)


def test_too_small_a_change_of_the_job_is_nothing_to_report(jobs: dict[str, Synthetic]) -> None:
    """It is there, and the truth says what it costs, but no verdict names it."""
    truth = jobs["C10b"].truth
    assert (truth.verdict, truth.main) == (Verdict.NONE, None)
    assert [answer.cause for answer in truth.answers] == [CauseName.JOB_WIDE]
    assert 0.005 < truth.excess_s / truth.healthy_step_s < 0.015


def test_wrong_clocks_are_no_reason_to_name_anybody(jobs: dict[str, Synthetic]) -> None:
    """The verdict is none; each wrong clock is in the list, with its host and offset."""
    truth = jobs["C11"].truth
    assert (truth.verdict, truth.main, truth.excess_s) == (Verdict.NONE, None, 0.0)
    assert {answer.verdict for answer in truth.answers} == {Verdict.DATA_QUALITY}
    offsets = {answer.where["node"]: answer.details["offset_s"] for answer in truth.answers}
    late = dict.fromkeys(["node-0003", "node-0007", "node-0011", "node-0015"], -0.0004)
    assert offsets == {"node-0009": 0.2} | late


@pytest.mark.parametrize("name", [name for name in CATALOGUE if name.startswith("N")])
def test_a_healthy_job_has_nothing_to_report(name: str) -> None:
    """No cause, and no cost."""
    truth = generate(scenario(name)).truth
    assert (truth.verdict, truth.answers, truth.excess_s) == (Verdict.NONE, (), 0.0)


def test_a_hot_device_shows_in_its_counters(jobs: dict[str, Synthetic]) -> None:
    """Clock 1980/k MHz, 72 to 89 °C, thermal flag from step 14 on; its peers stay as they are."""
    counters = jobs["C02"].context.counters
    for name, early, late in (
        ("gpu_clock_mhz", 1980, 1980 / 1.6),
        ("gpu_temperature_c", 72, 89),
        ("gpu_throttle_thermal", 0, 1),
    ):
        mine = (counters.name == name) & (counters.rank == 9)
        values = counters.value[mine][np.argsort(counters.step[mine])]
        assert values[:10] == pytest.approx(early, abs=2.5)
        assert values[40:] == pytest.approx(late, abs=2.5)
        peers = counters.value[(counters.name == name) & (counters.rank == 8)]
        assert peers == pytest.approx(early, abs=2.5)
        if name == "gpu_throttle_thermal":
            assert np.flatnonzero(values)[0] == 14


@pytest.mark.parametrize("name", ["C02", "C03-events", "C04", "C06", "C09-events", "C11", "C13"])
def test_side_evidence_is_there_only_if_it_is_asked_for(
    name: str, jobs: dict[str, Synthetic]
) -> None:
    """Each scenario has the one part that it is about; its sibling has none."""
    parts = {
        "C02": "counters",
        "C03-events": "events",
        "C04": "microbatches",
        "C06": "hosts",
        "C09-events": "events",
        "C11": "hosts",
        "C13": "expert_tokens",
    }
    context = jobs[name].context
    names = {"hosts", "switches", "events", "microbatches", "expert_tokens", "counters"}
    filled = {part for part in names if len(getattr(context, part))}
    assert filled == {parts[name]}
    for sibling in ("C02-no-counters", "C03", "C04-no-lengths", "C09", "C13-no-counts"):
        assert not jobs[sibling].context


def test_collections_are_reported_where_and_when_they_happen(jobs: dict[str, Synthetic]) -> None:
    """Each event lies inside one forward of its rank, in its step."""
    job = jobs["C03-events"]
    assert len(job.context.events) == 2 * 64
    for event in job.context.events[:20]:
        assert event.start_ns is not None
        ops = job.table.take((job.table.step == event.step) & (job.table.rank == event.rank))
        inside = (ops.start_ns <= event.start_ns) & (
            event.start_ns < ops.start_ns + ops.duration_ns
        )
        assert 0 in ops.optype[inside]
        assert event.duration_s == 0.35


def test_checkpoints_are_reported_after_their_step(jobs: dict[str, Synthetic]) -> None:
    """They begin with the end of the step, and the next one starts 6 s later."""
    job = jobs["C09-events"]
    assert [event.step for event in job.context.events] == [19, 39, 59]
    event = job.context.events[0]
    ops = job.table.between(19, 19)
    assert event.start_ns == (ops.start_ns + ops.duration_ns).max()
    assert event.rank is None
    following = job.table.between(20, 20).start_ns.min()
    assert (following - event.start_ns) / 1e9 == pytest.approx(6.05)
