"""Everything by keyboard: reached in reading order, seen when it has the focus, and it works."""

from __future__ import annotations

import pytest

from tests.browser.site import Site
from tests.browser.test_every_page import PAGES
from tests.browser.watched import DESKTOP, Opener

_MOST = 400

#: What can have the focus, in the order of the document, each with a mark of its own.
_ALL = """() => {
  const fields = "button, input:not([type=hidden]), select, textarea";
  return [...document.querySelectorAll(`a[href], ${fields}, summary, [tabindex='0']`)]
    .filter(each => !each.disabled && each.checkVisibility({visibilityProperty: true}))
    .filter(each => !each.closest("details:not([open]) > :not(summary)"))
    .filter(each => !each.closest(".js-plotly-plot"))
    .map((each, at) => { each.dataset.walk = at; return at; });
}"""

#: Mark of what has the focus, and whether an outline shows it.
_HERE = """() => {
  const here = document.activeElement;
  const style = getComputedStyle(here);
  const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 1;
  const shown = seen || style.boxShadow !== "none";
  return [here.dataset.walk ?? null, shown, here.outerHTML.slice(0, 120)];
}"""


@pytest.mark.parametrize("name", [name for name in PAGES if name != "window"])
def test_tab_goes_through_a_page_in_reading_order(visit: Opener, site: Site, name: str) -> None:
    """Each link, button, field, slider and summary, once, with a visible frame."""
    with visit(DESKTOP, reduced_motion="reduce") as watched:
        page = watched.page
        watched.go(PAGES[name].format(**site.jobs), 404 if name == "error" else 200)
        # Exchanges would put in new elements on the way.
        page.context.set_offline(offline=True)
        page.evaluate("document.activeElement.blur()")
        expected = page.evaluate(_ALL)[:_MOST]
        if name == "login":  # whose field has the focus when it opens
            page.evaluate("document.querySelector('.skip').focus()")
            reached = [page.evaluate(_HERE)]
        else:
            reached = []
        while len(reached) < len(expected):
            page.keyboard.press("Tab")
            reached.append(page.evaluate(_HERE))
        assert [int(mark) if mark else text for mark, _, text in reached] == expected
        assert [text for _, seen, text in reached if not seen] == []
        watched.complaints[:] = [each for each in watched.complaints if "DISCONNECTED" not in each]


def test_the_first_link_skips_to_the_content(visit: Opener, site: Site) -> None:
    """Tab, Enter: the focus is in the content, past the navigation."""
    with visit(DESKTOP) as watched:
        page = watched.page
        watched.go(site.job("AR"))
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.closest('main') !== null")


def test_details_and_switches_open_by_keyboard(visit: Opener, site: Site) -> None:
    """Enter opens a table; arrow keys choose what the heat map shows."""
    with visit(DESKTOP) as watched:
        page = watched.page
        watched.go(site.job("AR"))
        page.locator("#where-table summary").focus()
        page.keyboard.press("Enter")
        assert page.locator("#where-table").evaluate("each => each.open")
        before = page.locator("#heat-title").text_content()
        page.locator("#heat-show").focus()
        page.keyboard.press("ArrowDown")
        page.wait_for_function(
            "before => document.getElementById('heat-title').textContent !== before", arg=before
        )
