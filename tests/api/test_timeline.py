"""Timelines from the files to the page: a real worker draws what the routes ask for."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pytest
from sqlalchemy import select, update

from smon.store.models import Task, Window
from smon.synth.write import write_trace
from smon.worker.loop import Worker
from tests.api.filled import Client, World, make_world
from tests.api.test_imports import make, put
from tests.builders import synthetic_job

HTML: Final = {"accept": "text/html"}
FIGURE: Final = re.compile(r'id="figure-timeline">(.*?)</script>', re.DOTALL)
STEPS: Final = 6


@dataclass(frozen=True, slots=True)
class Imported:
    """A server with one analysed job whose worker (2, 1) is slow."""

    world: World
    client: Client
    job_id: str
    window_id: str

    @property
    def rest(self) -> str:
        """Routes of the timeline."""
        return f"/api/v1/jobs/{self.job_id}/windows/{self.window_id}/timeline"

    @property
    def page(self) -> str:
        """Address of the page."""
        return f"/jobs/{self.job_id}/windows/{self.window_id}/timeline-view"

    def work(self) -> None:
        """Let a worker do all there is."""
        Worker(self.world.settings, self.world.database, self.world.objects, name="test").drain()

    def shown(self, query: str = "") -> str:
        """The page once a worker has drawn."""
        self.html(query)
        self.work()
        return self.html(query)

    def html(self, query: str = "") -> str:
        """The page as it is now."""
        answer = self.client.get(f"{self.page}{query}", headers=HTML)
        assert answer.status_code == 200, answer.text
        return answer.text

    def marks(self, query: str = "") -> dict[str, Any]:
        """Marks once a worker has drawn."""
        path = f"{self.rest}/marks{query}"
        if self.client.get(path).status_code == 503:
            self.work()
        found: dict[str, Any] = self.client.json(path)
        return found


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Imported]:
    """One job, imported and analysed."""
    folder = tmp_path_factory.mktemp("timeline")
    world = make_world(folder)
    client = world.client("admin")
    table, job = synthetic_job(dp=4, pp=2, steps=STEPS)
    import_id = make(client, job="<b>=drawn")
    for n, path in enumerate(write_trace(table, job, folder / "trace")):
        put(client, import_id, n, path.read_bytes(), **{"smon-file-name": path.name})
    client.post(f"/api/v1/imports/{import_id}/start")
    Worker(world.settings, world.database, world.objects, name="test").drain()
    row = client.json(f"/api/v1/imports/{import_id}")
    yield Imported(world, client, row["job_id"], row["window_id"])
    world.database.close()


def words(text: str) -> str:
    """A page without its elements."""
    plain = re.sub(r"<script.*?</script>", " ", text, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", plain).split())


def test_marks_are_waited_for_and_then_there(imported: Imported) -> None:
    """503 with Retry-After until a worker has drawn; who asks again gets the same task."""
    path = f"{imported.rest}/marks?step=2"
    for _ in range(2):
        waiting = imported.client.get(path)
        assert (waiting.status_code, waiting.headers["retry-after"]) == (503, "5")
    imported.work()
    found = imported.client.json(path)
    assert found["step"] == 2
    assert found["rows"][0]["rank"] == found["longest"]["rank"] == 6
    assert found["rows"][0]["role"] == "suspect"
    assert len(found["rows"]) == 8


def test_marks_have_the_numbers_of_the_report(imported: Imported) -> None:
    """Step time and ideal of each step are those of the window's report."""
    report = imported.client.json(imported.rest.removesuffix("/timeline"))
    for each in report["per_step"][:3]:
        found = imported.marks(f"?step={each['step']}")
        assert found["recorded_s"] == each["recorded_s"]
        assert found["ideal_s"] == each["ideal_s"]
    worst = max(report["per_step"], key=lambda one: one["slowdown"])
    assert imported.marks()["step"] == worst["step"]


def test_marks_can_be_of_a_range_and_of_one_run(imported: Imported) -> None:
    """From what the worker made once: no other task is needed."""
    whole = imported.marks("?step=2")
    middle = whole["length_s"] / 2
    part = imported.client.json(f"{imported.rest}/marks?step=2&begin_s={middle}&kind=ideal")
    assert part["begin_s"] == pytest.approx(middle)
    assert set(part["marks"]["kind"]) == {1}
    assert 0 < part["ops"] < whole["ops"]
    few = imported.client.json(f"{imported.rest}/marks?step=2&most=100")
    assert len(few["marks"]["row"]) <= 100
    assert sum(few["marks"]["count"]) == few["ops"] == whole["ops"]


