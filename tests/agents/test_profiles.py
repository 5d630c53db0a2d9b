"""Folders of profiles and dumps: every whole file once, and everything else counted."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ingest_agents.sources.listing import FileKind
from ingest_agents.spool.eviction import evict
from ingest_agents.spool.folder import segments_of, spool_bytes, streams_in
from smon.topology import Layout
from smon.trace.formats import kineto, rank_events
from smon.wire import BatchKind
from smon.wire.frames import Frame, scan_frames
from smon.wire.parts import MAX_PART_BYTES
from tests.agents.builders import chance_of
from tests.agents.watching import Bench, torchrun
from tests.kineto_files import Ddp, ddp_events, document, write_ddp, write_json


def dump(version: str = "2.10", **more: object) -> bytes:
    """A dump of Flight Recorder."""
    return json.dumps({"version": version, "pg_config": {}, "entries": [], **more}).encode()


@pytest.fixture
def kineto_bench(tmp_path: Path) -> Bench:
    """A folder of profiles."""
    return Bench(tmp_path, FileKind.KINETO)


@pytest.fixture
def dumps(tmp_path: Path) -> Bench:
    """A folder of dumps."""
    return Bench(tmp_path, FileKind.FLIGHT_RECORDER)


# --- profiles -----------------------------------------------------------------------------------


def test_a_profile_arrives_as_the_events_of_its_rank(kineto_bench: Bench, tmp_path: Path) -> None:
    """Exactly what a reader makes of the file itself; with rank, steps and times beside it."""
    paths = write_ddp(kineto_bench.folder, Ddp(ranks=2, steps=3))
    kineto_bench.settle()
    (spec,) = kineto_bench.specs()
    assert (spec.job, spec.source, spec.layout) == ("job", "files", Layout(dp=2, pp=1))
    for path in paths:
        (own,) = kineto.read(path).events
        there = tmp_path / "there"
        there.write_bytes(kineto_bench.files()[path.name])
        (events,) = rank_events.read(there).events
        assert np.array_equal(events.start_ns, own.start_ns)
        assert (events.rank, events.names, events.groups) == (own.rank, own.names, own.groups)
    part = kineto_bench.parts()[1]
    assert (part.rank, part.world_size, part.first_step, part.last_step) == (1, 2, 10, 12)
    assert part.start_ns is not None
    assert not kineto_bench.gaps()


def test_only_whole_files_are_taken(kineto_bench: Bench, tmp_path: Path) -> None:
    """Not by temporary names, not without an end; by rename, and when the rest has come."""
    (path, other) = write_ddp(tmp_path / "made", Ddp(ranks=2, steps=2), packed=False)
    whole = path.read_bytes()
    for name in (".hidden.json", "a.json.tmp", "b.json.part", "c.txt"):
        (kineto_bench.folder / name).write_bytes(whole)
    growing = kineto_bench.folder / "growing.json"
    growing.write_bytes(whole[:-40])
    packed = kineto_bench.folder / "packed.json.gz"
    packed.write_bytes(gzip.compress(other.read_bytes())[:-200])
    kineto_bench.settle()
    assert not kineto_bench.parts()
    growing.write_bytes(whole)
    packed.write_bytes(gzip.compress(other.read_bytes()))
    kineto_bench.settle()
    assert set(kineto_bench.files()) == {"growing.json", "packed.json.gz"}
    assert not kineto_bench.gaps()


def test_a_file_that_is_never_finished_is_given_up(kineto_bench: Bench) -> None:
    """After a minute without a change; the server is told once."""
    (kineto_bench.folder / "cut.json").write_text('{"traceEvents": [')
    (kineto_bench.folder / "empty.json").touch()
    for _ in range(14):
        kineto_bench.turn()
    assert kineto_bench.gaps() == Counter({"not-whole": 1, "empty-file": 1})
    kineto_bench.kill()
    for _ in range(14):
        kineto_bench.turn()
    assert kineto_bench.gaps() == Counter({"not-whole": 1, "empty-file": 1})


def test_what_is_no_profile_is_passed_over(kineto_bench: Bench) -> None:
    """Said, with what was looked for; a profile that cannot be used is told to the server."""
    (kineto_bench.folder / "settings.json").write_text('{"lr": 1}')
    job = Ddp(ranks=2, steps=2)
    events = [each for each in ddp_events(job)[0] if "ProfilerStep" not in each["name"]]
    write_json(kineto_bench.folder / "no-steps.json", document(job, 0, events))
    kineto_bench.settle()
    assert kineto_bench.gaps() == Counter({"refused-by-reader": 1})
    assert any("settings.json: looked for" in text for text in kineto_bench.said)
    assert any("no-steps.json" in text and "no step" in text for text in kineto_bench.said)


def test_copies_and_touched_files_are_shipped_once(kineto_bench: Bench) -> None:
    """The content tells."""
    (path, *_) = write_ddp(kineto_bench.folder, Ddp(ranks=1, steps=2))
    kineto_bench.settle()
    shutil.copy(path, kineto_bench.folder / "copy.json.gz")
    os.utime(path)
    kineto_bench.settle()
    kineto_bench.kill()
    kineto_bench.settle()
    assert set(kineto_bench.files()) == {path.name}


def test_a_rank_has_many_profiles_over_time(kineto_bench: Bench) -> None:
    """One per cycle of the profiler, in folders of their own or not."""
    for first in (10, 20, 30):
        write_ddp(
            kineto_bench.folder / f"iteration_{first}", Ddp(ranks=1, steps=2, first_step=first)
        )
        kineto_bench.settle()
    steps = [(part.first_step, part.last_step) for part in kineto_bench.parts()]
    assert steps == [(10, 11), (20, 21), (30, 31)]


def test_files_of_long_ago_stay(tmp_path: Path) -> None:
    """Older than the agent's start by more than the setting: said, not shipped."""
    bench = Bench(tmp_path, FileKind.KINETO, file_age_s=100.0)
    old, young = write_ddp(bench.folder, Ddp(ranks=2, steps=2))
    os.utime(old, ns=(0, bench.wall_ns - 200 * 10**9))
    os.utime(young, ns=(0, bench.wall_ns - 50 * 10**9))
    bench.settle()
    assert set(bench.files()) == {young.name}
    assert bench.outbox.passed == Counter({"too-old": 1})
    assert not bench.gaps()


