"""The fleet page: the right jobs in the right order, with the numbers of REST, history and CSV."""

from __future__ import annotations

import csv
import io
import re
from html import unescape
from typing import Any, Final
from urllib.parse import quote

import pytest
from sqlalchemy import select, update

from dashboards.web.figures.spark import HEIGHT, spark
from dashboards.web.views.fleet import COLUMNS, Asked
from smon.store.models import Attempt, Finding, Job, StepResult
from smon.store.queries.jobs import JobSort, JobState
from smon.store.queries.recent import POINTS, recent_slowdowns
from tests.api.conftest import Filled, fill
from tests.api.filled import NOW, SECOND, World, add_job, make_world, report_of
from tests.api.test_pages import HOSTILE, HTML, Elements, page

ROW: Final = re.compile(r'<tr class="\w+">\s*<th scope="row"><a href="/jobs/(\w+)">(.*?)</a>')


def shown(text: str) -> list[str]:
    """Names of the jobs in the table, from top to bottom."""
    return [unescape(name) for _, name in ROW.findall(text)]


def row_of(text: str, job_id: str) -> str:
    """The line of one job, with white space made single."""
    found = re.search(
        rf'<tr class="\w+">\s*<th scope="row"><a href="/jobs/{job_id}">.*?</tr>', text, re.DOTALL
    )
    assert found is not None
    return " ".join(found[0].split())


def csv_rows(world: World, path: str) -> list[dict[str, str]]:
    """A CSV file, row by row."""
    answer = world.client().get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    return list(csv.DictReader(io.StringIO(answer.text)))


def section(text: str, name: str) -> str:
    """What stands in an element with an id, up to the end of its kind."""
    found = re.search(rf'<(\w+)[^>]* id="{name}".*?</\1>', text, re.DOTALL)
    assert found is not None, name
    return found[0]


def end(world: World, attempt_id: str) -> None:
    """A live job that is over."""
    with world.database.write() as session:
        session.execute(update(Attempt).where(Attempt.id == attempt_id).values(ended_ns=NOW))


@pytest.mark.parametrize("sort", [f"{sign}{key}" for key, *_ in COLUMNS for sign in ("", "-")])
def test_every_column_sorts_as_the_api_does(filled: Filled, sort: str) -> None:
    """Whatever the column and the direction, the table has the order of REST."""
    listed = filled.world.client().json(f"/api/v1/jobs?sort={sort}")["items"]
    assert shown(page(filled.world, f"/?sort={sort}")) == [job["name"] for job in listed]


def test_the_head_of_a_column_leads_to_the_other_direction(filled: Filled) -> None:
    """Numbers begin with the highest; the column that is sorted by says so, and turns round."""
    text = page(filled.world, "/")
    heads = dict(re.findall(r'<a href="([^"]*)">([\w ]+)<span class="order"', text))
    assert heads == {"/?sort=cost": "Cost"}
    assert text.count("aria-sort") == 1
    assert 'aria-sort="descending"' in text
    assert 'href="/?sort=-waste"' in text
    assert 'href="/?sort=name"' in text
    turned = page(filled.world, "/?sort=cost")
    assert 'aria-sort="ascending"' in turned
    assert re.search(r'aria-sort="ascending"><a href="/">', turned)


def test_the_numbers_of_the_table_are_those_of_the_api(filled: Filled) -> None:
    """Slowdown, waste, cost, since and last step of each line."""
    text = page(filled.world, "/")
    for job in filled.world.client().json("/api/v1/jobs")["items"]:
        line = row_of(text, job["id"])
        if job["slowdown"] is None:
            assert ">–</td>" in line
            continue
        assert f"{job['slowdown']:.3f} ×" in line
        assert f"{100 * job['waste_ratio']:.1f} %" in line
        assert f">{job['last_step']}<" in line
        if job["finding"]:
            assert f"step {job['finding']['since_step']}<" in line
            assert "1 min ago" in line


