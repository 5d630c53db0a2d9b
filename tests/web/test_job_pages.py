"""The pages of a job and of its windows, as a browser gets them."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from typing import Any, Final

import orjson
import pytest
import zstandard
from sqlalchemy import update

from smon.report import JobReport
from smon.store.models import Attempt, Finding, Result, Window
from smon.store.results import packed
from tests.api.conftest import Filled
from tests.api.filled import NOW, World, add_job, report_of

HTML: Final = {"accept": "text/html"}


def page(world: World, path: str, code: int = 200) -> str:
    """A page, in one line."""
    answer = world.client().get(path, headers=HTML)
    assert answer.status_code == code, answer.text
    return " ".join(answer.text.split())


def figure(text: str, name: str) -> Any:  # noqa: ANN401  # a figure
    """A figure of a page."""
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text)
    assert found is not None, name
    return orjson.loads(found[1])


def section(text: str, name: str) -> str:
    """A section of a page, by its id."""
    found = re.search(rf'<(section|div)[^>]* id="{name}".*?</\1>', text)
    assert found is not None, name
    return found[0]


def table(world: World, path: str) -> list[dict[str, str]]:
    """A CSV file."""
    answer = world.client().get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/csv")
    return list(csv.DictReader(io.StringIO(answer.text)))


def values(text: str) -> list[float]:
    """Numbers in ``data-value``, in order."""
    return [float(value) for value in re.findall(r'data-value="([^"]+)"', text)]


def job_of(filled: Filled) -> str:
    """Address of the page of the slow job."""
    return f"/jobs/{filled.slow.job_id}"


def replaced(world: World, job_id: str, report: JobReport) -> None:
    """Put another report in the place of a job's."""
    with world.database.write() as session:
        session.execute(update(Result).where(Result.job_id == job_id).values(report=packed(report)))


# --- what stands where ------------------------------------------------------------------------


def test_the_first_screen_says_who_why_and_what_it_costs(filled: Filled) -> None:
    """Kind, sentence with the rank, cost: in this order, before anything else."""
    text = page(filled.world, job_of(filled))
    report = report_of("slow")
    order = [
        text.index(each)
        for each in ("<b>Straggler</b>", "Rank 6 (DP rank 2, stage 1): slow GPU", 'id="time"')
    ]
    assert order == sorted(order)
    assert re.search(r'<p class="verdict" data-value="6">', text)
    recorded, ideal = report.step_time.recorded_s, report.step_time.ideal_s
    assert recorded is not None
    assert ideal is not None
    verdict = section(text, "verdict")
    assert values(verdict) == [6, recorded - ideal, report.slowdown.paper, report.waste_ratio]
    assert f'href="{job_of(filled)}/ranks/6"' in verdict
    assert 'href="/runbooks/slow_gpu"' in verdict


def test_sections_have_the_ids_that_others_rely_on(filled: Filled) -> None:
    """Links and browser tests name them."""
    text = page(filled.world, job_of(filled))
    for name in (
        "verdict", "time", "where", "heat-step", "heat-show", "rotation", "why", "waterfall",
        "fixes", "groups", "compare", "quality", "windows",
    ):  # fmt: skip
        assert text.count(f'id="{name}"') == 1, name


def test_the_waterfall_on_the_page_sums_up(filled: Filled) -> None:
    """Its numbers, as they are in the markup."""
    text = page(filled.world, job_of(filled))
    ideal, *parts, recorded = values(section(text, "waterfall"))
    assert sum(parts) == pytest.approx(recorded - ideal, rel=1e-9)


def test_a_dearer_finding_comes_first_and_the_others_open(filled: Filled) -> None:
    """The first is open, each other one is a line that can be opened."""
    report = report_of("slow")
    second = replace(report.findings[0], severity="info", cause="gc", verdict="host_stall")
    both = replace(report, findings=(report.findings[0], second))
    replaced(filled.world, filled.slow.job_id, both)
    verdict = section(page(filled.world, job_of(filled)), "verdict")
    assert verdict.count('<details class="other"') == 1
    assert "garbage collection pauses" in verdict.split("<details")[-1]


