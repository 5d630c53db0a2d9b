"""Recorded trace files: `smon-agent send`."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ingest_agents.cli import _report, parser
from ingest_agents.config import AgentSettings
from ingest_agents.link import Link
from ingest_agents.send import Sent, job_id_of, send, verdict_of
from ingest_agents.sources.recorded import (
    MAX_EVENTS,
    batches_of,
    context_batches,
    ops_batches,
    read_recording,
    spec_of_recording,
)
from ingest_agents.transport import Response
from smon.errors import ConfigError, NothingUsableError, StoreError
from smon.synth.presets import scenario
from smon.synth.scenario import generate
from smon.synth.write import write_synthetic
from smon.topology import Layout
from smon.wire import TYPE_ARROW, BatchKind
from tests.agents.fake import Fail, Fake, Wire, answer, problem
from tests.kineto_files import Ddp, write_ddp


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic job with side evidence."""
    folder = tmp_path_factory.mktemp("trace") / "job"
    folder.mkdir()
    write_synthetic(generate(scenario("C03-events", dp=4, pp=2, steps=12)), folder)
    return folder


def shipped(
    trace: Path, root: Path, fake: Fake, attempt: int | None = None, job: str | None = None
) -> Sent:
    """Send it to a fake server."""
    recording = read_recording([trace])
    spec = spec_of_recording(recording, "host", job=job, attempt=attempt)
    settings = replace(
        AgentSettings(spool_dir=str(root), poll_s=0.01, retry_min_s=0.001, retry_max_s=0.002),
        senders=1,
    )
    link = Link(lambda: Wire(fake), lambda: None, "host")
    return send(recording, spec, link, settings, lambda *_said: None, lambda *_progress: None)


def rows_of(fake: Fake) -> pa.Table:
    """All ops that the server got."""
    tables = [
        pa.ipc.open_stream(io.BytesIO(batch.raw)).read_all()
        for batch in fake.batches()
        if batch.kind is BatchKind.OPS
    ]
    return pa.concat_tables(tables)


def test_a_trace_arrives_whole_and_ends(trace: Path, tmp_path: Path) -> None:
    """Every op, sorted by step; the stream declares all workers, and ends."""
    fake = Fake()
    sent = shipped(trace, tmp_path / "spool", fake)
    table = read_recording([trace]).trace.table
    got = rows_of(fake)
    assert got.num_rows == len(table)
    steps = np.from_dlpack(got["step"].combine_chunks())
    assert (np.diff(steps) >= 0).all()
    assert sum(got["duration_ns"].to_pylist()) == int(table.duration_ns.sum())
    request = fake.only.request
    assert (request["mode"], request["source"]) == ("recorded", "recorded")
    assert request["time"] == ("step" if table.step_relative else "unix")
    layout = Layout(**request["layout"])
    assert len(request["ranks"]) == layout.dp * layout.pp
    assert fake.batches()[-1].kind is BatchKind.END
    assert sent.batches == len(fake.batches())
    assert not sent.dropped


def test_sending_again_stores_nothing_twice(trace: Path, tmp_path: Path) -> None:
    """The same content is the same stream, wherever the files lie."""
    fake = Fake()
    shipped(trace, tmp_path / "one", fake)
    before = len(fake.batches())
    copy = tmp_path / "copy"
    shutil.copytree(trace, copy)
    shipped(copy, tmp_path / "two", fake)
    assert len(fake.streams) == 1
    assert len(fake.batches()) == before
    shipped(trace, tmp_path / "three", fake, attempt=5)
    shipped(trace, tmp_path / "four", fake, job="other")
    assert len(fake.streams) == 3


def test_sending_goes_on_where_it_stopped(trace: Path, tmp_path: Path) -> None:
    """After a server that fails and drops connections, each batch is there once."""
    fake = Fake()
    for _ in range(3):
        fake.fails.extend([Fail(), Fail(drop="after"), Fail(503), Fail(drop="before")])
    shipped(trace, tmp_path / "spool", fake)
    assert rows_of(fake).num_rows == len(read_recording([trace]).trace.table)
    assert fake.only.epoch == 0


def test_a_stream_that_is_not_taken_is_an_error(trace: Path, tmp_path: Path) -> None:
    """`send` ends with a sentence instead of trying for ever."""
    fake = Fake()
    fake.greet = lambda _stream: Fail(409, "layout-conflict")
    with pytest.raises(ConfigError, match="does not take"):
        shipped(trace, tmp_path / "spool", fake)


