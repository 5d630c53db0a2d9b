"""What the REST API says of jobs, windows, findings, workers and fleet."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import update

from smon.store.models import Attempt, Finding, Job, Result, StepResult, Window
from smon.store.results import numbers_of, packed
from tests.api.conftest import Filled, fill
from tests.api.filled import (
    NOW,
    SECOND,
    World,
    add_event_file,
    add_job,
    make_world,
    report_of,
)


def names(page: dict[str, Any]) -> list[str]:
    """Names of the jobs of a page."""
    return [job["name"] for job in page["items"]]


def test_a_job_says_where_it_stands(filled: Filled) -> None:
    """State, verdict in words, numbers of the report, the open finding, agents."""
    job = filled.world.client().json(f"/api/v1/jobs/{filled.slow.job_id}")
    report = report_of("slow")
    assert job["state"] == "slow"
    assert job["slowdown"] == pytest.approx(report.slowdown.paper)
    assert job["finding"]["cause"] == "slow_gpu"
    assert job["sentence"] == job["finding"]["headline"]
    assert job["sentence"].startswith("Rank 6 (DP rank 2, stage 1): slow GPU, +")
    assert job["gpus"] == 16
    assert job["agents"] == {"total": 1, "down": 0, "ended": 0}
    assert [each["cause"] for each in job["findings"]] == ["slow_gpu"]
    assert job["attempts"][0]["number"] == 0


def test_states_tell_what_is_the_matter(filled: Filled) -> None:
    """Healthy, waiting, incomplete, critical, ended: each from what is stored."""
    client, world = filled.world.client(), filled.world

    def state(made: Any) -> str:  # noqa: ANN401  # Made
        return str(client.json(f"/api/v1/jobs/{made.job_id}")["state"])

    assert state(filled.healthy) == "healthy"
    assert state(filled.empty) == "waiting"
    with world.database.write() as session:
        session.execute(update(Finding).values(severity="critical"))
        session.execute(
            update(Window)
            .where(Window.id == filled.healthy.window_id)
            .values(missing=[3], missing_count=1, reason="waited 60 s")
        )
    assert state(filled.slow) == "critical"
    assert state(filled.healthy) == "incomplete"
    missing = client.json(f"/api/v1/jobs/{filled.healthy.job_id}")["missing"]
    assert (missing["count"], missing["ranks"], missing["reason"]) == (1, [3], "waited 60 s")
    with world.database.write() as session:
        session.execute(update(Attempt).values(ended_ns=NOW))
    ended = client.json(f"/api/v1/jobs/{filled.slow.job_id}")
    assert (ended["state"], ended["health"], ended["running"]) == ("ended", "critical", False)


def test_clocks_that_disagree_are_a_state(world: World) -> None:
    """A report whose clocks are not aligned makes a state."""
    with world.database.write() as session:
        made = add_job(session, world.tenant_id, "job", report_of("healthy"))
        session.execute(update(Result).values(aligned=False))
    assert world.client().json(f"/api/v1/jobs/{made.job_id}")["state"] == "not_aligned"
    assert names(world.client().json("/api/v1/jobs?sort=-state")) == ["job"]


def test_lists_filter_and_sort(filled: Filled) -> None:
    """By part of the name, verdict, waste, whether it runs; by each key, in both directions."""
    client = filled.world.client()
    assert names(client.json("/api/v1/jobs?name=SLOW")) == ["slow-job"]
    assert names(client.json("/api/v1/jobs?name=%25")) == []
    assert names(client.json("/api/v1/jobs?verdict=straggler")) == ["slow-job"]
    assert names(client.json("/api/v1/jobs?min_waste=0.1")) == ["slow-job"]
    assert names(client.json("/api/v1/jobs?sort=name")) == ["empty-job", "healthy-job", "slow-job"]
    for key in ("waste", "slowdown", "cost"):
        falling = ["slow-job", "healthy-job", "empty-job"]
        rising = ["healthy-job", "slow-job", "empty-job"]
        assert names(client.json(f"/api/v1/jobs?sort=-{key}")) == falling
        assert names(client.json(f"/api/v1/jobs?sort={key}")) == rising
    with filled.world.database.write() as session:
        session.execute(
            update(Attempt).where(Attempt.id == filled.slow.attempt_id).values(ended_ns=NOW)
        )
    assert names(client.json("/api/v1/jobs?state=ended")) == ["slow-job"]
    assert len(client.json("/api/v1/jobs?state=running")["items"]) == 2


@pytest.mark.parametrize("sort", ["-last_data", "name", "-waste"])
def test_pages_go_through_all_jobs_once(filled: Filled, sort: str) -> None:
    """Following `next` gives every job once, in the order of one large page."""
    client = filled.world.client()
    path = f"/api/v1/jobs?sort={sort}"
    whole = names(client.json(path))
    found, cursor = [], ""
    while True:
        page = client.json(f"{path}&limit=1{cursor}")
        found += names(page)
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"
    assert found == whole


def test_a_report_is_sent_as_it_is_stored(filled: Filled) -> None:
    """Byte for byte: in zstd to whoever reads it, unpacked to others; 304 to who has it."""
    client = filled.world.client()
    path = f"/api/v1/jobs/{filled.slow.job_id}/windows"
    stored = report_of("slow").to_json().encode()
    for name in (filled.slow.window_id, "latest"):
        plain = client.get(f"{path}/{name}", headers={"accept-encoding": "identity"})
        assert plain.content == stored
        assert "content-encoding" not in plain.headers
        small = client.get(f"{path}/{name}", headers={"accept-encoding": "zstd"})
        assert small.headers["content-encoding"] == "zstd"
        assert small.content == stored
    again = client.get(f"{path}/latest", headers={"if-none-match": plain.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    gzipped = client.get(f"{path}/latest", headers={"accept-encoding": "gzip, zstd;q=0"})
    assert gzipped.headers["content-encoding"] == "gzip"


def test_the_running_diagnosis_is_a_window_too(filled: Filled) -> None:
    """404 without one; with one, `live` is its report, and the plan is of it."""
    client = filled.world.client()
    path = f"/api/v1/jobs/{filled.healthy.job_id}"
    assert client.get(f"{path}/windows/live").status_code == 404
    with filled.world.database.write() as session:
        session.execute(
            update(Attempt)
            .where(Attempt.id == filled.healthy.attempt_id)
            .values(live_report=packed(report_of("slow")), live_step=99, live_analysed_ns=NOW)
            .values({f"live_{name}": each for name, each in numbers_of(report_of("slow")).items()})
        )
    assert client.json(f"{path}/windows/live")["verdict"] == "straggler"
    plan = client.json(f"{path}/plan")
    assert plan["window_id"] is None
    assert plan["fixes"][0]["speedup"] > 1.1
    job, report = client.json(path), client.json(f"{path}/windows/live")
    assert job["last_step"] == 99
    assert (job["slowdown"], job["waste_ratio"], job["recorded_s"]) == (
        report["slowdown"]["paper"],
        report["waste_ratio"],
        report["step_time"]["recorded_s"],
    )


def test_workers_come_slowest_first(filled: Filled) -> None:
    """Over the window, or in one step with compute and wait; by DP rank and stage."""
    client = filled.world.client()
    path = f"/api/v1/jobs/{filled.slow.job_id}/workers"
    first = client.json(f"{path}?limit=3")["items"]
    assert (first[0]["dp"], first[0]["stage"]) == (2, 1)
    assert first[0]["slowdown"] >= first[1]["slowdown"] >= first[2]["slowdown"]
    one = client.json(f"{path}?step=3&dp=2&stage=1")["items"]
    assert [(each["dp"], each["stage"], each["compute_s"]) for each in one] == [(2, 1, 0.5)]
    assert len(client.json(f"{path}?stage=0&limit=500")["items"]) == 4
    assert client.get(f"{path}?step=999").status_code == 404
    other = f"/api/v1/jobs/{filled.healthy.job_id}/workers?step=3"
    assert client.get(other).status_code == 404


def test_history_keeps_the_extremes(world: World) -> None:
    """Of ten thousand steps few are shown; the longest, the shortest and both ends are."""
    with world.database.write() as session:
        made = add_job(session, world.tenant_id, "job", report_of("empty"))
        session.add_all(
            StepResult(
                attempt_id=made.attempt_id, step=step, tenant_id=world.tenant_id,
                job_id=made.job_id, recorded_s=9.0 if step == 4321 else 1.0 + step / 1e6,
                simulated_s=1.0, ideal_s=1.0, slowdown=5.0 if step == 77 else 1.0,
                analysed_ns=NOW,
            )
            for step in range(10_000)
        )  # fmt: skip
    history = world.client().json(f"/api/v1/jobs/{made.job_id}/history?points=100")
    assert history["steps"] == 10_000
    assert len(history["step"]) <= 100
    assert {0, 77, 4321, 9999} <= set(history["step"])
    assert history["step"] == sorted(history["step"])
    few = world.client().json(
        f"/api/v1/jobs/{made.job_id}/history?from_step=10&to_step=12&metric=slowdown"
    )
    assert few["step"] == [10, 11, 12]
    assert few["recorded_s"] is None
    assert few["slowdown"] == [1.0, 1.0, 1.0]


def test_findings_have_their_life(filled: Filled) -> None:
    """Events, the document of the report, filters by state, time and attempt."""
    client = filled.world.client()
    path = f"/api/v1/jobs/{filled.slow.job_id}/findings"
    (finding,) = client.json(path)["items"]
    assert [event["event"] for event in finding["events"]] == ["opened"]
    assert finding["document"]["cause"] == "slow_gpu"
    assert finding["headline"].startswith("Rank 6")
    now_s = NOW / SECOND
    assert client.json(f"{path}?since={now_s - 20}")["items"]
    assert client.json(f"{path}?since={now_s}")["items"] == []
    assert client.json(f"{path}?state=cleared")["items"] == []
    assert client.json(f"{path}?attempt=1")["items"] == []


def test_hosts_count_jobs_and_what_they_waste(filled: Filled) -> None:
    """A host that was a suspect, by host and by GPU, with cause and GPU-hours."""
    client = filled.world.client()
    (host,) = client.json("/api/v1/hosts")["items"]
    assert (host["id"], host["causes"], host["open_findings"]) == ("node-7", ["slow_gpu"], 1)
    share = report_of("slow").findings[0].excess_share
    assert host["gpu_hours_per_day"] == pytest.approx(share * 16 * 24)
    (gpu,) = client.json("/api/v1/hosts?by=gpu")["items"]
    assert gpu["id"] == "GPU-00000007"
    assert client.json("/api/v1/hosts?days=0.00001")["items"] == []
    assert client.get("/api/v1/hosts/nobody").status_code == 404


def test_the_fleet_adds_up(filled: Filled) -> None:
    """Jobs, slowed ones, GPU-hours by cause: the parts make the whole."""
    fleet = filled.world.client().json("/api/v1/fleet/summary?days=1")
    assert (fleet["jobs"], fleet["running"], fleet["analysed"], fleet["slowed"]) == (3, 3, 2, 1)
    assert fleet["slowed_share"] == 0.5
    assert sum(each["jobs"] for each in fleet["waste"]) == 2
    parts = sum(each["gpu_hours_per_day"] for each in fleet["causes"])
    assert parts == pytest.approx(fleet["gpu_hours_per_day"])
    assert names({"items": fleet["worst_jobs"]})[0] == "slow-job"
    assert fleet["cost_per_day"] is None


def test_agents_are_down_when_they_are_silent(filled: Filled) -> None:
    """Heartbeat age, spool and drops; down only while not ended."""
    world = filled.world
    path = f"/api/v1/agents?job={filled.slow.job_id}"
    (agent,) = world.client().json(path)["items"]
    assert (agent["heartbeat_age_s"], agent["spool_bytes"], agent["dropped"]) == (
        4,
        12,
        {"full": 2},
    )
    assert not agent["down"]
    assert world.client().json(f"{path}&down=true")["items"] == []
    with world.database.write() as session:
        session.connection().exec_driver_sql("UPDATE streams SET heartbeat_ns = 1")
    assert world.client().json(f"{path}&down=true")["items"][0]["down"]
    with world.database.write() as session:
        session.connection().exec_driver_sql("UPDATE streams SET ended = true")
    assert world.client().json(f"{path}&down=true")["items"] == []
    assert not world.client().json(path)["items"][0]["down"]


def test_a_job_is_pinned_and_let_go(filled: Filled) -> None:
    """Pin and unpin say what they did, and twice is once."""
    admin, path = filled.world.client("admin"), f"/api/v1/jobs/{filled.slow.job_id}"
    for verb, pinned in (("pin", True), ("pin", True), ("unpin", False)):
        assert admin.post(f"{path}/{verb}").json()["pinned"] is pinned


def test_a_job_that_is_removed_leaves_nothing(filled: Filled) -> None:
    """Rows of every table and all files go; those of other jobs stay."""
    world, job_id = filled.world, filled.slow.job_id
    paths = [f"events/job={job_id}/day=2026-09-21/w0-x.parquet"]
    paths.append(f"results/job={job_id}/{filled.slow.window_id}-workers.parquet")
    world.objects.put(paths[0], b"events")
    with world.database.write() as session:
        add_event_file(session, world.tenant_id, filled.slow, paths[0])
    assert world.client("admin").request("DELETE", f"/api/v1/jobs/{job_id}").status_code == 204
    assert [world.objects.size(path) for path in paths] == [None, None]
    assert world.client().get(f"/api/v1/jobs/{job_id}").status_code == 404
    with world.database.read() as session:
        tables = ("attempts", "streams", "windows", "results", "steps", "findings", "event_files")
        for table in (*tables, "finding_events"):
            rows = session.connection().exec_driver_sql(
                f"SELECT count(*) FROM {table} WHERE job_id = '{job_id}'"  # noqa: S608  # names of tables
            )
            assert rows.scalar() == 0, table
        assert session.query(Job).count() == 3


def test_prices_become_money(world: World) -> None:
    """With a price of a GPU hour, what is lost has one too."""
    priced = make_world(world.settings.data_dir / "priced", None, {"price_per_gpu_hour": 2.0})
    made = fill(priced)
    job = priced.client().json(f"/api/v1/jobs/{made.slow.job_id}")
    assert job["cost_per_day"] == pytest.approx(2 * job["gpu_hours_per_day"])
    priced.database.close()


def test_a_number_that_is_none_is_null(filled: Filled) -> None:
    """NaN in the database (from another tool) becomes null, and the answer stays JSON."""
    world = filled.world
    with world.database.write() as session:
        session.execute(update(StepResult).values(recorded_s=float("inf")))
    answer = world.client().get(f"/api/v1/jobs/{filled.slow.job_id}/history")
    assert json.loads(answer.content, parse_constant=pytest.fail)["recorded_s"][0] is None


@pytest.mark.postgres
def test_postgresql_answers_as_sqlite_does(filled: Filled, postgres_url: str) -> None:
    """Every question that is asked of the database is one for both."""
    other = fill(make_world(filled.world.settings.data_dir / "pg", url=postgres_url))
    paths = [
        "/jobs?sort=-waste", "/jobs?name=Slow&state=running", "/jobs/ID", "/jobs/ID/windows",
        "/jobs/ID/windows/latest", "/jobs/ID/findings?since=5", "/jobs/ID/workers",
        "/jobs/ID/history?points=10", "/jobs/ID/plan", "/hosts", "/hosts/node-7",
        "/fleet/summary", "/agents?down=false&job=ID", "/imports",
    ]  # fmt: skip
    for path in paths:
        one, two = (
            each.world.client().get("/api/v1" + path.replace("ID", each.slow.job_id))
            for each in (filled, other)
        )
        assert (two.status_code, _shape(two.json())) == (one.status_code, _shape(one.json())), path
    admin = other.world.client("admin")
    made = admin.post("/api/v1/imports").json()
    assert admin.post(f"/api/v1/imports/{made['id']}/start").status_code == 409
    assert admin.request("DELETE", f"/api/v1/jobs/{other.slow.job_id}").status_code == 204
    other.world.database.close()


def _shape(value: Any) -> Any:  # noqa: ANN401  # any JSON
    """Without ids, which differ."""
    if isinstance(value, dict):
        hidden = ("id", "key", "job_id", "finding_id", "stream_id", "window_id")
        return {key: _shape(each) for key, each in value.items() if key not in hidden}
    return [_shape(each) for each in value] if isinstance(value, list) else value
