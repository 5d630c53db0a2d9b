"""Pages: right for every kind of job, safe for every name, quiet on the network."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from typing import Any, Final

import orjson
import pytest
from sqlalchemy import update

from dashboards.web.text import age, bytes_of, difference, duration, gpu_hours, percent, times
from dashboards.web.views.common import script_json
from smon.store.models import Attempt, Finding, Job, Stream, Window
from tests.api.conftest import Filled
from tests.api.filled import NOW, World, add_job, report_of

HTML: Final = {"accept": "text/html"}

FIGURE: Final = re.compile(
    r'<script type="application/json" id="([\w-]+)">(.*?)</script>', re.DOTALL
)

#: Names as they come from job scripts, and from people who mean harm.
HOSTILE: Final = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'; alert(1); '",
    "{{ 7 * 7 }}",
    "{% include 'job.html' %}",
    "</script><script>alert(1)</script>",
    "<!-- --> ]]>",
    "javascript:alert(1)",
    "\u202egnp.exe",
    "&lt;b&gt; & \x01\x1b[31m",
    "a" * 256,
]


class Elements(HTMLParser):
    """What elements and attributes a page has."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note one."""
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


def page(world: World, path: str) -> str:
    """A page that must succeed."""
    answer = world.client().get(path, headers=HTML)
    assert answer.status_code == 200, answer.text
    return answer.text


def figures(text: str) -> dict[str, Any]:
    """Figures of a page by id."""
    found = re.findall(
        r'<script type="application/json" id="([\w-]+)">(.*?)</script>', text, re.DOTALL
    )
    return {name: orjson.loads(body) for name, body in found}


def test_an_empty_server_says_what_to_do(world: World) -> None:
    """The commands that bring a job in, with this server's address."""
    text = page(world, "/")
    assert "smon import trace.parquet --meta meta.yaml --server http://localhost" in text
    assert "<table" not in text


def test_the_fleet_shows_the_dearest_job_first(filled: Filled) -> None:
    """Name, state in a word, verdict in few, numbers; and the hosts that recur."""
    text = page(filled.world, "/")
    order = [text.index(name) for name in ("slow-job", "healthy-job", "empty-job")]
    assert order == sorted(order)
    assert "Rank 6 (DP rank 2, stage 1): slow GPU" in " ".join(text.split())
    assert "</span> slow</span>" in text
    assert "no straggler" in text
    assert "insufficient data" in text
    assert "node-7" in text
    assert "foreign" not in text
    assert "healthy-job" not in page(filled.world, "/?q=slow")
    assert "No job has" in page(filled.world, "/?q=nothing")


def test_a_slow_job_says_who_why_and_what_to_do(filled: Filled) -> None:
    """The sentence, evidence, next commands, ledger, fixes and figures."""
    text = page(filled.world, f"/jobs/{filled.slow.job_id}")
    report = report_of("slow")
    finding = report.findings[0]
    assert '<p class="verdict" data-value="6">Rank 6 (DP rank 2, stage 1): slow GPU, +' in text
    assert html.escape(finding.next[0]) in text
    assert f"<li>{finding.evidence[0]}</li>" in text
    assert "slow workers" in text
    assert "replace" in text
    drawn = figures(text)
    assert drawn["figure-steps"]["data"][1]["x"] == [step.step for step in report.per_step]
    assert max(map(max, drawn["figure-heat"]["data"][0]["z"])) == pytest.approx(
        max(worker.slowdown or 0.0 for worker in report.workers), abs=1e-5
    )


def test_a_healthy_job_is_one_calm_line(filled: Filled) -> None:
    """No finding, no command, no alarm."""
    text = page(filled.world, f"/jobs/{filled.healthy.job_id}")
    verdict = re.search(r'<p class="verdict">(.*?)</p>', text)
    assert verdict is not None
    assert verdict[1].startswith("No straggler. This job runs at 1.0")
    assert 'class="copy"' not in text
    assert "Nothing that would be worth it." in text


def test_a_job_without_usable_data_says_so(filled: Filled) -> None:
    """No numbers, all reasons."""
    text = page(filled.world, f"/jobs/{filled.empty.job_id}")
    assert "Insufficient data: 0 usable steps." in text
    assert "no step is complete" in text
    assert "step 0 (no ops)" in text
    assert figures(text) == {}


def test_a_job_that_has_just_begun_waits(world: World) -> None:
    """Neither window nor running diagnosis: the page says so, and does not fail."""
    with world.database.write() as session:
        made = add_job(session, world.tenant_id, "job", report_of("empty"))
        for table in ("results", "windows"):
            session.connection().exec_driver_sql(f"DELETE FROM {table}")  # noqa: S608  # a name
    assert "Waiting: nothing has been analysed yet." in page(world, f"/jobs/{made.job_id}")


