from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy.orm import Session

from smon.errors import StoreError
from smon.metrics.jobs import LINGER_S, RESERVED, JobCollector, fitted
from smon.metrics.labels import MAX_LENGTH
from smon.metrics.latest import Latest, Patience
from smon.metrics.process import register_process
from smon.metrics.samples import HELP, Name, Sample
from smon.store.database import Database
from tests.metrics.jobs import (
    NOW,
    SECOND,
    add_finding,
    add_job,
    add_stream,
    collector,
    labelled,
    scraped,
)
from tests.metrics.published import published
from tests.service import database_url, postgres_url, sqlite

__all__ = ["database_url", "postgres_url", "sqlite"]

JOB = {"train_job": "llama"}

FORBIDDEN = {"rank", "host", "step", "microbatch", "communicator", "stage", "dp", "node"}


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """SQLite, then PostgreSQL."""
    made = Database(database_url)
    yield made
    made.close()


# --- what is published ----------------------------------------------------------------------


def test_a_running_job_has_the_numbers_of_its_diagnosis(database: Database) -> None:
    """Every family of the contract, with the values that the store has."""
    with database.write() as session:
        attempt = add_job(session)
        add_finding(session, attempt)
        job_id = attempt.job_id
    found = scraped(collector(database))
    assert found["smon_job_info"] == {
        labelled(
            **JOB,
            job_id=job_id,
            attempt="0",
            layout="dp8-pp4-tp8",
            url=f"https://smon.example/jobs/{job_id}",
        ): 1.0
    }
    one = {name: found[name][labelled(**JOB)] for name in found if labelled(**JOB) in found[name]}
    assert one == {
        "smon_job_gpus": 256.0,
        "smon_job_step_seconds": 5.0,
        "smon_job_ideal_step_seconds": 4.0,
        "smon_job_slowdown_ratio": 1.25,
        "smon_job_waste_ratio": 0.2,
        "smon_job_coverage_ratio": 1.0,
        "smon_job_clocks_aligned": 1.0,
        "smon_analysis_lag_seconds": 0.0,
    }
    cause = labelled(**JOB, cause="slow_gpu")
    assert found["smon_job_excess_seconds"] == {cause: 0.5}
    assert found["smon_job_excess_ratio"] == {cause: 0.1}
    assert found["smon_finding_severity"] == {cause: 2.0}
    assert found["smon_finding_onset_step"] == {cause: 42.0}
    assert found["smon_finding_stage"] == {cause: 2.0}
    kind = labelled(**JOB, cause="slow_gpu", scope="tp_group", persistence="onset")
    assert found["smon_finding_active"] == {kind: 1.0}
    slot = labelled(**JOB, cause="slow_gpu", slot="1")
    assert found["smon_suspect_rank"] == {slot: 168.0}
    assert found["smon_suspect_excess_seconds"] == {slot: 0.5}
    assert found["smon_job_metrics_up"] == {labelled(): 1.0}
    assert set(map(str, Name)) <= set(found)


def test_a_healthy_job_has_no_finding_and_no_suspect(database: Database) -> None:
    """Nobody is named for being the slowest: somebody always is."""
    with database.write() as session:
        add_job(session, live_slowdown=1.01, live_waste_ratio=0.01)
    found = scraped(collector(database))
    assert found["smon_job_slowdown_ratio"] == {labelled(**JOB): 1.01}
    assert not [name for name in found if "finding" in name or "suspect" in name]


def test_the_dearest_finding_of_a_cause_counts_and_the_gravest_severity(
    database: Database,
) -> None:
    """Costs of two findings of one cause do not add up; both are suspects."""
    with database.write() as session:
        attempt = add_job(session)
        add_finding(session, attempt, rank=1, excess_s=0.2, excess_share=0.04, severity="critical")
        add_finding(session, attempt, rank=2, excess_s=0.7, excess_share=0.14, kind="ramp")
        add_finding(session, attempt, rank=2, excess_s=0.1, cause="slow_link", scope="node")
    found = scraped(collector(database))
    gpu = labelled(**JOB, cause="slow_gpu")
    assert found["smon_job_excess_seconds"][gpu] == 0.7
    assert found["smon_finding_severity"][gpu] == 3.0
    ranks = {dict(labels)["slot"]: value for labels, value in found["smon_suspect_rank"].items()}
    assert ranks == {"1": 2.0, "2": 1.0}


