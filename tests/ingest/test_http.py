from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from smon.api.ingest import Doorman, FastLane, ingest_openapi
from smon.api.protocol import MAX_HEAD_BYTES
from smon.errors import StoreError, WireError
from smon.ingest.records import Record
from smon.ingest.service import Parts
from smon.ingest.wal import Wal
from smon.store.models import Mode
from smon.wire.problems import KINDS, Problem
from tests.ingest.batches import STREAM, FakeStore, FaultyDisk, gap, info, json_ops, ops
from tests.ingest.serving import Client, Running, TokenGate, request_of
from tests.service import run_aside
from tests.waiting import wait_until

Serve = Callable[..., Running]

READER: dict[str, Any] = {"token": "reader"}


class Now(FakeStore):
    """A store whose stream takes ops of any time."""

    def __init__(self) -> None:
        super().__init__(info(mode=Mode.RECORDED))


class HeldWal(Wal):
    """A log that writes only while it is let."""

    gate = threading.Event()

    def _commit(self, group: list[Record]) -> None:
        self.gate.wait()
        super()._commit(group)


class Stuck(Now):
    """A store that takes nothing from the log."""

    def ping(self) -> None:
        """Fail."""
        raise StoreError("stuck")


def parts(**changed: Any) -> Parts:  # noqa: ANN401  # fields of Parts
    """A store in memory."""
    return Parts(**{"store": Now(), **changed})


def test_a_batch_is_delivered_and_a_resend_is_a_duplicate(serve: Serve) -> None:
    """Over one connection."""
    client = serve(parts()).client()
    first = client.put(ops(0))
    assert (first.status, first.document) == (200, {"status": "stored", "next_seq": 1})
    assert first.headers["content-type"] == "application/json"
    assert client.put(ops(0)).document == {"status": "duplicate", "next_seq": 1}
    assert client.put(json_ops(1)).document == {"status": "stored", "next_seq": 2}
    assert client.put(gap(2, 4)).document == {"status": "stored", "next_seq": 5}


@pytest.mark.parametrize(
    "options, problem",
    [
        ({"token": "none"}, Problem.UNAUTHORIZED),
        ({"token": "reader"}, Problem.FORBIDDEN),
        ({"token": "other"}, Problem.NOT_FOUND),
        ({"method": "POST"}, Problem.METHOD_NOT_ALLOWED),
        ({"place": "a/b"}, Problem.NOT_FOUND),
        ({"place": f"{STREAM}/0/x"}, Problem.NOT_FOUND),
        ({"place": f"{STREAM}/0/-1"}, Problem.NOT_FOUND),
        ({"place": f"{STREAM}/0/{10**18}"}, Problem.NOT_FOUND),
        ({"place": f"{STREAM}/1/0"}, Problem.NOT_FOUND),
        ({"place": "no-such-stream/0/0"}, Problem.NOT_FOUND),
        ({"place": "..%2f..%2fevil/0/0"}, Problem.NOT_FOUND),
        ({"place": "a%00b/0/0"}, Problem.NOT_FOUND),
        ({"place": "a%0d%0ab/0/0"}, Problem.NOT_FOUND),
        ({"headers": {"SMon-Schema": "smon.ops/9"}}, Problem.WRONG_SCHEMA),
        ({"headers": {"SMon-Events": None}}, Problem.BAD_REQUEST),
        ({"headers": {"SMon-Events": "1e3"}}, Problem.BAD_REQUEST),
        ({"headers": {"SMon-Events": "13"}}, Problem.MALFORMED_BODY),
        ({"headers": {"Content-Digest": None}}, Problem.DIGEST_MISMATCH),
        ({"headers": {"Content-Digest": "sha-256=:AAAA:"}}, Problem.DIGEST_MISMATCH),
        ({"headers": {"Content-Encoding": "br"}}, Problem.UNSUPPORTED_ENCODING),
        ({"headers": {"Content-Encoding": "zstd, gzip"}}, Problem.UNSUPPORTED_ENCODING),
        ({"headers": {"Content-Encoding": "gzip"}}, Problem.MALFORMED_BODY),
        ({"headers": {"Content-Type": "application/octet-stream"}}, Problem.UNSUPPORTED_TYPE),
        ({"headers": {"Content-Type": "application/json"}}, Problem.MALFORMED_BODY),
    ],
)
def test_what_is_wrong_is_answered_with_its_problem(
    shared: Running, options: dict[str, Any], problem: Problem
) -> None:
    """It is counted; the connection stays, and the next batch is taken."""
    before = _counted(shared, problem)
    client = shared.client()
    answer = client.put(ops(next(_FRESH)), **options)
    assert (answer.status, answer.problem) == (KINDS[problem].status, problem)
    assert client.put(ops(0)).status == 200
    assert _counted(shared, problem) == [count + 1 for count in before]


