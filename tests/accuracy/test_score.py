from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from smon.synth.truth import CauseName
from tests.accuracy.page import Run, page, percent, rate, table
from tests.accuracy.real import real_traces
from tests.accuracy.score import Match, Scored, at_place, score
from tests.accuracy.study import all_cases, headline, main
from tests.accuracy.summary import (
    Failure,
    Rate,
    confusion,
    detection_limit,
    failures,
    summarise,
    upper_bound,
)
from tests.accuracy.windows import CAUSES, Case, Found, Outcome, Real, cases, outcome


def real(cause: str = "slow_gpu", share: float = 0.1, *, tellable: bool = True) -> Real:
    """A true cause on rank 3."""
    where: dict[str, int | str] = {"rank": 3, "dp": 3, "stage": 0, "node": "node-3"}
    return Real(
        cause, (cause,), "rank", ("persistent",), where, (3,), share, 0.9 * share, share,
        due=share >= 0.01, tellable=tellable,
    )  # fmt: skip


def found(cause: str = "slow_gpu", rank: int = 3, excess_s: float = 0.1) -> Found:
    """A finding about one rank."""
    return Found(
        "straggler", cause, "rank", "persistent", {"rank": rank}, (), excess_s, 0.1, "info"
    )


def window(*said: Found, true: tuple[Real, ...] = (), group: str = "", seed: int = 7) -> Outcome:
    """A window with what is true and what was said."""
    names = tuple(CauseName(one.cause) for one in true)
    group = group or ("clean", "alone", "pair")[len(true)]
    shape = dict.fromkeys(("dp", "pp", "microbatches", "steps", "first_step", "ranks_per_host"), 4)
    return Outcome(Case(seed, group, names), shape, 1.0, true, said, "none", aligned=True)


def wrong(outcome: Outcome) -> list[str]:
    """What is wrong with the answer to a window."""
    return [failure.what for failure in failures(score(outcome))]


# --- scores ---------------------------------------------------------------------------------


def test_a_finding_of_the_right_cause_stands_for_it() -> None:
    """Best the one at the right place; the others stand for nothing true."""
    scored = score(window(found(rank=5), found(), true=(real(),)))
    (match,) = scored.matches
    assert match.place
    assert match.kind
    assert match.found == found()
    assert scored.false == (found(rank=5),)


def test_a_cause_by_another_name_is_missed() -> None:
    """The finding is then a false one."""
    scored = score(window(found("gc"), true=(real(),)))
    assert scored.matches[0].found is None
    assert [one.cause for one in scored.false] == ["gc"]


@pytest.mark.parametrize("excess_s, error", [(0.1, 0.0), (0.095, 0.0), (0.12, 0.2), (0.045, 0.45)])
def test_a_cost_is_exact_between_what_it_adds_and_what_it_gains(
    excess_s: float, error: float
) -> None:
    """Outside it is off by the distance, relative to the larger of the two."""
    scored = score(window(found(excess_s=excess_s), true=(real(),)))
    assert scored.matches[0].error == pytest.approx(error)


def test_a_stage_is_not_a_worker_of_it() -> None:
    """Who names one replica does not name the stage."""
    stage = Real(
        "stage_partition", ("stage_partition",), "stage", ("persistent",), {"stage": 1}, (), 1.0,
        1.0, 0.1, due=True, tellable=True,
    )  # fmt: skip
    said = Found("imbalance", "stage_partition", "stage", "persistent", {"stage": 1}, (), 1, 1, "")
    one_replica = Found("", "stage_partition", "rank", "", {"stage": 1, "dp": 0}, (), 1, 1, "")
    assert at_place(said, stage)
    assert not at_place(one_replica, stage)


# --- failures -------------------------------------------------------------------------------


def test_a_right_answer_is_no_failure() -> None:
    """Neither is silence about what costs too little."""
    assert wrong(window(found(), true=(real(),))) == []
    assert wrong(window(true=(real(share=0.005),))) == []
    assert wrong(window()) == []


@pytest.mark.parametrize(
    "said, expected",
    [
        ((), ["missed"]),
        ((found("gc"),), ["called gc"]),
        ((found(rank=4),), ["wrong place"]),
        ((found(excess_s=0.2),), ["cost off by more than 20 %"]),
        ((found("gc"), found()), ["not the first finding", "extra finding: gc"]),
    ],
)
def test_each_way_to_fail_has_its_name(said: tuple[Found, ...], expected: list[str]) -> None:
    """A finding that is taken for the missed cause is not counted twice."""
    assert wrong(window(*said, true=(real(),))) == expected


def test_a_finding_about_a_healthy_job_is_a_false_alarm() -> None:
    """So is one about a job that is only recorded badly."""
    assert wrong(window(found())) == ["false alarm: slow_gpu"]
    assert failures(score(window(found(), group="clean"))) == [
        Failure("none", "false alarm: slow_gpu", "clean", 7)
    ]


def test_something_unknown_may_be_said_of_what_nobody_can_tell() -> None:
    """A ring without peers is neither missed nor called by another name."""
    ring = real("slow_link", tellable=False)
    assert wrong(window(true=(ring,))) == []
    assert wrong(window(found("unknown"), true=(ring,))) == []
    assert wrong(window(found("gc"), true=(ring,))) == ["extra finding: gc"]


