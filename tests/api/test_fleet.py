"""The fleet report: one set of numbers as JSON, page, CSV, and on the command line."""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from smon.api.routes.common import Seams
from smon.commands import fleet
from smon.errors import ConfigError, StoreError
from smon.render.amounts import dollars, gpu_hours, gpu_time, share
from smon.render.fleet import COLUMNS, fleet_csv, fleet_text
from smon.render.tables import csv_text
from smon.store.models import Attempt, Job, Result, Window
from tests.api.conftest import Filled, fill
from tests.api.filled import NOW, SECOND, World, make_world, report_of
from tests.api.served import served
from tests.api.test_pages import page

PATH = "/api/v1/fleet/summary"


@pytest.fixture
def priced(tmp_path: Path) -> Iterator[Filled]:
    """A server with jobs, and a price of a GPU hour."""
    made = fill(make_world(tmp_path, None, {"price_per_gpu_hour": 2.0}))
    yield made
    made.world.database.close()


def table(text: str) -> list[dict[str, str]]:
    """CSV, row by row."""
    return list(csv.DictReader(io.StringIO(text)))


def cells(row: dict[str, str]) -> dict[str, Any]:
    """What a row says, numbers as numbers."""
    numbers = COLUMNS[4:]
    return {
        name: float(value) if name in numbers else value for name, value in row.items() if value
    }


def test_the_period_is_the_sum_of_its_windows(filled: Filled) -> None:
    """Waste, mean step time, steps and GPUs of each analysed window, from their reports."""
    period = filled.world.client().json(PATH)["period"]
    busy, lost = 0.0, 0.0
    for kind in ("slow", "healthy"):
        report = report_of(kind)
        span = report.window.last_step - report.window.first_step + 1
        hours = (report.step_time.recorded_s or 0.0) * span * report.job.world_size / 3600
        busy += hours
        lost += hours * max(report.waste_ratio or 0.0, 0.0)
    assert period["jobs"] == 2
    assert period["gpu_hours"] == pytest.approx(busy)
    assert period["lost_gpu_hours"] == pytest.approx(lost)
    assert period["lost_share"] == pytest.approx(lost / busy)
    assert period["causes"][0]["cause"] == "slow_gpu"
    assert sum(each["lost_gpu_hours"] for each in period["causes"]) == pytest.approx(lost)
    assert [each["name"] for each in period["worst"]] == ["slow-job", "healthy-job"]
    assert period["lost_cost"] is None


def test_states_bins_and_causes_make_the_whole(priced: Filled) -> None:
    """Every job has one state, every analysed job one bin, every lost hour one cause."""
    report = priced.world.client().json(PATH)
    assert sum(report["states"].values()) == report["jobs"] == 3
    assert sum(each["jobs"] for each in report["waste"]) == report["analysed"] == 2
    for whole, parts, name in (
        (report["gpu_hours_per_day"], report["causes"], "gpu_hours_per_day"),
        (report["cost_per_day"], report["causes"], "cost_per_day"),
        (report["period"]["lost_cost"], report["period"]["causes"], "lost_cost"),
    ):
        assert sum(each[name] for each in parts) == pytest.approx(whole)
    assert report["cost_per_day"] == pytest.approx(2 * report["gpu_hours_per_day"])


def test_jobs_outside_the_period_are_counted_apart(filled: Filled) -> None:
    """A trace of another year, and one without times, are not in the sum, and are not hidden."""
    world = filled.world
    with world.database.write() as session:
        session.execute(
            update(Attempt)
            .where(Attempt.id == filled.healthy.attempt_id)
            .values(mode="recorded", time_base="step")
        )
        session.execute(
            update(Window)
            .where(Window.job_id == filled.slow.job_id)
            .values(updated_ns=NOW - 30 * 86_400 * SECOND)
        )
    report = world.client().json(PATH)
    assert (report["analysed"], report["period"]["jobs"], report["unplaced"]) == (2, 0, 2)
    text = page(world, "/fleet")
    assert "No window of the period has been analysed." in text
    assert "Not in this sum: 2 jobs" in text
    assert "<b>–</b>" in text
    assert world.client().json(f"{PATH}?days=60")["period"]["jobs"] == 1


# --- the page ---------------------------------------------------------------------------------


