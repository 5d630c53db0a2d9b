"""Pages of a job that runs: new without a reload, and what a reader did stays."""

from __future__ import annotations

import pytest

from tests.browser.site import LIVE_SLOW, LiveJob, Site, start_live
from tests.browser.watched import DESKTOP, Opener, Watched

_WAIT_MS = 60_000


@pytest.fixture
def live(site: Site, request: pytest.FixtureRequest) -> LiveJob:
    """A job of its own for each test, that runs as far as the test lets it."""
    return start_live(site.server, f"live of {request.node.name}"[:100])


def wait_verdict(watched: Watched, words: str) -> None:
    """Wait until the page says so by itself."""
    watched.page.wait_for_function(
        "words => document.querySelector('#verdict .verdict')?.textContent.includes(words)",
        arg=words, timeout=_WAIT_MS,
    )  # fmt: skip


def test_a_job_that_waits_becomes_a_job_with_a_verdict(visit: Opener, live: LiveJob) -> None:
    """The first report puts sections on the page that were not there; nobody reloads anything."""
    dp, stage = LIVE_SLOW
    rank = dp + live.made.job.layout.dp * stage
    with visit(DESKTOP) as watched:
        watched.go(f"/jobs/{live.job_id}")
        watched.page.evaluate("window.sameDocument = true")
        assert watched.page.locator("#where").count() == 0
        live.advance(30)
        live.wait_seen()
        wait_verdict(watched, f"ank {rank} ")
        watched.page.wait_for_selector("#chart-steps .main-svg", timeout=_WAIT_MS)
        assert watched.page.evaluate("window.sameDocument") is True


def test_an_exchange_leaves_alone_what_a_reader_did(visit: Opener, live: LiveJob) -> None:
    """Open details, the place on the page, the focus and the width of a table stay as they are."""
    live.advance(30)
    live.wait_seen()
    with visit(DESKTOP) as watched:
        page = watched.page
        watched.go(f"/jobs/{live.job_id}")
        wait_verdict(watched, "ank ")
        details = page.locator("#time details")
        details.locator("summary").click()
        page.mouse.wheel(0, 400)
        # A wheel scrolls smoothly: where it ends is known once it has stood still.
        page.wait_for_function(
            """() => {
              const still = window.scrollY > 100 && window.scrollY === window.lastY;
              window.lastY = window.scrollY;
              return still;
            }""",
            polling=300,
        )
        before = page.evaluate("""() => {
          window.old = document.querySelector("#time");
          return [window.scrollY, document.querySelectorAll("[data-figure]").length];
        }""")
        live.advance(2)
        live.wait_seen()
        page.wait_for_function(
            "() => document.querySelector('#time') !== window.old", timeout=_WAIT_MS
        )
        assert details.evaluate("each => each.open")
        assert page.evaluate("document.activeElement.tagName") == "SUMMARY"
        assert page.evaluate("""() =>
          [window.scrollY, document.querySelectorAll("[data-figure] .main-svg").length]
        """) == pytest.approx(before, abs=60)


def test_selected_text_is_not_taken_away(visit: Opener, live: LiveJob) -> None:
    """Somebody copies a sentence: the section waits, the others go on."""
    live.advance(30)
    live.wait_seen()
    with visit(DESKTOP) as watched:
        page = watched.page
        watched.go(f"/jobs/{live.job_id}")
        wait_verdict(watched, "ank ")
        page.locator("#time-words").select_text()
        said = page.evaluate("String(getSelection())")
        page.evaluate("window.old = document.querySelector('#head')")
        live.advance(2)
        live.wait_seen()
        page.wait_for_function(
            "() => document.querySelector('#head') !== window.old", timeout=_WAIT_MS
        )
        assert page.evaluate("String(getSelection())") == said
        page.evaluate("""() => {
          window.old = document.querySelector("#time");
          getSelection().removeAllRanges();
        }""")
        page.wait_for_function(
            "() => document.querySelector('#time') !== window.old", timeout=_WAIT_MS
        )


def test_a_page_says_when_it_is_not_fresh(visit: Opener, site: Site) -> None:
    """A server that does not answer is told, not hidden; when it answers again, all is well."""
    with visit(DESKTOP, locale="en-US") as watched:
        page = watched.page
        watched.go(site.job("C01"))
        page.context.set_offline(offline=True)
        page.wait_for_function(
            "() => document.getElementById('live-state').textContent.startsWith('Not fresh')",
            timeout=_WAIT_MS,
        )
        page.context.set_offline(offline=False)
        page.wait_for_function(
            "() => document.getElementById('live-state').textContent === ''", timeout=_WAIT_MS
        )
        # What the browser itself says of the break is expected.
        watched.complaints[:] = [each for each in watched.complaints if "DISCONNECTED" not in each]


def test_the_text_does_not_wait_for_the_figures(visit: Opener, site: Site) -> None:
    """plotly.js is large: the verdict is painted, and can be used, before it is there."""
    with visit(DESKTOP, locale="en-US") as watched:
        page = watched.page
        held: list[bool] = []

        def hold(route: object) -> None:
            held.append(page.evaluate(
                """async () => {
                    const painted = () =>
                        performance.getEntriesByName('first-contentful-paint').length > 0;
                    for (let turn = 0; turn < 200 && !painted(); turn++)
                        await new Promise(again => setTimeout(again, 100));
                    return painted();
                }"""
            ))  # fmt: skip
            route.continue_()  # type: ignore[attr-defined]

        page.route("**/plotly.min.js*", hold)
        watched.go(site.job("AR"))
        assert held == [True]
