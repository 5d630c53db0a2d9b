from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.analysis import Options, analyze
from smon.cli import EXIT_OK, EXIT_USAGE, main
from smon.diagnose.history import Earlier, History, earlier_of, history_of
from smon.errors import ConfigError
from smon.report import Finding, JobReport
from smon.synth.evidence import Machines
from smon.synth.faults import GcPauses, JobWide, SlowCompute, SlowP2P
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.synth.write import write_trace
from smon.topology import Layout
from smon.trace.context import Context, Counters

STEPS = 6

#: A defect that is known.


def made(**fields: Any) -> Synthetic:  # noqa: ANN401  # of Scenario
    """A job of 4 × 2 workers, unless told otherwise."""
    return generate(Scenario(**{"dp": 4, "pp": 2, "steps": STEPS, "name": "job", **fields}))


def report_of(job: Synthetic, history: History | None = None) -> JobReport:
    """The report of a job, against its earlier windows if there are any."""
    return analyze(job.table, job.job, Options(history=history), job.context)


def document(job_id: str = "job", **times: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON
    """What is read of an earlier report."""
    return {
        "schema": "smon.report/1",
        "job": {"job_id": job_id},
        "window": {"last_step": 99},
        "step_time": {"simulated_s": 2.0, "ideal_s": 1.9, **times},
    }


# --- reports as a reference -----------------------------------------------------------------


def test_a_report_can_be_read_back() -> None:
    """What ``--json`` prints has all that is needed."""
    report = report_of(made())
    earlier = earlier_of(json.loads(report.to_json()))
    assert earlier == Earlier(
        "job", STEPS - 1, report.step_time.simulated_s or 0.0, report.step_time.ideal_s or 0.0
    )


def test_several_reports_give_the_typical_times() -> None:
    """The median, so that one bad window is no reference."""
    earlier = [Earlier("job", 10 * n, 2.0 + n, 1.0 + n) for n in (3, 0, 1)]
    assert history_of(earlier, "job") == History(3, 3.0, 2.0, 30)


def test_no_reports_are_no_history() -> None:
    """The report has null."""
    assert history_of([], "job") is None
    assert report_of(made()).slowdown.history is None


def test_a_job_that_is_slow_on_all_ranks_is_found_against_its_past() -> None:
    """Within the window nobody stands out: the slowdown is 1."""
    before = earlier_of(report_of(made()).to_dict())
    slow = made(faults=(JobWide(compute=1.2, communication=1.2),))
    assert not report_of(slow).findings
    report = report_of(slow, history_of([before], "job"))
    assert report.slowdown.history == pytest.approx(1.2, rel=0.01)
    assert report.slowdown.paper == pytest.approx(1.0, abs=0.02)
    (finding,) = report.findings
    assert (finding.verdict, finding.cause, finding.scope) == ("job_wide", "job_wide", "job")
    assert finding.where.rank is None
    assert finding.excess_s == pytest.approx(0.2 * before.ideal_s, rel=0.05)


def test_the_share_of_a_change_between_windows_is_that_of_the_recorded_step() -> None:
    """It lies inside the step, unlike a pause between steps."""
    before = history_of([earlier_of(report_of(made()).to_dict())], "job")
    report = report_of(made(faults=(JobWide(compute=1.5, communication=1.5),)), before)
    (finding,) = report.findings
    recorded = report.step_time.recorded_s or 0.0
    assert finding.excess_share == pytest.approx(finding.excess_s / recorded, rel=1e-6)


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.02])
def test_a_job_that_is_about_as_fast_as_before_has_no_finding(factor: float) -> None:
    """Nor has one that got faster; the ratio is given all the same."""
    before = history_of([earlier_of(report_of(made()).to_dict())], "job")
    job = made(faults=(JobWide(compute=factor, communication=factor),))
    report = report_of(job, before)
    assert report.slowdown.history == pytest.approx(factor, rel=0.01)
    assert not report.findings


def test_one_slow_worker_is_a_straggler_and_no_change_of_the_job() -> None:
    """It lifts the mean a little, which stays below the threshold."""
    slow = SlowCompute(stage=1, dp=2, forward=1.15, backward=1.15)
    before = history_of([earlier_of(report_of(made()).to_dict())], "job")
    report = report_of(made(faults=(slow,)), before)
    assert [finding.cause for finding in report.findings] == ["slow_gpu"]
    assert (report.slowdown.history or 0.0) > 1.1


@pytest.mark.parametrize("ideal", [0.0, -1.0, 1e12])
def test_times_that_no_job_has_are_refused(ideal: float) -> None:
    """A report of somebody else's making is no reason to accuse."""
    with pytest.raises(ConfigError, match="expected an earlier report"):
        earlier_of(document(simulated_s=ideal, ideal_s=ideal))


# --- reports that cannot be used ------------------------------------------------------------