def test_the_csv_holds_the_same_jobs_and_numbers(filled: Filled) -> None:
    """In the order of the table, with all digits; filters hold for it as well."""
    rows = csv_rows(filled.world, "/jobs.csv?sort=-slowdown")
    jobs = filled.world.client().json("/api/v1/jobs?sort=-slowdown")["items"]
    assert [row["id"] for row in rows] == [job["id"] for job in jobs]
    for row, job in zip(rows, jobs, strict=True):
        assert row["state"] == job["state"]
        for name in ("slowdown", "waste_ratio", "gpu_hours_per_day", "recorded_s", "gpus"):
            known = job[name]
            assert (float(row[name]) if row[name] else None) == known, name
    assert [row["job"] for row in csv_rows(filled.world, "/jobs.csv?q=HEALTHY")] == ["healthy-job"]


def test_text_in_the_csv_is_no_formula(filled: Filled) -> None:
    """A spreadsheet shows the name; it does not compute it."""
    with filled.world.database.write() as session:
        session.execute(update(Job).where(Job.id == filled.slow.job_id).values(name="=1+1"))
    assert "'=1+1" in [row["job"] for row in csv_rows(filled.world, "/jobs.csv")]


# --- sparklines -------------------------------------------------------------------------------


def test_a_sparkline_draws_the_latest_steps_of_the_history(filled: Filled) -> None:
    """The values are those of the history route, and there is one point for each."""
    world, made = filled.world, filled.slow
    history = world.client().json(f"/api/v1/jobs/{made.job_id}/history")
    with world.database.read() as session:
        recent = recent_slowdowns(session, world.tenant_id, [made.attempt_id])[made.attempt_id]
    latest = list(zip(history["step"], history["slowdown"], strict=True))[-POINTS:]
    assert list(recent) == latest
    line = row_of(page(world, "/"), made.job_id)
    points = re.findall(r'<polyline points="(.*?)"', line)
    assert [len(each.split()) for each in points] == [len(latest)]
    words = f"slowdown in steps {latest[0][0]} to {latest[-1][0]}: last {latest[-1][1]:.3f} ×"
    assert line.count(words) == 2


def test_a_long_job_has_the_last_points_alone(world: World) -> None:
    """Of a thousand steps the last 32 are read, of another tenant's none."""
    with world.database.write() as session:
        made = add_job(session, world.tenant_id, "job", report_of("empty"))
        session.add_all(
            StepResult(
                attempt_id=made.attempt_id, step=step, tenant_id=world.tenant_id,
                job_id=made.job_id, slowdown=1 + step / 1000, analysed_ns=NOW,
            )
            for step in range(100, 1100)
        )  # fmt: skip
    with world.database.read() as session:
        recent = recent_slowdowns(session, world.tenant_id, [made.attempt_id])
        assert recent_slowdowns(session, world.other_id, [made.attempt_id]) == {}
    assert recent[made.attempt_id] == tuple((step, 1 + step / 1000) for step in range(1068, 1100))


def test_a_sparkline_has_gaps_a_threshold_and_a_scale() -> None:
    """Steps that were left out are gaps; higher is slower; noise of a healthy job stays flat."""
    drawn = spark(((5, 1.0), (6, 2.0), (7, None), (8, 1.5)))
    assert drawn is not None
    runs = [[tuple(map(float, one.split(","))) for one in line.split()] for line in drawn.lines]
    assert [len(run) for run in runs] == [2, 1]
    (first, second), (last,) = runs
    assert second[1] < last[1] < first[1] <= HEIGHT
    assert second[1] < drawn.limit < first[1]
    assert drawn.end == last
    assert drawn.slow
    calm = spark(tuple((step, 1.0 + 0.001 * (step % 2)) for step in range(32)))
    assert calm is not None
    heights = [float(one.split(",")[1]) for one in calm.lines[0].split()]
    assert max(heights) - min(heights) < 1
    assert not calm.slow
    assert spark(((1, None),)) is None
    assert spark(()) is None


# --- what is above and beside the table -------------------------------------------------------


def test_the_three_numbers_are_those_of_the_report(filled: Filled) -> None:
    """GPU-hours per day, slowed jobs, dearest cause: as ``fleet/summary`` says them."""
    facts = section(page(filled.world, "/"), "facts")
    report = filled.world.client().json("/api/v1/fleet/summary?days=7")
    values = [float(value) for value in re.findall(r'data-value="([^"]*)"', facts)]
    assert values == [report["gpu_hours_per_day"], report["slowed"]]
    assert f" of {report['analysed']}<" in facts
    assert "slow GPU" in facts


