from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from smon.errors import TraceError
from smon.trace.events import Collective, Kind, Phase
from smon.trace.formats import nsys
from smon.trace.load import load

ALL_REDUCE, GEMM = "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "cutlass_gemm"
PROCESS = 5 << 24

Kernel = tuple[int, int, str]
Range = tuple[int, int, str]


def export(path: Path, devices: Sequence[Sequence[Kernel]], ranges: Sequence[Range] = ()) -> Path:
    """An export with kernels (start, end, name) of each device, launched 50 ns before."""
    with closing(sqlite3.connect(path)) as base:
        base.executescript(
            """
            create table StringIds (id integer, value text);
            create table CUPTI_ACTIVITY_KIND_KERNEL (start integer, end integer, deviceId integer,
              globalPid integer, streamId integer, correlationId integer, shortName integer);
            create table CUPTI_ACTIVITY_KIND_RUNTIME (correlationId integer, globalTid integer,
              start integer);
            create table TARGET_INFO_SESSION_START_TIME (utcEpochNs integer);
            insert into TARGET_INFO_SESSION_START_TIME values (1000000);
            """
        )
        names: dict[str, int] = {}
        for device, kernels in enumerate(devices):
            process = PROCESS + (device << 25)
            for number, (start, end, name) in enumerate(kernels):
                row = (start, end, device, process, 7, number, names.setdefault(name, len(names)))
                base.execute("insert into CUPTI_ACTIVITY_KIND_KERNEL values (?,?,?,?,?,?,?)", row)
                base.execute(
                    "insert into CUPTI_ACTIVITY_KIND_RUNTIME values (?,?,?)",
                    (number, process + 1, start - 50),
                )
        base.executemany("insert into StringIds values (?,?)", [(n, t) for t, n in names.items()])
        if ranges:
            base.execute(
                "create table NVTX_EVENTS (start integer, end integer, globalTid integer,"
                " text text, textId integer, eventType integer)"
            )
            base.executemany(
                "insert into NVTX_EVENTS values (?,?,?,?,null,59)",
                [(start, end, PROCESS + 1, text) for start, end, text in ranges],
            )
        base.commit()
    return path


def test_each_gpu_of_a_file_is_a_rank(tmp_path: Path) -> None:
    """In the order of the devices; times count from the epoch of the session."""
    path = export(tmp_path / "x.sqlite", [[(100, 200, ALL_REDUCE)], [(150, 200, ALL_REDUCE)]])
    one, two = nsys.read(path).events
    assert (one.rank, two.rank, one.world_size) == (0, 1, 2)
    assert (one.start_ns.tolist(), two.duration_ns.tolist()) == ([1_000_100], [50])
    assert one.collective.tolist() == [Collective.ALL_REDUCE]


def test_a_file_of_one_gpu_has_its_rank_in_its_name(tmp_path: Path) -> None:
    """One process per file is what ``--output=rank%q{RANK}`` gives."""
    for rank in (0, 1):
        export(tmp_path / f"rank{rank}.sqlite", [[(100, 200, ALL_REDUCE)]])
    trace = load([tmp_path])
    assert [events.rank for events in trace.events] == [0, 1]
    assert trace.job.layout.dp == 2


def test_steps_are_ranges_that_name_them(tmp_path: Path) -> None:
    """By the launch; a kernel may run later."""
    kernels = [(100, 200, ALL_REDUCE), (310, 700, ALL_REDUCE), (560, 800, ALL_REDUCE)]
    ranges = [(40, 240, "step 3"), (250, 490, "step 4"), (60, 90, "optimizer")]
    (events,) = nsys.read(export(tmp_path / "x.sqlite", [kernels], ranges)).events
    assert events.step.tolist() == [3, 4, -1]
    assert [step.number for step in events.steps] == [3, 4]


def test_without_steps_the_file_is_one_and_says_so(tmp_path: Path) -> None:
    """Tables exist only if they hold data: no NVTX at all is usual."""
    (events,) = nsys.read(export(tmp_path / "x.sqlite", [[(100, 200, ALL_REDUCE)]])).events
    assert events.step.tolist() == [0]
    assert any("no step" in note for note in events.notes)


def test_phases_and_calls_come_from_the_ranges_around_a_launch(tmp_path: Path) -> None:
    """A kernel of messages is what the call says."""
    kernels = [(100, 200, GEMM), (300, 400, "ncclDevKernel_SendRecv"), (500, 600, GEMM)]
    ranges = [(40, 60, "backward"), (240, 260, "nccl:all_to_all, op_id = 3"), (440, 445, "forward")]
    (events,) = nsys.read(export(tmp_path / "x.sqlite", [kernels], ranges)).events
    assert events.phase.tolist() == [Phase.BACKWARD, -1, -1]
    assert events.collective.tolist() == [-1, Collective.ALL_TO_ALL, -1]


def test_the_public_file_has_66_exchanges_on_two_gpus(traces: Path) -> None:
    """An all-to-all of two ranks is made of messages."""
    found = nsys.read(traces / "nsys/mfu_2gpu_before.sqlite").events
    assert [len(one.of_kind(Kind.COLLECTIVE, Kind.P2P)) for one in found] == [33, 33]
    talks = Counter(c for one in found for c in one.collective.tolist() if c >= 0)
    assert sum(talks.values()) == 66
    assert found[0].host == "modal"


def test_a_profile_without_nccl_says_what_was_looked_for(traces: Path) -> None:
    """Two kernels, none of NCCL."""
    with pytest.raises(TraceError, match="no collective in 2 kernels"):
        nsys.read(traces / "nsys/mock.sqlite")


@pytest.mark.parametrize("size", [16, 100, 5_000])
def test_a_damaged_file_is_an_error_in_one_line(tmp_path: Path, size: int) -> None:
    """Cut off, or another database."""
    whole = export(tmp_path / "x.sqlite", [[(100, 200, ALL_REDUCE)]]).read_bytes()
    path = tmp_path / "cut.sqlite"
    path.write_bytes(whole[:size])
    with pytest.raises(TraceError) as caught:
        nsys.read(path)
    assert "\n" not in str(caught.value)


def test_another_database_is_an_error(tmp_path: Path) -> None:
    """SQLite, but no export."""
    path = tmp_path / "other.sqlite"
    with closing(sqlite3.connect(path)) as base:
        base.execute("create table users (name text)")
        base.commit()
    with pytest.raises(TraceError, match="CUPTI_ACTIVITY_KIND_KERNEL"):
        nsys.read(path)


def test_a_profile_is_never_written(tmp_path: Path) -> None:
    """No journal appears beside it, and a read-only file can be read."""
    path = export(tmp_path / "x.sqlite", [[(100, 200, ALL_REDUCE)]])
    before = path.read_bytes()
    nsys.read(path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["x.sqlite"]
