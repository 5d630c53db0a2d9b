"""Names of jobs and hosts may hold anything: they are shown as they are, and do nothing."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any
from urllib.parse import quote

import pytest

from smon.wire import TYPE_JSON, Batch, BatchKind
from tests.browser.names import HOSTILE, REFUSED
from tests.browser.site import Site, hello, small_job
from tests.browser.watched import DESKTOP, Opener, Watched
from tests.system.server import request

#: Those that come from an agent, and so name a host as well.
OF_HOSTS = tuple(name for name in HOSTILE if name.isprintable())

_NUMBER = re.compile(r"[+-]?[0-9][0-9.eE+-]*")

#: All that a page shows or would read out, without its scripts.
_TEXT = """() => {
  const copy = document.body.cloneNode(true);
  copy.querySelectorAll("script, style, template").forEach(each => each.remove());
  return copy.textContent;
}"""

#: What a page says, and all in it that could run or load something.
_READ = """text => {
  const page = new DOMParser().parseFromString(text, "text/html");
  const all = [...page.querySelectorAll("*")];
  const handles = each => [...each.attributes].some(one => one.name.startsWith("on"));
  const scripts = [...page.scripts].filter(each => each.type !== "application/json");
  const loads = "iframe, object, embed, img, base, style, link:not([href^='/static/'])";
  const others = [...page.querySelectorAll(loads), ...all.filter(handles),
    ...page.querySelectorAll("a[href^='javascript:'], a[href^='data:']")];
  const fields = [...page.querySelectorAll("input[name]")].map(each => [each.name, each.value]);
  page.querySelectorAll("script").forEach(each => each.remove());
  return {
    text: page.body.textContent,
    heading: page.querySelector("h1").textContent.trim(),
    links: Object.fromEntries([...page.querySelectorAll("main a")]
      .map(each => [each.textContent, each.pathname + each.search])),
    fields: Object.fromEntries(fields),
    scripts: scripts.map(each => each.getAttribute("src") ?? ""),
    others: others.map(each => each.outerHTML.slice(0, 200)),
  };
}"""

#: Pages of a job beside its own.
RESTS = ("/windows/latest", "/windows/latest/timeline-view", "/ranks/2", "/quality")


@pytest.fixture
def watched(visit: Opener) -> Iterator[Watched]:
    """A page for many visits, without the figures: they hold no names."""
    with visit(DESKTOP, locale="en-US") as one:
        empty = {"status": 200, "content_type": "text/javascript", "body": ""}
        one.page.route("**/plotly.min.js*", lambda route: route.fulfill(**empty))
        yield one


def show(watched: Watched, path: str) -> str:
    """Open a page whose figures are left out; its text."""
    answer = watched.page.goto(watched.url + path)
    assert answer is not None
    assert answer.status == 200, (path, answer.status)
    for figure in watched.page.locator("script[type='application/json']").all_text_contents():
        assert json.loads(figure) is not None
    return str(watched.page.evaluate(_TEXT))


def inert(watched: Watched, path: str) -> dict[str, Any]:
    """Text and fields of a page that is read, not opened; no name may have become an element."""
    answer = watched.page.request.get(watched.url + path, headers={"Accept": "text/html"})
    assert answer.status == 200, (path, answer.status)
    found: dict[str, Any] = watched.page.evaluate(_READ, answer.text())
    assert all(each.startswith("/static/") for each in found["scripts"]), path
    assert found["others"] == [], path
    return found


def links(watched: Watched, prefix: str) -> dict[str, str]:
    """Where links lead, as the browser understands them, by their text."""
    found: dict[str, str] = watched.page.evaluate(
        """prefix => Object.fromEntries([...document.querySelectorAll("main a")]
          .filter(each => each.getAttribute("href").startsWith(prefix))
          .map(each => [each.textContent, each.pathname + each.search]))""",
        prefix,
    )
    return found


def test_forty_names_stand_on_the_first_page_and_lead_to_their_jobs(
    watched: Watched, site: Site
) -> None:
    """The name is the text of the link; the link is that of the job with this name."""
    found: dict[str, str] = {}
    path: str | None = "/"
    while path:
        show(watched, path)
        found |= links(watched, "/jobs/")
        more = watched.page.locator("main a[rel=next], main a.more")
        path = more.first.get_attribute("href") if more.count() else None
    assert {name: found.get(name) for name in HOSTILE} == {name: site.job(name) for name in HOSTILE}


def test_a_hostile_name_is_literal_on_the_page_of_its_job(watched: Watched, site: Site) -> None:
    """As text, in the heading and in the title; nothing of it runs."""
    for name in HOSTILE:
        assert name in show(watched, site.job(name))
        assert (watched.page.locator("h1").text_content() or "").strip() == name.strip()
        assert " ".join(name.split()) in " ".join(watched.page.title().split())
        watched.check()


@pytest.mark.parametrize("rest", RESTS)
def test_a_hostile_name_is_literal_on_every_other_page(
    watched: Watched, site: Site, rest: str
) -> None:
    """All names as text, some of them opened as well."""
    for name in HOSTILE:
        assert name in inert(watched, site.job(name, rest))["text"]
    for name in HOSTILE[::8]:
        assert name in show(watched, site.job(name, rest))
        watched.check()


def test_a_hostile_host_has_its_page(watched: Watched, site: Site) -> None:
    """Reached by the link on the page of its rank; its own links lead back to the job."""
    watched.page.goto(watched.url + "/login")
    for number, name in enumerate(OF_HOSTS):
        address = inert(watched, site.job(name, "/ranks/2"))["links"][f"host {name}"]
        found = inert(watched, address)
        assert found["heading"] == name
        assert found["links"][name] == site.job(name)
        if number % 8 == 0:
            assert name in show(watched, address)
            watched.check()


@pytest.mark.parametrize("path", ["/", "/hosts", "/fleet"])
def test_lists_of_hosts_lead_to_hosts(watched: Watched, site: Site, path: str) -> None:
    """Every host that a page lists has the link of the host that is called so."""
    show(watched, path)
    listed = {name: link for name, link in links(watched, "/hosts").items() if name in OF_HOSTS}
    assert len(listed) >= 5
    for name, link in listed.items():
        assert inert(watched, link)["heading"] == name, link


def test_what_is_asked_for_is_literal_too(watched: Watched, site: Site) -> None:
    """A filter, an unknown host, the way back after signing in."""
    for name in HOSTILE:
        asked = quote(name, safe="")
        assert inert(watched, f"/?q={asked}")["fields"]["q"] == name
        target = inert(watched, f"/login?next={asked}")["fields"]["next"]
        assert re.match(r"/(?![/\\])", target)


def test_cells_of_files_are_no_formulas(watched: Watched, site: Site) -> None:
    """A cell that begins with = + - @ is a number, or is made harmless."""
    files = ["/jobs.csv", "/fleet.csv", "/hosts?as=csv"]
    for name in ("=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1:A9)"):
        files += [site.job(name, "/csv/workers"), f"/hosts/{quote(name, safe='')}?as=csv"]
    for path in files:
        answer = watched.page.request.get(watched.url + path)
        assert answer.status == 200, path
        assert answer.headers["content-type"].startswith("text/csv"), path
        for cell in filter(None, chain(*csv.reader(io.StringIO(answer.text())))):
            assert cell[0] not in "=+-@\t\r" or _NUMBER.fullmatch(cell), (path, cell)


def test_control_characters_come_in_by_no_way(site: Site) -> None:
    """Neither an agent nor an import may bring them."""
    made = small_job()
    for name in REFUSED:
        assert "stream_id" not in hello(site.server, made, name, "node-0", "recorded")
        assert "stream_id" not in hello(site.server, made, "fine", name, "recorded")
        body = json.dumps({"job": name}).encode()
        kind = {"Content-Type": "application/json"}
        assert request(site.server.port, "POST", "/api/v1/imports", body, kind)[0] == 422


def test_op_types_are_harmless_or_refused(site: Site) -> None:
    """Of what the wire does not know, only letters, digits and ._:/@+- get through."""
    made = small_job()
    stream = hello(site.server, made, "ops of all names", "node-0", "recorded")["stream_id"]
    one = {"step": [0], "dp": [0], "stage": [0], "rank": [0], "start_ns": [10**18],
           "duration_ns": [1000], "seq": [0]}  # fmt: skip
    seq = 0
    for name in HOSTILE:
        body = json.dumps({"columns": {**one, "optype": [name]}}).encode()
        batch = Batch(seq, BatchKind.OPS, TYPE_JSON, "identity", 1, body)
        path = f"/api/v1/ingest/{stream}/0/{seq}"
        status, answer = request(site.server.port, "PUT", path, body, batch.headers())
        allowed = re.fullmatch(r"[A-Za-z0-9._:/@+-]{1,256}", name) is not None
        assert (status == 200) == allowed, (name, status, answer)
        seq += allowed