def test_what_blames_nobody_is_no_suspect(database: Database) -> None:
    """A planned pause has a cost and a cause, and no slot; a cleared finding has nothing."""
    with database.write() as session:
        attempt = add_job(session)
        add_finding(session, attempt, verdict="planned_pause", cause="checkpoint", rank=0)
        add_finding(session, attempt, state="cleared")
    found = scraped(collector(database))
    assert list(found["smon_finding_active"]) == [
        labelled(**JOB, cause="checkpoint", scope="tp_group", persistence="onset")
    ]
    assert "smon_suspect_rank" not in found


def test_at_most_ten_suspects_are_named(database: Database) -> None:
    """The ten dearest, in order."""
    with database.write() as session:
        attempt = add_job(session)
        for rank in range(15):
            add_finding(session, attempt, rank=rank, excess_s=1.0 + rank)
    found = scraped(collector(database))
    ranks = {
        int(dict(labels)["slot"]): value for labels, value in found["smon_suspect_rank"].items()
    }
    assert ranks == {slot: 15.0 - slot for slot in range(1, 11)}


def test_unknown_numbers_are_absent_and_never_nan(database: Database) -> None:
    """A job without a diagnosis has what is known; infinity is not published."""
    with database.write() as session:
        add_job(
            session,
            live_slowdown=None,
            live_waste_ratio=None,
            live_recorded_s=math.inf,
            live_ideal_s=None,
            live_coverage_ratio=None,
            live_aligned=None,
        )
    found = scraped(collector(database))
    assert "smon_job_info" in found
    for name in ("slowdown_ratio", "waste_ratio", "step_seconds", "clocks_aligned"):
        assert f"smon_job_{name}" not in found
    assert all(math.isfinite(value) for series in found.values() for value in series.values())


def test_no_label_holds_a_rank_host_or_step(database: Database) -> None:
    """What has many values is a value, so that series stay few."""
    with database.write() as session:
        add_finding(session, add_job(session, tenant="blue"))
    found = scraped(collector(database))
    labels = {name for series in found.values() for each in series for name, _ in each}
    assert labels == {
        *("train_job", "tenant", "job_id", "attempt", "layout", "url", "state"),
        *("cause", "scope", "persistence", "slot"),
    }
    assert not labels & FORBIDDEN


# --- which jobs -----------------------------------------------------------------------------


def names(one: JobCollector) -> set[str]:
    """Jobs that are published."""
    return {dict(labels)["train_job"] for labels in scraped(one).get("smon_job_info", {})}


def test_jobs_that_run_are_published_and_others_are_not(database: Database) -> None:
    """Ended a while ago, silent, recorded: none of these runs."""
    old = NOW - 1000 * SECOND
    with database.write() as session:
        add_job(session, "runs")
        add_job(session, "just-ended", ended_ns=NOW - 5 * SECOND)
        add_job(session, "ended", ended_ns=NOW - round((LINGER_S + 1) * SECOND))
        add_job(session, "recorded", mode="recorded")
        add_job(session, "lost", streams=0, last_data_ns=old)
        hangs = add_job(session, "hangs", streams=0, last_data_ns=old)
        add_stream(session, hangs, 0)
    assert names(collector(database)) == {"runs", "just-ended", "hangs"}
    assert names(collector(database, metrics_silent_s=2000)) >= {"lost"}


def test_only_the_newest_attempt_of_a_job_counts(database: Database) -> None:
    """A restart does not double the job."""
    with database.write() as session:
        first = add_job(session, ended_ns=NOW - SECOND, live_slowdown=2.0)
        plain = {name: getattr(first, name) for name in (
            "tenant_id", "job_id", "dp", "pp", "tp", "cp", "ep", "vpp", "mode", "time_base",
            "window_steps", "notes", "created_ns")}  # fmt: skip
        session.add(type(first)(**plain, number=1, last_data_ns=NOW, live_slowdown=1.1))
    found = scraped(collector(database))
    assert found["smon_job_slowdown_ratio"] == {labelled(**JOB): 1.1}


def test_agents_are_counted_by_state(database: Database) -> None:
    """Down: no heartbeat for so long, and not ended."""
    with database.write() as session:
        attempt = add_job(session, streams=3)
        add_stream(session, attempt, 3, heartbeat_ns=NOW - 61 * SECOND)
        add_stream(session, attempt, 4, heartbeat_ns=None, created_ns=NOW - 61 * SECOND)
        add_stream(session, attempt, 5, heartbeat_ns=NOW - 600 * SECOND, ended=True)
    found = scraped(collector(database))["smon_job_agents"]
    states = {dict(labels)["state"]: value for labels, value in found.items()}
    assert states == {"up": 3.0, "down": 2.0, "ended": 1.0}


