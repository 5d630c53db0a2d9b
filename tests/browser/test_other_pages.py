"""Fleet, hosts, ranks, timeline, data quality, signing in: what they say, and that they work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.browser.names import HOSTILE
from tests.browser.site import Site
from tests.browser.watched import DESKTOP, Opener
from tests.system.server import ServerProcess, quiet_environ


def test_jobs_stand_by_money_and_sort_by_any_column(visit: Opener, site: Site) -> None:
    """The table, the file and REST have one order; a click on a heading sorts."""
    with visit(DESKTOP) as watched:
        page = watched.page
        watched.go("/")
        shown = page.locator("table.fleet th[scope=row] > a").all()
        head, *rows = watched.csv("#jobs a[href*='.csv']")
        costs = [float(row[head.index("cost_per_day")] or 0) for row in rows]
        links = [f"/jobs/{row[head.index('id')]}" for row in rows]
        assert [each.get_attribute("href") for each in shown] == links[: len(shown)]
        going = costs[: len([row for row in rows if row[head.index("state")] != "ended"])]
        assert going == sorted(going, reverse=True)
        page.get_by_role("link", name="Slowdown").click()
        page.wait_for_url("**sort=*")
        head, *rows = watched.csv("#jobs a[href*='.csv']")
        slowdowns = [float(row[head.index("slowdown")] or 0) for row in rows]
        ended = [row[head.index("state")] == "ended" for row in rows]
        going = [each for each, over in zip(slowdowns, ended, strict=True) if not over]
        assert going in (sorted(going), sorted(going, reverse=True))


def test_the_filter_finds_by_name(visit: Opener, site: Site) -> None:
    """Type a part of the name, press Enter."""
    with visit(DESKTOP) as watched:
        watched.go("/")
        watched.page.locator("input[name=q]").fill("C07")
        watched.page.keyboard.press("Enter")
        watched.page.wait_for_url("**q=C07*")
        assert watched.texts("table.fleet th[scope=row] > a") == ["C07a"]


def test_a_rank_is_named_as_what_it_is(visit: Opener, site: Site) -> None:
    """C12: rank 1 is the culprit, the others are victims that wait 200 ms."""
    with visit(DESKTOP) as watched:
        watched.go(site.job("C12", "/ranks/1"))
        assert watched.texts("#verdict .verdict")[0].startswith("Culprit")
        watched.go(site.job("C12", "/ranks/2"))
        assert watched.texts("#verdict .verdict")[0].startswith("Victim")


def test_the_clock_of_a_slow_gpu_stands_under_its_durations(visit: Opener, site: Site) -> None:
    """C02: while rank 9 computes longer, its clock falls from 1980 to below 1300 MHz."""
    with visit(DESKTOP) as watched:
        watched.go(site.job("C02", "/ranks/9"))
        lines = [
            trace["y"]
            for trace in watched.page.evaluate(
                "[...document.querySelectorAll('[data-figure]')].flatMap(each => each.data)"
                ".map(trace => ({y: [...trace.y]}))"
            )
            if trace["y"] and trace["y"][0] == pytest.approx(1980, abs=1)
        ]
        assert min(line[-1] for line in lines) < 1300


def test_a_host_has_its_record(visit: Opener, site: Site) -> None:
    """The list leads to the host, the host to the job, with a command that takes it out."""
    name = HOSTILE[-1]
    with visit(DESKTOP) as watched:
        watched.go("/hosts?q=xxxx")
        watched.page.locator(f"main a:has-text('{name}')").first.click()
        assert watched.texts("h1") == [name]
        assert watched.page.locator("#findings tbody tr").count() == 1
        watched.page.locator("#findings tbody a").first.click()
        watched.page.wait_for_url(f"**{site.job(name)}*")
        watched.wait_drawn()


def test_data_quality_names_the_wrong_clock(visit: Opener, site: Site) -> None:
    """C11: one host is 200 ms ahead, and nothing else is wrong."""
    with visit(DESKTOP) as watched:
        watched.go(site.job("C11", "/quality"))
        rows = [
            row.locator("th, td").all_text_contents()
            for row in watched.page.locator("#clocks tbody tr").all()
        ]
        assert any("200 ms" in ahead for _, ahead, *_ in rows), rows


def test_a_timeline_is_drawn_and_zoomed_by_keyboard(visit: Opener, site: Site) -> None:
    """Something is on the canvas; + shows a shorter range, 0 the whole step again."""
    colours = """() => {
      const canvas = document.querySelector("#timeline-view canvas");
      const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
      return new Set(new Uint32Array(data.buffer)).size;
    }"""
    picture = "document.querySelector('#timeline-view canvas').toDataURL()"
    with visit(DESKTOP) as watched:
        page = watched.page
        watched.go(site.job("AR", "/windows/latest/timeline-view"))
        assert page.evaluate(colours) > 5
        assert "rank 0" in watched.texts("#timeline-words")[0].casefold()
        whole = page.evaluate(picture)
        page.locator("#timeline-view").focus()
        page.keyboard.press("+")
        page.wait_for_function(f"whole => {picture} !== whole", arg=whole)
        page.keyboard.press("0")
        page.wait_for_function(f"whole => {picture} === whole", arg=whole)


def test_the_fleet_report_says_what_its_file_says(visit: Opener, site: Site) -> None:
    """The page, and the CSV behind its link."""
    with visit(DESKTOP) as watched:
        watched.go("/fleet")
        rows = watched.csv("main a[href*='.csv']")
        assert len(rows) > len(HOSTILE) // 2
        summary = site.server.get("fleet/summary?days=7")
        assert summary["slowed"] > 5
        assert f"{summary['slowed']}" in (watched.page.locator("main").text_content() or "")


def test_signing_in_leads_to_where_one_wanted_to_go(chromium: Browser, tmp_path: Path) -> None:
    """A wrong token is told; the right one opens the page; signing out closes it."""
    with ServerProcess(tmp_path / "server") as server:
        done = subprocess.run(
            [sys.executable, "-m", "smon.cli", "token", "create", "--scope", "read",
             "--name", "browser", "--data-dir", str(tmp_path / "server" / "data")],
            capture_output=True, text=True, check=True, env=quiet_environ(),
        )  # fmt: skip
        token = next(word for word in done.stdout.split() if word.startswith("smon_"))
        visit = Opener(chromium, server.url)
        with visit(DESKTOP) as watched:
            page = watched.page
            page.goto(server.url + "/hosts")
            assert page.url.endswith("/login?next=%2Fhosts")
            watched.expected_status = 401
            for typed in ("wrong", token):
                page.get_by_label("Token").fill(typed)
                page.get_by_role("button", name="Sign in").click()
                if typed != token:
                    assert "not known" in (page.get_by_role("alert").text_content() or "")
            page.wait_for_url(server.url + "/hosts")
            cookie = page.context.cookies()[0]
            assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
            page.get_by_role("button", name="Sign out").click()
            page.wait_for_url("**/login")
        visit.close()