def test_batches_keep_the_limits_and_say_which_steps_are_done(trace: Path) -> None:
    """At most 20,000 ops; a step is done with the batch that has its last op."""
    table = read_recording([trace]).trace.table
    many = table.take(np.repeat(np.arange(len(table)), 40_000 // len(table) + 2))
    batches = list(ops_batches(many))
    assert len(batches) > 2
    assert all(batch.events <= MAX_EVENTS for batch in batches)
    assert all(batch.content_type == TYPE_ARROW for batch in batches)
    assert sum(batch.events for batch in batches) == len(many)
    for batch, following in pairwise(batches):
        assert following.first_step is not None
        assert (batch.steps_done or -1) < following.first_step
    assert batches[-1].steps_done == int(many.step.max())


def test_a_trace_without_noise_is_not_taken_for_a_bomb(trace: Path) -> None:
    """Bodies that shrink too well go as they are: the server refuses more than 20:1."""
    table = read_recording([trace]).trace.table
    flat = table.take(np.zeros(MAX_EVENTS, np.intp))
    (batch,) = list(ops_batches(flat))
    assert batch.encoding == "identity"
    assert len(batch.body) < 4 << 20


def test_context_is_cut_below_the_limits() -> None:
    """Names stay together, tables go in portions, and no row is lost."""
    rows = 300_000
    counters = {
        "step": list(range(rows)),
        "rank": [0] * rows,
        "name": ["gpu_clock_mhz"] * rows,
        "value": [1410.0] * rows,
    }
    document = {
        "schema": "smon.context/1",
        "hosts": {"0": "a"},
        "switches": {"a": "b"},
        "counters": counters,
        "events": {},
    }
    batches = list(context_batches(document))
    assert sum(batch.events for batch in batches) == rows
    assert all(len(batch.body) < 4 << 20 for batch in batches)
    assert len(batches) > 3


def test_ops_longer_than_any_server_takes_are_left_out_and_told(trace: Path) -> None:
    """One of them would cost its whole batch."""
    recording = read_recording([trace])
    table = recording.trace.table
    duration = table.duration_ns.copy()
    duration[:3] = 5000 * 10**9
    longer = replace(
        recording, trace=replace(recording.trace, table=replace(table, duration_ns=duration))
    )
    batches = list(batches_of(longer))
    gaps = [batch for batch in batches if batch.kind is BatchKind.GAP]
    assert [gap.events for gap in gaps] == [3]
    assert sum(b.events for b in batches if b.kind is BatchKind.OPS) == len(table) - 3


def test_a_full_disk_is_an_error_and_no_gap(trace: Path, tmp_path: Path) -> None:
    """A recorded trace is sent whole or not at all."""
    place = tmp_path / "file"
    place.write_text("")
    with pytest.raises(StoreError):
        shipped(trace, place, Fake())


class Pages(Wire):
    """A server that also has the routes for reading."""

    def __init__(self, states: list[str]) -> None:
        super().__init__(Fake())
        self.states = states

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Response:
        """Jobs and windows."""
        if path == "/api/v1/jobs?name=a%2Fb":
            return answer({"items": [{"id": "j0", "name": "a/bc"}, {"id": "j1", "name": "a/b"}]})
        if path == "/api/v1/jobs/j1/windows":
            state = self.states.pop(0)
            return answer({"items": [{"state": state, "verdict": "slow_worker"}]})
        return super().request(method, path, headers, body)


def test_the_verdict_is_waited_for() -> None:
    """Until one window of the job is done."""
    link = Link(lambda: Pages(["open", "claimed", "done"]), lambda: None, "host")
    assert job_id_of(link, "a/b") == "j1"
    assert job_id_of(link, "other") is None
    assert verdict_of(link, "j1", 60.0, lambda _seconds: None) == "slow_worker"
    assert verdict_of(link, "j1", 0.0) is None


class Unread(Wire):
    """A server that stores, but lets nobody read: the token has the scope `ingest` alone."""

    def __init__(self, status: int) -> None:
        super().__init__(Fake())
        self.status = status

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Response:
        """No jobs."""
        if path.startswith("/api/v1/jobs"):
            if self.status == 200:
                return answer({"items": []})
            return problem(Fail(self.status))
        return super().request(method, path, headers, body)


@pytest.mark.parametrize(
    "status, words",
    [(403, "with the scope read as well"), (401, "the scope read"), (200, "does not list the job")],
)
def test_a_verdict_that_may_not_be_read_is_no_timeout(status: int, words: str) -> None:
    """It says at once what is missing, and that nothing was lost."""
    link = Link(lambda: Unread(status), lambda: None, "host")
    parsed = parser().parse_args(["send", "t.parquet", "--wait"])
    sent = Sent("s0", "a/b", 3, {})
    with pytest.raises(ConfigError, match=f"the data are stored, but .*{words}"):
        _report(parsed, AgentSettings(), link, sent)


def test_without_waiting_the_scope_of_sending_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    """The job's id cannot be told then; that is no failure."""
    link = Link(lambda: Unread(403), lambda: None, "host")
    parsed = parser().parse_args(["send", "t.parquet"])
    assert _report(parsed, AgentSettings(), link, Sent("s0", "a/b", 3, {})) == 0
    assert "3 batches are stored" in capsys.readouterr().out


def test_no_note_is_lost_on_the_way(trace: Path) -> None:
    """Notes of the reader go into the hello, as far as a server takes them."""
    recording = read_recording([trace])
    noted = replace(recording, trace=replace(recording.trace, notes=("x" * 5000, *["n"] * 300)))
    document = spec_of_recording(noted, "host").document()
    assert len(document["notes"]) == 100
    assert max(map(len, document["notes"])) == 1000
    json.dumps(document)


def test_files_without_ops_name_the_command_that_sends_them(tmp_path: Path) -> None:
    """Kernels and collectives: `smon import` takes them."""
    write_ddp(tmp_path / "ddp", Ddp(ranks=2, steps=2))
    with pytest.raises(NothingUsableError, match="`smon import"):
        read_recording([tmp_path / "ddp"])
