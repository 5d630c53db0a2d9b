"""Pages in a real browser, watched: a quiet console, nothing from elsewhere, a strict policy."""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Response

from tests.browser.names import CANARY

_NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

#: plotly.js leaves that inside a chart that it has drawn; the timeline says so itself.
_DRAWN: Final = """() =>
    [...document.querySelectorAll('[data-figure]')].every(each => each.querySelector('.main-svg'))
    && document.getElementById('timeline')?.dataset.state !== 'drawing'
"""

_WAIT_MS: Final = 60_000


@dataclass(frozen=True, slots=True)
class Look:
    """A screen, and what its owner prefers."""

    name: str
    width: int
    height: int
    scheme: str

    @property
    def options(self) -> dict[str, Any]:
        """Of a browser context."""
        return {
            "viewport": {"width": self.width, "height": self.height},
            "color_scheme": self.scheme,
            "has_touch": self.width < 600,
            "reduced_motion": "reduce",
            "locale": "en-GB",
            "timezone_id": "Europe/Berlin",
        }


DESKTOP: Final = Look("desktop-light", 1280, 800, "light")
LOOKS: Final = (
    DESKTOP,
    Look("desktop-dark", 1280, 800, "dark"),
    Look("phone-light", 390, 844, "light"),
    Look("phone-dark", 390, 844, "dark"),
)


def chromium_path() -> str | None:
    """Chromium of this system."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


def artifacts(otherwise: Path) -> Path:
    """Where screenshots go: SMON_ARTIFACTS, or a folder of this run."""
    folder = Path(os.environ.get("SMON_ARTIFACTS") or otherwise) / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@dataclass(slots=True)
class Watched:
    """A page of one origin, and all that went wrong on it."""

    page: Page
    url: str
    expected_status: int = 200
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Listen."""
        # Playwright marks the methods that it is given, which slots do not allow.
        self.page.on("console", lambda message: self._console(message))  # noqa: PLW0108
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("requestfailed", lambda one: self._failed(one.url, one.failure))
        self.page.on("request", lambda one: self._request(one.url))

    def go(self, path: str, status: int = 200) -> Response:
        """Open a page, wait until its figures are drawn, and check what came with it."""
        self.expected_status = status
        answer = self.page.goto(self.url + path, wait_until="load")
        assert answer is not None
        assert answer.status == status, (path, answer.status)
        check_policy(answer.headers.get("content-security-policy", ""))
        self.wait_drawn()
        return answer

    def wait_drawn(self) -> None:
        """Wait until every figure is drawn."""
        self.page.wait_for_function(_DRAWN, timeout=_WAIT_MS)

    def csv(self, link: str) -> list[list[str]]:
        """The rows behind a link of the page."""
        address = self.page.locator(link).first.get_attribute("href")
        assert address is not None
        answer = self.page.request.get(self.url + address)
        assert answer.status == 200, (address, answer.status)
        assert answer.headers["content-type"].startswith("text/csv")
        return list(csv.reader(io.StringIO(answer.text())))

    def check(self) -> None:
        """Nothing went wrong so far, and no name has become a script."""
        ran = self.page.evaluate(f"typeof window.{CANARY}")
        assert ran == "undefined", "a name ran as a script"
        assert not self.complaints, "\n".join(self.complaints)

    def figure(self, figure_id: str) -> Any:  # noqa: ANN401  # JSON
        """The data of a figure, as it stands in the page."""
        return self.page.evaluate(
            "id => JSON.parse(document.getElementById(id).textContent)", figure_id
        )

    def texts(self, selector: str) -> list[str]:
        """What all such elements say, hidden or not."""
        return [each or "" for each in self.page.locator(selector).all_text_contents()]

    def _console(self, message: ConsoleMessage) -> None:
        status = f"status of {self.expected_status}"
        expected = self.expected_status != 200 and status in message.text
        if message.type in {"error", "warning"} and not expected:
            self.complaints.append(f"console {message.type}: {message.text}")

    def _failed(self, url: str, failure: str | None) -> None:
        # What a page asks for is given up when the page is left.
        if failure != "net::ERR_ABORTED":
            self.complaints.append(f"failed: {url}: {failure}")

    def _request(self, url: str) -> None:
        parts = urlsplit(url)
        here = f"{parts.scheme}://{parts.netloc}" == self.url
        if not here and parts.scheme not in {"data", "blob", "about"}:
            self.complaints.append(f"asked elsewhere: {url}")


def check_policy(policy: str) -> None:
    """The policy lets nothing in from elsewhere, and no script or style that stands in a page."""
    rules = dict(re.findall(r"([\w-]+) ([^;]+)", policy))
    assert rules["default-src"] == "'self'"
    assert "unsafe" not in policy
    assert rules["frame-ancestors"] == rules["object-src"] == rules["base-uri"] == "'none'"


class Opener:
    """Opens watched pages in one browser; pages of one look share its cache, as tabs do."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._url = url
        self._contexts: dict[Look, BrowserContext] = {}

    @contextmanager
    def __call__(self, look: Look = DESKTOP, **more: Any) -> Iterator[Watched]:  # noqa: ANN401  # of Playwright
        """A page; checked when it is closed. With options of its own it shares nothing."""
        context = self._made(look, **more) if more else self._shared(look)
        page = context.new_page()
        try:
            watched = Watched(page, self._url)
            yield watched
            watched.check()
        finally:
            page.close()
            if more:
                context.close()

    def close(self) -> None:
        """Close what is shared."""
        for context in self._contexts.values():
            context.close()

    def _shared(self, look: Look) -> BrowserContext:
        if look not in self._contexts:
            self._contexts[look] = self._made(look)
        return self._contexts[look]

    def _made(self, look: Look, **more: Any) -> BrowserContext:  # noqa: ANN401  # of Playwright
        return self._browser.new_context(**{**look.options, **more})
