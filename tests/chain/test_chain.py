"""The real chain: trainers, agents, server, Prometheus, Alertmanager, receiver."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.chain.programs import (
    Message,
    Receiver,
    agent_command,
    alertmanager,
    fetched,
    firing,
    prometheus,
    receiving,
    running,
    suppressed,
)
from tests.chain.trainer import SLOW_RANK, Host, Trainer
from tests.system.server import ServerProcess
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.slow]

JOBS = ("chain-slow", "chain-healthy", "chain-broken")
FINDINGS = {"SMonSlowRank", "SMonJobSlowedDown", "SMonJobSlowedDownCritical"}


@dataclass(frozen=True, slots=True)
class Chain:
    """Everything that runs."""

    server: ServerProcess
    receiver: Receiver
    alertmanager_port: int
    prometheus_port: int
    slow: Trainer
    healthy: Trainer
    broken: Trainer
    stop_agent: Callable[[], None]


@pytest.fixture
def chain(tmp_path: Path) -> Iterator[Chain]:
    """Three jobs of two hosts; the second host of the third has an agent of its own."""
    spools = [tmp_path / str(number) for number in range(3)]
    for spool in spools:
        spool.mkdir()
    first, second, alone = spools
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess(tmp_path / "server", price_per_gpu_hour=2))
        receiver, receiver_port = stack.enter_context(receiving())
        alertmanager_port = stack.enter_context(alertmanager(tmp_path, receiver_port))
        prometheus_port = stack.enter_context(
            prometheus(tmp_path, [server.ops_port], alertmanager_port)
        )
        agents = [stack.enter_context(_agent(spool, server)) for spool in spools]
        slow = Trainer("chain-slow", [Host(first, (0, 1)), Host(second, (2, 3))])
        healthy = Trainer("chain-healthy", [Host(first, (0, 1)), Host(second, (2, 3))])
        broken = Trainer("chain-broken", [Host(first, (0, 1, 2)), Host(alone, (3,))])
        for trainer in (slow, healthy, broken):
            stack.callback(trainer.stop)
            trainer.start()
        yield Chain(
            server=server,
            receiver=receiver,
            alertmanager_port=alertmanager_port,
            prometheus_port=prometheus_port,
            slow=slow,
            healthy=healthy,
            broken=broken,
            stop_agent=agents[2].kill,
        )


def _agent(
    spool: Path, server: ServerProcess
) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
    return running(
        agent_command(),
        spool.parent / f"agent-{spool.name}.log",
        SMON_SERVER=server.url,
        SMON_SPOOL_DIR=str(spool),
        SMON_HOSTNAME=f"node-{spool.name}",
    )


def test_an_alert_arrives_and_is_taken_back(
    chain: Chain, record_property: Callable[[str, object], None]
) -> None:
    """A straggler reaches the receiver and leaves it; health is silent; gaps hold back."""
    for trainer in (chain.slow, chain.healthy, chain.broken):
        wait_until(lambda one=trainer: one.step >= 8, f"{trainer.job} runs")  # type: ignore[misc]
    assert not any(map(partial(_findings, chain), JOBS))

    chain.stop_agent()
    chain.slow.slow_down()
    chain.broken.slow_down()
    first = wait_until(lambda: _findings(chain, "chain-slow"), "an alert of the slow job")[0]
    assert chain.slow.onset is not None
    step, began = chain.slow.onset
    record_property("onset_to_receiver_s", round(first.at - began, 1))
    print(f"from the onset step to the receiver: {first.at - began:.1f} s")  # noqa: T201
    _says_everything(chain, first, step)

    wait_until(
        lambda: firing(chain.prometheus_port, "chain-broken") & FINDINGS,
        "Prometheus sees the straggler of the job without all data",
    )
    chain.slow.cure()
    wait_until(
        lambda: "SMonJobIncomplete" in {one.name for one in chain.receiver.of("chain-broken")},
        "that data are missing is told",
    )
    wait_until(lambda: FINDINGS & set(_held(chain)), "Alertmanager has heard of the straggler")
    held = _held(chain)
    assert {name for name, inhibited in held.items() if inhibited} >= FINDINGS & set(held)

    fired = {(one.receiver, one.name) for one in _findings(chain, "chain-slow")}
    wait_until(
        lambda: (
            {(one.receiver, one.name) for one in chain.receiver.of("chain-slow", "resolved")}
            >= fired
        ),
        "the alerts are taken back",
        2 * PATIENCE_S,
    )
    assert "SMonWatchdog" in {one.name for one in chain.receiver.messages}
    # That data of theirs were missing for a while may be told, if the machine stood still.
    assert not _findings(chain, "chain-healthy")
    assert not _findings(chain, "chain-broken")
    for trainer in (chain.slow, chain.healthy, chain.broken):
        assert trainer.error is None


def _held(chain: Chain) -> dict[str, bool]:
    return suppressed(chain.alertmanager_port, "chain-broken")


def _findings(chain: Chain, job: str) -> list[Message]:
    return [one for one in chain.receiver.of(job) if one.name in FINDINGS]


def _says_everything(chain: Chain, message: Message, onset: int) -> None:
    """Job, rank, cause, cost, since when, and links that work."""
    assert message.labels["cause"] == "slow_gpu"
    summary, description = message.annotations["summary"], message.annotations["description"]
    assert summary.startswith(f"chain-slow: rank {SLOW_RANK}, ")
    assert "slow_gpu, +" in summary
    assert "GPU-hours per day" in summary
    assert f"since step {onset}." in description
    assert "per day." in description
    status, runbook = fetched(message.annotations["runbook_url"])
    assert status == 200
    assert message.name in runbook
    job = chain.server.get("jobs?name=chain-slow")["items"][0]["id"]
    assert message.annotations["dashboard_url"] == f"{chain.server.url}/jobs/{job}"
    assert fetched(message.annotations["dashboard_url"])[0] == 200