def test_a_job_that_is_over_is_dim_and_costs_nothing_now(filled: Filled) -> None:
    """It comes last whatever the order, under its own heading, and leaves the rate."""
    world = filled.world
    before = world.client().json("/api/v1/fleet/summary")
    slow = world.client().json(f"/api/v1/jobs/{filled.slow.job_id}")["gpu_hours_per_day"]
    end(world, filled.slow.attempt_id)
    text = page(world, "/?sort=-cost")
    assert shown(text)[-1] == "slow-job"
    over = text[text.index('<tbody class="over">') :]
    assert shown(over) == ["slow-job"]
    assert "Ended" in over
    after = world.client().json("/api/v1/fleet/summary")
    assert after["gpu_hours_per_day"] == pytest.approx(before["gpu_hours_per_day"] - slow)
    assert after["slowed"] == before["slowed"] == 1
    assert "slow_gpu" not in [each["cause"] for each in after["causes"]]
    assert shown(page(world, "/?state=ended")) == ["slow-job"]


def test_states_are_counted_and_filter(filled: Filled) -> None:
    """Each state that occurs, with its jobs; together they are all; a second click lets go."""
    text = page(filled.world, "/")
    chips = re.findall(r'<a href="(/\?state=\w+)">.*?<b>(\d+)</b>', text, re.DOTALL)
    assert sum(int(count) for _, count in chips) == 3
    for href, count in chips:
        alone = page(filled.world, href)
        assert len(shown(alone)) == int(count)
        assert 'href="/" aria-current="true"' in alone
    assert shown(page(filled.world, "/?state=slow&q=healthy")) == []
    assert "No job has “healthy” in its name and is slow" in page(
        filled.world, "/?state=slow&q=healthy"
    )


@pytest.mark.parametrize(
    "query", ["sort=x", "sort=--cost", "state=x", "page=0", "page=-1", "page=1e3", "page=99999999"]
)
def test_what_cannot_be_asked_for_is_refused(filled: Filled, query: str) -> None:
    """422, and a page that says so."""
    answer = filled.world.client().get(f"/?{query}", headers=HTML)
    assert answer.status_code == 422
    assert "expected" in answer.text


def test_a_host_recurs_from_the_second_job_on(filled: Filled) -> None:
    """In one job it is a suspect, listed quietly; in two it stands above, with both counted."""
    world = filled.world
    beside = section(page(world, "/"), "hosts")
    assert "No host was a suspect in more than one job." in beside
    assert re.search(r'class="suspects once">\s*<li><a href="/hosts/node-7">', beside)
    with world.database.write() as session:
        add_job(session, world.tenant_id, "second", report_of("slow"))
    beside = section(page(world, "/"), "hosts")
    recurring = re.search(r'class="suspects recurring">(.*?)</ul>', beside, re.DOTALL)
    assert recurring is not None
    assert "node-7" in recurring[1]
    assert "<b>2 jobs</b>" in recurring[1]
    assert "slow GPU" in recurring[1]
    assert 'class="suspects once"' not in beside
    (host,) = world.client().json("/api/v1/hosts")["items"]
    hours = re.search(r"([\d.,]+) GPU-h wasted", recurring[1])
    assert hours is not None
    assert float(hours[1].replace(",", "")) == pytest.approx(
        host["lost_gpu_hours"], rel=0.01, abs=1e-3
    )


# --- none, one, many --------------------------------------------------------------------------


def test_one_job_is_a_table_without_pages(world: World) -> None:
    """No paging, no hosts, and the job."""
    with world.database.write() as session:
        add_job(session, world.tenant_id, "only", report_of("healthy"))
    text = page(world, "/")
    assert shown(text) == ["only"]
    assert "1–1 of 1" in text
    assert 'aria-label="Pages of the list"' not in text
    assert re.search(r'<aside id="hosts"[^>]* hidden>', text)


