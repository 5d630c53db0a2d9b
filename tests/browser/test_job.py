"""The page of a job says what the report says, and the report is right."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from tests.browser.site import SCENARIOS, TRACES, Site
from tests.browser.watched import DESKTOP, Opener, Watched

#: (dp, stage) of the slow worker, where it is one.
SLOW = {"AR": (0, 0), "C01": (3, 5), "C02": (9, 0), "C12": (1, 0)}


def hottest(figure: dict[str, Any]) -> list[int]:
    """Rank, DP rank and stage of the highest cell."""
    return max(cells(figure), key=lambda cell: cell[0])[1]


def cells(figure: dict[str, Any]) -> list[tuple[float, list[int]]]:
    """Value, and [rank, DP rank, stage], of each cell that has one."""
    data = figure["data"][0]
    flat = zip(chain(*data["z"]), chain(*data["customdata"]), strict=True)
    return [(value, place) for value, place in flat if value is not None]


def values(watched: Watched, selector: str) -> list[float]:
    """The numbers behind what is shown."""
    found = watched.page.locator(f"{selector}[data-value]").all()
    return [float(each.get_attribute("data-value") or "nan") for each in found]


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_verdict_is_the_true_one(visit: Opener, site: Site, name: str) -> None:
    """Rank, stage or nobody: what was planted stands in the sentence, and no other rank does."""
    truth = site.truths[name]
    where = truth["where"] or {}
    with visit(DESKTOP) as watched:
        watched.go(site.job(name))
        verdict = watched.page.locator("#verdict .verdict").first
        said = (verdict.text_content() or "").casefold()
        if truth["scope"] in {"rank", "node"} and truth["verdict"] != "none":
            assert f"rank {where['rank']} " in said.replace(",", " ")
            assert verdict.get_attribute("data-value") == str(where["rank"])
        else:
            assert "rank " not in said.replace("dp rank", "").replace("worst rank", "")
        if truth["scope"] == "stage":
            assert f"stage {where['stage']}" in said
        if truth["verdict"] in {"none", "planned_pause", "job_wide"}:
            assert watched.page.locator("#verdict [data-value]").count() <= 4
            assert verdict.get_attribute("data-value") is None


@pytest.mark.parametrize("name", SLOW)
def test_the_hottest_cell_is_the_slow_worker(visit: Opener, site: Site, name: str) -> None:
    """In the data of the figure, in what plotly drew, and in the table behind it."""
    dp, stage = SLOW[name]
    with visit(DESKTOP) as watched:
        watched.go(site.job(name))
        rank, *place = hottest(watched.figure("figure-heat"))
        assert place == [dp, stage]
        drawn = watched.page.evaluate(
            "document.getElementById('chart-heat').data[0].z.map(row => [...row])"
        )
        flat = [cell for row in drawn for cell in row]
        assert flat.index(max(flat)) == stage * len(drawn[0]) + dp
        assert watched.page.locator("#chart-heat .heatmaplayer image").count() == 1
        first = watched.texts("#heat-lines tr:first-child > *")
        assert first[:3] == [str(rank), str(dp), str(stage)]


def test_the_step_slider_shows_one_step_by_mouse_and_by_keyboard(visit: Opener, site: Site) -> None:
    """C02 grows slow: the first step is calm, the last one hot; the address keeps the step."""
    with visit(DESKTOP) as watched:
        watched.go(site.job("C02"))
        page, slider = watched.page, watched.page.locator("#heat-step")
        average = watched.figure("figure-heat")["data"][0]["z"]
        slider.focus()
        page.keyboard.press("End")
        page.wait_for_url("**step=59*")
        page.wait_for_function(
            "z => JSON.stringify(document.getElementById('chart-heat').data[0].z) !== z",
            arg=page.evaluate("z => JSON.stringify(z)", average),
        )
        last = watched.figure("figure-heat")
        assert hottest(last)[1:] == [9, 0]
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.wait_for_url("**step=0*")
        page.wait_for_function(
            "() => document.getElementById('heat-step-words').textContent === 'step 0'"
        )
        page.wait_for_function(
            "most => Math.max(...document.getElementById('chart-heat').data[0].z.flat()) < most",
            arg=max(cells(last))[0] - 0.2,
        )
        box = slider.bounding_box()
        assert box is not None
        page.mouse.click(box["x"] + box["width"] - 4, box["y"] + box["height"] / 2)
        page.wait_for_url("**step=59*")


def test_the_heat_switch_shows_who_waits(visit: Opener, site: Site) -> None:
    """In C12 the slow worker waits least, and the others about 200 ms."""
    with visit(DESKTOP) as watched:
        watched.go(site.job("C12"))
        before = watched.page.locator("#heat-title").text_content()
        watched.page.locator("#heat-show").select_option("wait")
        watched.page.wait_for_function(
            "before => document.getElementById('heat-title').textContent !== before", arg=before
        )
        waits = {place[1]: value for value, place in cells(watched.figure("figure-heat"))}
        assert min(waits, key=lambda dp: waits[dp]) == 1
        assert all(150 < waits[dp] - waits[1] < 250 for dp in (0, 2, 3))


@pytest.mark.parametrize("name", [*TRACES, "C03", "C05", "C06"])
def test_the_parts_of_the_waterfall_sum_up(visit: Opener, site: Site, name: str) -> None:
    """Ideal, and all parts, make the recorded step; the CSV holds the same numbers."""
    with visit(DESKTOP) as watched:
        watched.go(site.job(name))
        bars = values(watched, "#waterfall tr")
        step_time = site.report(name)["step_time"]
        assert bars[0] == pytest.approx(step_time["ideal_s"])
        assert bars[-1] == pytest.approx(step_time["recorded_s"])
        assert sum(bars[:-1]) == pytest.approx(bars[-1], rel=1e-6)
        rows = watched.csv("#waterfall a[href*='csv']")
        assert [float(row[1]) for row in rows[1:]] == pytest.approx(bars)


def test_files_hold_the_numbers_shown(visit: Opener, site: Site) -> None:
    """Steps and workers of AR: the CSV and the figures come from one place."""
    with visit(DESKTOP) as watched:
        watched.go(site.job("AR"))
        report = site.report("AR")
        head, *steps = watched.csv("#time a[href*='csv']")
        recorded = [float(row[head.index("recorded_s")]) for row in steps]
        assert recorded == pytest.approx([each["recorded_s"] for each in report["per_step"]])
        head, *workers = watched.csv("#heat-csv")
        slowdowns = [float(row[head.index("slowdown")]) for row in workers]
        assert sorted(slowdowns) == pytest.approx(
            sorted(each["slowdown"] for each in report["workers"])
        )
        top = values(watched, "#heat-lines tr")
        assert top == pytest.approx(sorted(slowdowns, reverse=True)[: len(top)])


def test_the_rotation_says_whether_it_is_always_the_same(visit: Opener, site: Site) -> None:
    """AR has one slow worker; in SE it changes with the sequences."""
    with visit(DESKTOP) as watched:
        watched.go(site.job("AR"))
        assert "same worker" in (watched.page.locator("#rotation-words").text_content() or "")
        watched.go(site.job("SE"))
        assert "rotating" in (watched.page.locator("#rotation-words").text_content() or "")


def test_a_window_says_the_same_as_its_job(visit: Opener, site: Site) -> None:
    """A recorded job has one window: its page has the same verdict and numbers."""
    with visit(DESKTOP) as watched:
        watched.go(site.job("AR"))
        verdict = watched.texts("#verdict .verdict")
        bars = values(watched, "#waterfall tr")
        watched.go(site.job("AR", "/windows/latest"))
        assert watched.texts("#verdict .verdict") == verdict
        assert values(watched, "#waterfall tr") == bars


def test_the_range_of_steps_is_kept_in_the_address(visit: Opener, site: Site) -> None:
    """Two numbers and Enter: the step slider and the file have these steps and no others."""
    with visit(DESKTOP) as watched:
        watched.go(site.job("C02"))
        form = watched.page.locator("#time form")
        form.locator("[name=from]").fill("40")
        form.locator("[name=to]").fill("49")
        form.locator("[name=to]").press("Enter")
        watched.page.wait_for_url("**from=40*")
        watched.wait_drawn()
        _, *steps = watched.csv("#time a[href*='csv']")
        assert [int(row[0]) for row in steps] == list(range(40, 50))
        slider = watched.page.locator("#heat-step").get_attribute("data-steps")
        assert slider == ",".join(map(str, range(40, 50)))


def test_commands_are_copied(visit: Opener, site: Site) -> None:
    """What the button copies is the command, and it says so."""
    more = {"permissions": ["clipboard-read", "clipboard-write"]}
    with visit(DESKTOP, **more) as watched:
        watched.go(site.job("C01"))
        command = watched.page.locator("#verdict pre.copy").first
        text = (command.text_content() or "").removesuffix("Copy")
        command.locator("button").click()
        command.get_by_text("Copied", exact=True).wait_for()
        assert watched.page.evaluate("navigator.clipboard.readText()") == text


def test_commands_are_copied_without_tls_too(visit: Opener, site: Site) -> None:
    """Browsers keep the new clipboard from plain http; people still need the command."""
    with visit(DESKTOP, permissions=["clipboard-read"]) as watched:
        watched.page.add_init_script("""{
          const clipboard = navigator.clipboard;
          window.pasted = () => clipboard.readText();
          Object.defineProperty(navigator, "clipboard", { value: undefined });
        }""")
        watched.go(site.job("C01"))
        command = watched.page.locator("#verdict pre.copy").first
        text = (command.text_content() or "").removesuffix("Copy")
        command.locator("button").click()
        watched.page.wait_for_function("text => window.pasted().then(it => it === text)", arg=text)
