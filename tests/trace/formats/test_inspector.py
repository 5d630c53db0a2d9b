from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from smon.collectives.report import analyze_collectives
from smon.errors import TraceError
from smon.trace.events import Collective, RankEvents
from smon.trace.formats import inspector
from smon.trace.load import load

Record = dict[str, Any]


def record(seq: int, *, rank: int = 0, start_us: int | None = None, **perf: object) -> Record:
    """One record of version 4.0; verbose if it has a start."""
    trace: Record = {}
    if start_us is not None:
        kernel = {"channel_id": 0, "kernel_start_ts": start_us, "kernel_stop_ts": start_us + 90}
        trace = {"event_trace_ts": {"coll_start_ts": start_us - 70, "kernel_events": [kernel]}}
    return {
        "header": {"id": "0x7f", "rank": rank, "n_ranks": 2, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "dump_timestamp_us": 1_752_867_229_276_385,
            "hostname": f"node-{rank}",
            "pid": 1,
        },
        "coll_perf": {
            "coll": "AllReduce",
            "coll_sn": seq,
            "coll_msg_size_bytes": 1 << 20,
            "coll_exec_time_us": 90,
            **perf,
            **trace,
        },
    }


def read(path: Path, text: str) -> RankEvents:
    """The rank of a log with this text."""
    path.write_text(text)
    assert inspector.recognises(path.read_bytes(), path)
    (events,) = inspector.read(path).events
    return events


def lines(records: list[Record]) -> str:
    """JSON lines, as the plug-in writes them."""
    return "".join(json.dumps(each) + "\n" for each in records)


def test_verbose_records_have_a_start(tmp_path: Path) -> None:
    """That of the first channel's kernel."""
    events = read(tmp_path / "x.log", lines([record(4, start_us=1_000), record(5, start_us=2_000)]))
    assert events.timed
    assert events.start_ns.tolist() == [1_000_000, 2_000_000]
    assert events.duration_ns.tolist() == [90_000, 90_000]
    assert events.seq.tolist() == [4, 5]
    assert events.size_bytes.tolist() == [1 << 20] * 2
    assert (events.rank, events.world_size, events.host) == (0, 2, "node-0")


def test_plain_records_have_durations_only(tmp_path: Path) -> None:
    """What lies between collectives is unknown; who came last is not."""
    for rank, duration in ((0, 90), (1, 30)):
        text = lines([record(4, rank=rank, coll_exec_time_us=duration)])
        (tmp_path / f"h-pid{rank}.log").write_text(text)
    trace = load([tmp_path])
    assert not trace.events[0].timed
    report = analyze_collectives(trace.events, trace.job)
    assert report.verdict == "insufficient_data"
    (one,) = report.collectives
    assert one.last_rank == 1
    assert one.waits_s == pytest.approx((60e-6, 0.0))
    assert any("no start times" in note for note in report.quality.notes)


def test_header_and_metadata_hold_until_the_next_ones(tmp_path: Path) -> None:
    """Version 4.3 writes them once."""
    first = record(4)
    later = {"coll_perf": record(5)["coll_perf"]}
    events = read(tmp_path / "x.log", lines([first, later, later | {"header": {}}]))
    assert events.seq.tolist() == [4, 5]
    assert dict(events.dropped) == {"record without communicator, rank, number or time": 1}


@pytest.mark.parametrize("indent", [None, 2])
def test_values_without_quotes_are_read(tmp_path: Path, indent: int | None) -> None:
    """``"datatype": ncclFloat32`` is no JSON."""
    text = json.dumps(record(4, datatype="ncclFloat32", busy=True), indent=indent)
    bare = text.replace('"ncclFloat32"', "ncclFloat32")
    assert bare != text
    assert read(tmp_path / "x.log", bare).seq.tolist() == [4]


def test_records_that_are_broken_or_of_messages_are_counted(tmp_path: Path) -> None:
    """A cut-off line, a record without numbers, a send: the others stay."""
    send = {**record(0), "p2p_perf": {"p2p": "Send", "p2p_sn": 1}}
    del send["coll_perf"]
    whole = lines([record(4), send, record(5, coll_exec_time_us="nan"), record(6)])
    events = read(tmp_path / "x.log", whole + '{"header": {"id": 3, "ra')
    assert events.seq.tolist() == [4, 6]
    assert sorted(dict(events.dropped).values()) == [1, 1, 1]


def test_the_rank_is_that_of_the_largest_communicator(tmp_path: Path) -> None:
    """Ranks inside a group of two say nothing of the job."""
    small = record(4, rank=1)
    large = record(9)
    large["header"] = {"id": "0x99", "rank": 5, "n_ranks": 8}
    events = read(tmp_path / "x.log", lines([small, large]))
    assert (events.rank, events.world_size) == (5, 8)
    assert [group.size for group in events.groups] == [2, 8]


def test_steps_are_what_repeats(tmp_path: Path) -> None:
    """Two all-reduces of different size, nine times: numbers tell the step, also past a loss."""
    records = [
        record(seq, start_us=1_000 * seq, coll_msg_size_bytes=(1 + seq % 2) << 20)
        for seq in range(40, 58)
        if seq != 47
    ]
    events = read(tmp_path / "x.log", lines(records))
    assert events.step.tolist() == [seq // 2 for seq in range(40, 58) if seq != 47]
    assert any("every 2 collectives" in note for note in events.notes)


def test_a_late_rank_is_found_in_verbose_logs(tmp_path: Path) -> None:
    """Rank 1 arrives 400 µs later in every step."""
    for rank in (0, 1):
        late = 400 if rank == 1 else 0
        records = [
            record(
                seq, rank=rank, start_us=10**9 + 2_000 * seq + late, coll_exec_time_us=500 - late
            )
            for seq in range(8)
        ]
        (tmp_path / f"h-pid{rank}.log").write_text(lines(records))
    trace = load([tmp_path])
    report = analyze_collectives(trace.events, trace.job)
    assert report.verdict == "straggler"
    assert report.findings[0].where.rank == 1
    assert report.findings[0].excess_s == pytest.approx(400e-6)


def test_a_gzipped_log_is_read(tmp_path: Path) -> None:
    """Rotated logs are packed."""
    path = tmp_path / "x.log.gz"
    path.write_bytes(gzip.compress(lines([record(4)]).encode()))
    assert inspector.recognises(path.read_bytes(), path)
    assert len(inspector.read(path).events[0]) == 1


def test_a_log_without_a_collective_says_what_was_looked_for(tmp_path: Path) -> None:
    """Only headers, so far."""
    header = record(4)
    del header["coll_perf"]
    with pytest.raises(TraceError, match="no collective"):
        read(tmp_path / "x.log", lines([header]))


def test_the_samples_of_nccl_are_read(traces: Path) -> None:
    """Plain and verbose, both of version 4.0."""
    folder = traces / "nccl-plugin-samples"
    (plain,) = inspector.read(folder / "inspector_v4.0_readme_0.json").events
    (verbose,) = inspector.read(folder / "inspector_v4.0_readme_1.json").events
    assert (plain.rank, plain.world_size, plain.timed) == (2, 8, False)
    assert plain.duration_ns.tolist() == [61_974_000]
    assert plain.collective.tolist() == [Collective.ALL_REDUCE]
    assert verbose.timed
    assert verbose.start_ns.tolist() == [1_752_867_229_235_181_000]
    assert verbose.collective.tolist() == [Collective.REDUCE_SCATTER]
