from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from sqlalchemy import select
from sqlalchemy.orm import Session

from smon.api.agents import agent_openapi, interval_for
from smon.api.hello import MAX_NAME, MAX_STREAMS, read_heartbeat, read_hello
from smon.errors import WireError
from smon.ingest.agents import AgentFigures
from smon.ingest.metrics import IngestMetrics
from smon.store import streams
from smon.store.models import Job, Stream
from smon.store.streams import StreamRequest
from smon.topology import Layout
from smon.wire.problems import Problem
from tests.ingest.batches import ops
from tests.ingest.serving import Client, Running, folder_settings

HELLO = "/api/v1/agents/hello"
HEARTBEAT = "/api/v1/agents/heartbeat"
AGENT = {"version": "1", "host": "node1", "pid": 7}
Serve = Callable[..., Running]


def stream(key: str = "k1", **changed: object) -> dict[str, Any]:
    """A stream of a hello."""
    made: dict[str, Any] = {
        "key": key,
        "job": "llama",
        "attempt": 1,
        "layout": {"dp": 4, "pp": 2},
        "mode": "live",
        "time": "unix",
        "window_steps": None,
        "host": "node1",
        "source": "recorder",
        "ranks": [1],
        "epoch": 0,
        "notes": [],
    }
    return {**made, **changed}


def hello(*streams: dict[str, Any], **changed: object) -> bytes:
    """A hello."""
    return json.dumps({"protocol": 1, "agent": AGENT, "streams": streams, **changed}).encode()


def beat(name: str, **changed: object) -> dict[str, Any]:
    """A stream of a heartbeat."""
    made: dict[str, Any] = {
        "stream_id": name,
        "epoch": 0,
        "next_seq": 3,
        "spool_bytes": 100,
        "oldest_unsent_s": 1.5,
        "dropped": {"spool-full": 4},
    }
    return {**made, **changed}