def test_a_profile_without_a_rank_has_that_of_its_process(kineto_bench: Bench) -> None:
    """By the number of the process in its name; also when the process has ended."""
    job = Ddp(ranks=2, steps=2)
    value = document(job, 1, ddp_events(job)[1])
    del value["distributedInfo"]
    kineto_bench.process(4711, torchrun(1, SMON_JOB_ID="mine"))
    kineto_bench.turn()
    kineto_bench.ends(4711)
    kineto_bench.turn()
    write_json(kineto_bench.folder / "node_4711.1700000000.pt.trace.json", value)
    kineto_bench.settle()
    (part,) = kineto_bench.parts()
    assert (part.rank, part.world_size) == (1, 2)
    assert kineto_bench.specs()[0].job == "mine"


def test_every_job_on_a_host_has_its_stream(tmp_path: Path) -> None:
    """Also every attempt of a job."""
    bench = Bench(tmp_path, FileKind.KINETO, job_id="")
    for pid, more in ((1, {"SLURM_JOB_ID": "5"}), (2, {"SLURM_RESTART_COUNT": "2"}), (3, {})):
        bench.process(pid, torchrun(0, 1, **more))
    job = Ddp(ranks=1, steps=2)
    for pid in (1, 2, 3):
        value = document(job, 0, ddp_events(Ddp(ranks=1, steps=2, first_step=pid))[0])
        write_json(bench.folder / f"host_{pid}.17.pt.trace.json", value)
    bench.settle()
    found = {(spec.job, spec.attempt) for spec in bench.specs()}
    assert found == {("5", 0), ("77", 2), ("77", 0)}


def test_a_file_whose_job_nobody_knows_stays(tmp_path: Path) -> None:
    """It is said what is missing."""
    bench = Bench(tmp_path, FileKind.KINETO, job_id="")
    write_ddp(bench.folder, Ddp(ranks=1, steps=2))
    bench.settle()
    assert not bench.specs()
    assert bench.outbox.passed == Counter({"job-unknown": 1})


# --- the process that reads ---------------------------------------------------------------------

DIES = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]