def test_what_is_missing_is_named(filled: Filled) -> None:
    """Missing ranks, silent agents, an attempt that ended."""
    world, job_id = filled.world, filled.slow.job_id
    with world.database.write() as session:
        session.execute(
            update(Window)
            .where(Window.job_id == job_id)
            .values(missing=[7, 9], missing_count=2, reason="waited 60 s")
        )
        session.execute(update(Stream).values(heartbeat_ns=1))
        session.execute(update(Attempt).values(ended_ns=NOW, end_reason="finished"))
    text = page(world, f"/jobs/{job_id}")
    assert "2 ranks missing" in text
    assert "<code>7, 9</code>" in text
    assert "1 agent is down" in text
    assert "ended</span>" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_only_text(filled: Filled, name: str) -> None:
    """Names of jobs, hosts and reasons never become elements, attributes or scripts."""
    world, job_id = filled.world, filled.slow.job_id
    with world.database.write() as session:
        finding = session.query(Finding).filter_by(job_id=job_id).one()
        document = {**finding.document, "where": {**finding.document["where"], "node": name}}
        session.execute(update(Job).where(Job.id == job_id).values(name=name))
        session.execute(update(Finding).values(host=name, document=document, cause=name))
        session.execute(update(Stream).values(host=name, heartbeat_ns=1))
        session.execute(update(Window).values(missing_count=1, missing=[1], reason=name))
    for path in ("/", f"/jobs/{job_id}"):
        seen = Elements(page(world, path))
        clean = {"script", "link", "meta", "img", "iframe", "object", "style"}
        kinds = [tag for tag in seen.tags if tag in clean]
        assert "img" not in kinds
        assert kinds.count("script") == (6 if path != "/" else 1)
        assert "style" not in kinds
        names = {attribute for attribute, _ in seen.attributes}
        assert not [attribute for attribute in names if attribute.startswith("on")]
        assert "style" not in names
        links = [value for key, value in seen.attributes if key in ("href", "src")]
        assert not [link for link in links if not link.startswith(("/", "#"))]
    search = world.client().get("/", params={"q": name}, headers=HTML)
    assert search.status_code == 200
    assert "<script>alert" not in search.text


def test_json_in_a_page_cannot_end_its_script() -> None:
    """Whatever stands in a figure."""
    for name in HOSTILE:
        text = script_json({"name": name})
        assert "<" not in text
        assert orjson.loads(text)["name"] == name


def test_pages_allow_nothing_from_elsewhere(filled: Filled) -> None:
    """A strict policy, no inline script or style, no address of another server."""
    for path in ("/", f"/jobs/{filled.slow.job_id}", "/login", "/nothing"):
        answer = filled.world.client().get(path, headers=HTML)
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'self';")
        assert "unsafe" not in policy
        assert answer.headers["x-frame-options"] == "DENY"
        assert "http" not in re.sub(r"<pre.*?</pre>", "", answer.text, flags=re.DOTALL)
        assert not re.search(r"<script(?![^>]*(src=|application/json))", answer.text)


def test_an_unknown_job_is_a_page_with_its_request(filled: Filled) -> None:
    """404 with the request's id; a foreign job is as unknown."""
    for job_id in ("0123456789abcdef", filled.foreign.job_id, "x"):
        answer = filled.world.client().get(f"/jobs/{job_id}", headers=HTML)
        assert answer.status_code == 404
        assert answer.headers["x-request-id"] in answer.text


def test_a_page_that_has_not_changed_is_not_sent_again(filled: Filled) -> None:
    """304 to the ETag that the client has; new data make a new one."""
    client, path = filled.world.client(), f"/jobs/{filled.slow.job_id}"
    tag = client.get(path, headers=HTML).headers["etag"]
    assert client.get(path, headers={**HTML, "if-none-match": tag}).status_code == 304
    with filled.world.database.write() as session:
        session.execute(update(Attempt).values(revision=99))
    assert client.get(path, headers={**HTML, "if-none-match": tag}).status_code == 200


@pytest.mark.parametrize(
    "name, kind",
    [
        ("smon.css", "text/css"),
        ("smon.js", "javascript"),
        ("plotly.min.js", "javascript"),
        ("plotly.css", "text/css"),
        ("icon.svg", "image/svg+xml"),
    ],
)
def test_files_of_the_pages_come_from_here(world: World, name: str, kind: str) -> None:
    """Without a token, compressed, and asked for once."""
    client = world.client(None)
    answer = client.get(f"/static/{name}?v=1", headers={"accept-encoding": "gzip"})
    assert answer.status_code == 200
    assert kind in answer.headers["content-type"]
    assert answer.headers["content-encoding"] == "gzip"
    assert "immutable" in answer.headers["cache-control"]
    tag = answer.headers["etag"]
    again = client.get(f"/static/{name}", headers={"if-none-match": tag})
    assert again.status_code == 304


@pytest.mark.parametrize("name", ["..%2fpages.py", "pages.py", "%2e%2e/pages.py", "x.css"])
def test_no_other_file_is_served(world: World, name: str) -> None:
    """A closed list, no paths."""
    assert world.client(None).get(f"/static/{name}").status_code == 404


@pytest.mark.parametrize(
    "text, wanted",
    [
        (duration(None), "–"),
        (duration(0.01234), "12.3 ms"),
        (difference(-0.5), "−500 ms"),
        (difference(1.2345), "+1.23 s"),
        (percent(0.1234), "12.3 %"),
        (times(1.1), "1.100 ×"),
        (gpu_hours(999.0), "999 GPU-h/day"),
        (gpu_hours(2400.0), "100 GPU-days/day"),
        (age(-5.0), "0 s"),
        (age(90.0), "2 min"),
        (age(86_400.0 * 3), "3 d"),
        (bytes_of(5 << 20), "5 MiB"),
        (bytes_of(5 << 40), "5120.0 GiB"),
    ],
)
def test_numbers_read_well(text: str, wanted: str) -> None:
    """Three digits, a unit, a sign on differences."""
    assert text == wanted
