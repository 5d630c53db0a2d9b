"""Crowds of agents of different tenants at one server: some within their limits, some far above.

`play` has all of them send side by side; a `Watched` relay looks whether a real agent that is told
to wait does so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import uvloop

from tests.faults.proxy import Proxy, _Request, _Upstream
from tests.load.agents import (
    Request,
    Sender,
    Timing,
    all_refusals,
    all_times,
    connect,
    hello,
    quantile,
    requests_of,
    retry_after_s_of,
    stop,
)
from tests.load.samples import family_cpu_s
from tests.service import run_aside
from tests.system.server import ServerProcess


@dataclass(frozen=True, slots=True)
class Crowd:
    """Agents of one tenant that send the same.

    Attributes
    ----------
    job
        Name of their job; another one each time, so that each batch is new.
    rows
        Events of a batch.
    """

    job: str
    token: str
    agents: int
    rows: int
    timing: Timing


@dataclass(frozen=True, slots=True)
class Told:
    """What a crowd was told.

    Attributes
    ----------
    events
        That were acknowledged.
    statuses
        Of refusals, each once.
    silent
        Refusals that do not say when to come again.
    longest_wait_s
        That a refusal asked for.
    """

    job: str
    agents: int
    batches: int
    events: int
    refused: int
    statuses: tuple[int, ...]
    silent: int
    longest_wait_s: float
    p50_s: float
    p99_s: float
    refusal_p99_s: float


@dataclass(frozen=True, slots=True)
class Played:
    """Crowds side by side for so long; `cpu_s` is what the server took."""

    seconds: float
    cpu_s: float
    told: Mapping[str, Told] = field(default_factory=dict)

    @property
    def batches(self) -> int:
        """Acknowledged, of all crowds."""
        return sum(each.batches for each in self.told.values())

    @property
    def refused(self) -> int:
        """Refused, of all crowds."""
        return sum(each.refused for each in self.told.values())

    @property
    def silent(self) -> int:
        """Refusals without a word on when to come again."""
        return sum(each.silent for each in self.told.values())


def play(server: ServerProcess, crowds: Sequence[Crowd], seconds: float) -> Played:
    """Have all crowds send for so long, each over connections of its own."""
    assert server.process is not None
    pid = server.process.pid
    ids = [hello(server.url, each.agents, job=each.job, token=each.token) for each in crowds]
    requests = [requests_of(0, rows=each.rows, token=each.token) for each in crowds]
    spent_s = family_cpu_s(pid)
    groups = run_aside(
        lambda: _play(server.port, crowds, ids, requests, seconds), uvloop.new_event_loop
    )
    spent_s = family_cpu_s(pid) - spent_s
    told = {crowd.job: _told(crowd, senders) for crowd, senders in zip(crowds, groups, strict=True)}
    return Played(seconds, spent_s, told)


async def _play(
    port: int,
    crowds: Sequence[Crowd],
    ids: Sequence[Sequence[str]],
    requests: Sequence[Sequence[Request]],
    seconds: float,
) -> list[list[Sender]]:
    groups = [
        [Sender(each, mine, crowd.timing) for each in streams]
        for crowd, streams, mine in zip(crowds, ids, requests, strict=True)
    ]
    everyone = [sender for group in groups for sender in group]
    await connect(port, everyone)
    await asyncio.sleep(seconds)
    await stop(everyone)
    return groups


def _told(crowd: Crowd, senders: Sequence[Sender]) -> Told:
    times, refusals = all_times(senders), all_refusals(senders)
    waits = [each.retry_after_s for each in refusals if each.retry_after_s is not None]
    return Told(
        job=crowd.job,
        agents=crowd.agents,
        batches=len(times),
        events=len(times) * crowd.rows,
        refused=len(refusals),
        statuses=tuple(sorted({each.status for each in refusals})),
        silent=len(refusals) - len(waits),
        longest_wait_s=max(waits, default=0.0),
        p50_s=quantile(times, 0.5),
        p99_s=quantile(times, 0.99),
        refusal_p99_s=quantile([each.took_s for each in refusals], 0.99),
    )


class Watched(Proxy):
    """Stands before the server of one agent that sends one batch at a time.

    Attributes
    ----------
    told
        How often the agent was told to wait.
    impatient
        Batches that came before that time was over.
    """

    def __init__(self, port: int) -> None:
        self.told = self.impatient = 0
        self._not_before_s = 0.0
        super().__init__([port])

    def _answered(self, request: _Request, upstream: _Upstream) -> tuple[bytes, bool]:
        if request.batch is None:
            return super()._answered(request, upstream)
        self.impatient += time.monotonic() < self._not_before_s
        answer, whole = super()._answered(request, upstream)
        wait_s = retry_after_s_of(answer)
        if wait_s is not None:
            self.told += 1
            # From before the agent has heard it: its own pause ends later.
            self._not_before_s = time.monotonic() + wait_s
        return answer, whole