@pytest.mark.parametrize("query", ["steps=3-2", "steps=a", "steps=1-2-3", "kind=past"])
def test_a_timeline_of_nonsense_is_refused(imported: Imported, query: str) -> None:
    """422, and what was expected."""
    assert imported.client.get(f"{imported.rest}?{query}").status_code == 422


def test_a_trace_file_has_the_steps_asked_for(imported: Imported) -> None:
    """And its name says which."""
    path = f"{imported.rest}?kind=both&steps=2-3&dp=2&stage=1"
    assert imported.client.get(path).status_code == 503
    imported.work()
    answer = imported.client.get(path)
    events = [each for each in answer.json()["traceEvents"] if each["ph"] == "X"]
    places = {(e["args"]["step"], e["args"]["dp"], e["args"]["stage"]) for e in events}
    assert places == {(2, 2, 1), (3, 2, 1)}
    assert {each["cat"] for each in events} == {"actual", "ideal"}
    assert f"{imported.window_id}-2-3-both.json" in answer.headers["content-disposition"]


def test_steps_that_are_not_there_are_a_conflict_that_is_tried_again(imported: Imported) -> None:
    """409 with the steps there are; a minute later the task is made anew."""
    path = f"{imported.rest}?steps=900-901"
    assert imported.client.get(path).status_code == 503
    imported.work()
    answer = imported.client.get(path)
    assert answer.status_code == 409
    assert f"0 to {STEPS - 1}, found 900 to 901" in answer.json()["detail"]
    assert imported.client.get(path).status_code == 409
    with imported.world.database.write() as session:
        session.execute(update(Task).where(Task.state == "failed").values(finished_ns=1))
    assert imported.client.get(path).status_code == 503


# --- the page ---------------------------------------------------------------------------------


def test_the_page_shows_at_once_and_says_what_it_waits_for(imported: Imported) -> None:
    """The step's numbers stand there before a worker has drawn; without a script it comes back."""
    text = imported.html("?step=4")
    assert 'data-state="drawing"' in text
    assert re.search(r"Step 4 took [\d.]+ (s|ms); its ideal is [\d.]+ (s|ms)", words(text))
    assert '<noscript><meta http-equiv="refresh"' in text
    assert "figure-timeline" not in text
    shown = imported.shown("?step=4")
    assert 'data-state="drawn"' in shown
    assert "http-equiv" not in shown


def test_the_page_says_who_is_longest_and_who_waits(imported: Imported) -> None:
    """The sentence, the rows, the table of waits; numbers as the route has them."""
    text = imported.shown("?step=2")
    found = imported.marks("?step=2")
    assert "Rank 6 (DP 2, stage 1) computes longest for its stage" in words(text)
    labels = re.findall(r"<li class=\"tl-role-(\w+)\"><span><code><span>rank </span>(\d+)", text)
    assert labels == [(row["role"], str(row["rank"])) for row in found["rows"]]
    waits = re.findall(r'data-label="Waited" data-value="([\d.e-]+)"', text)
    assert [float(one) for one in waits] == [one["wait_s"] for one in found["waits"]]
    match = FIGURE.search(text)
    assert match is not None
    figure = json.loads(match[1])
    assert figure["marks"] == found["marks"]
    assert (figure["recorded_s"], figure["ideal_s"]) == (found["recorded_s"], found["ideal_s"])
    assert len(figure["classes"]) == len(figure["types"])


def test_the_page_goes_from_step_to_step(imported: Imported) -> None:
    """With the same workers; the first has none before it, the last none after."""
    text = imported.html("?step=2&dp=1-2&stage=1")
    assert re.search(r'rel="prev" href="[^"]*\?step=1&amp;dp=1-2&amp;stage=1"', text)
    assert re.search(r'rel="next" href="[^"]*\?step=3&amp;dp=1-2&amp;stage=1"', text)
    assert 'rel="prev"' not in imported.html("?step=0")
    assert 'rel="next"' not in imported.html(f"?step={STEPS - 1}")


def test_the_page_shows_chosen_workers(imported: Imported) -> None:
    """As typed, and the links to Perfetto and the data are of the same."""
    text = imported.shown("?step=2&dp=1,+3&stage=1")
    found = re.findall(r"<small>DP (\d) · stage (\d)", text)
    assert sorted(found) == [("1", "1"), ("3", "1")]
    assert "kind=both&amp;steps=2&amp;dp=1&amp;dp=3&amp;stage=1" in text
    assert 'value="1, 3"' in text
    nobody = imported.html("?step=2&dp=50")
    assert "No worker of this job has these DP ranks and stages." in words(nobody)