def test_the_page_shows_the_numbers_of_the_api(priced: Filled) -> None:
    """Each bar has its number, as REST has it; sentences say the sums."""
    text = page(priced.world, "/fleet?days=7")
    report = priced.world.client().json(f"{PATH}?days=7")
    for name, values in (
        ("period", [each["lost_gpu_hours"] for each in report["period"]["causes"]]),
        ("now", [each["gpu_hours_per_day"] for each in report["causes"]]),
        ("period-jobs", [each["lost_gpu_hours"] for each in report["period"]["worst"]]),
        ("now-jobs", [each["gpu_hours_per_day"] for each in report["worst_jobs"]]),
    ):
        part = text[text.index(f'<section id="{name}"') :].partition("</section>")[0]
        assert [float(value) for value in re.findall(r'data-value="([^"]*)"', part)] == values
        widths = [float(value) for value in re.findall(r'height="8" width="([^"]*)"', part)]
        assert widths == pytest.approx([100 * each / values[0] for each in values], abs=0.01)
    counts = [int(count) for count in re.findall(r'<text class="count"[^>]*>(\d+)<', text)]
    assert counts == [each["jobs"] for each in report["waste"]]
    assert "Slowed by 10 % or more: 1 of 2 (50.0 %)." in text
    assert f'href="/jobs/{priced.slow.job_id}"' in text
    assert 'href="/hosts/node-7"' in text
    assert 'aria-current="page">7 days<' in text


@pytest.mark.parametrize("days", ["0", "-1", "x", "nan", "1e9"])
def test_a_period_must_be_one(filled: Filled, days: str) -> None:
    """422 for the page and its CSV."""
    client = filled.world.client()
    for path in ("/fleet", "/fleet.csv"):
        assert client.get(f"{path}?days={days}").status_code == 422


def test_an_empty_server_has_an_empty_report(world: World) -> None:
    """Zeros and dashes, no failure."""
    text = page(world, "/fleet")
    assert "No job of the period has been analysed." in text
    assert "No host was a suspect in the period." in text
    assert [row["kind"] for row in table(world.client().get("/fleet.csv").text)][:2] == [
        "now",
        "slowed",
    ]


def test_the_page_needs_a_token_and_knows_what_has_not_changed(filled: Filled) -> None:
    """Pages of the fleet are read like all others."""
    world = filled.world
    for path in ("/fleet", "/fleet.csv", "/jobs.csv"):
        assert world.client(None).get(path).status_code == 401
        assert world.client("ingest").get(path).status_code == 403
    answer = world.client().get("/fleet")
    again = world.client().get("/fleet", headers={"if-none-match": answer.headers["etag"]})
    assert again.status_code == 304
    other = world.client().get("/fleet?days=1", headers={"if-none-match": answer.headers["etag"]})
    assert other.status_code == 200


# --- CSV --------------------------------------------------------------------------------------


def test_the_csv_holds_every_number_of_the_report(priced: Filled) -> None:
    """Page, REST and command give the same table; each row is a part of the document."""
    report = priced.world.client().json(PATH)
    answer = priced.world.client().get("/fleet.csv")
    assert answer.text == fleet_csv(report)
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in table(answer.text):
        rows.setdefault(row["kind"], []).append(cells(row))
    assert rows["now"][0]["gpu_hours_per_day"] == report["gpu_hours_per_day"]
    assert rows["slowed"][0]["jobs"] == report["slowed"]
    assert [row["jobs"] for row in rows["waste"]] == [each["jobs"] for each in report["waste"]]
    period = report["period"]
    assert rows["period"][0]["covered_ratio"] == period["covered_ratio"]
    assert rows["period"][0]["lost_cost"] == period["lost_cost"]
    for kind, parts, name in (
        ("cause_now", report["causes"], "cost_per_day"),
        ("cause_period", period["causes"], "lost_gpu_hours"),
        ("job_now", report["worst_jobs"], "gpu_hours_per_day"),
        ("job_period", period["worst"], "lost_share"),
        ("host", report["worst_hosts"], "lost_gpu_hours"),
    ):
        assert [row.get(name, 0.0) for row in rows[kind]] == [each[name] for each in parts], kind


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@x", "\tx", "=HYPERLINK(1)"])
def test_a_cell_of_text_is_never_a_formula(name: str) -> None:
    """An apostrophe in front; numbers below zero stay numbers."""
    (row,) = table(csv_text(("name", "n"), [{"name": name, "n": -1.5}]))
    assert row == {"name": f"'{name}", "n": "-1.5"}