def without(name: str) -> dict[str, Any]:
    """A document that lacks a key."""
    return {key: value for key, value in document().items() if key != name}


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        "report",
        [],
        [document()],
        {},
        {"schema": None},
        document(simulated_s=None),
        document(ideal_s=None),
        document(ideal_s="fast"),
        document(ideal_s=[1.0]),
        document(ideal_s={}),
        without("step_time"),
        without("window"),
        without("job"),
        {**document(), "job": []},
        {**document(), "job": "job"},
        {**document(), "window": {"last_step": None}},
        {**document(), "step_time": 3.0},
    ],
)
def test_what_is_no_report_is_refused(value: object) -> None:
    """Whatever the document is, the error says what was expected."""
    with pytest.raises(ConfigError, match="expected"):
        earlier_of(value)


@pytest.mark.parametrize("schema", ["smon.report/2", "smon.context/1", "", 1, [], {}])
def test_another_schema_is_refused(schema: object) -> None:
    """Both are named."""
    with pytest.raises(ConfigError, match=r"expected schema smon\.report/1, found"):
        earlier_of({**document(), "schema": schema})


def test_a_report_of_another_job_is_refused() -> None:
    """It says nothing about this one."""
    with pytest.raises(ConfigError, match="about job 'other', this trace about 'job'"):
        history_of([earlier_of(document()), earlier_of(document("other"))], "job")


@pytest.mark.parametrize(
    "text",
    [
        '{"last_step": 1e999}',
        '{"last_step": NaN}',
    ],
)
def test_a_step_number_that_is_none_is_refused(text: str) -> None:
    """JSON as Python reads it has numbers that are not finite."""
    with pytest.raises(ConfigError, match="expected an earlier report"):
        earlier_of({**document(), "window": json.loads(text)})


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_a_step_time_that_is_not_finite_is_refused(text: str) -> None:
    """It would be no reference, and nobody would notice."""
    with pytest.raises(ConfigError, match="expected an earlier report"):
        earlier_of(document(ideal_s=json.loads(text)))


# --- the command line -----------------------------------------------------------------------


def analyzed(folder: Path, *arguments: str) -> int:
    """Exit code of ``smon analyze`` of a small job."""
    job = made()
    write_trace(job.table, job.job, folder)
    return main(["analyze", str(folder), "--json", *arguments])


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What stderr says, if it is one line without control characters and stdout is empty."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.strip().isprintable()
    return captured.err


