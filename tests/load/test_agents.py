from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ingest.serving import Running, folder_settings
from tests.load.agents import (
    Manners,
    Sender,
    Timing,
    all_refusals,
    all_times,
    connect,
    hello,
    host_name,
    phase_of,
    requests_of,
    retry_after_s_of,
    stop,
)
from tests.service import run_aside
from tests.waiting import wait_in_loop

_GOOD = "good"

#: (path, when it came)
Heard = list[tuple[str, float]]

_TAKEN = b'HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\n{"status": "stored"}'
_LATER = b"HTTP/1.1 429 Too Many\r\nRetry-After: %d\r\ncontent-length: 2\r\n\r\n{}"


class _Server(asyncio.Protocol):
    """Answers each request, a head and a body of one byte, with what it is told to."""

    def __init__(self, answers: list[bytes], heard: Heard) -> None:
        self._answers, self._heard = answers, heard

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        path = data.split(b" ")[1].decode()
        self._heard.append((path, asyncio.get_running_loop().time()))
        answer = self._answers.pop(0) if self._answers else _TAKEN
        assert isinstance(self._transport, asyncio.Transport)
        self._transport.write(answer)


def _played(answers: list[bytes], timing: Timing, requests: int) -> tuple[Sender, Heard]:
    """One agent at a server that answers so, until it has sent so many; what both have noted."""

    async def play() -> tuple[Sender, Heard]:
        heard: Heard = []
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Server(answers, heard), "127.0.0.1", 0)
        head = b"PUT /%s/%d HTTP/1.1\r\n"
        sender = Sender("s", [(head, b"\r\n", b"b")], timing)
        await connect(server.sockets[0].getsockname()[1], [sender])
        await wait_in_loop(lambda: len(heard) >= requests, "requests")
        await stop([sender])
        server.close()
        return sender, heard

    return run_aside(play)


def test_a_refused_batch_comes_again_before_the_next() -> None:
    """Numbers have no holes, and a refusal is no acknowledgement."""
    sender, heard = _played([_TAKEN, _LATER % 9, _LATER % 9], Timing(pause_s=0.02), 5)
    paths = [path for path, _ in heard]
    assert paths[:5] == ["/s/0", "/s/1", "/s/1", "/s/1", "/s/2"]
    assert sender.refused == 2
    assert len(sender.times) == len(paths) - 2
    assert [each.retry_after_s for each in sender.refusals] == [9, 9]
    assert not sender.lost


def test_a_polite_agent_waits_as_it_is_told() -> None:
    """An eager one does not."""
    _, heard = _played([_LATER % 1], Timing(0.01, 0.0, manners=Manners.POLITE), 2)
    assert heard[1][1] - heard[0][1] >= 1
    _, heard = _played([_LATER % 60], Timing(0.01, 0.0), 2)
    assert heard[1][1] - heard[0][1] < 60


def test_an_answer_may_not_say_when_to_come_again() -> None:
    """Nothing is made up."""
    assert retry_after_s_of(_LATER % 7) == 7
    assert retry_after_s_of(_TAKEN) is None
    assert retry_after_s_of(b"HTTP/1.1 503 Busy\r\nretry-after: soon\r\n\r\n{}") is None
    assert retry_after_s_of(b"HTTP/1.1 503 Busy\r\n\r\nretry-after: 5\r\n") is None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    """A real server."""
    running = Running(folder_settings(tmp_path, flush_interval_s=8.0))
    running.start()
    yield running
    running.stop()


def test_phases_are_those_that_the_server_tells(server: Running) -> None:
    """A host's place in the interval follows from its name alone."""
    for number in range(5):
        agent = {"version": "0", "pid": 1, "host": host_name(number)}
        said = {"protocol": 1, "streams": [], "agent": agent}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_GOOD}"}
        request = urllib.request.Request(  # our own server
            f"http://127.0.0.1:{server.port}/api/v1/agents/hello",
            json.dumps(said).encode(),
            headers,
        )
        with urllib.request.urlopen(request) as response:  # noqa: S310  # our own server
            flush = json.load(response)["flush"]
        assert flush["phase_s"] / flush["interval_s"] == pytest.approx(
            phase_of(host_name(number)), abs=1e-3
        )


def test_what_is_sent_is_taken(server: Running) -> None:
    """Bodies of any size, whole or slowly; each acknowledged once."""
    url = f"http://127.0.0.1:{server.port}"
    ids = hello(url, 3, token=_GOOD)
    requests = requests_of(0, rows=64, bodies=2, token=_GOOD)
    timings = [Timing(0.02), Timing(), Timing(0.02, upload_s=0.05)]

    async def play() -> list[Sender]:
        senders = [
            Sender(each, requests, timing) for each, timing in zip(ids, timings, strict=True)
        ]
        await connect(server.port, senders)
        await asyncio.sleep(0.3)
        await stop(senders)
        return senders

    senders = run_aside(play)
    assert all_refusals(senders) == []
    assert all(sender.times for sender in senders)
    assert min(senders[2].times) >= 0.05
    stored = server.service.metrics.events._value.get()
    assert stored == len(all_times(senders)) * 64
