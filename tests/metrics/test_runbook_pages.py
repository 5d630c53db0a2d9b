from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards.web.views import runbook
from tests.api.filled import World, make_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A server with tokens."""
    made = make_world(tmp_path)
    yield made
    made.database.close()


def test_a_runbook_is_read_without_a_token(world: World) -> None:
    """Whoever is woken follows the link on a phone that has never signed in."""
    answer = world.client(None).get("/runbooks/SMonSlowRank")
    assert answer.status_code == 200
    assert "<h1>SMonSlowRank: one rank is slow, and stays slow</h1>" in answer.text
    assert "dcgmi diag -r 2" in answer.text
    assert "default-src 'self'" in answer.headers["content-security-policy"]


def test_links_between_runbooks_work_on_the_page(world: World) -> None:
    """Every link of every runbook leads to a page."""
    client = world.client(None)
    links = set()
    for name in runbook.names():
        links |= set(re.findall(r'href="([^"/#]+)"', client.get(f"/runbooks/{name}").text))
    assert "SMonSlowRank.md" in links
    assert {client.get(f"/runbooks/{link}").status_code for link in links} == {200}


def test_the_list_of_runbooks_leads_to_all(world: World) -> None:
    """For who does not come from an alert; without a token, as the runbooks."""
    answer = world.client(None).get("/runbooks")
    assert answer.status_code == 200
    found = re.findall(r'href="/runbooks/(\w+)"', answer.text)
    assert sorted(found) == sorted(runbook.names())
    assert "a GPU is slow" in answer.text


@pytest.mark.parametrize("name", ["nobody", "%2e%2e", "..%2F..%2Fpyproject.toml", "SMONDOWN"])
def test_other_names_lead_nowhere(world: World, name: str) -> None:
    """A name is looked up among those that there are; no file is opened by it."""
    assert world.client(None).get(f"/runbooks/{name}").status_code == 404


def test_markup_in_a_runbook_is_text() -> None:
    """A runbook cannot bring a script with it."""
    made = runbook.rendered("# T\n\n<script>alert(1)</script> [x](javascript:alert)\n")
    assert "<script" not in made
    assert 'href="javascript' not in made