# --- the slider and the switches --------------------------------------------------------------


def test_the_slider_asks_for_one_step(filled: Filled) -> None:
    """The same figure by the page's address, and by the route of the slider."""
    made = filled.slow
    step = report_of("slow").per_step[5].step
    text = page(filled.world, f"{job_of(filled)}?step={step}&show=wait")
    assert f'aria-valuetext="step {step}"' in text
    assert '<option value="wait" selected>' in text
    answer = filled.world.client().json(
        f"{job_of(filled)}/heat?window={made.window_id}&step={step}&show=wait"
    )
    assert answer["figure"] == figure(text, "figure-heat")
    assert answer["lines"][0]["text"] == "100 ms"
    assert f"step {step}" in answer["title"]


def test_the_hottest_cell_of_the_page_is_the_slow_worker(filled: Filled) -> None:
    """Its number is the report's."""
    (heat,) = figure(page(filled.world, job_of(filled)), "figure-heat")["data"]
    cells = {
        tuple(place): cell
        for row, places in zip(heat["z"], heat["customdata"], strict=True)
        for cell, place in zip(row, places, strict=True)
    }
    hottest = max(cells, key=lambda place: cells[place])
    assert hottest == (6, 2, 1)
    exact = max(worker.slowdown or 0.0 for worker in report_of("slow").workers)
    assert cells[hottest] == pytest.approx(exact, abs=1e-5)


def test_a_step_that_is_gone_is_said_and_the_rest_is_shown(filled: Filled) -> None:
    """An address that was kept may ask for a step of another window."""
    text = page(filled.world, f"{job_of(filled)}?step=123456&show=wait")
    assert "Step 123456 is not one of the analysed steps of this report. Shown instead" in text
    assert '<option value="wait" selected>' in text
    assert 'aria-valuetext="all steps"' in text


def test_without_the_file_of_the_workers_there_is_no_slider(filled: Filled) -> None:
    """Nor a switch that it would need; the map itself is there."""
    text = page(filled.world, f"/jobs/{filled.healthy.job_id}")
    assert 'id="heat-step"' not in text
    assert '<option value="compute"' not in text
    assert "a window has them once it is closed" in text
    assert figure(text, "figure-heat")


def test_questions_that_make_no_sense_are_refused(filled: Filled) -> None:
    """422 with what was expected."""
    for query in ("show=all", "step=x", "step=-1", "group=1.5", "step=99999999999999999999"):
        for path in (f"{job_of(filled)}/heat?{query}", f"{job_of(filled)}?{query}"):
            assert filled.world.client().get(path).status_code == 422, path


def test_a_live_job_has_a_slider_too(filled: Filled) -> None:
    """Steps of the running diagnosis, which no window has yet."""
    world, made = filled.world, filled.slow
    path = f"results/job={made.job_id}/{made.window_id}-workers.parquet"
    last = report_of("slow").window.last_step
    with world.database.write() as session:
        session.execute(
            update(Attempt)
            .where(Attempt.id == made.attempt_id)
            .values(
                live_step=last + 1, live_analysed_ns=NOW, live_report=packed(report_of("slow")),
                live_workers=world.objects.get(path),
            )
        )  # fmt: skip
        session.execute(update(Result).values(workers_path=None))
    text = page(world, job_of(filled))
    assert "running diagnosis" in section(text, "verdict")
    assert 'data-window="live"' in text
    step = report_of("slow").per_step[0].step
    answer = world.client().json(f"{job_of(filled)}/heat?window=live&step={step}&show=compute")
    assert answer["lines"][0]["value"] == pytest.approx(0.5)


# --- the range --------------------------------------------------------------------------------