@pytest.mark.parametrize(
    "fields, lag",
    [
        ({}, 0.0),
        ({"last_data_ns": NOW}, 0.0),
        ({"live_analysed_ns": NOW - 65 * SECOND}, 60.0),
        ({"live_analysed_ns": NOW - 65 * SECOND, "last_data_ns": NOW - 65 * SECOND}, 0.0),
        ({"ready_step": 101, "live_analysed_ns": NOW - 6 * SECOND}, 1.0),
        ({"ready_step": None, "live_step": None, "live_analysed_ns": None,
          "live_recorded_s": None, "created_ns": NOW - 30 * SECOND}, 30.0),
    ],
)  # fmt: skip
def test_the_lag_is_how_long_the_diagnosis_is_overdue(
    sqlite: Database, fields: dict[str, Any], lag: float
) -> None:
    """It is due a step time after the last one, if data came since; also if no worker is alive."""
    with sqlite.write() as session:
        add_job(session, **fields)
    assert scraped(collector(sqlite))["smon_analysis_lag_seconds"] == {labelled(**JOB): lag}


def test_a_job_that_sends_files_alone_is_owed_no_running_diagnosis(sqlite: Database) -> None:
    """There are no ops that it could be made of."""
    with sqlite.write() as session:
        nothing: dict[str, Any] = {"ready_step": None, "live_step": None, "live_analysed_ns": None}
        attempt = add_job(session, streams=0, live_recorded_s=None, **nothing)
        add_stream(session, attempt, 0, events=0)
    assert scraped(collector(sqlite))["smon_analysis_lag_seconds"] == {labelled(**JOB): 0.0}


# --- names ----------------------------------------------------------------------------------

HOSTILE = [
    'a"} 1\nsmon_job_info{x="',
    "back\\slash",
    "\x00\x1b[31m",
    "\ud800 surrogate".encode("utf-8", "replace").decode(),
    "<script>alert(1)</script>",
    "{{ $value }}",
    "模型",
    "x" * 5000,
    "",
]


def test_hostile_names_are_labels_and_nothing_else(database: Database) -> None:
    """Each job has one series, whatever its name; the text is read back as it was meant."""
    with database.write() as session:
        for name in HOSTILE:
            if "\x00" not in name or database.is_sqlite:
                add_job(session, name)
        count = len(HOSTILE) - (not database.is_sqlite)
    registry = CollectorRegistry()
    registry.register(collector(database))
    text = generate_latest(registry).decode()
    (family,) = [one for one in text_string_to_metric_families(text) if one.name == "smon_job_info"]
    jobs = [sample.labels["train_job"] for sample in family.samples]
    assert len(set(jobs)) == len(jobs) == count
    assert 'a"} 1\\nsmon_job_info{x="' in jobs
    assert all(name and name.isprintable() and len(name) <= MAX_LENGTH + 17 for name in jobs)


def test_names_that_look_the_same_stay_apart(sqlite: Database) -> None:
    """Of two the older keeps it; two series of one name would cost the whole scrape."""
    with sqlite.write() as session:
        ids = {add_job(session, name).job_id for name in ("a\x00", "a\\x00")}
    found = names(collector(sqlite))
    assert len(found) == 2
    assert "a\\x00" in found
    first, second_name = sorted(found, key=len)
    assert second_name.startswith(f"{first}~")
    assert second_name.removeprefix(f"{first}~") in ids


def test_tenants_are_told_apart_and_the_default_one_has_no_label(sqlite: Database) -> None:
    """Two tenants may have jobs of one name."""
    with sqlite.write() as session:
        add_job(session)
        add_job(session, tenant="blue")
    found = scraped(collector(sqlite))["smon_job_gpus"]
    assert set(found) == {labelled(**JOB), labelled(**JOB, tenant="blue")}


# --- limits ---------------------------------------------------------------------------------


