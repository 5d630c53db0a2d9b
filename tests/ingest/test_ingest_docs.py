from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from smon.api.protocol import Connections
from smon.config import Settings
from smon.ingest.metrics import IngestMetrics
from smon.wire.problems import KINDS, Problem

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"

_SUFFIXES = {"counter": "_total"}


def test_every_problem_is_documented() -> None:
    """A row with its status, and a section that says when it comes and what to do."""
    page = (REFERENCE / "problems.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| \[`([a-z-]+)`\]\(#\1\) \| (\d+) \|", page, re.MULTILINE))
    assert rows == {problem.value: str(KINDS[problem].status) for problem in Problem}
    sections = dict(re.findall(r"^## `([a-z-]+)`\n\n(.+)$", page, re.MULTILINE))
    assert list(sections) == [problem.value for problem in Problem]
    for name, text in sections.items():
        assert text.startswith("*When*: "), name
        assert "*What to do*" in text or "*What the agent does*" in text, name


def test_every_setting_that_a_problem_names_exists() -> None:
    """As a variable, with the default that the page gives."""
    page = "".join(
        (REFERENCE / name).read_text(encoding="utf-8") for name in ("problems.md", "metrics.md")
    )
    names = set(re.findall(r"`SMON_([A-Z_]+)`", page))
    assert names
    assert {name.lower() for name in names} <= set(Settings.__dataclass_fields__)


def test_every_metric_of_ingest_is_documented() -> None:
    """Name, labels, type; and nothing is documented that does not exist."""
    registry = CollectorRegistry()
    IngestMetrics(registry)
    Connections(Settings(), registry)
    made = {}
    for family in registry.collect():
        labels = {
            name
            for sample in family.samples
            for name in sample.labels
            if name not in {"le", "quantile"}
        }
        made[family.name + _SUFFIXES.get(family.type, "")] = (family.type, labels)
    page = (REFERENCE / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(smon_(?:ingest|wal|drain|agent)_\w+)(?:\{(\w+)\})?` \| (\w+) \|", page, re.MULTILINE
    )
    described = {name: (kind, label) for name, label, kind in rows}
    assert set(described) == set(made)
    for name, (kind, labels) in made.items():
        assert described[name][0] == kind
        # A family without samples yet does not show its labels.
        assert not labels or described[name][1] in labels