#: Answers for all but the first profile.
DIES_AT_FIRST = """
import json, sys
limits, *orders = [json.loads(line) for line in sys.stdin]
for order in orders:
    if order["path"].endswith("rank0.pt.trace.json.gz"):
        sys.exit(3)
    print(json.dumps({"key": order["key"], "fault": "seen", "detail": "x"}), flush=True)
"""


def test_a_reader_that_dies_costs_one_file(tmp_path: Path) -> None:
    """The one it was at: given up for good, and the others are read."""
    bench = Bench(tmp_path, FileKind.KINETO, command=[sys.executable, "-c", DIES_AT_FIRST])
    write_ddp(bench.folder, Ddp(ranks=3, steps=2))
    bench.settle()
    assert bench.gaps() == Counter({"reader-died": 1, "seen": 2})
    bench.kill()
    bench.settle()
    assert bench.gaps() == Counter({"reader-died": 1, "seen": 2})


def test_a_reader_that_always_dies_is_not_started_for_ever(tmp_path: Path) -> None:
    """Once for each file."""
    bench = Bench(tmp_path, FileKind.KINETO, command=DIES)
    write_ddp(bench.folder, Ddp(ranks=3, steps=2))
    bench.settle()
    assert bench.gaps() == Counter({"reader-died": 3})
    assert any("ended by signal 9" in text for text in bench.said)


def test_a_reader_that_hangs_is_ended(tmp_path: Path) -> None:
    """After `reader_s`."""
    slow = [sys.executable, "-c", "import time; time.sleep(600)"]
    bench = Bench(tmp_path, FileKind.KINETO, command=slow, reader_s=0.3)
    write_ddp(bench.folder, Ddp(ranks=1, steps=2))
    bench.settle()
    assert bench.gaps() == Counter({"reader-too-slow": 1})


def test_a_reader_has_no_more_memory_than_it_may(tmp_path: Path) -> None:
    """A profile that unpacks to 600 MB in one event is given up, and the host is not."""
    bench = Bench(tmp_path, FileKind.KINETO, reader_bytes=1 << 29)
    with gzip.open(bench.folder / "bomb.json.gz", "wb", compresslevel=1) as file:
        file.write(b'{"schemaVersion": 1, "deviceProperties": [], "traceEvents": [{"name": "')
        for _ in range(600):
            file.write(b"x" * (1 << 20))
        file.write(b'"}]}')
    bench.settle()
    assert sum(bench.gaps().values()) == 1
    assert not bench.parts()


def test_without_libraries_files_stay_and_it_is_said_once(tmp_path: Path) -> None:
    """With the command that installs them; dumps need none."""
    bench = Bench(tmp_path, FileKind.KINETO, needs=["json", "no_such_library"])
    write_ddp(bench.folder, Ddp(ranks=1, steps=2))
    bench.settle()
    assert not bench.specs()
    (text,) = set(bench.said)
    assert "no_such_library is not installed" in text
    assert 'pip install "smon[agent]"' in text
    bench.seams["needs"] = None
    bench.kill()
    bench.settle()
    assert len(bench.files()) == 1


def test_a_result_that_vanishes_is_made_again(kineto_bench: Bench) -> None:
    """Somebody cleans the spool before it is shipped: nothing is lost, and the agent goes on."""
    write_ddp(kineto_bench.folder, Ddp(ranks=1, steps=2))
    kineto_bench.turn()
    kineto_bench.clock.now += 6
    command = kineto_bench.reducer._command
    folder = kineto_bench.reducer.folder
    clean = f"answer=$({' '.join(command)}); rm -rf '{folder}'; echo \"$answer\""
    kineto_bench.reducer._command = ("sh", "-c", clean)
    kineto_bench.turn(0.0)
    kineto_bench.reducer._command = command
    assert not kineto_bench.files()
    assert any("No such file" in text for text in kineto_bench.said)
    kineto_bench.settle()
    assert len(kineto_bench.files()) == 1
    assert not kineto_bench.gaps()


# --- hostile folders ----------------------------------------------------------------------------