def test_the_range_drives_the_page(filled: Filled) -> None:
    """Points, slider, strip and findings are those of the chosen steps; a link resets it."""
    steps = [each.step for each in report_of("slow").per_step]
    first, last = steps[4], steps[9]
    text = page(filled.world, f"{job_of(filled)}?from={last}&to={first}")
    assert figure(text, "figure-steps")["data"][1]["x"] == steps[4:10]
    assert f'data-steps="{",".join(map(str, steps[4:10]))}"' in text
    assert "of 6 steps" in section(text, "rotation")
    assert f'<a class="reset" href="{job_of(filled)}">' in text
    assert f'name="from" inputmode="numeric" pattern="[0-9]*" size="6" value="{first}"' in text


def test_findings_outside_the_range_are_counted(filled: Filled) -> None:
    """Not hidden without a word."""
    with filled.world.database.write() as session:
        session.execute(update(Finding).values(onset_step=None, opened_step=2, last_step=5))
    steps = [each.step for each in report_of("slow").per_step]
    text = section(page(filled.world, f"{job_of(filled)}?from={steps[-3]}"), "findings")
    assert "None in these steps." in text
    assert "1 outside the chosen steps." in text


# --- CSV holds the numbers that are shown -----------------------------------------------------


def test_csv_of_the_steps(filled: Filled) -> None:
    """All points of the chart, or those of the range."""
    report = report_of("slow")
    rows = table(filled.world, f"{job_of(filled)}/csv/steps?attempt=0")
    assert [float(row["recorded_s"]) for row in rows] == [
        each.recorded_s for each in report.per_step
    ]
    first = report.per_step[3].step
    assert len(table(filled.world, f"{job_of(filled)}/csv/steps?from={first}&to={first}")) == 1


def test_csv_of_the_workers(filled: Filled) -> None:
    """Every worker: over the report, or in one step with computing and waiting."""
    report = report_of("slow")
    rows = table(filled.world, f"{job_of(filled)}/csv/workers?window=latest")
    assert {row["rank"]: float(row["slowdown"]) for row in rows} == {
        str(worker.rank): worker.slowdown for worker in report.workers
    }
    step = report.per_step[2].step
    one = table(filled.world, f"{job_of(filled)}/csv/workers?window=latest&step={step}")
    assert len(one) == len(report.workers)
    assert {row["step"] for row in one} == {str(step)}
    assert {row["wait_s"] for row in one} == {"0.1"}


def test_csv_of_ledger_fixes_groups_and_rotation(filled: Filled) -> None:
    """As on the page."""
    report = report_of("slow")
    base = f"{job_of(filled)}/csv"
    bars = table(filled.world, f"{base}/ledger")
    assert [bars[0]["bar"], bars[-1]["bar"]] == ["ideal", "recorded"]
    ledger = [float(row["excess_s"]) for row in bars[1:-1]]
    assert ledger == pytest.approx([part.excess_s for part in report.ledger])
    fixes = table(filled.world, f"{base}/fixes")
    assert [float(row["speedup"]) for row in fixes] == [fix.speedup for fix in report.fixes]
    groups = table(filled.world, f"{base}/groups")
    assert len(groups) == len(report.groups)
    strip = table(filled.world, f"{base}/rotation")
    assert [row["rank"] for row in strip] == [
        str(each.worst.rank) for each in report.per_step if each.worst is not None
    ]


def test_there_is_no_other_table(filled: Filled) -> None:
    """404, and for a job of another tenant too."""
    client = filled.world.client()
    assert client.get(f"{job_of(filled)}/csv/secrets").status_code == 404
    for path in ("heat", "csv/workers", "csv/steps", "windows/latest"):
        assert client.get(f"/jobs/{filled.foreign.job_id}/{path}").status_code == 404


