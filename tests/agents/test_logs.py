"""Logs of NCCL Inspector that grow, move and begin anew: every record once."""

from __future__ import annotations

import json
import os
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from ingest_agents.sources.listing import FileKind
from ingest_agents.sources.portions import Portion, key_of_log, portions_of
from smon.trace.events import RankEvents
from smon.trace.formats import rank_events
from tests.agents.watching import Bench, append, inspector_record, torchrun

#: A period that is long over, in seconds; a whole number of minutes.
T0 = 1_790_000_040.0 // 60 * 60


class Host:
    """A host on which one process writes a log."""

    def __init__(self, root: Path, *, rank: int = 0) -> None:
        self.bench = Bench(root, FileKind.INSPECTOR, file_age_s=1e12)
        self.bench.wall_ns = int(T0 * 1e9)
        self.rank, self.log = rank, self.bench.folder / "host-pid7.log"
        self.bench.process(7, torchrun(rank, SMON_JOB_ID="job"))

    def write(self, first: int, count: int, at: float, *, step: float = 0.5) -> None:
        """So many records, dumped from `at` seconds on."""
        records = [
            inspector_record(first + number, T0 + at + step * number, rank=self.rank)
            for number in range(count)
        ]
        append(self.log, *records)

    def at(self, seconds: float) -> None:
        """Look, and read what is over, at this time; once more for files that were just found."""
        self.bench.wall_ns = int((T0 + seconds) * 1e9)
        self.bench.turn(2.0)
        self.bench.turn(2.0)

    def portions(self) -> list[tuple[str, RankEvents]]:
        """Name and events of all portions."""
        found = []
        for name, content in self.bench.files().items():
            path = self.bench.root / "portion"
            path.write_bytes(content)
            (events,) = rank_events.read(path).events
            found.append((name, events))
        return found

    def seqs(self) -> list[int]:
        """Number of every collective that was shipped, in order."""
        return [int(seq) for _, events in self.portions() for seq in events.seq]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Of rank 0."""
    return Host(tmp_path)


def test_hosts_cut_their_logs_alike(tmp_path: Path) -> None:
    """Portions end at the same unix time, whenever agents look, by the stamps of the records."""
    hosts = [Host(tmp_path / str(rank), rank=rank) for rank in (0, 1)]
    for host in hosts:
        host.write(0, 240, 1.0)
    hosts[0].at(70)
    for host in hosts:
        host.at(131)
    one, other = ([(name, events.seq.tolist()) for name, events in h.portions()] for h in hosts)
    assert one == other
    assert [name for name, _ in one] == [f"host-pid7.log@{int(T0) + at}" for at in (0, 60)]
    assert [events.rank for host in hosts for _, events in host.portions()] == [0, 0, 1, 1]


def test_a_period_that_is_not_over_is_left(host: Host) -> None:
    """And a while more, for the thread that writes the log."""
    host.write(0, 10, 1.0)
    host.at(50)
    host.at(60)
    assert not host.seqs()
    host.at(66)
    assert host.seqs() == list(range(10))


def test_a_record_without_its_end_is_left(host: Host) -> None:
    """Until the rest of it comes."""
    host.write(0, 5, 1.0)
    text = host.log.read_text()
    host.log.write_text(text[:-30])
    host.at(66)
    assert host.seqs() == [0, 1, 2, 3]
    host.log.write_text(text)
    host.write(5, 2, 61.0)
    host.at(126)
    assert host.seqs() == list(range(7))


def test_an_agent_that_is_killed_reads_nothing_twice(host: Host) -> None:
    """How far it was is written with the portion."""
    for minute in range(4):
        host.write(minute * 10, 10, minute * 60 + 1.0)
        host.at(minute * 60 + 66)
        host.bench.kill()
        host.at(minute * 60 + 67)
    assert host.seqs() == list(range(40))


def test_a_log_that_is_renamed_goes_on(host: Host) -> None:
    """And its successor is another log; also when the agent was down meanwhile."""
    host.write(0, 10, 1.0)
    host.at(66)
    host.write(10, 10, 61.0)
    host.bench.kill()
    host.log.rename(host.log.with_name("host-pid7.log.1"))
    host.write(20, 10, 70.0)
    host.at(126)
    assert sorted(host.seqs()) == list(range(30))


def test_a_log_that_is_copied_and_cut_off_goes_on(host: Host) -> None:
    """The copy is the same log: what was not read of it is read there."""
    host.write(0, 10, 1.0)
    host.at(66)
    host.write(10, 10, 61.0)
    host.log.with_name("host-pid7.log.1").write_bytes(host.log.read_bytes())
    os.truncate(host.log, 0)
    host.write(20, 10, 70.0)
    host.at(126)
    assert sorted(host.seqs()) == list(range(30))


def test_a_header_that_is_written_once_holds_after_a_cut(host: Host) -> None:
    """Version 4.3: later records of the process have none, in the new file neither."""
    records = [inspector_record(number, T0 + 1 + number) for number in range(9)]
    head = {name: records[0][name] for name in ("header", "metadata")}
    bare = [{"coll_perf": each["coll_perf"]} for each in records]
    append(host.log, head, *bare[:3])
    host.at(66)
    append(host.log, *[started(each, 61 + n) for n, each in enumerate(bare[3:6])])
    host.at(126)
    assert host.seqs() == list(range(6))
    os.truncate(host.log, 0)
    append(host.log, *[started(each, 121 + n) for n, each in enumerate(bare[6:])])
    host.at(186)
    assert host.seqs() == list(range(9))
    assert {events.world_size for _, events in host.portions()} == {2}


def started(record: dict[str, Any], at: float) -> dict[str, Any]:
    """The same with another start."""
    trace = {"coll_start_ts": int((T0 + at) * 1e6), "kernel_events": []}
    return {"coll_perf": {**record["coll_perf"], "event_trace_ts": trace}}


def test_a_new_file_of_the_same_name_is_another_log(host: Host) -> None:
    """Its beginning tells."""
    host.write(0, 10, 1.0)
    host.at(66)
    host.log.unlink()
    host.write(10, 10, 61.0)
    host.at(126)
    assert host.seqs() == list(range(20))
    assert not host.bench.gaps()


def test_what_is_removed_before_it_was_read_is_counted(host: Host) -> None:
    """Nobody knows how many records that were."""
    host.write(0, 10, 1.0)
    host.at(66)
    host.write(10, 10, 61.0)
    host.at(70)
    host.log.unlink()
    for second in range(71, 100):
        host.at(second)
    assert host.seqs() == list(range(10))
    assert host.bench.gaps() == Counter({"gone-before-read": 1})


def test_the_rank_is_remembered_when_the_process_and_the_agent_have_ended(host: Host) -> None:
    """It is written with the first portion."""
    host.rank = 1
    host.bench.ends(7)
    host.bench.process(8, torchrun(5, 16, SMON_JOB_ID="job"))
    host.log = host.log.with_name("host-pid8.log")
    host.write(0, 10, 1.0)
    host.at(66)
    host.bench.ends(8)
    host.bench.kill()
    host.write(10, 10, 61.0)
    host.at(126)
    assert [(events.rank, events.world_size) for _, events in host.portions()] == [(5, 16)] * 2
    assert not any("global ranks are those" in n for _, e in host.portions() for n in e.notes)


def test_without_a_process_the_largest_communicator_tells_the_rank(host: Host) -> None:
    """That of the whole log so far, also where a portion has only smaller ones."""
    host.bench.ends(7)
    small, large = (
        inspector_record(1, T0 + 61, rank=1),
        inspector_record(0, T0 + 1, rank=6, world=8),
    )
    append(host.log, large)
    host.at(66)
    append(host.log, small)
    host.at(126)
    assert [(events.rank, events.world_size) for _, events in host.portions()] == [(6, 8)] * 2


def test_a_number_of_a_process_in_a_container_is_found(host: Host) -> None:
    """The log has the number inside; two containers with the same one are left undecided."""
    host.bench.process(4000, torchrun(3, 8, SMON_JOB_ID="job"), inner=12)
    host.log = host.log.with_name("host-pid12.log")
    host.write(0, 3, 1.0)
    host.at(66)
    (_, events), *_ = host.portions()
    assert events.rank == 3


def test_a_log_that_is_renamed_before_it_is_read_is_found_again(host: Host) -> None:
    """And its successor is not taken for it."""
    host.write(0, 10, 1.0)
    host.at(10)
    command = host.bench.reducer._command
    move = f"mv '{host.log}' '{host.log}.1'; exec {' '.join(command)}"
    host.bench.reducer._command = ("sh", "-c", move)
    host.bench.wall_ns = int((T0 + 66) * 1e9)
    host.bench.turn(0.0)
    assert not host.log.exists()
    assert host.seqs() == list(range(10))
    assert not host.bench.gaps()


def test_a_portion_that_the_reader_does_not_survive_is_left_out(host: Host) -> None:
    """And the log goes on behind it."""
    host.write(0, 10, 1.0)
    command = host.bench.reducer._command
    host.bench.reducer._command = ("sh", "-c", "exit 3")
    host.at(66)
    host.bench.reducer._command = command
    host.bench.kill()
    host.write(10, 10, 61.0)
    host.at(126)
    assert host.seqs() == list(range(10, 20))
    assert host.bench.gaps() == Counter({"reader-died": 1})


def test_files_that_are_no_logs_are_passed_over(host: Host) -> None:
    """By their content; with what was looked for."""
    host.log.write_text("step 1: loss 3.2\n" * 100)
    (host.log.parent / "host-pid9.log.swp").write_text("x" * 1000)
    host.at(66)
    assert not host.bench.gaps()
    assert host.bench.outbox.passed == Counter({"other-content": 1})


def test_a_log_of_messages_only_has_no_portions(host: Host) -> None:
    """Nothing is shipped, and reading goes on."""
    record = inspector_record(0, T0 + 1)
    record["p2p_perf"] = {"p2p": "Send", "p2p_sn": 1}
    del record["coll_perf"]
    append(host.log, record)
    host.at(66)
    assert not host.bench.parts()
    host.write(1, 3, 61.0)
    host.at(126)
    assert host.seqs() == [1, 2, 3]


# --- portions -----------------------------------------------------------------------------------


def cut(text: str, until_s: float, *, offset: int = 0, carry: Any = None) -> list[Portion]:  # noqa: ANN401  # JSON
    """Portions of a minute."""
    file = BytesIO(text.encode())
    return list(portions_of(file, offset, carry or {}, 60_000_000, int((T0 + until_s) * 1e6)))


def lines(*records: object, indent: int | None = None) -> str:
    """Records one after the other."""
    return "".join(json.dumps(each, indent=indent) + "\n" for each in records)


@pytest.mark.parametrize("indent", [None, 2])
def test_records_on_one_line_or_many_are_cut_between_them(indent: int | None) -> None:
    """At the first record of the next period."""
    one, two = (lines(inspector_record(n, T0 + 59 + 2 * n), indent=indent) for n in (0, 1))
    first, second = cut(one + two, 120)
    assert (first.text.decode(), first.end) == (one, len(one))
    assert second.text.decode().endswith(two)
    assert [portion.begin_us for portion in (first, second)] == [T0 * 1e6, (T0 + 60) * 1e6]
    assert [portion.end for portion in cut(one + two, 60)] == [len(one)]


def test_stamps_that_are_damaged_or_go_back_move_no_cut() -> None:
    """A record without a time belongs to the one before it."""
    good, late = inspector_record(0, T0 + 1), inspector_record(2, T0 + 61)
    wild = inspector_record(1, 9e11)
    back = inspector_record(3, T0 + 2)
    first, second = cut(lines(good, wild, {"coll_perf": {}}, late, back), 120)
    assert first.text.count(b"coll_perf") == 3
    assert second.text.count(b"coll_perf") == 2


def test_a_record_that_never_ends_is_left_behind() -> None:
    """A megabyte without an end is none."""
    (portion,) = cut('{"coll_perf": "' + "x" * (1 << 20), 60)
    assert portion.end > 1 << 20


def test_a_log_is_known_by_its_beginning() -> None:
    """Not before there is enough of it, and the same while it grows."""
    text = lines(*(inspector_record(n, T0 + n) for n in range(500))).encode()
    assert key_of_log(text[:150]) is None
    assert key_of_log(text[:1000]) == key_of_log(text[: 1 << 16])
    assert key_of_log(b"x" * (1 << 16)) is not None