def test_the_newest_window_has_a_lasting_address(imported: Imported) -> None:
    """`latest` leads to the window's own, with the query; so what is shown stays."""
    for name in ("latest", "live"):
        path = f"/jobs/{imported.job_id}/windows/{name}/timeline-view?step=3"
        answer = imported.client.get(path, headers=HTML)
        assert answer.status_code == 303
        assert answer.headers["location"] == f"{imported.page}?step=3"


def test_the_table_for_programs_has_the_marks(imported: Imported) -> None:
    """One line each, names made harmless."""
    imported.shown("?step=2")
    answer = imported.client.get(f"{imported.page}?step=2&as=csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    found = imported.marks("?step=2&most=10000")
    assert [float(row["start_s"]) for row in rows] == found["marks"]["start_s"]
    assert {row["run"] for row in rows} == {"actual", "ideal"}
    assert {row["op"] for row in rows} == {found["types"][one] for one in found["marks"]["type"]}


@pytest.mark.parametrize(
    "query",
    [
        "kind=past", "step=x", "step=-1", "dp=a", "dp=5-3", "dp=0-999", "stage=1;2",
        "begin_s=nan", "end_s=-1", "end_s=x",
    ],
)  # fmt: skip
def test_a_page_of_nonsense_is_refused(imported: Imported, query: str) -> None:
    """With a page that says what was expected."""
    assert imported.client.get(f"{imported.page}?{query}", headers=HTML).status_code == 422


def test_a_step_or_window_that_is_not_there_is_not_found(imported: Imported) -> None:
    """Also for the other tenant, who has no such job."""
    client = imported.client
    assert client.get(f"{imported.page}?step=900", headers=HTML).status_code == 404
    other = f"/jobs/{imported.job_id}/windows/{'0' * 16}/timeline-view"
    assert client.get(other, headers=HTML).status_code == 404
    stranger = imported.world.client("other")
    assert stranger.get(imported.page, headers=HTML).status_code == 404
    assert stranger.get(f"{imported.rest}/marks").status_code == 404


def test_a_result_that_was_removed_is_drawn_again(imported: Imported) -> None:
    """Retention takes old ones; the page waits once more."""
    imported.shown("?step=1")
    for stored in list(imported.world.objects.list("tasks")):
        imported.world.objects.delete(stored.path)
    assert 'data-state="drawing"' in imported.html("?step=1")
    assert 'data-state="drawn"' in imported.shown("?step=1")


def test_a_damaged_result_is_drawn_again(imported: Imported) -> None:
    """It is only a copy of what the events say."""
    imported.shown("?step=5")
    for content in (b"no gzip", gzip.compress(b"{")):
        with imported.world.database.read() as session:
            tasks = session.scalars(select(Task).where(Task.kind == "marks")).all()
            paths = [one.path for one in tasks if one.options["step"] == 5]
        for path in filter(None, paths):
            imported.world.objects.put(path, content)
        assert imported.client.get(f"{imported.rest}/marks?step=5").status_code == 503
        assert 'data-state="drawing"' in imported.html("?step=5")
        assert 'data-state="drawn"' in imported.shown("?step=5")


def test_a_step_that_failed_says_why(imported: Imported) -> None:
    """And the rest of the page is there."""
    imported.html("?step=3&stage=0")
    with imported.world.database.write() as session:
        session.execute(
            update(Task)
            .where(Task.kind == "marks", Task.state == "queued")
            .values(state="failed", error="the ops <b>contradict</b>", finished_ns=2**62)
        )
    text = imported.html("?step=3&stage=0")
    assert "This step cannot be drawn: the ops &lt;b&gt;contradict&lt;/b&gt;." in text
    assert "Step 3 took" in words(text)


def test_names_of_jobs_stand_on_the_page_as_they_are(imported: Imported) -> None:
    """Escaped, whatever they are."""
    text = imported.html()
    assert "&lt;b&gt;=drawn" in text
    assert "<b>=drawn" not in text


def test_a_window_whose_events_are_gone_says_so(imported: Imported) -> None:
    """The report is still there; nothing is asked of a worker."""
    with imported.world.database.write() as session:
        session.execute(update(Window).values(expired_ns=1))
    try:
        text = imported.html("?step=2")
        assert 'data-state="gone"' in text
        assert "no longer kept" in words(text)
        assert "Step 2 took" in words(text)
        assert imported.client.get(f"{imported.rest}/marks?step=2").status_code == 404
    finally:
        with imported.world.database.write() as session:
            session.execute(update(Window).values(expired_ns=None))
