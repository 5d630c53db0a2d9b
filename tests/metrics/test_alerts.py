"""Rules, routes and runbooks: they name what exists, and are tested both ways."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards.web.views import runbook as runbooks
from smon.render.words import CAUSES
from tests.deploy.files import ROOT, tool
from tests.metrics.published import published

PROMETHEUS = ROOT / "dashboards" / "prometheus"
ALERTMANAGER = ROOT / "dashboards" / "alertmanager" / "alertmanager.yml"
RULES = sorted((PROMETHEUS / "rules").glob("*.yml"))
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))

PARTS = ("## Meaning", "## Impact", "## What to look at", "## What to do", "## Cured when")
SUFFIXES = re.compile(r"_(bucket|count|sum)$")

Rule = dict[str, Any]


def read(path: Path) -> Any:  # noqa: ANN401  # YAML
    """A YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@cache
def rules() -> tuple[Rule, ...]:
    """All rules, in the order in which they are evaluated."""
    return tuple(
        rule for path in RULES for group in read(path)["groups"] for rule in group["rules"]
    )


ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


def run(*command: str | Path) -> str:
    """What a program prints; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# --- rules ----------------------------------------------------------------------------------


def test_prometheus_takes_the_rules() -> None:
    """Without a warning of its linter."""
    found = run(tool("promtool", "prometheus"), "check", "rules", "--lint=all", *RULES)
    assert found.count("SUCCESS") == len(RULES)


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.name)
def test_the_unit_tests_of_the_rules_pass(path: Path) -> None:
    """Each alert fires with the right words, and is silent when it should be."""
    assert "SUCCESS" in run(tool("promtool", "prometheus"), "test", "rules", path)


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_is_tested_both_ways(name: str) -> None:
    """Some unit test sees it fire, and some sees it silent; the watchdog is never silent."""
    seen = {
        bool(test["exp_alerts"])
        for path in TESTS
        for each in read(path)["tests"]
        for test in each.get("alert_rule_test", ())
        if test["alertname"] == name
    }
    assert seen == ({True} if name == "SMonWatchdog" else {True, False})


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_says_what_and_where_to_look(name: str) -> None:
    """Severity, cause and kind as labels; a summary; a runbook of its own."""
    alert = ALERTS[name]
    labels, annotations = alert["labels"], alert["annotations"]
    assert labels["severity"] in {"none", "warning", "critical"}
    assert labels["kind"] in {"finding", "hang", "data", "self"}
    assert "cause" in labels or "cause" in alert["expr"]
    assert annotations["summary"]
    assert annotations["description"]
    assert annotations["runbook_url"].endswith(f"/{name}")
    if labels["kind"] != "self":
        assert "train_job" in annotations["summary"]
        assert "dashboard_url" in annotations


def test_rules_name_only_metrics_that_exist() -> None:
    """In expressions and in the queries of annotations; recorded ones are recorded."""
    text = "\n".join(
        "\n".join([rule["expr"], *rule.get("annotations", {}).values()]) for rule in rules()
    )
    named = {SUFFIXES.sub("", name) for name in re.findall(r"\b(smon_\w+)", text)}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert named
    assert not named - published()
    assert set(re.findall(r"\bsmon:[\w:]+", text)) <= recorded


def test_rules_take_the_maximum_over_servers() -> None:
    """Every server publishes the same jobs: a sum would count a job as often."""
    for rule in rules():
        assert not re.search(r"sum[^(]*\(\s*smon_(job|finding|suspect)", rule["expr"]), rule


def test_prometheus_scrapes_the_worker_where_it_is() -> None:
    """The port after the server's, as the image sets it; rules know the names of both jobs."""
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"]
        for job in read(PROMETHEUS / "prometheus.yml")["scrape_configs"]
    }
    assert set(jobs) >= {"smon", "smon-worker"}
    (ops_port,) = re.findall(r"SMON_OPS_PORT=(\d+)", (ROOT / "Dockerfile").read_text("utf-8"))
    assert jobs["smon-worker"] == [f"worker:{int(ops_port) + 1}"]
    assert "worker" in read(ROOT / "docker-compose.yml")["services"]


# --- routes ---------------------------------------------------------------------------------


def receiver(**labels: str) -> str:
    """Where an alert goes."""
    words = [f"{name}={value}" for name, value in labels.items()]
    command = (tool("amtool", "prometheus-alertmanager"), "config", "routes", "test")
    found = run(*command, f"--config.file={ALERTMANAGER}", *words)
    return found.splitlines()[0]


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_goes_where_its_severity_says(name: str) -> None:
    """Critical wakes somebody; the watchdog has a route of its own; the rest can wait."""
    severity = ALERTS[name]["labels"]["severity"]
    wanted = {"critical": "pager", "warning": "chat", "none": "watchdog"}[severity]
    assert receiver(alertname=name, severity=severity, train_job="llama") == wanted


