"""A growing folder of op files: every line once, whatever happens."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingest_agents.payload import decode, gap_of
from ingest_agents.sources.directory import DirectorySource
from ingest_agents.sources.recorded import read_table
from ingest_agents.spool.folder import StreamSpec, streams_in
from ingest_agents.spool.writer import SpoolLimits
from smon.synth.presets import scenario
from smon.synth.scenario import generate
from smon.synth.write import write_trace
from smon.topology import Layout
from smon.wire import BatchKind
from tests.agents.builders import chance_of, spec
from tests.agents.test_spool import read_all

NOW = time.time_ns()


def of_two(**changed: object) -> StreamSpec:
    """A stream of ranks 0 and 1."""
    both = replace(spec("directory"), source="directory", ranks=(0, 1))
    return replace(both, **changed)  # type: ignore[arg-type]  # any field


class Folder:
    """A folder of op files, and sources that read it one after the other."""

    def __init__(self, root: Path) -> None:
        self.path, self.spool = root / "ops", root / "spool"
        self.path.mkdir()
        self.source = self.open()

    def open(self, **changed: object) -> DirectorySource:
        """A source on it."""
        limits = SpoolLimits(3000, 1e9, 0)
        made = of_two(**changed)
        return DirectorySource(self.path, self.spool, made, limits, read_table)

    def add(self, name: str, *lines: object, end: str = "\n") -> None:
        """Append lines to a file."""
        text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        with (self.path / name).open("a") as file:
            file.write("\n".join(text) + end)

    def restart(self) -> None:
        """End as `kill -9` does, and begin anew."""
        self.source._writer.abandon()
        self.source = self.open()

    def batches(self) -> list[Any]:
        """All batches so far."""
        return read_all(streams_in(self.spool)[0])

    def ops(self) -> list[int]:
        """Start of every op, from now."""
        found = []
        for batch in self.batches():
            if batch.kind is BatchKind.OPS:
                columns = json.loads(decode(batch))["columns"]
                found += [start - NOW for start in columns["start_ns"]]
        return found

    def done(self) -> int | None:
        """The last step that is done."""
        return max((b.steps_done for b in self.batches() if b.steps_done is not None), default=None)

    def gaps(self) -> dict[str, int]:
        """Events by reason of all GAPs."""
        gaps = [gap_of(batch) for batch in self.batches() if batch.kind is BatchKind.GAP]
        return {
            reason: sum(g.events for g in gaps if g.reason == reason)
            for reason in {gap.reason for gap in gaps}
        }


def op(start: int, *, step: object = 0, dp: int = 0, **more: object) -> dict[str, Any]:
    """A line."""
    return {
        "step": step,
        "dp": dp,
        "stage": 0,
        "rank": dp,
        "optype": "forward-compute",
        "start_ns": NOW + start,
        "duration_ns": 5,
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """An empty folder."""
    return Folder(tmp_path)


def test_lines_become_ops(folder: Folder) -> None:
    """All fields arrive; sequence numbers that are not given are counted."""
    folder.add("a.jsonl", op(1), op(2, seq=7, microbatch=3, chunk=1, global_chunk=2), op(3))
    folder.source.poll()
    (batch,) = folder.batches()
    columns = json.loads(decode(batch))["columns"]
    assert columns["seq"] == [0, 7, 1]
    assert columns["microbatch"] == [-1, 3, -1]
    assert (columns["chunk"], columns["global_chunk"]) == ([-1, 1, -1], [-1, 2, -1])


def test_a_worker_can_be_given_by_its_rank(folder: Folder) -> None:
    """Without dp and stage, the layout knows them."""
    line = {"step": 0, "rank": 1, "optype": "optimizer", "start_ns": NOW, "duration_ns": 1}
    folder.add("a.jsonl", line)
    folder.source.poll()
    columns = json.loads(decode(folder.batches()[0]))["columns"]
    assert (columns["dp"], columns["stage"]) == ([1], [0])


def test_a_partial_line_is_kept_for_later(folder: Folder) -> None:
    """It becomes an op when its end is there."""
    line = json.dumps(op(2))
    folder.add("a.jsonl", op(1))
    folder.add("a.jsonl", line[:20], end="")
    folder.source.poll()
    assert folder.ops() == [1]
    folder.add("a.jsonl", line[20:])
    folder.source.poll()
    assert folder.ops() == [1, 2]


def test_restarts_at_any_line_lose_and_double_nothing(folder: Folder) -> None:
    """How far a file was read is in the same record as the batch."""
    chance = chance_of(2)
    at = 0
    for _ in range(30):
        for _ in range(chance.randrange(5)):
            folder.add(chance.choice(["a.jsonl", "b.jsonl"]), op(at, step=at // 10))
            at += 1
        folder.source.poll()
        if chance.random() < 0.6:
            folder.restart()
    folder.source.poll()
    assert sorted(folder.ops()) == list(range(at))


def test_counted_numbers_go_on_after_a_restart(folder: Folder) -> None:
    """The count of a step is part of the position."""
    folder.add("a.jsonl", op(1), op(2))
    folder.source.poll()
    folder.restart()
    folder.add("a.jsonl", op(3), op(4, step=1))
    folder.source.poll()
    numbers = [n for b in folder.batches() for n in json.loads(decode(b))["columns"]["seq"]]
    assert numbers == [0, 1, 2, 0]


def test_a_step_is_done_when_a_later_one_has_begun(folder: Folder) -> None:
    """For every worker; a line can say so earlier."""
    folder.add("0.jsonl", op(1), op(2, step=1), op(3, step=2))
    folder.source.poll()
    assert folder.done() is None, "of rank 1 nothing is known"
    folder.add("1.jsonl", op(4, dp=1), op(5, step=1, dp=1))
    folder.source.poll()
    assert folder.done() == 0
    folder.add("1.jsonl", {"step_done": 2})
    folder.source.poll()
    assert folder.done() == 2


def test_done_steps_survive_a_restart(folder: Folder) -> None:
    """What was known of each worker is part of the position."""
    folder.add("0.jsonl", op(1), op(2, step=1))
    folder.source.poll()
    folder.restart()
    folder.add("1.jsonl", op(4, dp=1), op(5, step=1, dp=1))
    folder.source.poll()
    assert folder.done() == 0


BAD = {
    "not-json": ["{", "x", "[1"],
    "not-a-record": ["[]", "7", '"x"', "null"],
    "no-step": ['{"optype": "gc"}'],
    "unknown-op-type": [json.dumps(op(0, optype="dance")), json.dumps(op(0, optype=["gc"]))],
    "duration-out-of-range": [
        json.dumps(op(0, duration_ns=-1)),
        json.dumps(op(0, duration_ns=10**14)),
    ],
    "number-out-of-range": [
        json.dumps(op(0, step=-1)),
        json.dumps(op(0, step=1.5)),
        json.dumps(op(0, step=True)),
        json.dumps(op(0, seq=2**40)),
        '{"step_done": "x"}',
        '{"step_done": -1}',
        json.dumps({**op(0), "dp": None, "rank": 77}),
        json.dumps({**op(0), "dp": None, "rank": "x"}),
    ],
    "other-worker": [json.dumps(op(0, dp=1, stage=4, rank=-1))],
    "rank-of-other-worker": [json.dumps(op(0, rank=1))],
    "start-out-of-range": [json.dumps({**op(0), "start_ns": 5}), json.dumps(op(10**15))],
}


@pytest.mark.parametrize("reason", BAD)
def test_lines_that_are_no_ops_are_counted_by_reason(folder: Folder, reason: str) -> None:
    """One GAP per reason, once, also over a restart; the lines around them arrive."""
    folder.add("a.jsonl", op(1), *BAD[reason], op(2))
    folder.source.poll()
    folder.restart()
    folder.source.poll()
    assert folder.ops() == [1, 2]
    assert folder.gaps() == {reason: len(BAD[reason])}
    assert folder.source.faults == {reason: len(BAD[reason])}


def test_hostile_lines_stop_nothing(folder: Folder) -> None:
    """Deep nesting, huge numbers, NaN, bytes that are no text, lines without an end."""
    path = folder.path / "a.jsonl"
    path.write_bytes(
        b"[" * 100_000
        + b"\n"
        + b'{"step": NaN}\n'
        + b"\xff\xfe\n"
        + b'{"step": 1e999}\n'
        + b'{"step": '
        + b"9" * 5000
        + b"}\n"
        + json.dumps(op(1)).encode()
        + b"\n"
    )
    with (folder.path / "long.jsonl").open("wb") as file:
        file.write(b"x" * (3 << 20))
    folder.source.poll()
    assert folder.ops() == [1]
    assert sum(folder.gaps().values()) >= 5


def test_a_rotated_file_is_read_to_its_end(folder: Folder) -> None:
    """It keeps its place under its new name, and its successor begins at 0."""
    folder.add("a.jsonl", op(1), op(2))
    folder.source.poll()
    folder.add("a.jsonl", op(3))
    (folder.path / "a.jsonl").rename(folder.path / "a.jsonl.1")
    folder.add("a.jsonl", op(4, step=1))
    folder.source.poll()
    folder.restart()
    folder.source.poll()
    assert sorted(folder.ops()) == [1, 2, 3, 4]


def test_a_file_that_is_cut_off_begins_anew(folder: Folder) -> None:
    """As `copytruncate` does."""
    folder.add("a.jsonl", op(1), op(2))
    folder.source.poll()
    (folder.path / "a.jsonl").write_text("")
    folder.add("a.jsonl", op(3))
    folder.source.poll()
    assert folder.ops() == [1, 2, 3]


def test_files_that_are_gone_are_forgotten(folder: Folder) -> None:
    """Their places do not grow the position for ever."""
    for number in range(30):
        name = f"{number}.jsonl"
        folder.add(name, op(number))
        folder.source.poll()
        (folder.path / name).unlink()
    for _ in range(30):
        folder.source.poll()
    folder.add("last.jsonl", op(100))
    folder.source.poll()
    places = [name for name in folder.source._writer.position if name.startswith("file:")]
    assert len(places) == 1


def test_what_stands_beside_is_passed_over(folder: Folder) -> None:
    """Meta files, hidden files, folders, pipes."""
    for name in ("meta.yaml", ".hidden", "context.json", "x.tmp"):
        (folder.path / name).write_text(json.dumps(op(1)) + "\n")
    (folder.path / "sub").mkdir()
    folder.source.poll()
    assert not folder.batches()


def test_steps_far_apart_go_into_batches_of_their_own(folder: Folder) -> None:
    """A server refuses a batch that would become hundreds of files."""
    folder.add("a.jsonl", *[op(step, step=step * 1000) for step in range(10)])
    folder.source.poll()
    assert all((b.last_step - b.first_step) <= 1000 for b in folder.batches())
    assert len(folder.ops()) == 10


def test_a_parquet_file_is_taken_once_as_a_whole(tmp_path: Path) -> None:
    """Its steps are done with it; a restart does not take it again; a damaged one is counted."""
    chosen = scenario("healthy", dp=2, pp=1, tp=1, microbatches=2, steps=3)
    made = generate(chosen)
    write_trace(made.table, made.job, tmp_path)
    (tmp_path / "live").mkdir()
    shifted = Folder(tmp_path / "live")
    relative = made.table.step_relative
    shifted.source._writer.abandon()
    base = int(made.table.start_ns[0])
    clock = "step" if relative else "unix"
    limits = SpoolLimits(3000, 1e9, 0)
    source = DirectorySource(
        shifted.path,
        tmp_path / "spool2",
        of_two(layout=Layout(dp=2, pp=1), time=clock),
        limits,
        read_table,
        wall=lambda: base,
    )
    (tmp_path / "trace.parquet").rename(shifted.path / "trace.parquet")
    (shifted.path / "bad.parquet").write_bytes(b"PAR1 no")
    source.poll()
    source.poll()
    source._writer.abandon()
    again = DirectorySource(
        shifted.path,
        tmp_path / "spool2",
        of_two(layout=Layout(dp=2, pp=1), time=clock),
        limits,
        read_table,
        wall=lambda: base,
    )
    again.poll()
    again.close()
    batches = read_all(streams_in(tmp_path / "spool2")[0])
    assert sum(b.events for b in batches if b.kind is BatchKind.OPS) == len(made.table)
    assert max(b.steps_done or 0 for b in batches) == int(made.table.step.max())
    gaps = [gap_of(b) for b in batches if b.kind is BatchKind.GAP]
    assert [(gap.reason, gap.events) for gap in gaps] == [("unreadable-file", 1)]
