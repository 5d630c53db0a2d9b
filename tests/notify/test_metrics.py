from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from smon.notify.metrics import NotifyMetrics, Result

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


def test_every_metric_is_documented_with_its_labels() -> None:
    """The page has each, its type, and no other of these."""
    registry = CollectorRegistry()
    made = NotifyMetrics(registry)
    page = PAGE.read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(smon_notify_\w+)\{([\w,]+)\}` \| (\w+) \| (.*) \|$", page, re.MULTILINE
    )
    families = {family.name: family.type for family in registry.collect()}
    assert {name.removesuffix("_total"): kind for name, _, kind, _ in rows} == families
    labels = {f"smon_notify_{name}": one._labelnames for name, one in vars(made).items()}
    assert {
        name.removesuffix("_total").removesuffix("_seconds"): tuple(given.split(","))
        for name, given, _, _ in rows
    } == labels
    assert {str(result) for result in Result} == set(re.findall(r"`([a-z_]+)`", rows[0][3]))