def test_messages_are_grouped_by_job_and_cause() -> None:
    """One message for a job and cause, however many rules speak of it."""
    assert read(ALERTMANAGER)["route"]["group_by"] == ["tenant", "train_job", "cause"]


def matched(matchers: list[str], labels: dict[str, str]) -> bool:
    """Whether labels fit all matchers of an inhibition."""
    for matcher in matchers:
        found = re.fullmatch(r'(\w+) *(=~|!~|!=|=) *"?([^"]*)"?', matcher)
        assert found, matcher
        name, operator, value = found.groups()
        fits = bool(re.fullmatch(value if "~" in operator else re.escape(value),
                                 labels.get(name, "")))  # fmt: skip
        if fits == operator.startswith("!"):
            return False
    return True


def inhibited(source: str, target: str) -> bool:
    """Whether one alert holds another one of the same job and cause back."""
    labels = {name: {"alertname": name, **rule["labels"]} for name, rule in ALERTS.items()}
    return any(
        matched(rule["source_matchers"], labels[source])
        and matched(rule["target_matchers"], labels[target])
        for rule in read(ALERTMANAGER)["inhibit_rules"]
    )


FINDINGS = [name for name, rule in ALERTS.items() if rule["labels"]["kind"] == "finding"]


@pytest.mark.parametrize("name", FINDINGS)
def test_findings_wait_while_data_cannot_be_trusted(name: str) -> None:
    """Incomplete, not aligned, or hanging: what is missing can change every finding."""
    for source in ("SMonJobIncomplete", "SMonJobNotAligned", "SMonHang"):
        assert inhibited(source, name)


def test_a_hang_is_told_whatever_the_data_are_like() -> None:
    """And neither a finding nor a watchdog is held back by another job's trouble."""
    sources = set(ALERTS) - {"SMonHang"}
    assert not [source for source in sources if inhibited(source, "SMonHang")]
    assert not [source for source in ALERTS if inhibited(source, "SMonWatchdog")]
    of_jobs = [
        rule
        for rule in read(ALERTMANAGER)["inhibit_rules"]
        if not any("SMonD" in matcher for matcher in rule["source_matchers"])
    ]
    assert all({"tenant", "train_job"} <= set(rule["equal"]) for rule in of_jobs)


def test_one_message_for_one_cause() -> None:
    """Critical holds warnings back, and what names the place holds back what does not."""
    for name in set(FINDINGS) - {"SMonJobSlowedDownCritical"}:
        assert inhibited("SMonJobSlowedDownCritical", name)
        assert not inhibited(name, "SMonJobSlowedDownCritical")
    for name in set(FINDINGS) - {"SMonJobSlowedDown", "SMonJobSlowedDownCritical"}:
        assert inhibited(name, "SMonJobSlowedDown")
        assert not inhibited("SMonJobSlowedDown", name)


# --- runbooks -------------------------------------------------------------------------------


def test_every_alert_and_cause_has_a_runbook_and_no_other_does() -> None:
    """Links of alerts end in the alert's name, those of findings in the cause's."""
    assert runbooks.names() == {*ALERTS, *CAUSES}


@pytest.mark.parametrize("name", sorted({*ALERTS, *CAUSES}))
def test_a_runbook_has_all_parts(name: str) -> None:
    """What it means, what it costs, where to look, what to do, and when it is over."""
    text = (runbooks.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert text.startswith(f"# {name}: ")
    assert [line for line in text.splitlines() if line.startswith("## ")] == list(PARTS)


def test_runbooks_name_only_metrics_and_settings_that_exist() -> None:
    """What is typed at night must be there."""
    from tests.deploy.files import AGENT_VARIABLES, SERVER_VARIABLES

    text = "\n".join(path.read_text(encoding="utf-8") for path in runbooks.FOLDER.glob("*.md"))
    named = {SUFFIXES.sub("", name) for name in re.findall(r"\b(smon_[a-z_]+)", text)}
    assert not named - published() - {"smon_slow_gpu"}  # the reason of a drain
    assert set(re.findall(r"\bSMON_[A-Z_]+", text)) <= SERVER_VARIABLES | AGENT_VARIABLES


def test_the_documentation_lists_all_runbooks() -> None:
    """With what each is about, as the page does."""
    text = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
    found = re.findall(
        r"^- \[`(\w+)`\]\(\.\./dashboards/runbooks/\1\.md\): (.*)$", text, re.MULTILINE
    )
    assert found == [*runbooks.listed().causes, *runbooks.listed().alerts]