def test_names_cannot_do_harm(kineto_bench: Bench) -> None:
    """They are shown only: cleaned, and no longer than a server takes."""
    (path,) = write_ddp(kineto_bench.folder, Ddp(ranks=1, steps=2))
    names = ["a\n\x1b[31m\"'; rm -rf.json.gz", "é" * 100 + ".json.gz", "x" * 240 + ".json.gz"]
    content = path.read_bytes()
    for number, name in enumerate(names):
        (kineto_bench.folder / name).write_bytes(content + gzip.compress(b" " * number))
    path.unlink()
    kineto_bench.settle()
    shown = [part.name for part in kineto_bench.parts()]
    # The content is the same once it is reduced: the server gets all three, by their names.
    assert len(shown) == 3
    assert all(len(name) <= 200 and name.isascii() and name.isprintable() for name in shown)


def test_links_loops_devices_and_pipes_are_left_alone(kineto_bench: Bench, tmp_path: Path) -> None:
    """Nothing outside of the folder is read, and nothing blocks."""
    (outside,) = write_ddp(tmp_path / "outside", Ddp(ranks=1, steps=2))
    folder = kineto_bench.folder
    (folder / "link.json.gz").symlink_to(outside)
    (folder / "loop").symlink_to(folder)
    (folder / "dangling.json").symlink_to(folder / "nothing")
    os.mkfifo(folder / "pipe.json")
    kineto_bench.settle()
    assert not kineto_bench.parts()
    assert kineto_bench.outbox.passed == Counter({"no-plain-file": 4})


def test_a_file_of_two_gib_is_not_read(kineto_bench: Bench) -> None:
    """Also a sparse one, whose size costs nothing."""
    with (kineto_bench.folder / "sparse.json").open("wb") as file:
        file.truncate(2 << 30)
    kineto_bench.settle()
    assert kineto_bench.outbox.passed == Counter({"too-large": 1})


def test_a_file_that_vanishes_is_counted(kineto_bench: Bench) -> None:
    """Between the look and the reading."""
    (path,) = write_ddp(kineto_bench.folder, Ddp(ranks=1, steps=2))
    kineto_bench.turn()
    kineto_bench.clock.now += 6
    command = kineto_bench.reducer._command
    kineto_bench.reducer._command = ("sh", "-c", f"rm '{path}'; exec {' '.join(command)}")
    kineto_bench.settle()
    assert kineto_bench.gaps() == Counter({"unreadable-file": 1})


def test_a_folder_that_is_not_there_is_no_failure(kineto_bench: Bench) -> None:
    """It may come later."""
    kineto_bench.folder.rmdir()
    kineto_bench.turn()
    write_ddp(kineto_bench.folder, Ddp(ranks=1, steps=2))
    kineto_bench.settle()
    assert len(kineto_bench.files()) == 1


def test_a_folder_that_is_away_for_a_while_ships_nothing_twice(kineto_bench: Bench) -> None:
    """As one that is mounted again; what is known of files that are gone for good is dropped."""
    (path,) = write_ddp(kineto_bench.folder, Ddp(ranks=1, steps=2))
    kineto_bench.settle()
    kineto_bench.folder.rename(kineto_bench.root / "away")
    for _ in range(30):
        kineto_bench.turn()
    (kineto_bench.root / "away").rename(kineto_bench.folder)
    kineto_bench.settle()
    assert len(kineto_bench.parts()) == 1
    path.unlink()
    for _ in range(30):
        kineto_bench.turn()
    assert kineto_bench.outbox._finished == {"unreadable-file ."}


# --- dumps --------------------------------------------------------------------------------------


def test_a_dump_goes_as_it_is(dumps: Bench) -> None:
    """With the rank in its name, and the time of its writing."""
    (dumps.folder / "nccl_trace_rank_3").write_bytes(dump())
    (dumps.folder / "_dump_12").write_bytes(b"\x80\x02pg_config.")
    (dumps.folder / "training.log").write_text("pg_config")
    (dumps.folder / "notes").write_text("nothing of this kind")
    dumps.settle()
    assert dumps.files()["nccl_trace_rank_3"] == dump()
    assert {part.name: part.rank for part in dumps.parts()} == {
        "nccl_trace_rank_3": 3,
        "_dump_12": 12,
    }
    assert dumps.parts()[0].start_ns is not None


def test_equal_dumps_of_two_ranks_are_two(dumps: Bench) -> None:
    """Ranks that have called nothing leave the same 87 bytes; a copy of one is a copy."""
    for name in ("_dump_0", "_dump_1", "old_dump_1"):
        (dumps.folder / name).write_bytes(dump())
    dumps.settle()
    assert [part.rank for part in dumps.parts()] == [0, 1]