def test_earlier_reports_are_given_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice the same window is a ratio of 1."""
    assert analyzed(tmp_path) == EXIT_OK
    earlier = tmp_path / "earlier.txt"
    earlier.write_text(capsys.readouterr().out, encoding="utf-8")
    options = ["--history", str(earlier), "--history", str(earlier)]
    assert analyzed(tmp_path, *options) == EXIT_OK
    report = json.loads(capsys.readouterr().out)
    assert report["slowdown"]["history"] == pytest.approx(1.0)
    assert report["findings"] == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not JSON",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b"null",
        b'{"schema": "smon.report/2\x1b[31m\\n"}',
        b'{"schema": "smon.report/1\\u001b[31m\\nsmon analyze: fine"}',
        b'{"schema": "\\ud800"}',
        json.dumps(document("other\x1b[2J\n")).encode(),
        json.dumps(document(ideal_s=None)).encode(),
    ],
)
def test_hostile_content_is_one_line_with_the_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    """No traceback, nothing for the terminal to obey, and no report."""
    earlier = tmp_path / "earlier.txt"
    earlier.write_bytes(content)
    assert analyzed(tmp_path, "--history", str(earlier)) == EXIT_USAGE
    assert one_line(capsys).startswith("smon analyze: error: ")


@pytest.mark.parametrize("name", ["gone.json", "."])
def test_a_report_that_cannot_be_opened_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """A file that is not there, or is a folder."""
    path = tmp_path / name
    assert analyzed(tmp_path, "--history", str(path)) == EXIT_USAGE
    assert f"{str(path)!r}: cannot read an earlier report" in one_line(capsys)


# --- counters: what else stands beside a trace ----------------------------------------------

Readings = Mapping[tuple[str, int], float]


def counters(readings: Readings, steps: int = STEPS) -> Context:
    """The same reading of each (counter, rank) in every step."""
    rows = [(step, rank, name) for step in range(steps) for name, rank in readings]
    return Context(
        counters=Counters(
            step=np.array([step for step, _, _ in rows], np.int64),
            rank=np.array([rank for _, rank, _ in rows], np.int32),
            name=np.array([name for _, _, name in rows]),
            value=np.array([readings[name, rank] for _, rank, name in rows], float),
        )
    )


#: A slow worker of a job with TP 4, and its place.
GROUPED = {"tp": 4, "faults": (SlowCompute(stage=1, dp=2, forward=1.5, backward=1.5),)}
DP, STAGE = 2, 1
GROUP = Layout(dp=4, pp=2, tp=4)


def found(readings: Readings) -> Finding:
    """The only finding of the job with a slow TP group."""
    job = made(**GROUPED)
    (finding,) = analyze(job.table, job.job, context=counters(readings)).findings
    return finding


def waits(*seconds: float) -> dict[tuple[str, int], float]:
    """How long each TP rank of the slow worker waits."""
    ranks = [GROUP.rank(DP, STAGE, tp) for tp in range(len(seconds))]
    return {("tp_wait_s", rank): wait for rank, wait in zip(ranks, seconds, strict=True)}


def test_the_tp_rank_that_waits_least_is_the_suspect() -> None:
    """The others wait for it."""
    finding = found(waits(0.2, 0.2, 0.01, 0.2))
    assert (finding.verdict, finding.cause, finding.scope) == ("straggler", "slow_gpu", "rank")
    assert (finding.where.tp, finding.where.rank) == (2, GROUP.rank(DP, STAGE, 2))
    assert any("TP rank 2 waits 0.01 s a step" in line for line in finding.evidence)


@pytest.mark.parametrize(
    "readings, said",
    [
        ({}, "would tell which of its 4 ranks"),
        (waits(0.2, 0.2, 0.01), "would tell which of its 4 ranks"),
        (waits(0.2, 0.2, 0.15, 0.2), "wait alike"),
    ],
)
def test_without_a_clear_wait_the_tp_group_is_named(readings: Readings, said: str) -> None:
    """And the evidence says what is missing."""
    finding = found(readings)
    assert (finding.scope, finding.where.tp) == ("tp_group", None)
    assert any(said in line for line in finding.evidence)


def transfers(slow: float, usual: float) -> dict[tuple[str, int], float]:
    """TP transfer times of all ranks of the job; those of the slow worker differ."""
    mine = {GROUP.rank(DP, STAGE, tp) for tp in range(GROUP.tp)}
    return {
        ("tp_comm_s", rank): slow if rank in mine else usual for rank in range(GROUP.world_size)
    }


def test_tp_transfers_that_are_slow_on_all_ranks_are_the_links_of_the_node() -> None:
    """Not a GPU, and the group is named."""
    finding = found({**transfers(0.3, 0.2), **waits(0.2, 0.2, 0.01, 0.2)})
    assert (finding.verdict, finding.cause, finding.scope) == ("link", "nvlink", "tp_group")
    assert (finding.phase, finding.where.tp) == ("TP communication", None)


def test_usual_tp_transfers_accuse_no_link() -> None:
    """The device is slow."""
    assert found(transfers(0.22, 0.2)).cause == "slow_gpu"


PAUSES = {"dp": 8, "steps": 24, "faults": (GcPauses(every=12),)}


@pytest.mark.parametrize("retries, cause", [(1.0, "allocator"), (0.0, "gc"), (None, "gc")])
def test_pauses_with_retries_of_the_allocator_are_its_own(
    retries: float | None, cause: str
) -> None:
    """Without the counter, or without retries, they are garbage collections."""
    job = made(**PAUSES)
    ranks = range(job.job.layout.world_size)
    readings = {} if retries is None else {("alloc_retries", rank): retries for rank in ranks}
    report = analyze(job.table, job.job, context=counters(readings, steps=24))
    (finding,) = report.findings
    assert (finding.verdict, finding.cause) == ("host_stall", cause)
    advice = " ".join(finding.next)
    assert ("expandable_segments" in advice) == (cause == "allocator")


def congested(*dps: int, switches: bool = True) -> JobReport:
    """Slow transfers into stage 2 of some replicas; every stage is under a switch of its own."""
    job = made(
        dp=8,
        pp=4,
        steps=20,
        machines=Machines(ranks_per_host=1, hosts_per_switch=8 if switches else None),
        faults=tuple(SlowP2P(stage=2, dp=dp, factor=40.0) for dp in dps),
    )
    return analyze(job.table, job.job, context=job.context)


def test_slow_transfers_of_many_places_through_one_switch_are_its_congestion() -> None:
    """One finding that names the switch, instead of one per replica."""
    (finding,) = congested(0, 1, 2).findings
    assert (finding.verdict, finding.cause, finding.scope) == ("link", "congestion", "leaf")
    assert finding.where.leaf == "leaf-002"
    assert finding.where.rank is None


@pytest.mark.parametrize("dps, switches", [((0, 1, 2), False), ((1,), True)])
def test_one_replica_or_unknown_switches_are_no_congestion(
    dps: tuple[int, ...], *, switches: bool
) -> None:
    """Then every replica with slow transfers is a finding of its own."""
    findings = congested(*dps, switches=switches).findings
    assert {finding.cause for finding in findings} == {"slow_link"}
    assert {finding.where.dp for finding in findings} == set(dps)