# --- numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hits, of, bound",
    [(0, 1000, 0.002991), (1, 1000, 0.004735), (5, 100, 0.102253), (3, 3, 1.0), (0, 0, 1.0)],
)
def test_the_upper_bound_is_that_of_clopper_and_pearson(hits: int, of: int, bound: float) -> None:
    """Known values: 95 % quantiles of the beta distribution, (hits + 1, of - hits)."""
    assert upper_bound(hits, of) == pytest.approx(bound, rel=1e-3)


def test_the_detection_limit_is_the_smallest_share_with_nine_in_ten_found() -> None:
    """Of ten one may be missed, of eleven not two."""
    big = [Match(real(share=0.1 + n / 100), found()) for n in range(9)]
    missed = [Match(real(share=0.05), None), Match(real(share=0.02), None)]
    assert detection_limit([*missed, *big]) == 0.05
    assert detection_limit(missed) is None


def test_the_matrix_counts_first_findings_of_what_is_due() -> None:
    """What costs too little, and pairs, are left out."""
    outcomes = [
        window(),
        window(found("gc"), true=(real(),)),
        window(true=(real(share=0.001),)),
        window(true=(real(), real("gc"))),
    ]
    counted = confusion([score(one) for one in outcomes])
    assert counted == Counter({("none", "none"): 1, ("slow_gpu", "gc"): 1})


def test_the_summary_counts_each_group() -> None:
    """Clean windows, large single causes, pairs."""
    outcomes = [
        window(),
        window(found()),
        window(found(), true=(real(),)),
        window(found(rank=4), true=(real(share=0.3),)),
        window(true=(real(share=0.05),)),
        window(found(), found("gc"), true=(real(), real("gc"))),
        window(found(), found("unknown"), true=(real(), real("gc"))),
    ]
    summary = summarise([score(one) for one in outcomes])
    assert summary.clean == Rate(1, 2)
    assert summary.big_cause == Rate(2, 2)
    assert summary.big_place == Rate(1, 2)
    assert summary.pairs.both_found == Rate(1, 2)
    assert summary.pairs.extra == Rate(1, 2)
    assert summary.silences.nothing == 1
    (row,) = summary.rows
    assert (row.due, row.found, row.place) == (3, 2, 1)
    assert [band.of for band in row.bands] == [0, 0, 1, 1, 1]


# --- windows --------------------------------------------------------------------------------


def test_the_study_has_every_cause_and_no_seed_twice() -> None:
    """Clean windows on top have seeds of their own."""
    todo = all_cases(400, 100, 1_000_000)
    assert len({case.seed for case in todo}) == len(todo) == 500
    assert {case.group for case in todo} == {"clean", "recording", "alone", "pair"}
    alone = {case.causes[0] for case in todo if case.group == "alone"}
    assert alone == {*CAUSES, CauseName.HANG}
    assert cases(400, 1_000_000) == todo[:400]


def test_a_window_is_analysed_and_written_down() -> None:
    """A healthy one, and what is true of a sick one."""
    seen = outcome(Case(3, "alone", (CauseName.SLOW_GPU,), 0.3))
    (true,) = seen.answers
    assert true.due
    assert true.tellable
    assert score(seen).matches[0].place


# --- the page -------------------------------------------------------------------------------


RUN = Run(20, 0, 1, 60.0, 2, "2026-01-01", "0", "3.11")


def test_the_page_has_all_its_parts_even_of_few_windows() -> None:
    """Every table has as many cells in each line as in its head."""
    outcomes = [window(found(), true=(real(),)), window(found("gc"), true=(real(share=0.2),))]
    summary = summarise([score(one) for one in outcomes])
    text = page(RUN, outcomes, summary, [])
    assert text.startswith("# Accuracy\n")
    assert "| `slow_gpu` | called gc | 1 |  | 20.0 % | 7 |" in text
    assert text.count("\n## ") == 8
    for block in text.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count(" | ") for line in block.splitlines()}) == 1
    assert headline(RUN, summary)["big_single_cause_right_ratio"] == 0.5


def test_rates_say_what_they_are_made_of() -> None:
    """Not quite all is never shown as all; nothing has no rate."""
    assert rate(Rate(1, 4)) == "25.0 % (1 of 4)"
    assert rate(Rate(9999, 10000)) == "99.9 % (9,999 of 10,000)"
    assert rate(Rate(0, 0)) == "–"
    assert percent(0.0123) == "1.2 %"
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_without_real_traces_there_is_nothing_to_say(tmp_path: Path) -> None:
    """The study runs without them."""
    assert list(real_traces(tmp_path)) == []


def test_a_seed_that_is_not_in_the_study_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The message says which are."""
    assert main(["--show", "1"]) == 2
    assert "3000000 to 3001999" in capsys.readouterr().err


def test_the_first_finding_is_what_one_reads() -> None:
    """Or none."""
    assert Scored(window(), (), ()).first == "none"
    assert score(window(found("gc"), found())).first == "gc"