def test_jobs_that_lose_least_are_left_out_whole(sqlite: Database) -> None:
    """Beyond the limit a job has all of its series or none, and what is left out is counted."""
    with sqlite.write() as session:
        for number in range(120):
            add_job(session, f"job-{number:03}", live_waste_ratio=number / 1000)
        hangs = add_job(session, "hangs", live_waste_ratio=0.0)
        add_finding(session, hangs, verdict="hang", cause="hang", excess_s=0.0, excess_share=0.0)
    one = collector(sqlite, metrics_max_series=RESERVED + 1000)
    found = scraped(one)
    series = {name: len(found[name]) for name in map(str, Name) if name in found}
    kept = names(one)
    assert sum(series.values()) <= 1000
    assert "hangs" in kept
    assert "job-119" in kept
    assert "job-000" not in kept
    assert series["smon_job_info"] == series["smon_job_step_seconds"] == len(kept)
    own = {name: found[name][labelled()] for name in found if name.startswith("smon_job_metrics")}
    assert own["smon_job_metrics_series"] == sum(series.values())
    healthy = 12  # all but findings and suspects
    assert own["smon_job_metrics_dropped_series"] == healthy * (121 - len(kept))


def test_everything_fits_exactly() -> None:
    """A job that just fits is kept; the first that does not ends it."""
    job = [Sample(Name.GPUS, {}, 1.0)] * 3
    assert fitted([job, job], 6) == (job * 2, 0)
    assert fitted([job, job], 5) == (job, 3)
    assert fitted([job], 0) == ([], 3)


def test_a_scrape_of_many_jobs_is_cheap(sqlite: Database) -> None:
    """500 jobs with two findings each: 0.18 s of CPU where nothing else runs, 0.24 s under load."""
    with sqlite.write() as session:
        for number in range(500):
            attempt = add_job(session, f"job-{number}", streams=16)
            add_finding(session, attempt)
            add_finding(session, attempt, cause="gc", scope="job", rank=None)
    registry = CollectorRegistry()
    one = JobCollector(
        sqlite,
        collector(sqlite)._settings,
        clock=lambda: NOW,
        patience=Patience(fresh_s=0.0, wait_s=30.0),
    )
    registry.register(one)
    generate_latest(registry)
    took = []
    for _ in range(5):
        begin = time.process_time()
        text = generate_latest(registry)
        took.append(time.process_time() - begin)
    assert text.count(b"\nsmon_job_info{") == 500
    assert min(took) < 0.5


# --- a database that fails ------------------------------------------------------------------


class Broken(Database):
    """A database that can be told to fail."""

    failing = False

    @contextmanager
    def read(self) -> Iterator[Session]:
        """Fail, or go on."""
        if self.failing:
            raise StoreError("the database cannot be used: it is away")
        with super().read() as session:
            yield session


def test_a_database_that_is_away_costs_its_metrics_and_no_other(database_url: str) -> None:
    """The scrape goes on, and a metric says that the numbers are not fresh."""
    database = Broken(database_url)
    database.failing = True
    registry = CollectorRegistry()
    register_process(registry, "api")
    registry.register(collector(database))
    text = generate_latest(registry).decode()
    assert "\nsmon_job_metrics_up 0.0\n" in text
    assert "\nsmon_job_metrics_failures_total 1.0\n" in text
    assert "\nsmon_build_info{" in text
    assert "\nsmon_job_info{" not in text
    database.close()


def test_the_last_numbers_stay_for_a_while(sqlite: Database, database_url: str) -> None:
    """A hiccup of the database must not take alerts back."""
    database = Broken(str(sqlite.engine.url))
    with sqlite.write() as session:
        add_job(session)
    now = [0.0]
    one = collector(database)
    one._latest = Latest(one._look, Patience(fresh_s=1.0, keep_s=120.0), clock=lambda: now[0])
    assert "smon_job_info" in scraped(one)
    database.failing = True
    now[0] = 100.0
    found = scraped(one)
    assert "smon_job_info" in found
    assert found["smon_job_metrics_up"] == {labelled(): 0.0}
    now[0] = 130.0
    assert "smon_job_info" not in scraped(one)
    database.failing = False
    assert scraped(one)["smon_job_metrics_up"] == {labelled(): 1.0}
    database.close()


# --- documentation --------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


def test_every_metric_is_documented_and_no_other() -> None:
    """The page has each family of every process."""
    text = PAGE.read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(smon_\w+)", text, re.MULTILINE))
    assert documented == published()


def test_every_family_has_a_line_of_help() -> None:
    """None is published without saying what it is."""
    assert set(HELP) == set(Name)