_FRESH = itertools.count(100)


def _counted(server: Running, problem: Problem) -> list[float]:
    status = str(KINDS[problem].status)
    return [
        server.metric("smon_ingest_refused_total", problem=problem.value),
        server.metric("smon_ingest_requests_total", status=status),
        server.metric("smon_ingest_batches_total", result="refused"),
    ]


def test_a_body_that_was_changed_on_its_way_is_refused(shared: Running) -> None:
    """Every one of its bytes counts."""
    client = shared.client()
    batch = ops(0)
    for at in range(0, len(batch.body), 37):
        body = bytearray(batch.body)
        body[at] ^= 1
        headers = {"Content-Digest": batch.headers()["Content-Digest"]}
        answer = client.put(dataclasses.replace(batch, body=bytes(body)), headers=headers)
        assert answer.problem == Problem.DIGEST_MISMATCH


def test_the_answer_does_not_repeat_the_body(shared: Running) -> None:
    """Nor any value of it."""
    client = shared.client()
    answer = client.put(json_ops(next(_FRESH), optype=["SECRET WORD"] * 12))
    assert answer.problem == Problem.WRONG_VALUES
    assert b"SECRET" not in answer.body


def test_a_length_is_needed(shared: Running) -> None:
    """A body in chunks has no size that could be refused beforehand."""
    client = shared.client()
    head = request_of(
        dataclasses.replace(ops(0), body=b""),
        headers={"Content-Length": None, "Transfer-Encoding": "chunked"},
    )
    client.send(head + b"0\r\n\r\n")
    assert client.answer().problem == Problem.LENGTH_REQUIRED


@pytest.mark.parametrize("apart", [True, False])
def test_nothing_behind_a_body_in_chunks_is_a_request(serve: Serve, *, apart: bool) -> None:
    """Something on the way may see its end elsewhere: the connection ends with the answer."""
    server, batch = serve(parts()), ops(0)
    client = server.client()
    headers = {"Content-Length": None, "Transfer-Encoding": "chunked"}
    pieces = [request_of(dataclasses.replace(batch, body=b""), headers=headers), b"0\r\n\r\n"]
    pieces.append(request_of(batch))
    for piece in pieces if apart else [b"".join(pieces)]:
        with contextlib.suppress(ConnectionError):
            client.send(piece)
    answer = client.answer()
    assert answer.problem == Problem.LENGTH_REQUIRED
    assert answer.headers["connection"] == "close"
    assert client.closed()
    assert server.client().put(batch).document["status"] == "stored"


def test_nothing_behind_a_body_in_chunks_is_a_header_of_it(shared: Running) -> None:
    """Also not when all comes in one piece, before the request is looked at."""
    headers = {"Content-Length": None, "Transfer-Encoding": "chunked", "Authorization": None}
    head = request_of(dataclasses.replace(ops(0), body=b""), headers=headers)
    client = shared.client()
    client.send(head + b"0\r\n\r\n" + request_of(ops(0)))
    assert client.answer().problem == Problem.UNAUTHORIZED
    assert client.closed()