def test_whoever_may_not_read_gets_nothing(filled: Filled) -> None:
    """401 without a token, 403 with one that only sends."""
    for path in ("", "/heat", "/csv/steps", "/csv/workers", "/windows/latest"):
        address = f"{job_of(filled)}{path}"
        assert filled.world.client(None).get(address).status_code == 401, path
        assert filled.world.client("ingest").get(address).status_code == 403, path


# --- windows ----------------------------------------------------------------------------------


def add_window(world: World, filled: Filled, number: int, report: JobReport) -> str:
    """One more window of the slow job; its id."""
    made = filled.slow
    with world.database.write() as session:
        first = session.get(Window, made.window_id)
        assert first is not None
        shift = 1000 * number
        window = Window(
            id=f"{number:016x}", tenant_id=first.tenant_id, job_id=made.job_id,
            attempt_id=made.attempt_id, number=number, first_step=first.first_step + shift,
            last_step=first.last_step + shift, rows=1, state="done", missing_count=0,
            opened_ns=NOW, updated_ns=NOW, revision=1, fence=0, lease_ns=0, tries=0, pinned=False,
        )  # fmt: skip
        session.add(window)
        session.flush()
        session.add(
            Result(
                tenant_id=first.tenant_id, job_id=made.job_id, attempt_id=made.attempt_id,
                window_id=window.id, code_version="test", revision=1, fence=0, created_ns=NOW,
                analysis_s=0.1, verdict=report.verdict, coverage_ratio=1.0, report=packed(report),
            )
        )  # fmt: skip
        return window.id


def test_a_window_has_the_same_page_for_its_own_report(filled: Filled) -> None:
    """Its steps, its verdict, links to its neighbours; not the list of windows."""
    world = filled.world
    second = add_window(world, filled, 1, report_of("healthy"))
    old = page(world, f"{job_of(filled)}/windows/{filled.slow.window_id}")
    assert "<h1>Window 0: steps " in old
    assert "Rank 6 (DP rank 2, stage 1)" in section(old, "verdict")
    assert f'rel="next" href="{job_of(filled)}/windows/{second}"' in old
    assert 'rel="prev"' not in old
    assert 'class="reset"' not in old
    assert 'class="reset"' in page(world, f"{job_of(filled)}/windows/latest?from=1001")
    assert 'id="windows"' not in old
    new = page(world, f"{job_of(filled)}/windows/latest")
    assert "<h1>Window 1: steps " in new
    assert "No straggler. This job runs at" in section(new, "verdict")
    assert f'rel="prev" href="{job_of(filled)}/windows/{filled.slow.window_id}"' in new


def test_the_page_of_a_job_lists_its_windows_newest_first(filled: Filled) -> None:
    """Ten on a page, with a link to the older ones."""
    world = filled.world
    for number in range(1, 12):
        add_window(world, filled, number, report_of("slow"))
    listed = section(page(world, job_of(filled)), "windows")
    numbers = [int(number) for number in re.findall(r">window (\d+)</a>", listed)]
    assert numbers == list(range(11, 1, -1))
    older = re.search(r'href="([^"]*windows=[^"]*)#windows"', listed)
    assert older is not None
    rest = section(page(world, older[1]), "windows")
    assert re.findall(r">window (\d+)</a>", rest) == ["1", "0"]


def test_an_unknown_window_is_not_found(filled: Filled) -> None:
    """Also the one of another job."""
    for name in ("0123456789abcdef", "live", "nothing", "%2e%2e%2fx"):
        page(filled.world, f"{job_of(filled)}/windows/{name}", 404)
    page(filled.world, f"{job_of(filled)}/windows/{filled.healthy.window_id}", 404)


# --- states -----------------------------------------------------------------------------------


def waiting(world: World, **fields: Any) -> str:  # noqa: ANN401  # of the attempt
    """The verdict of a job of which nothing has been analysed."""
    with world.database.write() as session:
        made = add_job(session, world.tenant_id, "job", report_of("empty"), **fields)
        for name in ("results", "windows"):
            session.connection().exec_driver_sql(f"DELETE FROM {name}")  # noqa: S608  # a name
    return section(page(world, f"/jobs/{made.job_id}"), "verdict")