def test_cells_are_quoted_and_gaps_are_empty() -> None:
    """Commas, quotes and line ends stay in their cell."""
    name = 'a,"b"\nc'
    (row,) = table(csv_text(("name", "n", "flag"), [{"name": name, "flag": True}]))
    assert row == {"name": name, "n": "", "flag": "true"}


@pytest.mark.parametrize(
    "text, wanted",
    [
        (gpu_hours(0.0), "0 GPU-h"),
        (gpu_hours(0.1234), "0.123 GPU-h"),
        (gpu_hours(12.345), "12.3 GPU-h"),
        (gpu_hours(123456.0), "123,456 GPU-h"),
        (gpu_time(999.0), "999 GPU-h"),
        (gpu_time(2400.0), "100 GPU-days"),
        (gpu_time(None), "–"),
        (dollars(0.5), "$0.50"),
        (dollars(1234.5), "$1,234"),
        (share(0.1234), "12.3 %"),
    ],
)
def test_amounts_have_three_digits_and_a_unit(text: str, wanted: str) -> None:
    """Large ones keep all whole digits; cents stand where they matter."""
    assert text == wanted


# --- the command ------------------------------------------------------------------------------


def parsed(*arguments: str) -> argparse.Namespace:
    """Arguments as the command line would give them."""
    parser = argparse.ArgumentParser()
    fleet.add(parser.add_subparsers())
    return parser.parse_args(["fleet", "report", *arguments])


@pytest.fixture
def token_file(priced: Filled, tmp_path: Path) -> Path:
    """A file with a token that may read."""
    path = tmp_path / "token"
    path.write_text(priced.world.tokens["read"])
    return path


def test_the_command_prints_what_the_server_says(
    priced: Filled, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text, CSV and JSON; the numbers are those of REST."""
    with served(priced.world, Seams(lambda: NOW, 0.05)) as (address, _):
        outputs = {}
        for shape in ("", "--csv", "--json"):
            more = [shape] if shape else []
            arguments = parsed("--server", address, "--token-file", str(token_file), *more)
            assert fleet.run(arguments) == 0
            outputs[shape] = capsys.readouterr().out
    document = json.loads(outputs["--json"])
    assert document["slowed"] == 1
    assert outputs["--csv"] == fleet_csv(document)
    text = outputs[""]
    assert text == fleet_text(document)
    assert "Slowed by 10 % or more: 1 of 2 (50.0 %)." in text
    assert re.search(r"^  slow GPU +1 +[\d.,]+ GPU-h +\$[\d.,]+$", text, re.MULTILINE)
    assert re.search(r"^node-7 +1 +1 +slow GPU$", text, re.MULTILINE)


def test_the_command_says_what_is_wrong(priced: Filled, tmp_path: Path) -> None:
    """No server, a wrong token, an address that is none: one line each."""
    wrong = tmp_path / "wrong"
    wrong.write_text("smon_00000000_0000000000000000000000000000000000000000000")
    with (
        served(priced.world) as (address, _),
        pytest.raises(ConfigError, match="refuses"),
    ):
        fleet.run(parsed("--server", address, "--token-file", str(wrong)))
    with pytest.raises(StoreError, match="cannot reach"):
        fleet.run(parsed("--server", "http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match="expected a server"):
        fleet.run(parsed("--server", "nowhere"))
    for days in ("0", "x", "9999"):
        with pytest.raises(SystemExit):
            parsed("--server", "http://127.0.0.1:9", "--days", days)


def test_names_cannot_move_the_cursor(priced: Filled) -> None:
    """What a job or host is called is printed with its control characters visible, and cut."""
    world = priced.world
    with world.database.write() as session:
        session.execute(
            update(Job).where(Job.id == priced.slow.job_id).values(name="\x1b[31m" + "x" * 99)
        )
        session.execute(update(Result).where(Result.cause.is_not(None)).values(cause="\x07"))
    text = fleet_text(world.client().json(PATH))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "\\x1b[31mx" in text
    assert "x" * 60 not in text