def heartbeat(*streams: dict[str, Any], **changed: object) -> bytes:
    """A heartbeat."""
    clock = {"offset_ns": -5, "error_ns": 10, "drift_ppm": 0.5}
    return json.dumps({"agent": AGENT, "streams": streams, "clock": clock, **changed}).encode()


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server with a real database, for all tests here that do not change its settings."""
    server = Running(folder_settings(tmp_path_factory.mktemp("agents")))
    server.start()
    yield server
    server.stop()


def registered(client: Client, *streams: dict[str, Any]) -> list[dict[str, Any]]:
    """What a hello answers of each stream."""
    found: list[dict[str, Any]] = client.ask("POST", HELLO, hello(*streams)).document["streams"]
    return found


# --- hello ------------------------------------------------------------------------------------


def test_a_hello_tells_all_that_an_agent_needs(known: Running) -> None:
    """Server, limits, encodings, when to send, and each stream with what is expected next."""
    answer = known.client().ask("POST", HELLO, hello(stream("h1")))
    document = answer.document
    assert answer.status == 200
    assert document["protocol"] == 1
    assert document["server_id"] == known.service.server_id
    assert abs(document["time_ns"] - time.time_ns()) < 60 * 10**9
    assert document["limits"] == {
        "body_bytes": 4 << 20,
        "decoded_bytes": 32 << 20,
        "events": 100_000,
        "ratio": 20,
    }
    assert "zstd" in document["encodings"]
    assert "application/json" in document["content_types"]
    assert document["flush"]["interval_s"] == 1.0
    assert 0 <= document["flush"]["phase_s"] < 1.0
    assert document["heartbeat_s"] == 15.0
    (found,) = document["streams"]
    assert (found["key"], found["epoch"], found["next_seq"]) == ("h1", 0, 0)


def test_who_says_hello_again_gets_the_same_stream_and_goes_on(known: Running) -> None:
    """With the numbers that are durable, whether they are in the log or stored."""
    client = known.client()
    (first,) = registered(client, stream("again"))
    batch = ops(0, start_ns=[time.time_ns()] * 12)
    assert client.put(batch, place=f"{first['stream_id']}/0/0").document["status"] == "stored"
    (second,) = registered(client, stream("again"))
    assert second == {**first, "next_seq": 1}
    (third,) = registered(client, stream("again", epoch=1))
    assert (third["epoch"], third["next_seq"]) == (1, 0)
    (fourth,) = registered(client, stream("again", epoch=0))
    assert fourth["problem"]["type"].endswith("stale-epoch")


def test_each_stream_is_answered_for_itself(known: Running) -> None:
    """One that is wrong does not hold up its neighbours."""
    client = known.client()
    registered(client, stream("n0", job="neighbours"))
    answers = registered(
        client,
        stream("n1", job="neighbours"),
        stream("n2", job="neighbours", layout={"dp": 8, "pp": 2}),
        stream("n3", job="neighbours", attempt=-1),
        stream("n0", job="another"),
    )
    problems = [answer.get("problem", {}).get("type", "")[17:] for answer in answers]
    assert problems == ["", "layout-conflict", "invalid", "key-conflict"]


@pytest.mark.parametrize("name", ["../../evil", "a/b c", "é ünïcode 名前", "'; DROP TABLE jobs;--"])
def test_a_job_may_have_any_printable_name(known: Running, name: str) -> None:
    """It is text in a column, and never a path."""
    (answer,) = registered(known.client(), stream(f"key {name}", job=name))
    assert "problem" not in answer
    with known.database.read() as session:
        assert session.scalar(select(Job.id).where(Job.name == name))
    folder = known.settings.data_dir
    assert not list(Path(folder.parent).rglob("*evil*"))


def test_a_tenant_has_a_number_of_open_streams(serve: Serve) -> None:
    """At the limit streams are registered; above, the new one is not; known ones go on."""
    client = serve(max_streams_per_tenant=2).client()
    answers = registered(client, stream("a"), stream("b"), stream("c"))
    assert ["problem" in answer for answer in answers] == [False, False, True]
    assert answers[2]["problem"]["type"].endswith("rate-limited")
    assert "problem" not in registered(client, stream("b"))[0]


@pytest.mark.parametrize("count, interval_s", [(0, 1.0), (125, 1.0), (500, 4.0), (12_500, 10.0)])
def test_the_flush_interval_grows_with_the_streams(count: int, interval_s: float) -> None:
    """A second for up to 125 streams, ten at most."""
    assert interval_for(count) == interval_s


def test_the_flush_interval_may_be_set(serve: Serve) -> None:
    """Then it does not depend on anything."""
    client = serve(flush_interval_s=0.3).client()
    assert client.ask("POST", HELLO, hello()).document["flush"]["interval_s"] == 0.3


def test_agents_send_at_different_moments(known: Running) -> None:
    """The phase is made of the host's name."""
    client = known.client()
    phases = set()
    for number in range(20):
        agent = {**AGENT, "host": f"node{number}"}
        answer = client.ask("POST", HELLO, hello(agent=agent))
        phases.add(answer.document["flush"]["phase_s"])
    assert len(phases) > 15


@pytest.mark.parametrize(
    "changed",
    [
        {"key": ""},
        {"key": "a" * 257},
        {"key": 3},
        {"key": "a\nb"},
    ],
)
def test_a_stream_without_a_sound_key_spoils_the_hello(changed: dict[str, Any]) -> None:
    """There would be no name to answer it by."""
    with pytest.raises(WireError) as caught:
        read_hello(hello(stream(**changed)))
    assert caught.value.problem == Problem.INVALID