def test_too_large_a_body_is_refused_before_it_is_sent(serve: Serve) -> None:
    """At the limit it is read; above, the answer comes at once."""
    batch = ops(0)
    server = serve(parts(), max_body_bytes=len(batch.body))
    assert server.client().put(batch).status == 200
    client = server.client()
    client.send(
        request_of(dataclasses.replace(batch, body=b""), headers={"Content-Length": "9" * 9})
    )
    assert client.answer().problem == Problem.TOO_LARGE
    above = ops(0, rows=40)
    assert len(above.body) > len(batch.body)
    other = server.client()
    assert other.put(above).problem == Problem.TOO_LARGE
    assert other.put(batch).status == 200


def test_a_client_may_ask_before_it_sends(serve: Serve) -> None:
    """``Expect: 100-continue``: a refusal comes without the body."""
    client = serve(parts()).client()
    whole = request_of(ops(0), headers={"Expect": "100-continue"})
    head, _, body = whole.partition(b"\r\n\r\n")
    client.send(head + b"\r\n\r\n")
    assert client.answer().status == 100
    client.send(body)
    assert client.answer().document["status"] == "stored"


def test_a_conflict_and_a_stale_epoch_are_409(serve: Serve) -> None:
    """The agent begins a new epoch."""
    server = serve(parts())
    client = server.client()
    client.put(ops(0))
    assert client.put(ops(0, rows=14)).problem == Problem.KEY_CONFLICT
    store = server.parts.store
    assert isinstance(store, FakeStore)
    store.streams["default", STREAM] = dataclasses.replace(
        store.streams["default", STREAM], epoch=1
    )
    assert client.put(ops(0), place=f"{STREAM}/1/0").status == 200
    assert client.put(ops(1)).problem == Problem.STALE_EPOCH


def test_a_tenant_over_its_limit_is_told_when_to_come(serve: Serve) -> None:
    """429 with Retry-After."""
    client = serve(parts(), tenant_events_per_s=0.1).client()
    assert client.put(ops(0)).status == 200
    answer = client.put(ops(1))
    assert (answer.status, answer.problem) == (429, Problem.RATE_LIMITED)
    assert int(answer.headers["retry-after"]) > 60


def test_bodies_in_flight_have_a_limit(serve: Serve) -> None:
    """Beyond it 503 with a pause of 3 to 9 s; later there is room again."""
    HeldWal.gate.clear()
    batch = ops(0)
    server = serve(parts(wal=HeldWal), max_in_flight_bytes=len(batch.body) + 10)
    first, second = server.client(), server.client()
    first.send(request_of(batch))
    wait_until(lambda: server.metric("smon_ingest_in_flight_bytes"), "a body on its way")
    answer = second.put(ops(1))
    assert (answer.status, answer.problem) == (503, Problem.OVERLOADED)
    assert 3 <= int(answer.headers["retry-after"]) <= 9
    HeldWal.gate.set()
    assert first.answer().status == 200
    assert second.put(ops(1)).status == 200


def test_a_full_log_refuses_before_it_looks_into_a_body(serve: Serve) -> None:
    """503, also for one that would be 400: a refusal costs no decoding."""
    client = serve(parts(store=Stuck()), max_wal_bytes=4096 * 3).client()
    seq = 0
    while client.put(ops(seq)).status == 200:
        seq += 1
    spoiled = dataclasses.replace(ops(seq), body=b"x" * 2 * len(ops(seq).body))
    answer = client.put(spoiled)
    assert (answer.status, answer.problem) == (503, Problem.OVERLOADED)
    assert int(answer.headers["retry-after"]) >= 1
    assert seq > 0


