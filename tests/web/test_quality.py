"""The page of the data quality: each check, what it means, and the numbers behind it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import delete, update

from dashboards.web.views.quality import Mark, quality_view
from smon.report import JobReport
from smon.store.models import ClockSample, Coverage, Result, StepResult, Stream, Window
from smon.store.queries.trust import Trust, TrustQuestion, trust_of
from smon.store.results import packed
from tests.api.conftest import Filled
from tests.api.filled import NOW, SECOND, report_of
from tests.web.places import page, section, table, words

DOWN_NS = 60 * SECOND


def path(filled: Filled) -> str:
    """Address of the page of the slow job."""
    return f"/jobs/{filled.slow.job_id}/quality"


def trust(filled: Filled) -> Trust:
    """What the store knows of the slow job."""
    with filled.world.database.read() as session:
        question = TrustQuestion(filled.slow.job_id, None, NOW, DOWN_NS)
        return trust_of(session, filled.world.tenant_id, question)


def marks(filled: Filled) -> dict[str, Mark]:
    """How each check comes out."""
    return {one.name: one.mark for one in quality_view(trust(filled)).checks}


def store_report(filled: Filled, report: JobReport) -> None:
    """Put another report in place of the slow job's."""
    mine = Result.window_id == filled.slow.window_id
    with filled.world.database.write() as session:
        session.execute(update(Result).where(mine).values(report=packed(report)))


def with_quality(**fields: Any) -> JobReport:  # noqa: ANN401  # of the quality
    """The slow job's report with another quality."""
    report = report_of("slow")
    return replace(report, quality=replace(report.quality, **fields))


def change(filled: Filled, what: type[Any], **values: Any) -> None:  # noqa: ANN401  # columns
    """Change all rows of the slow job."""
    with filled.world.database.write() as session:
        session.execute(update(what).where(what.job_id == filled.slow.job_id).values(**values))


def forget_drops(filled: Filled) -> None:
    """An agent that never dropped anything."""
    beat = {"spool_bytes": 12, "oldest_unsent_s": 0.5, "dropped": {}}
    change(filled, Stream, heartbeat=beat)


def test_good_data_are_one_calm_line(filled: Filled) -> None:
    """Every check is fine, and says what that means."""
    forget_drops(filled)
    text = section(page(filled.world, path(filled)), "verdict")
    assert "These numbers can be trusted." in text
    assert "Every expected rank has delivered the newest window." in text
    assert {mark for name, mark in marks(filled).items() if name != "Clocks"} == {Mark.FINE}
    assert "verdicts healthy" in text


def test_clocks_that_disagree_withhold_communication_causes(filled: Filled) -> None:
    """And that is what the page says, with the residual."""
    clock = replace(report_of("slow").quality.clock, aligned=False, residual_s=0.0123)
    store_report(filled, with_quality(clock=clock))
    forget_drops(filled)
    text = words(page(filled.world, path(filled)))
    assert "These numbers can be used, with limits: clocks." in text
    assert "not aligned, residual 12.3 ms" in text
    assert "Communication causes (links, data loader) are withheld" in text


def test_a_replay_that_does_not_fit_is_not_to_be_trusted(filled: Filled) -> None:
    """Above 5 % no slowdown means anything."""
    store_report(filled, with_quality(simulation_error_ratio=0.051))
    assert marks(filled)["Simulation error"] is Mark.BAD
    text = words(page(filled.world, path(filled)))
    assert "Do not rely on these numbers before this is mended: simulation error" in text
    store_report(filled, with_quality(simulation_error_ratio=0.049))
    assert marks(filled)["Simulation error"] is Mark.FINE


