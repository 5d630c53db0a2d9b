"""Real processes: agents and trainers that are killed, stopped, and measured by what they load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ingest_agents.spool.folder import streams_in
from ingest_agents.spool.writer import SpoolWriter
from ingest_agents.transport import HttpTransport, TransportError, address_of
from smon.synth.presets import scenario
from smon.synth.scenario import generate
from smon.synth.write import write_synthetic
from tests.agents.builders import SMALL, batch, chance_of, spec, write
from tests.agents.fake import Fail, Fake, serve
from tests.waiting import PATIENCE_S, wait_until

AGENT = [sys.executable, "-m", "ingest_agents.cli"]


def environment(root: Path, url: str, **more: str) -> dict[str, str]:
    """Of an agent that is quick about everything."""
    return {
        **os.environ,
        "SMON_SPOOL_DIR": str(root),
        "SMON_SERVER": url,
        "SMON_POLL_S": "0.02",
        "SMON_RETRY_MIN_S": "0.01",
        "SMON_RETRY_MAX_S": "0.05",
        **more,
    }


@contextmanager
def agent(root: Path, url: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A running agent; killed at the end if it still runs."""
    command = [*AGENT, "run"]
    with subprocess.Popen(
        command, env=environment(root, url, **more), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


TRAINER = """
import os
from ingest_agents.recorder import Recorder
from smon.ops import OpType

recorder = Recorder.from_env()
assert recorder.on
for step in range(int(os.environ["STEPS"])):
    with recorder.step(step):
        for number in range(20):
            recorder.measured(recorder.begin(OpType.FORWARD_COMPUTE), step * 20 + number, 5)
"""


def test_killed_agents_deliver_every_op_once(tmp_path: Path) -> None:
    """Killed again and again while a server fails and drops connections: exactly once."""
    fake = Fake()
    chance = chance_of(1)
    with serve(fake) as url:
        writer = SpoolWriter(tmp_path, spec(), SMALL)
        for number in range(400):
            writer.append(batch(number * 3, 3, step=number))
            if number % 57 == 3:
                fake.fails.extend([Fail(drop="after"), Fail(503), Fail(drop="before")])
            if number % 80 == 40:
                with agent(tmp_path, url):
                    before = len(fake.ops())
                    wait_until(lambda before=before: len(fake.ops()) > before, "more ops")  # type: ignore[misc]
                    time.sleep(chance.random() * 0.03)
        writer.end("complete")
        writer.close()
        with agent(tmp_path, url):
            wait_until(fake.ended, "the end")
    counts = Counter(fake.ops())
    assert set(counts.values()) == {1}
    assert sorted(counts) == list(range(1200))
    assert not fake.gaps()


def test_a_trainer_and_its_agent(tmp_path: Path) -> None:
    """Recorder, spool, agent, server: every op of every step, and the END."""
    fake = Fake()
    with serve(fake) as url, agent(tmp_path, url):
        environ = environment(tmp_path, url, SMON_JOB_ID="job", STEPS="30")
        subprocess.run([sys.executable, "-c", TRAINER], env=environ, check=True)
        wait_until(fake.ended, "the end")
        wait_until(lambda: not streams_in(tmp_path), "an empty spool")
    assert sorted(fake.ops()) == list(range(600))
    assert max(each.steps_done or 0 for each in fake.batches()) == 29


def test_a_killed_trainer_loses_only_what_it_had_not_written(tmp_path: Path) -> None:
    """What it had written arrives, once; its agent ends the stream for it."""
    fake = Fake()
    code = TRAINER.replace('int(os.environ["STEPS"])', "10**9")
    with serve(fake) as url, agent(tmp_path, url):
        environ = environment(tmp_path, url, SMON_JOB_ID="job", SMON_FLUSH_S="0.02")
        with subprocess.Popen([sys.executable, "-c", code], env=environ) as trainer:
            wait_until(lambda: len(fake.ops()) > 100, "ops")
            trainer.send_signal(signal.SIGKILL)
        wait_until(fake.ended, "the end")
    ops = fake.ops()
    assert len(ops) == len(set(ops))


def test_sigterm_sends_what_is_left(tmp_path: Path) -> None:
    """The agent ends with 0 after it has sent what was written last."""
    fake = Fake(flush_s=600.0)
    with serve(fake) as url, agent(tmp_path, url, SMON_STOP_S="60") as process:
        wait_until(lambda: fake.requests, "a request")
        write(tmp_path, 10, end=False)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert len(fake.ops()) == 30


def test_sigterm_does_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    """A black hole holds the agent up no longer than its stop time; nothing is lost."""
    fake = Fake()
    write(tmp_path, 3, end=False)
    fake.fails.extend([Fail(sleep_s=2.0)] * 50)
    with serve(fake) as url, agent(tmp_path, url, SMON_STOP_S="0.05") as process:
        wait_until(lambda: any(method == "PUT" for method, _ in fake.requests), "a batch")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert streams_in(tmp_path)


def test_switched_off_the_agent_does_nothing(tmp_path: Path) -> None:
    """`SMON_ENABLE=0`: exit code 0, no folder, no request."""
    root = tmp_path / "spool"
    environ = environment(root, "http://127.0.0.1:1", SMON_ENABLE="0")
    done = subprocess.run([*AGENT, "run"], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert "SMON_ENABLE=0" in done.stderr
    assert not root.exists()


def test_the_agent_loads_nothing_heavy() -> None:
    """On recorder spools it needs neither numpy nor pyarrow nor yaml, nor does the recorder."""
    code = (
        "import sys, ingest_agents.cli, ingest_agents.agent, ingest_agents.recorder, "
        "ingest_agents.transport, ingest_agents.sources.directory; "
        "print({name.split('.')[0] for name in sys.modules} & "
        "{'numpy', 'pyarrow', 'yaml', 'pandas', 'torch', 'zstandard', 'asyncio'})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_send_from_the_command_line(tmp_path: Path) -> None:
    """Prints where to look, leaves nothing behind, and says nothing where there is no terminal."""
    trace = tmp_path / "job"
    trace.mkdir()
    write_synthetic(generate(scenario("healthy", dp=2, pp=1, tp=1, microbatches=2, steps=3)), trace)
    fake = Fake()
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with serve(fake) as url:
        environ = environment(tmp_path / "unused", url, TMPDIR=str(scratch))
        command = [*AGENT, "send", str(trace), "--job", "mine", "--server", url]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    assert "job mine" in done.stdout
    assert url in done.stdout
    assert fake.ended()
    assert not list(scratch.iterdir())
    assert not (tmp_path / "unused").exists()


def test_check_from_the_command_line(tmp_path: Path) -> None:
    """Exit code 1 when something is wrong, 0 when nothing is."""
    with serve(Fake()) as url:
        for address, code in ((url, 0), ("http://127.0.0.1:1", 1)):
            environ = environment(tmp_path, address)
            command = [*AGENT, "check"]
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == code, done.stderr


# --- the transport ------------------------------------------------------------------------------


def test_connections_are_kept_and_opened_anew(tmp_path: Path) -> None:
    """One that the server has closed in the meantime is no failure."""
    fake = Fake()
    with serve(fake) as url:
        transport = HttpTransport(address_of(url), timeout_s=5.0)
        assert transport.request("GET", "/api/v1/time", {}, None).status == 200
        first = transport._connection
        assert transport.request("GET", "/api/v1/time", {}, None).status == 200
        assert transport._connection is first
        assert first is not None
        first.sock.shutdown(2)
        assert transport.request("GET", "/api/v1/time", {}, None).status == 200
        transport.close()


def test_a_dropped_answer_is_a_failure_to_the_caller(tmp_path: Path) -> None:
    """On a fresh connection: the caller decides when to try again."""
    fake = Fake()
    fake.fails.extend([Fail(drop="before", only="")] * 2)
    with serve(fake) as url:
        transport = HttpTransport(address_of(url), timeout_s=5.0)
        with pytest.raises(TransportError):
            transport.request("GET", "/api/v1/time", {}, None)
        transport.close()


def test_nobody_there_is_a_failure() -> None:
    """With the system's reason."""
    transport = HttpTransport(address_of("http://127.0.0.1:1"), timeout_s=5.0)
    with pytest.raises(TransportError, match="refused"):
        transport.request("GET", "/", {}, None)


def test_wrong_certificates_are_a_setting_that_is_wrong(tmp_path: Path) -> None:
    """Said at the start, not at the first request."""
    from smon.errors import ConfigError

    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    with pytest.raises(ConfigError, match="certificates"):
        HttpTransport(address_of("https://localhost"), timeout_s=1.0, ca_file=str(file))
