"""The parts of a dashboard as plain data, in the words of Grafana's JSON.

Flow: **here** → `dashboards.grafana.jobs`, `dashboards.grafana.service` → JSON. A panel knows its
title, what it means, its queries and their unit; where it stands is counted by `board`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

#: The dashboard schema of Grafana 11 and 12; older ones are migrated when they are loaded.
SCHEMA_VERSION: Final = 41

#: Whichever Prometheus the reader chooses: no dashboard names one.
SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}

_WIDTH: Final = 24

Json = dict[str, Any]

#: From where on a number is worth a look, and where it is bad: the thresholds of findings.
WASTE_STEPS: Final = ((None, "text"), (0.10, "orange"), (0.20, "red"))
RATIO_STEPS: Final = ((None, "text"), (1.1, "orange"), (1.25, "red"))
SOME_STEPS: Final = ((None, "text"), (1, "orange"))
BAD_STEPS: Final = ((None, "text"), (1, "red"))

Steps = Sequence[tuple[float | None, str]]


@dataclass(frozen=True, slots=True)
class Query:
    """One expression, and what its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: what it is called, its unit, and where a click on it leads.

    Attributes
    ----------
    decimals
        None: as many as Grafana likes.
    steps
        Thresholds by which the text is coloured; none: not at all.
    words
        Words for numbers.
    """

    name: str
    shown: str
    unit: str = ""
    decimals: int | None = None
    steps: Steps = ()
    words: Mapping[int, str] = field(default_factory=dict)
    link: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; `kind` is Grafana's name of it.

    Attributes
    ----------
    meaning
        What it shows and when to act: behind the (i) of the panel.
    more
        What only its kind has: merged into the JSON.
    """

    kind: str
    title: str
    meaning: str
    queries: tuple[Query, ...]
    unit: str
    width: int
    height: int
    more: Json = field(default_factory=dict)

    def json(self, number: int, x: int, y: int) -> Json:
        """As Grafana reads it, at a place of the grid."""
        plain: Json = {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.meaning,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": [
                _target(query, chr(ord("A") + place), self.kind)
                for place, query in enumerate(self.queries)
            ],
            "fieldConfig": {"defaults": {"unit": self.unit}, "overrides": []},
            "options": {},
        }
        return _merged(plain, self.more)


def _target(query: Query, name: str, kind: str) -> Json:
    now = kind != "timeseries"
    return {
        "refId": name,
        "datasource": SOURCE,
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "instant": now,
        "range": not now,
        "format": "table" if kind == "table" else "time_series",
    }


def _merged(plain: Json, more: Mapping[str, Any]) -> Json:
    for name, value in more.items():
        inner = plain.get(name)
        plain[name] = _merged(inner, value) if isinstance(inner, dict) else value
    return plain


def _thresholds(steps: Steps) -> Json:
    shown = [{"value": value, "color": color} for value, color in steps]
    return {"mode": "absolute", "steps": shown or [{"value": None, "color": "text"}]}


