"""The dashboards as Grafana reads them, and every expression in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dashboards.grafana.build import FOLDER, texts

#: What Grafana puts in before it asks.
_VARIABLES = {"$__rate_interval": "20s", "$train_job": ".*", "$instance": ".*"}

_NAME = re.compile(r"\b(?:smon|process)_\w+")


@dataclass(frozen=True, slots=True)
class Expression:
    """One query of a panel."""

    board: str
    panel: str
    text: str

    def asked(self, **variables: str) -> str:
        """As Prometheus gets it; by default for all jobs and processes."""
        text = self.text
        for name, value in {**_VARIABLES, **{f"${key}": v for key, v in variables.items()}}.items():
            text = text.replace(name, value)
        return text

    def metrics(self) -> set[str]:
        """Names of the metrics in it, as families are called."""
        return set(_NAME.findall(self.text))


def boards() -> dict[str, dict[str, Any]]:
    """Each dashboard, by the name of its file."""
    return {name: json.loads((FOLDER / name).read_text(encoding="utf-8")) for name in texts()}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """All panels that show something."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[Expression]:
    """Every query of every panel."""
    for name, board in boards().items():
        for panel in panels(board):
            for target in panel["targets"]:
                yield Expression(name, panel["title"], target["expr"])


def variables(board: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Variables of a dashboard, by name."""
    return {one["name"]: one for one in board["templating"]["list"]}
