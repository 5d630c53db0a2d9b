"""Every page, on a desk and on a phone, in light and dark: quiet, accessible, inside the screen."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import FloatRect, Page

from tests.browser.axe import violations
from tests.browser.site import Site
from tests.browser.watched import DESKTOP, LOOKS, Look, Opener

#: Pages by name; ``{AR}`` is the id of that job.
PAGES = {
    "fleet": "/",
    "job-AR": "/jobs/{AR}",
    "job-healthy": "/jobs/{C10}",
    "window": "/jobs/{AR}/windows/latest",
    "timeline": "/jobs/{AR}/windows/latest/timeline-view",
    "rank": "/jobs/{C02}/ranks/9",
    "quality": "/jobs/{AR}/quality",
    "hosts": "/hosts",
    "host": "/hosts/" + quote("name with   three spaces"),
    "report": "/fleet",
    "runbooks": "/runbooks",
    "runbook": "/runbooks/slow_gpu",
    "login": "/login",
    "error": "/nowhere",
}

#: Width of a phone that is held, at twice the size of letters.
NARROW = Look("narrow", 320, 640, "light")

#: Made by the template of another one.
_LIKE_OTHERS = frozenset({"job-healthy", "window"})

_MOST_PX = 5000

_TOO_WIDE = """() => {
  const most = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth <= most) return [];
  return [...document.querySelectorAll("body *")]
    .filter(each => each.getBoundingClientRect().right > most + 1)
    .filter(each => !each.closest(".scroll, .chart"))
    .slice(0, 5).map(each => each.outerHTML.slice(0, 160));
}"""


def take(page: Page, path: Path) -> None:
    """A picture of the page, of long ones of the beginning."""
    height = page.evaluate("document.documentElement.scrollHeight")
    size = page.viewport_size or {"width": 0}
    clip: FloatRect = {"x": 0, "y": 0, "width": size["width"], "height": min(height, _MOST_PX)}
    page.screenshot(path=path, full_page=True, clip=clip)


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.name)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_quiet_and_keeps_nobody_out(
    visit: Opener, site: Site, axe: Path, shots: Path, name: str, look: Look
) -> None:
    """No complaint in the console, no request elsewhere, nothing grave for axe-core."""
    with visit(look) as watched:
        page = watched.page
        watched.go(PAGES[name].format(**site.jobs), 404 if name == "error" else 200)
        take(page, shots / f"{name}-{look.name}.png")
        assert page.title().endswith("SMon")
        assert page.locator("h1").count() == 1
        assert page.evaluate(_TOO_WIDE) == []
        assert violations(page, axe) == []


@pytest.mark.parametrize("name", [name for name in PAGES if name not in _LIKE_OTHERS])
def test_a_narrow_page_scrolls_in_one_direction(visit: Opener, site: Site, name: str) -> None:
    """At 320 px, as at 200 % on a phone, only tables and charts scroll sideways, in themselves."""
    with visit(NARROW) as watched:
        watched.go(PAGES[name].format(**site.jobs), 404 if name == "error" else 200)
        assert watched.page.evaluate(_TOO_WIDE) == []


def test_a_page_follows_what_its_reader_prefers(visit: Opener, site: Site) -> None:
    """Dark after light without a reload: the ground, and the figures that are drawn on it."""
    colours = """() => [
      getComputedStyle(document.body).backgroundColor,
      getComputedStyle(document.querySelector("#chart-steps .xtick text")).fill,
    ]"""
    with visit(DESKTOP, locale="en-US") as watched:
        watched.go(site.job("AR"))
        light = watched.page.evaluate(colours)
        watched.page.emulate_media(color_scheme="dark")
        watched.page.wait_for_function(f"before => ({colours})().every((c, i) => c !== before[i])",
                                       arg=light)  # fmt: skip


def test_a_page_says_the_same_without_a_script(visit: Opener, site: Site) -> None:
    """Verdict, tables and forms are text: a text browser at night is enough."""
    with visit(DESKTOP, java_script_enabled=False) as watched:
        answer = watched.page.goto(site.url + site.job("AR"))
        assert answer is not None
        assert answer.status == 200
        assert watched.page.locator("#verdict .verdict").is_visible()
        watched.page.goto(site.url + site.job("AR", "?show=compute"))
        assert watched.page.locator("#heat-show").input_value() == "compute"