def test_missing_ranks_are_named_with_the_reason(filled: Filled) -> None:
    """Which, since when, why, and where to look at each."""
    change(
        filled, Window, missing=[3, 5], missing_count=20, reason="<b>waited</b> 60 s",
        ready_ns=NOW - 3600 * SECOND,
    )  # fmt: skip
    text = page(filled.world, path(filled))
    missing = section(text, "missing")
    assert f'href="/jobs/{filled.slow.job_id}/ranks/3?attempt=0"' in missing
    assert "&lt;b&gt;waited&lt;/b&gt; 60 s" in missing
    assert "1 h ago" in missing
    assert "and 18 more" in missing
    assert marks(filled)["Missing ranks"] is Mark.LIMITED
    (row,) = table(filled.world, f"{path(filled)}?as=csv&of=windows")
    assert (row["missing"], row["missing_count"]) == ("3 5", "20")


def test_little_coverage_is_a_limit(filled: Filled) -> None:
    """Below 95 % what is missing can change the answer; the bar of the window is as high."""
    report = report_of("slow")
    store_report(filled, replace(report, window=replace(report.window, coverage_ratio=0.9)))
    change(filled, Result, coverage_ratio=0.9)
    view = quality_view(trust(filled))
    (bar,) = view.bars
    assert [bar.y, bar.height] == pytest.approx([10, 90])
    assert bar.mark is Mark.LIMITED
    assert marks(filled)["Coverage"] is Mark.LIMITED
    assert "90.0 %" in words(section(page(filled.world, path(filled)), "coverage"))


def test_reasons_that_differ_in_place_only_are_one(filled: Filled) -> None:
    """How many steps, which, and a few examples word by word."""
    texts = [
        "DP rank 3 stage 2: 1 of 8 forward-compute missing (and 2 more replicas)",
        "DP rank 1 stage 0: 1 of 8 forward-compute missing",
        "DP rank 1: no ops of any stage",
    ]
    with filled.world.database.write() as session:
        for step, text in enumerate(texts, 100):
            session.add(
                StepResult(
                    attempt_id=filled.slow.attempt_id, step=step, job_id=filled.slow.job_id,
                    tenant_id=filled.world.tenant_id, skipped=text, analysed_ns=NOW,
                )
            )  # fmt: skip
    first, second = trust(filled).steps.reasons
    assert (first.reason, first.steps) == ("1 of 8 forward-compute missing", 2)
    assert (first.first_step, first.last_step) == (100, 101)
    assert sorted(first.examples) == [(100, texts[0]), (101, texts[1])]
    assert (second.reason, second.steps) == ("no ops of any stage", 1)
    assert "3 of 27" in words(section(page(filled.world, path(filled)), "verdict"))
    rows = table(filled.world, f"{path(filled)}?as=csv&of=skipped")
    assert [row["steps"] for row in rows] == ["2", "1"]


def test_clocks_are_listed_farthest_off_first(filled: Filled) -> None:
    """Ahead of the server is plus; the last probe counts, the hour before says how steady it is."""
    probes = [(0, "near", 10, 2_000_000), (0, "far", 60, 9_000_000), (1, "far", 10, -5_000_000)]
    with filled.world.database.write() as session:
        plain = session.get(Stream, filled.slow.stream_id)
        assert plain is not None
        for host in ("near", "far"):
            session.add(_copy(plain, id=host, key=host, host=host))
        session.flush()
        for _, host, ago, offset in probes:
            at = NOW - ago * SECOND
            session.add(ClockSample(stream_id=host, at_ns=at, offset_ns=offset, error_ns=100_000))
    far, near = trust(filled).clocks
    assert [each.host for each in (far, near)] == ["far", "near"]
    assert [far.ahead_s, far.drift_s, near.ahead_s] == pytest.approx([0.005, 0.014, -0.002])
    assert far.probes == 2
    text = words(section(page(filled.world, path(filled)), "clocks"))
    assert "far +5.00 ms 0.100 ms 14.0 ms 2" in text
    rows = table(filled.world, f"{path(filled)}?as=csv&of=clocks")
    assert [row["host"] for row in rows] == ["far", "near"]


def _copy(row: Stream, **changes: object) -> Stream:
    columns = {column.key: getattr(row, column.key) for column in Stream.__table__.columns}
    return Stream(**{**columns, **changes})