@pytest.mark.parametrize(
    "changed",
    [
        {"job": ""},
        {"job": "a" * (MAX_NAME + 1)},
        {"job": "tab\tjob"},
        {"job": "nul\0"},
        {"job": "rtl\u202e"},
        {"job": None},
        {"attempt": -1},
        {"attempt": True},
        {"attempt": 1.0},
        {"attempt": 2**31},
        {"layout": {"dp": 4}},
        {"layout": {"dp": 0, "pp": 1}},
        {"layout": {"dp": 2**21, "pp": 1}},
        {"layout": {"dp": 2**20, "pp": 2}},
        {"layout": {"dp": 4, "pp": 2, "zz": 1}},
        {"layout": [4, 2]},
        {"mode": "dead"},
        {"mode": ["live"]},
        {"time": "gps"},
        {"window_steps": -1},
        {"window_steps": "40"},
        {"host": ""},
        {"source": "a" * 201},
        {"ranks": [8]},
        {"ranks": [-1]},
        {"ranks": [1, 1]},
        {"ranks": [True]},
        {"ranks": "1"},
        {"epoch": -1},
        {"notes": "x"},
        {"notes": [3]},
        {"notes": ["x" * 1001]},
        {"notes": ["x"] * 101},
    ],
)
def test_a_stream_is_read_strictly(changed: dict[str, Any]) -> None:
    """Every field has its type and bounds; nothing is guessed."""
    ((_, found),) = read_hello(hello(stream(**changed))).streams
    assert isinstance(found, WireError)
    assert found.problem == Problem.INVALID


def test_a_stream_at_its_bounds_is_read() -> None:
    """Names of 200 characters, the last rank, the smallest and largest numbers."""
    changed: dict[str, Any] = {
        "job": "a" * MAX_NAME,
        "attempt": 2**31 - 1,
        "layout": {"dp": 4, "pp": 2, "tp": 2, "cp": 1, "ep": 2, "vpp": 2},
        "window_steps": 0,
        "ranks": [15, 0],
        "notes": ["line\nend"],
        "mode": "recorded",
        "time": "step",
    }
    ((key, found),) = read_hello(hello(stream(**changed))).streams
    assert isinstance(found, StreamRequest)
    assert key == "k1"
    assert found.ranks == (0, 15)
    assert found.layout == Layout(dp=4, pp=2, tp=2, ep=2, vpp=2)
    assert found.notes == ("line end",)


@pytest.mark.parametrize(
    "body, problem",
    [
        (b"", Problem.MALFORMED_BODY),
        (b"{", Problem.MALFORMED_BODY),
        (b"[" * 100_000, Problem.MALFORMED_BODY),
        (b'{"protocol": NaN}', Problem.MALFORMED_BODY),
        (b"[]", Problem.INVALID),
        (hello(protocol=2), Problem.INVALID),
        (hello(agent=None), Problem.INVALID),
        (hello(agent={"version": "1", "host": "a\nb", "pid": 1}), Problem.INVALID),
        (hello(streams={}), Problem.INVALID),
        (hello(streams=[1]), Problem.INVALID),
        (hello(streams=[stream()] * (MAX_STREAMS + 1)), Problem.INVALID),
    ],
    ids=range(11),
)
def test_a_malformed_hello_is_refused(body: bytes, problem: Problem) -> None:
    """As a whole."""
    with pytest.raises(WireError) as caught:
        read_hello(body)
    assert caught.value.problem == problem