def test_a_full_disk_is_507_and_passes(serve: Serve) -> None:
    """Not ready meanwhile."""
    disk = FaultyDisk()
    server = serve(parts(disk=disk), min_free_bytes=1000)
    client = server.client()
    disk.free = 1200
    answer = client.put(ops(0))
    assert (answer.status, answer.problem) == (507, Problem.DISK_FULL)
    assert server.health("/readyz").status == 503
    assert server.health("/healthz").status == 200
    assert server.metric("smon_wal_read_only") == 1
    disk.free = None
    wait_until(lambda: server.health("/readyz").status == 200, "a server that is ready")
    assert client.put(ops(0)).document["status"] == "stored"
    assert server.metric("smon_wal_read_only") == 0


def test_a_database_that_is_down_is_503_for_strangers_only(serve: Serve) -> None:
    """Tokens and streams that are known go on; the answer names no host."""
    server = serve(parts())
    client = server.client()
    assert client.put(ops(0)).status == 200
    store = server.parts.store
    assert isinstance(store, FakeStore)
    store.down = server.gate.down = True
    assert client.put(ops(1)).status == 200
    answer = client.put(ops(0), place="unknown/0/0")
    assert (answer.status, answer.problem) == (503, Problem.STORE_UNAVAILABLE)
    answer = client.put(ops(2), **READER)
    assert answer.problem == Problem.STORE_UNAVAILABLE
    assert b"10.0.0.1" not in answer.body
    wait_until(lambda: server.health("/readyz").status != 200, "a server that is not ready")
    assert server.health("/readyz").document["reasons"]


def test_a_defect_is_500_and_counted(serve: Serve) -> None:
    """No traceback gets out, and the batch may be sent again."""

    class Broken(Now):
        ill = True

        def find(self, tenant_id: str, stream_id: str) -> Any:  # noqa: ANN401  # as FakeStore
            if self.ill:
                raise RuntimeError("SECRET")
            return super().find(tenant_id, stream_id)

    store = Broken()
    server = serve(parts(store=store))
    client = server.client()
    answer = client.put(ops(0))
    assert (answer.status, answer.problem) == (500, Problem.INTERNAL)
    assert b"SECRET" not in answer.body
    assert server.metric("smon_ingest_refused_total", problem="internal") == 1
    store.ill = False
    assert server.client().put(ops(0)).document["status"] == "stored"


# --- the socket -------------------------------------------------------------------------------