def test_a_job_that_waits_says_for_what(world: World) -> None:
    """Steps that all ranks have delivered, and how many send."""
    text = waiting(world, ready_step=None)
    assert "<b>Waiting</b>" in text
    assert "two steps that all ranks have delivered; last such step: none yet." in text
    assert "1 streams from 1 hosts send" in text


def test_a_recorded_trace_that_waits_needs_a_worker(world: World) -> None:
    """Its data are all there."""
    assert "wait for a worker process that is free" in waiting(world, mode="recorded")


def test_a_healthy_job_is_quiet(filled: Filled) -> None:
    """One line in the verdict, no cost to worry about; the sections are there."""
    text = page(filled.world, f"/jobs/{filled.healthy.job_id}")
    verdict = section(text, "verdict")
    assert verdict.startswith('<section class="verdicts healthy"')
    assert "<b>No straggler</b>" in verdict
    assert "lost per day" not in verdict
    for name in ("where", "why", "groups", "quality"):
        assert f'id="{name}"' in text


def test_a_planned_pause_is_calm(filled: Filled) -> None:
    """It says that it is no straggler, and is not drawn as one."""
    report = report_of("slow")
    where = replace(report.findings[0].where, rank=None, dp=None, stage=None)
    pause = replace(
        report.findings[0], verdict="planned_pause", cause="checkpoint", scope="job",
        severity="info", where=where, victims=None,
    )  # fmt: skip
    replaced(filled.world, filled.slow.job_id, replace(report, findings=(pause,)))
    verdict = section(page(filled.world, job_of(filled)), "verdict")
    assert verdict.startswith('<section class="verdicts healthy"')
    assert "<b>Planned pause</b><span>: no straggler" in verdict


def test_clocks_that_are_not_aligned_withhold_causes(filled: Filled) -> None:
    """The verdict says so, and the groups too."""
    report = report_of("healthy")
    clock = replace(report.quality.clock, aligned=False)
    quality = replace(report.quality, clock=clock)
    replaced(filled.world, filled.healthy.job_id, replace(report, quality=quality, groups=()))
    text = page(filled.world, f"/jobs/{filled.healthy.job_id}")
    assert "causes in communication are withheld" in section(text, "verdict")
    assert "Withheld: the clocks are not aligned" in section(text, "groups")


def test_a_hang_names_its_step(filled: Filled) -> None:
    """It has no cost in seconds."""
    report = report_of("slow")
    lasting = replace(report.findings[0].persistence, onset_step=17)
    hang = replace(report.findings[0], verdict="hang", cause="hang", persistence=lasting)
    replaced(filled.world, filled.slow.job_id, replace(report, findings=(hang,)))
    verdict = section(page(filled.world, job_of(filled)), "verdict")
    assert "<b>Hang</b>" in verdict
    assert "hangs in step 17." in verdict


def test_a_job_that_is_over_says_when_and_why(filled: Filled) -> None:
    """Beside its last verdict."""
    with filled.world.database.write() as session:
        session.execute(update(Attempt).values(ended_ns=NOW, end_reason="finished"))
    assert "Ended" in section(page(filled.world, job_of(filled)), "verdict")


def test_a_damaged_report_breaks_only_what_needs_it(filled: Filled) -> None:
    """The page stands, each broken part says so, and the steps are still drawn."""
    document = report_of("slow").to_dict()
    del document["workers"], document["ledger"], document["findings"]
    raw = zstandard.ZstdCompressor().compress(orjson.dumps(document))
    with filled.world.database.write() as session:
        session.execute(
            update(Result).where(Result.job_id == filled.slow.job_id).values(report=raw)
        )
    text = page(filled.world, job_of(filled))
    assert "This part cannot be shown" in section(text, "where")
    assert figure(text, "figure-steps")["data"][1]["y"]
