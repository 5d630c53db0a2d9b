"""The verdict: what kind, who, how sure, what it is not, what to type, where to look."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from dashboards.web.figures.rotation import Mark
from dashboards.web.views.part import part
from dashboards.web.views.rotation import MAX_MARKS, RotationKind, marks_of, rotation_view
from dashboards.web.views.time import Range
from dashboards.web.views.verdict import Addresses, FindingView, finding_view, kind_of
from smon.errors import StoreError
from smon.report import Candidate, Finding, Where
from tests.api.filled import report_of

HERE = Addresses("/jobs/j", "/runbooks")


def shown(where: dict[str, Any] | None = None, **changes: Any) -> FindingView:  # noqa: ANN401  # of the finding
    """The finding of the slow job, changed."""
    report = report_of("slow")
    finding = report.findings[0]
    if where is not None:
        changes["where"] = replace(finding.where, **where)
    return finding_view(report, replace(finding, **changes), HERE)


def of_slow() -> Finding:
    """As the report has it."""
    return report_of("slow").findings[0]


def test_the_finding_names_the_slow_rank() -> None:
    """Kind, sentence, rank, evidence, confidence in a number and a word."""
    view = shown(confidence=0.95)
    assert view.kind[1] == "Straggler"
    assert view.headline.startswith("Rank 6 (DP rank 2, stage 1): slow GPU, +")
    assert view.rank == 6
    assert view.evidence == of_slow().evidence[:4]
    assert view.sure == "high"
    assert shown(confidence=0.7).sure == "medium"
    assert shown(confidence=0.3).sure == "low"


def test_victims_are_called_victims() -> None:
    """All others, or how many of them."""
    assert shown().victims.startswith("all 15 other workers only wait, typically ")
    victims = of_slow().victims
    assert victims is not None
    some = shown(victims=replace(victims, count=3, wait_s=None))
    assert some.victims == "3 of the other workers only wait"
    assert shown(victims=None).victims == ""


def test_small_parts_of_the_ledger_are_what_it_is_not() -> None:
    """Named with their share; what saves time and what is large are not."""
    report = report_of("slow")
    small = [part.factor for part in report.ledger if 0 <= part.share < 0.05]
    assert small
    words = shown().not_it
    assert words.endswith(" of the loss")
    assert words.count("(") == len(small)
    assert "slow workers" not in words
    assert shown(verdict="planned_pause").not_it == ""


def test_a_named_host_is_drained_in_slurm_or_cordoned_in_kubernetes() -> None:
    """The report drains it; a name that Kubernetes cannot have gets no command for it."""
    drains = ("scontrol update NodeName=node-17 State=DRAIN Reason=smon_slow_gpu",)
    view = shown(where={"node": "node-17"}, next=drains)
    labelled = {command.label: command.text for command in view.commands if command.label}
    assert labelled == {
        "Slurm": "scontrol update NodeName=node-17 State=DRAIN Reason=smon_slow_gpu",
        "Kubernetes": "kubectl cordon node-17",
    }
    hostile = shown(where={"node": "a; rm -rf $(x) 'b'"})
    assert [command.label for command in hostile.commands if command.label] == ["Slurm"]
    assert not any("rm -rf" in command.text for command in hostile.commands)


def test_an_unknown_host_stays_a_placeholder() -> None:
    """As the report says it, and for no other system."""
    view = shown(where={"node": None})
    assert [command.label for command in view.commands if command.label] == ["Slurm"]
    assert "<node of rank 6>" in view.commands[-1].text


def test_the_drain_comes_before_the_test_that_stops_work() -> None:
    """The page keeps the order of the report; the other system stands beside the drain."""
    view = shown()
    assert tuple(command.text for command in view.commands) == report_of("slow").findings[0].next
    next_ = ("scontrol update NodeName=n State=DRAIN Reason=x", "dcgmi diag -r 2  # on n")
    labels = [command.label for command in shown(where={"node": "n"}, next=next_).commands]
    assert labels == ["Slurm", "Kubernetes", ""]


def test_other_advice_is_kept_as_it_is() -> None:
    """In the order of the report, without a drain command."""
    view = shown(next=("smon plan x", "fewer checkpoints"), where={"node": "n"})
    assert [(each.text, each.label) for each in view.commands] == [
        ("smon plan x", ""),
        ("fewer checkpoints", ""),
    ]


def test_links_lead_to_rank_host_gpu_and_runbook() -> None:
    """Names in addresses are quoted."""
    view = shown(where={"node": "rack/../<7>", "gpu_uuid": "GPU-1"})
    assert [link.address for link in view.links] == [
        "/jobs/j/ranks/6",
        "/hosts/rack%2F..%2F%3C7%3E",
        "/hosts/GPU-1",
        "/runbooks/slow_gpu",
    ]
    report = report_of("slow")
    without = finding_view(report, report.findings[0], Addresses("/jobs/j", None))
    assert "runbook" not in [link.words for link in without.links]


def test_candidates_are_listed_with_what_tells_them_apart() -> None:
    """At most eight, the rest counted."""
    place = Where(rank=1, dp=1, stage=0, node="n\n1")
    many = tuple(Candidate("slow_link", place, "swap cables") for _ in range(11))
    view = shown(candidates=many)
    assert view.candidates[0] == "rank 1, DP rank 1, stage 0, n\\n1: slow network: swap cables"
    assert (len(view.candidates), view.more_candidates) == (8, 3)


@pytest.mark.parametrize(
    "kind, slow, word",
    [
        ("slow", True, "Straggler"),
        ("healthy", False, "No straggler"),
        ("healthy", True, "Slow, cause unknown"),
        ("empty", False, "Insufficient data"),
    ],
)
def test_the_first_word_says_what_kind_of_answer_it_is(kind: str, *, slow: bool, word: str) -> None:
    """Straggler, job-wide, planned, or nothing: before anything else is read."""
    assert kind_of(report_of(kind), slow=slow)[1] == word


def test_a_part_that_cannot_be_made_says_so() -> None:
    """The error of the store in its words; a damaged report without internals."""

    def refuse() -> int:
        raise StoreError("the file is gone")

    def stumble() -> int:
        return {"a": 1}["b"]

    assert part(refuse).problem == "the file is gone"
    assert part(stumble).problem == "the report does not have what it needs"
    assert part(lambda: 3).value == 3


# --- who was the slowest ----------------------------------------------------------------------


def marks(ranks: list[int], slowdown: float = 1.2) -> list[Mark]:
    """One mark a step."""
    return [Mark(step, rank, rank, 0, slowdown) for step, rank in enumerate(ranks)]


def test_the_same_worker_is_said_with_its_steps() -> None:
    """And has the colour of a culprit."""
    view = rotation_view(marks([7] * 37 + [1, 2, 3]), Range())
    assert view is not None
    assert view.kind is RotationKind.SAME
    assert view.words == "Rank 7 was the slowest in 37 of 40 steps (92.5 %)."
    assert view.counts[0] == (7, 7, 0, 37)
    culprit = orjson.loads(view.figure)["data"][0]
    assert culprit["x"] == list(range(37))
    assert culprit["marker"]["color"] == "var(--culprit)"


def test_workers_that_take_turns_are_nobody_s_fault() -> None:
    """How many they are, and how often the most frequent."""
    view = rotation_view(marks([step % 8 for step in range(40)]), Range())
    assert view is not None
    assert view.kind is RotationKind.TURNS
    assert view.words.startswith("8 workers take turns; the most frequent, rank 0, was the slowest")
    assert view.workers == 8


def test_the_range_narrows_the_strip() -> None:
    """To steps of which none may be known."""
    view = rotation_view(marks([1] * 20 + [2] * 20), Range(20, 39))
    assert view is not None
    assert (view.steps, view.counts[0][0]) == (20, 2)
    assert rotation_view(marks([1]), Range(50, 60)) is None


def test_noise_is_no_rotation() -> None:
    """When no worker stands out in any step."""
    view = rotation_view(marks([1, 2, 3], 1.001), Range())
    assert view is not None
    assert view.kind is RotationKind.NOBODY
    assert orjson.loads(view.figure)["data"][0]["x"] == []
    assert view.words.startswith("In none of 3 steps does any worker stand out")


def test_long_strips_show_the_newest_and_say_so() -> None:
    """The counts are of all."""
    view = rotation_view(marks([1] * (MAX_MARKS + 500)), Range())
    assert view is not None
    assert (view.left_out, view.steps) == (500, MAX_MARKS + 500)


def test_reports_without_the_slowest_worker_are_told_from_those_without_steps() -> None:
    """The strip is then made from the file of the workers."""
    assert marks_of({"per_step": [{"step": 1}]}) is None
    told = {"rank": 3, "dp": 3, "stage": 0, "slowdown": 1.5}
    found = marks_of({"per_step": [{"step": 1, "worst": told}, {"step": 2, "worst": None}]})
    assert found == [Mark(1, 3, 3, 0, 1.5)]