def test_losses_are_counted_by_reason_and_gap(filled: Filled) -> None:
    """What agents dropped, what is lost for good, and batches that have not come."""
    change(filled, Stream, lost_events=250, events=750)
    with filled.world.database.write() as session:
        session.add(
            Coverage(
                stream_id=filled.slow.stream_id, epoch=0, ranges=[[0, 4], [8, 9], [12, 20]],
                pending_steps=[], awaited=[[15, 16]],
            )
        )  # fmt: skip
    known = trust(filled)
    (drop,) = known.drops
    assert (drop.reason, drop.events, drop.streams) == ("full", 2, 1)
    (gap,) = known.gaps
    assert (gap.holes, gap.awaited) == (((5, 7), (10, 11)), ((15, 16),))
    text = words(page(filled.world, path(filled)))
    assert "25.0 % of the events are gone for good" in text
    assert "node-0 recorder 0 5–7, 10–11 15–16" in text


def test_agents_that_are_down_come_first(filled: Filled) -> None:
    """Silent for longer than SMON_AGENT_DOWN_S, and not complete."""
    with filled.world.database.write() as session:
        plain = session.get(Stream, filled.slow.stream_id)
        assert plain is not None
        old = NOW - 300 * SECOND
        session.add(_copy(plain, id="gone", key="gone", host="node-z", heartbeat_ns=old))
    known = trust(filled)
    assert (known.streams.streams, known.streams.down) == (2, 1)
    assert [one.host for one in known.agents] == ["node-z", "node-0"]
    text = section(page(filled.world, path(filled)), "agents")
    assert "◆ down" in text
    assert "5 min ago" in text
    assert marks(filled)["Agents"] is Mark.LIMITED
    rows = table(filled.world, f"{path(filled)}?as=csv&of=agents")
    assert [row["down"] for row in rows] == ["true", "false"]


def test_the_version_of_an_agent_is_shown(filled: Filled) -> None:
    """As it said in its heartbeat; it may say anything."""
    beat = {"agent": {"version": "<i>9</i>"}, "spool_bytes": 5, "dropped": {"<u>x</u>": 1}}
    change(filled, Stream, heartbeat=beat)
    text = section(page(filled.world, path(filled)), "agents")
    assert "&lt;i&gt;9&lt;/i&gt;" in text
    assert "&lt;u&gt;x&lt;/u&gt;" in text
    assert "<u>" not in text


def test_a_job_without_report_has_nothing_to_trust(filled: Filled) -> None:
    """Not known is neither good nor bad."""
    with filled.world.database.write() as session:
        session.execute(delete(Result).where(Result.job_id == filled.slow.job_id))
    text = page(filled.world, path(filled))
    assert "Nothing has been analysed yet, so there is nothing to trust." in text
    assert marks(filled)["Coverage"] is Mark.UNKNOWN


def test_every_check_leads_to_its_section(filled: Filled) -> None:
    """By an anchor that is there; each mark is a word and an icon."""
    text = page(filled.world, path(filled))
    anchors = re.findall(r'<a href="#([\w-]+)">', section(text, "verdict"))
    assert len(anchors) == 7
    for anchor in anchors:
        assert f'id="{anchor}"' in text, anchor


def test_rest_says_the_same(filled: Filled) -> None:
    """One number, one place."""
    rest = filled.world.client().json(f"/api/v1{path(filled)}")
    known = trust(filled)
    assert rest["steps"] == known.steps.steps == 24
    assert rest["coverage_ratio"] == report_of("slow").window.coverage_ratio
    assert rest["streams"]["events"] == known.streams.events
    assert [each["host"] for each in rest["agents"]] == ["node-0"]


def test_an_unknown_job_attempt_or_table(filled: Filled) -> None:
    """Not found, or for a table that there is not, the first one."""
    page(filled.world, f"/jobs/{filled.foreign.job_id}/quality", 404)
    page(filled.world, f"{path(filled)}?attempt=9", 404)
    (row,) = table(filled.world, f"{path(filled)}?as=csv&of=nothing")
    assert row["state"] == "done"
