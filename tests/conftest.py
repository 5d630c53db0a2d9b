"""What all tests share: the public traces, profiles of hypothesis, and no silent skip."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
TRACES = ROOT.parent / "shared" / "traces"

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of the public traces; without it the test is skipped."""
    if not TRACES.is_dir():
        pytest.skip("NO TRACES: expected the public traces in ../shared/traces beside the project")
    return TRACES


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test that reads the public traces, so that `-m "not traces"` works."""
    for item in items:
        if "traces" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.traces)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """With SMON_NO_SKIP=1 a run that skipped anything has failed."""
    if _skips_fail() and _skipped(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say loudly what was not run, and why."""
    skipped = _skipped(config)
    if not skipped:
        return
    verdict = ", AND SMON_NO_SKIP=1 ALLOWS NONE" if _skips_fail() else ""
    terminalreporter.section(f"NOT RUN: {len(skipped)}{verdict}", red=_skips_fail(), yellow=True)
    for name, reason in skipped:
        terminalreporter.write_line(f"{name}: {reason}")


def _skips_fail() -> bool:
    return os.environ.get("SMON_NO_SKIP", "0") not in {"", "0"}


def _skipped(config: pytest.Config) -> list[tuple[str, str]]:
    """(test, reason) of what was skipped; empty in the workers of xdist, which report upwards."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return []
    return [(report.nodeid, _reason(report)) for report in reporter.stats.get("skipped", ())]


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    where = report.longrepr
    text = where[2] if isinstance(where, tuple) else str(where)
    return text.removeprefix("Skipped: ")
