from __future__ import annotations

import json
from dataclasses import replace

import pytest

from smon.synth import causes
from smon.synth.evidence import Evidence, Machines
from smon.synth.faults import GcPauses, SlowCompute, When
from smon.synth.scenario import Scenario, generate
from smon.synth.truth import Cause, CauseName, Scope, Verdict
from tests.synth.builders import QUIET

JOB = Scenario(dp=4, pp=2, microbatches=8, steps=12)


def test_the_cost_of_a_fault_is_that_of_the_same_job_without_it() -> None:
    """The same draws both times, so that a difference below the noise is exact."""
    slow = replace(JOB, causes=(causes.slow_gpu(1, 1, 1.02),))
    made, healthy = generate(slow), generate(JOB)
    assert made.truth.healthy_step_s == healthy.step_seconds.mean()
    assert made.truth.faulty_step_s == made.step_seconds.mean()
    assert made.truth.excess_s > 0


def test_a_long_stage_is_compared_with_the_same_work_on_all_stages() -> None:
    """Half of the extra work on each of two stages."""
    long = replace(JOB, noise=QUIET, causes=(causes.stage_partition(1, 1.5, 1.5),))
    even = replace(
        JOB,
        noise=QUIET,
        faults=tuple(SlowCompute(stage, None, 1.25, 1.25) for stage in (0, 1)),
    )
    expected = generate(even).step_seconds.mean()
    assert generate(long).truth.healthy_step_s == pytest.approx(expected)


def test_two_causes_are_two_answers_the_costlier_one_first() -> None:
    """Each with what it costs alone, and what its repair would gain in the job as it is."""
    pair = replace(
        JOB,
        causes=(causes.slow_gpu(0, 0, 1.1), causes.slow_gpu(1, 0, 1.3)),
    )
    truth = generate(pair).truth
    assert truth.verdict is Verdict.STRAGGLER
    first, second = truth.answers
    assert (first.where["dp"], second.where["dp"]) == (1, 0)
    assert first.excess_s == pytest.approx(truth.excess_s, rel=0.05)
    assert first.gain_s == pytest.approx(truth.excess_s - second.excess_s, rel=0.05)
    assert second.excess_s > 0.01
    assert second.gain_s == pytest.approx(0, abs=0.005)


def test_causes_of_different_kinds_add_up() -> None:
    """A pause between steps hides nothing of a slow device."""
    pair = replace(JOB, causes=(causes.slow_gpu(0, 0, 1.1), causes.checkpoint(2.4, every=4)))
    truth = generate(pair).truth
    assert [answer.cause for answer in truth.answers] == [CauseName.CHECKPOINT, CauseName.SLOW_GPU]
    assert sum(answer.excess_s for answer in truth.answers) == pytest.approx(truth.excess_s)
    assert truth.answers[0].excess_s == pytest.approx(0.6)


def test_wrong_clocks_come_after_what_costs_time() -> None:
    """A straggler on a job with a wrong clock is still a straggler."""
    pair = replace(JOB, causes=(causes.clock([(0, 0)], 0.2), causes.slow_gpu(1, 1, 1.2)))
    truth = generate(pair).truth
    assert truth.verdict is Verdict.STRAGGLER
    assert [answer.verdict for answer in truth.answers] == [
        Verdict.STRAGGLER,
        Verdict.DATA_QUALITY,
    ]


def test_faults_without_a_cause_leave_the_verdict_open() -> None:
    """Nobody said what they stand for, but their cost is known."""
    truth = generate(replace(JOB, faults=(SlowCompute(0, 0, 2.0, 2.0),))).truth
    assert (truth.verdict, truth.answers) == (None, ())
    assert truth.excess_s > 0.5


def test_all_workers_of_a_node_are_candidates() -> None:
    """With four ranks per host, rank 5 shares its host with ranks 4, 6 and 7."""
    workers = [(1, 1), (0, 1), (2, 1), (3, 1)]
    job = replace(
        JOB,
        causes=(causes.contention(workers, 0.01, 0.0, [3, 4]),),
        machines=Machines(ranks_per_host=4, hosts_per_switch=1),
        evidence=frozenset({Evidence.COUNTERS}),
    )
    made = generate(job)
    assert made.truth.main is not None
    assert made.truth.main.scope is Scope.NODE
    assert made.truth.main.where == {"rank": 5, "dp": 1, "stage": 1, "node": "node-0001"}
    assert made.truth.main.candidates == (4, 5, 6, 7)
    assert made.truth.main.victims == (0, 1, 2, 3)
    assert made.context.hosts[7] == "node-0001"
    assert made.context.switches == {"node-0000": "leaf-000", "node-0001": "leaf-001"}
    assert len(set(made.context.gpus.values())) == 8
    counters = made.context.counters
    busy = counters.step[(counters.name == "host_cpu_ratio") & (counters.value > 0.9)]
    assert sorted(set(busy.tolist())) == [3, 4]


def test_a_broken_link_counts_errors_in_its_bad_steps() -> None:
    """The counter of the node's NIC, and no other."""
    job = replace(
        JOB,
        causes=(causes.slow_link(1, 1, 2.0, When(first=9)),),
        evidence=frozenset({Evidence.COUNTERS}),
    )
    counters = generate(job).context.counters
    errors = (counters.name == "nic_errors") & (counters.value > 0)
    assert set(counters.rank[errors].tolist()) == {5}
    assert sorted(counters.step[errors].tolist()) == [9, 10, 11]


def test_a_hang_has_no_cost_per_step_but_a_place() -> None:
    """The step that never ends is left out of the means."""
    truth = generate(replace(JOB, causes=(causes.hang(2, 1, 11, 3),))).truth
    assert truth.verdict is Verdict.HANG
    assert truth.main is not None
    assert truth.main.where["rank"] == 6
    assert truth.excess_s == 0


def test_a_job_of_which_no_step_ends_has_no_mean() -> None:
    """Zero, which no step takes."""
    truth = generate(replace(JOB, steps=1, causes=(causes.hang(0, 0, 0, 0),))).truth
    assert (truth.healthy_step_s, truth.faulty_step_s) == (0, 0)


@pytest.mark.parametrize(
    "cause",
    [causes.slow_gpu(1, 1, 1.5), causes.gc(GcPauses(every=3)), causes.lost_rows(0.01)],
)
def test_the_truth_is_plain_json(cause: Cause) -> None:
    """The main cause at the top, all causes in a list; names as strings, no enum objects."""
    truth = generate(replace(JOB, causes=(cause,))).truth
    document = json.loads(truth.to_json())
    assert document["schema"] == "smon.truth/1"
    assert document["verdict"] == truth.verdict
    assert document["excess_s"] == truth.excess_s
    assert len(document["causes"]) == 1
    answer = document["causes"][0]
    assert answer["cause"] == cause.name.value
    assert 0 < answer["persistence"]["share"] <= 1
    reported = cause.name is not CauseName.LOST_DATA
    assert document["cause"] == (answer["cause"] if reported else None)
    assert document["where"] == (answer["where"] if reported else None)


def test_a_healthy_job_says_so_in_json() -> None:
    """All keys are there."""
    document = json.loads(generate(JOB).truth.to_json())
    assert (document["verdict"], document["cause"], document["causes"]) == ("none", None, [])
    assert document["healthy_step_s"] == document["faulty_step_s"] > 0
