"""A server with everything on it, a browser, and pages that are watched."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.browser.axe import axe_path
from tests.browser.site import PRICE, Site, fill, served
from tests.browser.watched import Opener, artifacts, chromium_path
from tests.system.server import ServerProcess


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder, so that `-m "not browser"` works."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    """The browser of this system; without it the test is skipped."""
    path = chromium_path()
    if path is None:
        pytest.skip("NO CHROMIUM: expected chromium on PATH (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        # Only inside a container is a browser run as root; there is no sandbox for root.
        browser = playwright.chromium.launch(
            executable_path=path, chromium_sandbox=os.geteuid() != 0, args=["--disable-gpu"]
        )
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def site(
    chromium: Browser, traces: Path, tmp_path_factory: pytest.TempPathFactory, worker: str
) -> Iterator[Site]:
    """A server with all jobs; filled once for all processes of a run, each serves a copy."""
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if worker else base) / "browser-site"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "truths.json").exists():
            with ServerProcess(shared / "server", price_per_gpu_hour=PRICE) as server:
                truths = fill(server, traces, tmp_path_factory.mktemp("jobs"))
                server.stop()
            (shared / "truths.json").write_text(json.dumps(truths))
    copy = tmp_path_factory.mktemp("site") / "server"
    shutil.copytree(shared / "server", copy)
    yield from served(copy, json.loads((shared / "truths.json").read_text()))


@pytest.fixture(scope="session")
def worker(request: pytest.FixtureRequest) -> str:
    """Name of this process among those of xdist; empty if it is alone."""
    return str(getattr(request.config, "workerinput", {}).get("workerid", ""))


@pytest.fixture(scope="session")
def visit(chromium: Browser, site: Site) -> Iterator[Opener]:
    """Opens pages of the site; what goes wrong on one fails the test."""
    opener = Opener(chromium, site.url)
    yield opener
    opener.close()


@pytest.fixture(scope="session")
def axe() -> Path:
    """axe-core; without it the test is skipped."""
    path = axe_path()
    if not path.is_file():
        pytest.skip(f"NO AXE: expected {path} (npm install --prefix ~/.cache/smon/axe axe-core)")
    return path


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go."""
    return artifacts(tmp_path_factory.getbasetemp())