def stat(
    title: str,
    meaning: str,
    query: Query,
    unit: str,
    *,
    decimals: int | None = None,
    steps: Steps = (),
) -> Panel:
    """One number, large; it is coloured only where a threshold says that it matters."""
    defaults: Json = {"thresholds": _thresholds(steps), "noValue": "none"}
    defaults |= {} if decimals is None else {"decimals": decimals}
    more: Json = {
        "fieldConfig": {"defaults": defaults},
        "options": {
            "colorMode": "value",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "value",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }
    return Panel("stat", title, meaning, (query,), unit, 4, 4, more)


def series(
    title: str,
    meaning: str,
    queries: Iterable[Query],
    unit: str,
    *,
    width: int = 12,
    steps: Steps = (),
) -> Panel:
    """Lines over time, from zero; a threshold is a dashed line."""
    custom: Json = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 0,
        "showPoints": "never",
        "spanNulls": False,
        "axisSoftMin": 0,
        "thresholdsStyle": {"mode": "dashed" if steps else "off"},
    }
    defaults: Json = {
        "custom": custom,
        "color": {"mode": "palette-classic"},
        "thresholds": _thresholds(steps),
    }
    options: Json = {
        "legend": {
            "displayMode": "table",
            "placement": "bottom",
            "showLegend": True,
            "calcs": ["lastNotNull", "max"],
        },
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    more: Json = {"fieldConfig": {"defaults": defaults}, "options": options}
    return Panel("timeseries", title, meaning, tuple(queries), unit, width, 9, more)


def table(
    title: str,
    meaning: str,
    queries: Iterable[Query],
    columns: Sequence[Column],
    *,
    sort: str,
    height: int = 9,
) -> Panel:
    """Rows of the present moment: queries are merged by their labels, in the order of `columns`.

    The column that `sort` names, as it is shown, has the largest value first.
    """
    names = [column.name for column in columns]
    organised: Json = {
        "excludeByName": {"Time": True},
        "indexByName": {name: place for place, name in enumerate(names)},
        "renameByName": {column.name: column.shown for column in columns},
    }
    more: Json = {
        "transformations": [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": organised},
            {"id": "sortBy", "options": {"fields": {}, "sort": [{"field": sort, "desc": True}]}},
        ],
        "fieldConfig": {
            "defaults": {"noValue": "–", "custom": {"align": "auto", "filterable": True}},
            "overrides": [_override(column) for column in columns],
        },
        "options": {"showHeader": True, "cellHeight": "sm"},
    }
    return Panel("table", title, meaning, tuple(queries), "", _WIDTH, height, more)


def _override(column: Column) -> Json:
    found: list[tuple[str, Any]] = []
    if column.unit:
        found.append(("unit", column.unit))
    if column.decimals is not None:
        found.append(("decimals", column.decimals))
    if column.steps:
        found.append(("thresholds", _thresholds(column.steps)))
        found.append(("custom.cellOptions", {"type": "color-text"}))
    if column.words:
        options = {str(number): {"text": word} for number, word in column.words.items()}
        found.append(("mappings", [{"type": "value", "options": options}]))
    if column.link == HIDDEN:
        found.append(("custom.hidden", True))
    elif column.link:
        link = {"title": "Open in SMon", "url": column.link, "targetBlank": True}
        found.append(("links", [link]))
    return {
        "matcher": {"id": "byName", "options": column.shown},
        "properties": [{"id": name, "value": value} for name, value in found],
    }


#: As link of a column: it is there for the links of others, and not shown.
HIDDEN: Final = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """A heading, and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


def board(
    uid: str, title: str, meaning: str, rows: Iterable[Row], variables: Iterable[Json]
) -> Json:
    """A dashboard: panels fill the grid from left to right, row by row."""
    return {
        "uid": uid,
        "title": title,
        "description": meaning,
        "tags": ["smon"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {"list": list(variables)},
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "title": "SMon",
                "tags": ["smon"],
                "asDropdown": False,
                "keepTime": True,
                "includeVars": True,
                "icon": "external link",
                "targetBlank": False,
            }
        ],
        "panels": list(_placed(rows)),
    }


def _placed(rows: Iterable[Row]) -> Iterable[Json]:
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": _WIDTH, "h": 1},
            "panels": [],
        }
        y += 1
        x = height = 0
        for panel in row.panels:
            if x + panel.width > _WIDTH:
                x, y, height = 0, y + height, 0
            number += 1
            yield panel.json(number, x, y)
            x, height = x + panel.width, max(height, panel.height)
        y += height


def datasource() -> Json:
    """The variable by which the reader chooses a Prometheus."""
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "regex": "",
        "refresh": 1,
        "hide": 0,
        "multi": False,
        "includeAll": False,
        "options": [],
        "current": {},
    }


def chosen(name: str, shown: str, metric: str, label: str) -> Json:
    """A variable with the values of a label; all of them by default."""
    definition = f"label_values({metric}, {label})"
    return {
        "name": name,
        "label": shown,
        "type": "query",
        "datasource": SOURCE,
        "definition": definition,
        "query": {"query": definition, "refId": "values"},
        "refresh": 2,
        "sort": 1,
        "regex": "",
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "options": [],
        "current": {"text": ["All"], "value": ["$__all"]},
    }