def test_hello_needs_json_of_bounded_size_and_a_token(serve: Serve) -> None:
    """As every route for agents."""
    server = serve(max_json_bytes=1000)
    client = server.client()
    assert client.ask("POST", HELLO, hello(), type_="text/plain").status == 415
    assert client.ask("POST", HELLO, hello().ljust(1000)).status == 200
    assert client.ask("POST", HELLO, hello().ljust(1001)).problem == Problem.TOO_LARGE
    other = server.client()
    other.send(b"GET /api/v1/time HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = other.answer()
    assert answer.problem == Problem.UNAUTHORIZED
    assert answer.headers["www-authenticate"] == "Bearer"


# --- heartbeat --------------------------------------------------------------------------------


def test_a_heartbeat_is_noted_and_names_the_streams_that_nobody_knows(known: Running) -> None:
    """So that the agent says hello again."""
    client = known.client()
    (found,) = registered(client, stream("alive"))
    answer = client.ask("POST", HEARTBEAT, heartbeat(beat(found["stream_id"]), beat("no-such")))
    assert answer.status == 200
    assert answer.document["unknown_streams"] == ["no-such"]
    assert answer.document["server_id"] == known.service.server_id
    assert answer.document["flush"].keys() == {"interval_s", "phase_s"}
    with known.database.read() as session:
        row = session.get_one(Stream, found["stream_id"])
        assert row.heartbeat is not None
        assert row.heartbeat["agent"] == AGENT
        assert row.heartbeat["spool_bytes"] == 100
        assert row.heartbeat["clock"]["offset_ns"] == -5
        assert row.heartbeat_ns is not None


def test_a_heartbeat_locks_streams_in_the_order_of_a_commit(
    known: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else, on PostgreSQL, each could hold what the other wants."""
    client = known.client()
    found = registered(client, *(stream(f"k{number}") for number in range(8)))
    names = [each["stream_id"] for each in found]
    asked, note = list[str](), streams.heartbeat

    def noted(session: Session, tenant: str, name: str, *rest: Any) -> bool:  # noqa: ANN401  # passed on
        asked.append(name)
        return note(session, tenant, name, *rest)

    monkeypatch.setattr(streams, "heartbeat", noted)
    backwards = sorted(names, reverse=True)
    answer = client.ask("POST", HEARTBEAT, heartbeat(*(beat(name) for name in backwards)))
    assert answer.status == 200
    assert asked == sorted(names)


def test_a_heartbeat_may_know_no_clock(known: Running) -> None:
    """The first one comes before the probes."""
    (found,) = registered(known.client(), stream("clockless"))
    body = heartbeat(beat(found["stream_id"], oldest_unsent_s=None), clock=None)
    assert known.client().ask("POST", HEARTBEAT, body).status == 200


@pytest.mark.parametrize(
    "changed",
    [
        {"stream_id": ""},
        {"epoch": -1},
        {"next_seq": None},
        {"spool_bytes": -1},
        {"spool_bytes": 2**70},
        {"oldest_unsent_s": "x"},
        {"dropped": [1]},
        {"dropped": {"a": -1}},
        {"dropped": {"a": 1.5}},
        {"dropped": {"a\n": 1}},
        {"dropped": {str(number): 1 for number in range(65)}},
    ],
)
def test_a_heartbeat_is_read_strictly(changed: dict[str, Any]) -> None:
    """Every field has its type and bounds."""
    with pytest.raises(WireError):
        read_heartbeat(heartbeat(beat("s", **changed)))


@pytest.mark.parametrize("clock", [3, {}, {"offset_ns": 1}, {"offset_ns": 1, "error_ns": -1}])
def test_the_clock_of_a_heartbeat_is_read_strictly(clock: object) -> None:
    """Offset and error, or null."""
    with pytest.raises(WireError):
        read_heartbeat(heartbeat(clock=clock))


def test_figures_of_agents_are_added_up() -> None:
    """Over the streams that were heard of lately; what was dropped counts once."""
    registry, now = CollectorRegistry(), [0]
    figures = AgentFigures(IngestMetrics(registry), 60.0, lambda: now[0])
    figures.note("a", 100, {"spool-full": 5, "strange": 1})
    figures.note("b", 50, {})
    figures.note("a", 70, {"spool-full": 7, "stranger": 2})

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("smon_agent_streams") == 2
    assert value("smon_agent_spool_bytes") == 120
    assert value("smon_agent_dropped_total", reason="spool-full") == 7
    assert value("smon_agent_dropped_total", reason="other") == 2
    # The agent begins anew, and counts from 0.
    figures.note("a", 70, {"spool-full": 2})
    assert value("smon_agent_dropped_total", reason="spool-full") == 9
    now[0] = 61 * 10**9
    assert value("smon_agent_streams") == 0
    assert value("smon_agent_spool_bytes") == 0


# --- time -------------------------------------------------------------------------------------


def test_the_time_is_told_twice(known: Running) -> None:
    """When the request was there, and when it was answered."""
    before = time.time_ns()
    document = known.client().ask("GET", "/api/v1/time").document
    assert before <= document["received_ns"] <= document["sent_ns"] <= time.time_ns()


def test_the_routes_describe_themselves() -> None:
    """Paths, methods, answers, for the OpenAPI document."""
    described = agent_openapi()
    assert {path: list(methods) for path, methods in described.items()} == {
        HELLO: ["post"],
        HEARTBEAT: ["post"],
        "/api/v1/time": ["get"],
    }
    for methods in described.values():
        for operation in methods.values():
            assert {"200", "401", "403", "503"} <= operation["responses"].keys()
