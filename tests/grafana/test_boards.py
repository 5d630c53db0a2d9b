from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest
import yaml

from dashboards.grafana.build import FOLDER, texts
from tests.deploy.files import COMPOSE
from tests.grafana.boards import boards, expressions, panels, variables

#: Units of Grafana that stand in these dashboards: a wrong one is shown as text behind the number.
UNITS = {"none", "s", "percentunit", "bytes", "Bps", "ops", "reqps", "currencyUSD", ""}

#: What panels of these kinds must have, so that Grafana shows them without migrating them.
KINDS = {"stat", "timeseries", "table"}


@pytest.fixture(scope="module", params=list(texts()))
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Each dashboard."""
    return boards()[request.param]


@pytest.mark.parametrize("name", texts())
def test_the_files_are_what_the_code_makes(name: str) -> None:
    """``python -m dashboards.grafana.build`` writes them."""
    assert (FOLDER / name).read_text(encoding="utf-8") == texts()[name]


def test_there_is_no_other_file() -> None:
    """Grafana would show a dashboard that nobody makes any more."""
    assert {path.name for path in FOLDER.glob("**/*.json")} == set(texts())


def test_a_dashboard_has_what_grafana_wants(board: dict[str, Any]) -> None:
    """A name of its own, a schema of today, and no id of a database."""
    assert board["schemaVersion"] >= 39
    assert re.fullmatch(r"[a-z0-9-]{1,40}", board["uid"])
    assert board["title"].startswith("SMon: ")
    assert "id" not in board
    assert {"time", "refresh", "templating", "annotations", "links", "panels"} <= set(board)
    assert [one["uid"] for one in boards().values()] == ["smon-jobs", "smon-service"]


def test_no_dashboard_names_a_data_source(board: dict[str, Any]) -> None:
    """The reader chooses one: its id is another one in each Grafana."""
    assert variables(board)["datasource"]["type"] == "datasource"
    text = json.dumps(board)
    assert set(re.findall(r'"uid": "([^"]+)"', text)) == {board["uid"], "${datasource}"}
    for panel in panels(board):
        for part in (panel, *panel["targets"]):
            assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


def test_each_panel_says_what_it_shows(board: dict[str, Any]) -> None:
    """Title, meaning, unit, queries, each query under a letter of its own."""
    for panel in panels(board):
        assert panel["type"] in KINDS
        assert panel["title"]
        assert len(panel["description"].split()) >= 2, panel["title"]
        assert panel["targets"]
        letters = [target["refId"] for target in panel["targets"]]
        assert letters == list("ABCDEFGH"[: len(letters)])
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    titles = [panel["title"] for panel in panels(board)]
    assert len(titles) == len(set(titles))
    numbers = [panel["id"] for panel in board["panels"]]
    assert len(numbers) == len(set(numbers))


def test_a_panel_of_the_present_asks_for_the_present(board: dict[str, Any]) -> None:
    """A table over time would have a row for each point."""
    for panel in panels(board):
        for target in panel["targets"]:
            assert target["instant"] is (panel["type"] != "timeseries")
            assert target["range"] is not target["instant"]
            assert (target["format"] == "table") is (panel["type"] == "table")


def test_columns_that_are_changed_are_there(board: dict[str, Any]) -> None:
    """An override of a name that no column has would be ignored without a word."""
    for panel in panels(board):
        if panel["type"] != "table":
            continue
        steps = {step["id"]: step["options"] for step in panel["transformations"]}
        shown = steps["organize"]["renameByName"]
        letters = [target["refId"] for target in panel["targets"]]
        values = {name for name in shown if name.startswith("Value #")}
        assert values <= {f"Value #{letter}" for letter in letters}
        overrides = [one["matcher"]["options"] for one in panel["fieldConfig"]["overrides"]]
        assert overrides == list(shown.values())
        assert steps["sortBy"]["sort"][0]["field"] in shown.values()
        units = [
            p["value"]
            for one in panel["fieldConfig"]["overrides"]
            for p in one["properties"]
            if p["id"] == "unit"
        ]
        assert set(units) <= UNITS


def test_labels_of_tables_and_legends_are_asked_for(board: dict[str, Any]) -> None:
    """What an expression does not keep cannot be shown."""
    for panel in panels(board):
        for target in panel["targets"]:
            named = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", target["expr"]))))
            assert named <= kept, panel["title"]
    for panel in panels(board):
        if panel["type"] == "table":
            text = " ".join(target["expr"] for target in panel["targets"])
            kept = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", text))))
            organised = panel["transformations"][1]["options"]["indexByName"]
            assert {name for name in organised if "#" not in name} <= kept


def test_panels_do_not_lie_on_each_other(board: dict[str, Any]) -> None:
    """And stay within the grid of 24 columns."""
    places = [panel["gridPos"] for panel in board["panels"]]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_variables_that_are_used_are_there(board: dict[str, Any]) -> None:
    """And those that are there are used."""
    text = json.dumps([panel["targets"] for panel in panels(board)])
    used = {name or other for name, other in re.findall(r"\$\{(\w+)\}|\$(\w+)", text)}
    assert used - {"__rate_interval"} == set(variables(board))


def test_jobs_are_counted_once_however_many_servers_there_are() -> None:
    """Every server of a database publishes each job: adding them up would double them."""
    for one in expressions():
        if one.board == "jobs.json":
            bare = re.sub(r"(?:max|min) by \([^)]*\) \(smon_\w+\{[^}]*\}", "", one.text)
            assert "smon_" not in bare.replace("max(smon_gpu_hour_price)", ""), one.text


# --- provisioning -----------------------------------------------------------------------------


def test_grafana_finds_the_dashboards_where_they_are_mounted() -> None:
    """docker-compose.yml, the provider's path and the folder fit each other."""
    provider = yaml.safe_load((FOLDER / "provisioning/dashboards/smon.yml").read_text("utf-8"))
    path = provider["providers"][0]["options"]["path"]
    service = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]["grafana"]
    mounts = dict(reversed(volume.split(":")[:2]) for volume in service["volumes"])
    assert (COMPOSE.parent / mounts[path]).resolve() == FOLDER
    assert (
        COMPOSE.parent / mounts["/etc/grafana/provisioning"]
    ).resolve() == FOLDER / "provisioning"


def test_the_provisioned_data_source_is_the_prometheus_of_the_composition() -> None:
    """Its kind is the one that the dashboards let the reader choose from."""
    path = FOLDER / "provisioning/datasources/prometheus.yml"
    (source,) = yaml.safe_load(path.read_text("utf-8"))["datasources"]
    services = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]
    assert source["type"] == "prometheus"
    host = source["url"].removeprefix("http://").partition(":")[0]
    assert host in services