def test_a_dump_without_a_rank_goes_without_one(dumps: Bench) -> None:
    """And that is said."""
    (dumps.folder / "flight.json").write_bytes(dump())
    dumps.settle()
    (part,) = dumps.parts()
    assert part.rank is None
    assert any("goes without a rank" in text for text in dumps.said)


def test_a_dump_that_is_written_again_is_shipped_again(dumps: Bench) -> None:
    """The next hang writes the same name."""
    path = dumps.folder / "_dump_0"
    for version in ("2.9", "2.10"):
        path.write_bytes(dump(version))
        dumps.settle()
    assert len(dumps.parts()) == 2


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_file_in_parts_survives_a_kill_between_them(tmp_path: Path, kept: int) -> None:
    """What was written before the kill is not written again, and the rest is."""
    bench = Bench(tmp_path, FileKind.FLIGHT_RECORDER)
    content = dump(noise=chance_of(3).randbytes(MAX_PART_BYTES).hex() + "!" * 1000)
    (bench.folder / "_dump_0").write_bytes(content)
    bench.settle()
    assert [part.part for part in bench.parts()] == [0, 1, 2]
    (folder,) = streams_in(bench.spool)
    bench.outbox.close()
    cut_after(folder, kept)
    bench.open()
    assert len(bench.parts()) == kept
    bench.settle()
    assert [part.part for part in bench.parts()] == [0, 1, 2]
    assert bench.files() == {"_dump_0": content}


def cut_after(folder: Path, files: int) -> None:
    """Leave so many FILE batches of a stream, as a kill would."""
    ((_, path),) = segments_of(folder)
    data, left, end = path.read_bytes(), files, 0
    for frame in scan_frames(data):
        assert isinstance(frame, Frame)
        if frame.type == BatchKind.FILE:
            if not left:
                break
            left -= 1
        end = frame.end
    path.write_bytes(data[:end])


def test_no_more_is_shipped_in_an_hour_than_allowed(tmp_path: Path) -> None:
    """What is too much is left out and told; later there is room again."""
    bench = Bench(tmp_path, FileKind.FLIGHT_RECORDER, file_hour_bytes=3000)
    for number in range(3):
        name = bench.folder / f"_dump_{number}"
        name.write_bytes(dump(noise=chance_of(number).randbytes(500).hex()))
    bench.settle()
    assert len(bench.parts()) == 2
    assert bench.gaps() == Counter({"hourly-limit": 1})
    bench.clock.now += 3600
    (bench.folder / "_dump_9").write_bytes(dump(noise=chance_of(9).randbytes(500).hex()))
    bench.settle()
    assert len(bench.parts()) == 3


def test_a_full_spool_drops_the_oldest_files(tmp_path: Path) -> None:
    """Below its cap again; the server is told how many batches went."""
    bench = Bench(tmp_path, FileKind.FLIGHT_RECORDER, segment_bytes=20_000)
    for number in range(12):
        name = bench.folder / f"_dump_{number}"
        name.write_bytes(dump(noise=chance_of(number).randbytes(8000).hex()))
        bench.settle()
    bench.outbox.close()
    dropped = evict(bench.spool, 60_000, {})
    assert spool_bytes(bench.spool) <= 60_000
    assert sum(dropped.values()) == bench.gaps()["spool-full"] == 12 - len(bench.parts())
    bench.open()
    bench.settle()
    assert len(bench.parts()) == 12 - dropped.total()


def test_a_stream_ends_a_day_after_its_job(dumps: Bench) -> None:
    """Not while a process of the job runs; a file that comes later begins another stream."""
    dumps.process(5, {"RANK": "0", "SMON_JOB_ID": "job"})
    (dumps.folder / "_dump_0").write_bytes(dump())
    dumps.settle()
    dumps.turn(90_000)
    assert BatchKind.END not in {batch.kind for batch in dumps.batches()}
    dumps.ends(5)
    dumps.turn()
    dumps.turn(90_000)
    assert dumps.batches()[-1].kind is BatchKind.END
    dumps.kill()
    late = dumps.folder / "_dump_1"
    late.write_bytes(dump())
    os.utime(late, ns=(0, dumps.wall_ns))
    dumps.settle()
    assert len(dumps.specs()) == 2
    assert set(dumps.files()) == {"_dump_0", "_dump_1"}