def test_many_jobs_come_in_pages(world: World) -> None:
    """Going from page to page shows every job once, in the order of the whole list."""
    with world.database.write() as session:
        session.add_all(
            Job(
                id=f"{number:016x}", tenant_id=world.tenant_id, name=f"job-{number:03d}",
                created_ns=NOW, last_data_ns=NOW - number * SECOND, pinned=False,
            )
            for number in range(230)
        )  # fmt: skip
    found: list[str] = []
    href: str | None = "/?sort=name"
    backs = []
    while href:
        text = page(world, href)
        found += shown(text)
        backs += re.findall(r'rel="prev" href="([^"]*)"', text)
        following = re.search(r'rel="next" href="([^"]*)"', text)
        href = None if following is None else unescape(following[1])
    assert found == [f"job-{number:03d}" for number in range(230)]
    later = [f"/?sort=name&page={number}" for number in (2, 3, 4)]
    assert [unescape(back) for back in backs] == ["/?sort=name", *later]
    assert "The list ends before this page." in page(world, "/?page=7")
    assert len(csv_rows(world, "/jobs.csv")) == 230


# --- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_text_and_links_hold(filled: Filled, name: str) -> None:
    """Job, host and cause appear literally; the links lead to the right job and host."""
    world = filled.world
    with world.database.write() as session:
        finding = session.execute(
            select(Finding).where(Finding.job_id == filled.slow.job_id)
        ).scalar_one()
        document = {**finding.document, "where": {**finding.document["where"], "node": name}}
        session.execute(update(Job).where(Job.id == filled.slow.job_id).values(name=name))
        session.execute(update(Finding).values(host=name, document=document, cause=name))
    for path in ("/", "/fleet", f"/?q={quote(name)}"):
        text = page(world, path)
        seen = Elements(text)
        assert "img" not in seen.tags
        assert seen.tags.count("script") == Elements(page(world, "/login")).tags.count("script")
        assert not [key for key, _ in seen.attributes if key.startswith("on") or key == "style"]
        links = [value for key, value in seen.attributes if key in ("href", "src")]
        assert not [link for link in links if not link.startswith(("/", "#"))]
        assert f"/jobs/{filled.slow.job_id}" in links
        if path != "/fleet":
            assert name.replace("\x00", "\ufffd") in [
                each.replace("\x00", "\ufffd") for each in shown(text)
            ]


def test_addresses_keep_what_was_asked() -> None:
    """A link changes one thing and keeps the rest; what is usual is left out."""
    asked = Asked("a&b", JobState.SLOW, JobSort.WASTE, descending=False, page=3)
    assert asked.href(page=4) == "/?q=a%26b&state=slow&sort=waste&page=4"
    assert asked.href(state=None) == "/?q=a%26b&sort=waste"
    assert Asked().href() == "/"
    assert {sort for sort, _, _ in COLUMNS} == set(JobSort) - {JobSort.LAST_DATA}


def test_the_page_is_sent_again_when_something_has_changed(filled: Filled) -> None:
    """304 to whoever has it; a new finding, order or filter makes another tag."""
    world = filled.world
    tag = world.client().get("/", headers=HTML).headers["etag"]

    def status(path: str) -> Any:  # noqa: ANN401  # a number
        return world.client().get(path, headers={**HTML, "if-none-match": tag}).status_code

    assert status("/") == 304
    assert status("/?sort=name") == 200
    with world.database.write() as session:
        session.execute(update(Finding).values(last_ns=NOW))
    assert status("/") == 200


@pytest.mark.postgres
def test_postgresql_makes_the_same_pages(filled: Filled, postgres_url: str) -> None:
    """Order, sparklines, numbers and sums do not depend on the database."""
    other = fill(make_world(filled.world.settings.data_dir / "pg", url=postgres_url))
    for path in ("/", "/?sort=since", "/fleet"):
        one, two = (page(each.world, path) for each in (filled, other))
        assert shown(two) == shown(one)
        assert re.findall(r'polyline points="(.*?)"', two) == re.findall(
            r'polyline points="(.*?)"', one
        )
        assert re.findall(r'data-value="(.*?)"', two) == re.findall(r'data-value="(.*?)"', one)
    other.world.database.close()