def test_slow_clients_harm_nobody(serve: Serve) -> None:
    """Half requests from many connections: health and an agent go on, the slow ones get 408."""
    server = serve(parts(), receive_timeout_s=3.0)
    whole = request_of(ops(0))
    slow = [server.client() for _ in range(40)]
    for number, client in enumerate(slow):
        client.send(whole[: 1 + number * (len(whole) - 2) // 40])
    agent = server.client()
    for number in range(20):
        assert agent.put(ops(number)).document["status"] == "stored"
        for client in slow:
            # One byte a time keeps nothing alive.
            try:
                client.send(b"x" if number % 2 else b"")
            except ConnectionError:
                continue
        assert server.health("/healthz").body == b"ok\n"
        assert server.health("/readyz").status == 200
    answers = []
    for client in slow:
        try:
            answers.append(client.answer().problem)
        except ConnectionError:
            answers.append("closed")
    assert answers.count(Problem.TOO_SLOW) > 20
    assert server.metric("smon_ingest_requests_too_slow_total") > 20
    assert server.client().put(ops(0)).document["status"] == "duplicate"


def test_a_connection_that_says_nothing_is_closed(serve: Serve) -> None:
    """Without an answer: nothing was asked."""
    assert serve(parts(), receive_timeout_s=0.1).client().closed()


def test_line_ends_between_requests_keep_nothing_open(serve: Serve) -> None:
    """They are allowed, and begin no request."""
    client = serve(parts(), receive_timeout_s=2.0).client()
    assert client.put(ops(0)).status == 200
    client.socket.settimeout(0.02)
    wait_until(lambda: _is_closed(client, b"\r\n"), "the end of the connection")


def _is_closed(client: Client, data: bytes) -> bool:
    """Whether the connection is closed, found out by sending a little."""
    try:
        client.send(data)
        return client.socket.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def test_an_idle_connection_is_kept_for_a_while_and_then_closed(serve: Serve) -> None:
    """Longer than a request may take."""
    client = serve(parts(), receive_timeout_s=1.0, keep_alive_s=6.0).client()
    assert client.put(ops(0)).status == 200
    client.socket.settimeout(2.0)
    with pytest.raises(TimeoutError):
        client.socket.recv(1)
    client.socket.settimeout(20)
    assert client.closed()


def test_an_answer_may_take_longer_than_a_request(serve: Serve) -> None:
    """The deadline is for receiving alone."""
    HeldWal.gate.clear()
    server = serve(parts(wal=HeldWal), receive_timeout_s=1.0)
    client = server.client()
    client.send(request_of(ops(0)))
    client.socket.settimeout(2.0)
    with pytest.raises(TimeoutError):
        client.socket.recv(1)
    client.socket.settimeout(20)
    HeldWal.gate.set()
    assert client.answer().document["status"] == "stored"


def test_an_address_has_a_number_of_connections(serve: Serve) -> None:
    """Below and at the limit they work; one more is closed at once; one that goes makes room."""
    server = serve(parts(), max_connections_per_address=3)
    clients = [server.client() for _ in range(3)]
    for number, client in enumerate(clients):
        assert client.put(ops(number)).status == 200
    assert server.client().closed()
    assert server.metric("smon_ingest_connections_refused_total", limit="address") == 1
    assert server.metric("smon_ingest_connections") == 3
    clients[0].close()
    wait_until(lambda: server.metric("smon_ingest_connections") < 3, "a connection to go")
    assert server.client().put(ops(3)).status == 200
    assert server.health("/healthz").status == 200


def test_all_addresses_together_have_a_number_of_connections(serve: Serve) -> None:
    """As each of them."""
    server = serve(parts(), max_connections=2)
    clients = [server.client() for _ in range(2)]
    assert [client.put(ops(number)).status for number, client in enumerate(clients)] == [200, 200]
    assert server.client().closed()
    assert server.metric("smon_ingest_connections_refused_total", limit="all") == 1


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\x00", b"HELO there\r\n\r\n", b"PUT /\r\nbroken\r\n\r\n"],
    ids=["tls", "smtp", "no-version"],
)
def test_what_is_no_http_is_a_problem_document(shared: Running, data: bytes) -> None:
    """And the connection is closed."""
    client = shared.client()
    client.send(data)
    assert client.answer().problem == Problem.BAD_REQUEST
    assert client.closed()
    assert shared.client().put(ops(0)).status == 200


@pytest.mark.parametrize("whole", [False, True])
def test_a_head_has_a_largest_size(shared: Running, *, whole: bool) -> None:
    """Whether it comes in one piece or never ends; one that is just small enough is read."""
    client = shared.client()
    filler = {"X-Filler": "x" * (MAX_HEAD_BYTES - 2000)}
    assert client.put(ops(0), headers=filler).status == 200
    head = b"PUT /api/v1/ingest/a/0/0 HTTP/1.1\r\nHost: localhost\r\nX-Filler: "
    client.send(head + b"x" * MAX_HEAD_BYTES + (b"\r\n\r\n" if whole else b""))
    assert client.answer().problem == Problem.BAD_REQUEST
    assert client.closed()


def test_requests_one_after_another_in_one_piece_are_all_answered(serve: Serve) -> None:
    """Pipelining is slow, and works."""
    client = serve(parts()).client()
    client.send(request_of(ops(0)) + request_of(ops(1)) + request_of(ops(2)))
    assert [client.answer().document["next_seq"] for _ in range(3)] == [1, 2, 3]


def test_a_client_that_leaves_in_the_middle_leaves_nothing(serve: Serve) -> None:
    """No room is held, and nothing is stored."""
    server = serve(parts())
    client = server.client()
    client.send(request_of(ops(0))[:-5])
    wait_until(lambda: server.metric("smon_ingest_in_flight_bytes"), "a body on its way")
    client.close()
    wait_until(lambda: not server.metric("smon_ingest_in_flight_bytes"), "no body on its way")
    assert server.client().put(ops(0)).document["status"] == "stored"


# --- the ops port -----------------------------------------------------------------------------


def test_the_ops_port_tells_health_readiness_and_metrics(serve: Serve) -> None:
    """And nothing else."""
    server = serve(parts())
    server.client().put(ops(0))
    assert server.health("/healthz").status == 200
    ready = server.health("/readyz")
    assert ready.document == {"ready": True, "reasons": []}
    metrics = server.health("/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert b"smon_ingest_events_total 12.0" in metrics.body
    assert server.health("/api/v1/jobs").problem == Problem.NOT_FOUND


def test_health_answers_while_readiness_takes_long(serve: Serve) -> None:
    """A database that hangs holds up its own question only."""
    server = serve(parts())
    wait = threading.Event()
    ops_server = server._ops
    assert ops_server is not None
    ops_server._server.config.app._ready = lambda: [str(wait.wait(20))]  # type: ignore[union-attr]  # our own app
    hanging = Client(ops_server.port)
    hanging.send(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
    for _ in range(5):
        assert server.health("/healthz").status == 200
    wait.set()
    assert hanging.answer().status == 503
    hanging.close()


# --- description ------------------------------------------------------------------------------


def test_the_gate_is_not_asked_for_every_batch() -> None:
    """What it said holds for two seconds; a quarter of an hour while it cannot tell; no longer."""
    now, gate = [0.0], TokenGate()
    doorman = Doorman(gate, lambda: now[0])
    headers = {"authorization": "Bearer good", "host": "localhost"}

    async def ask() -> str:
        return (await doorman.access(headers)).tenant_id

    async def test() -> None:
        assert await asyncio.gather(*(ask() for _ in range(3))) == ["default"] * 3
        first = gate.asked
        now[0] = 1.9
        await ask()
        assert gate.asked == first
        now[0] = 2.0
        await asyncio.gather(*(ask() for _ in range(50)))
        assert gate.asked == first + 1
        gate.down = True
        for second in (5, 6, 100, 899):
            now[0] = second
            assert await ask() == "default"
        now[0] = 903
        with pytest.raises(StoreError):
            await ask()
        gate.down = False
        assert await ask() == "default"
        headers["authorization"] = "Bearer revoked"
        with pytest.raises(WireError):
            await ask()

    run_aside(test)


def test_batches_do_not_pass_the_middleware_of_the_application(shared: Running) -> None:
    """All other requests do; answers of the fast lane have an id as well."""

    async def behind(scope: Scope, receive: Receive, send: Send) -> None:
        await Response("behind", 418)(scope, receive, send)

    lane = FastLane(behind, shared.service, shared.gate)

    async def ask(path: str) -> tuple[int, bytes]:
        transport = httpx.ASGITransport(lane)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.put(path)
        return answer.status_code, answer.content

    assert run_aside(lambda: ask("/api/v1/jobs")) == (418, b"behind")
    status, body = run_aside(lambda: ask("/api/v1/ingest/a/0/0"))
    assert status == 401
    assert len(json.loads(body)["instance"]) == 16


def test_the_route_describes_itself() -> None:
    """Every answer that it can give stands in the OpenAPI document."""
    (path,) = ingest_openapi()
    answers = ingest_openapi()[path]["put"]["responses"]
    statuses = {"200", "400", "401", "403", "404", "405", "408", "409", "411", "413", "415"}
    assert statuses | {"422", "429", "500", "503", "507"} == set(answers)
