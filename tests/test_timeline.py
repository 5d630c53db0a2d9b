from __future__ import annotations

import errno
import gzip
import json
import os
import re
import resource
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from smon.errors import ConfigError
from smon.ops import LOCAL, OP_TYPES, STREAM_COMPUTE, OpType
from smon.prepare import Prepared, prepare
from smon.simulate.engine import Engine
from smon.simulate.ideal import Ideal
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.synth.timing import SlowCompute
from smon.timeline import write_timeline
from smon.timeline.spans import GAP_RATIO, MAX_CUT_RATIO, side_by_side
from smon.topology import Layout
from smon.trace.load import load
from smon.trace.meta import Job
from smon.trace.table import OpTable, concat
from tests.synth.builders import quiet

Event = dict[str, Any]

#: Which op an event is: step, dp, stage, type, seq.
Key = tuple[int, int, int, str, int]

FIRST_FORWARD = (0, 0, "forward-compute", 0)

SCHEDULES = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b"},
    {"schedule": "1f1b", "overlap": True},
    {"schedule": "interleaved", "vpp": 2},
    {"schedule": "zero-bubble"},
    {"schedule": "interleaved", "vpp": 2, "record_noops": True},
    {"schedule": "1f1b", "step_microbatches": {1: 4}, "step_dp": {2: 2}},
    {"schedule": "1f1b", "pp": 1},
    {"schedule": "1f1b", "dp": 1, "step_relative": True},
]


class Drawn:
    """A timeline, read back."""

    def __init__(self, path: Path) -> None:
        packed = path.suffix == ".gz"
        text = gzip.decompress(path.read_bytes()) if packed else path.read_bytes()
        self.document = json.loads(text)
        self.all: list[Event] = self.document["traceEvents"]
        self.ops = [event for event in self.all if event["ph"] == "X"]
        self.processes = self._meta("process_name", "name")
        self.threads = self._meta("thread_name", "name")

    def _meta(self, name: str, arg: str) -> dict[Any, Any]:
        found = [event for event in self.all if event["ph"] == "M" and event["name"] == name]
        places = [(e["pid"], e["tid"]) if "tid" in e else e["pid"] for e in found]
        assert len(places) == len(set(places))
        return dict(zip(places, (event["args"][arg] for event in found), strict=True))

    def order(self, what: str) -> dict[Any, int]:
        """Sort index by process, or by (process, thread)."""
        return self._meta(f"{what}_sort_index", "sort_index")

    def of(self, kind: str) -> dict[Key, Event]:
        """The ops of one kind; none occurs twice."""
        chosen = {pid for pid, name in self.processes.items() if name.endswith(f" · {kind}")}
        ops = [(key(event), event) for event in self.ops if event["pid"] in chosen]
        found = dict(ops)
        assert len(found) == len(ops)
        return found


def key(event: Event) -> Key:
    """Which op it is."""
    args = event["args"]
    return args["step"], args["dp"], args["stage"], event["name"], args["seq"]


def begin_ns(event: Event) -> int:
    """As Perfetto reckons: every number as whole ns."""
    return round(float(event["ts"]) * 1e3)


def end_ns(event: Event) -> int:
    """As `begin_ns`."""
    return begin_ns(event) + round(float(event["dur"]) * 1e3)


def prepared(job: Synthetic | None = None, **fields: Any) -> Prepared:  # noqa: ANN401  # of Scenario
    """A small job, made or given."""
    job = job or generate(Scenario(**{"pp": 3, "dp": 3, "microbatches": 6, "steps": 3, **fields}))
    return prepare(job.table, job.job)


def draw(tmp_path: Path, ready: Prepared) -> Drawn:
    """Write and read back."""
    out = tmp_path / "timeline.json"
    events = write_timeline(ready, out)
    drawn = Drawn(out)
    assert events == len(drawn.ops)
    return drawn


def rows(table: OpTable) -> dict[Key, int]:
    """Row of every op; garbage collections that take no time are left out."""
    found = {}
    for row in np.flatnonzero((table.optype != OpType.GC) | (table.duration_ns > 0)).tolist():
        place = (int(table.step[row]), int(table.dp[row]), int(table.stage[row]))
        found[(*place, OP_TYPES[table.optype[row]].label, int(table.seq[row]))] = row
    return found


# --- what is drawn --------------------------------------------------------------------------


def test_a_step_worked_out_by_hand_is_drawn_so(tmp_path: Path) -> None:
    """Computes one after the other, receives from when they are posted, the end of step in turn."""
    drawn = draw(tmp_path, prepared(quiet(pp=2, microbatches=1, steps=2)))
    expected = {
        (0, "forward-compute"): [0, 10],
        (0, "forward-send"): [10, 11],
        (1, "forward-recv"): [0, 11],
        (1, "forward-compute"): [11, 21],
        (1, "backward-compute"): [21, 41],
        (1, "backward-send"): [41, 42],
        (0, "backward-recv"): [0, 42],
        (0, "backward-compute"): [42, 62],
        (0, "layernorm-grads-all-reduce"): [62, 63],
        (1, "layernorm-grads-all-reduce"): [41, 42],
        (0, "embedding-grads-all-reduce"): [63, 66],
        (1, "embedding-grads-all-reduce"): [42, 66],
        (0, "optimizer-clip-main-grad"): [66, 68],
        (1, "optimizer-clip-main-grad"): [66, 68],
        (0, "optimizer"): [68, 75],
        (1, "optimizer"): [68, 75],
    }
    for kind in ("actual", "ideal"):
        times: dict[int, dict[Any, list[float]]] = {0: {}, 1: {}}
        for (step, _, stage, name, _), event in drawn.of(kind).items():
            begin = event["ts"] / 1e3 - step * 75 * (1 + GAP_RATIO)
            times[step][stage, name] = [begin, begin + event["dur"] / 1e3]
        for found in times.values():
            assert set(found) == set(expected)
            for op, span in expected.items():
                assert found[op] == pytest.approx(span)
    args = drawn.of("actual")[0, 0, 1, "embedding-grads-all-reduce", 0]["args"]
    assert args == {"step": 0, "dp": 0, "stage": 1, "rank": 1, "seq": 0, "wait_us": 21_000}
    args = drawn.of("actual")[1, 0, 1, "forward-compute", 0]["args"]
    assert args == {
        "step": 1, "dp": 0, "stage": 1, "rank": 1, "seq": 0, "chunk": 0, "microbatch": 0
    }  # fmt: skip


@pytest.mark.parametrize("fields", SCHEDULES, ids=str)
def test_every_schedule_is_drawn_whole_and_in_order(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Every op once in each run, none over another, steps in turn, the ideal as simulated."""
    ready = prepared(**fields)
    drawn = draw(tmp_path, ready)
    used = ready.table.take(np.isin(ready.table.step, ready.window.steps))
    assert set(drawn.of("actual")) == set(drawn.of("ideal")) == set(rows(used))
    assert nothing_overlaps(drawn)
    assert steps_apart(drawn)
    assert ideal_lasts(drawn) == pytest.approx(ready.engine.ideal_step_ns, abs=2)


def nothing_overlaps(drawn: Drawn) -> bool:
    """Whether Perfetto keeps all events: it drops what overlaps another one of its thread."""
    spans = sorted((e["pid"], e["tid"], begin_ns(e), end_ns(e)) for e in drawn.ops)
    return all(one[:2] != next_[:2] or one[3] <= next_[2] for one, next_ in pairwise(spans))


def steps_apart(drawn: Drawn) -> bool:
    """Whether each step is drawn before all of the next one, and the first one from 0."""
    spans: dict[int, tuple[int, int]] = {}
    for event in drawn.ops:
        step = event["args"]["step"]
        first, last = spans.get(step, (begin_ns(event), end_ns(event)))
        spans[step] = min(first, begin_ns(event)), max(last, end_ns(event))
    begins = spans[min(spans)][0]
    return begins == 0 and all(
        spans[step][1] < spans[after][0] for step, after in pairwise(sorted(spans))
    )


def ideal_lasts(drawn: Drawn) -> list[int]:
    """Ideal time of each step, from the first start to the last optimizer, in ns."""
    steps = defaultdict(list)
    for at, event in drawn.of("ideal").items():
        steps[at[0]].append(event)
    return [
        max(end_ns(event) for event in events if event["name"] == "optimizer")
        - min(begin_ns(event) for event in events)
        for events in steps.values()
    ]


def test_actual_times_are_the_recorded_ones(tmp_path: Path) -> None:
    """To the ns, each step moved to its place as a whole; the ideal begins where it does."""
    ready = prepared()
    drawn = draw(tmp_path, ready)
    found, table = drawn.of("actual"), ready.table
    moved: dict[int, set[int]] = defaultdict(set)
    for at, row in rows(table).items():
        moved[at[0]].add(begin_ns(found[at]) - int(table.start_ns[row]))
        assert end_ns(found[at]) - begin_ns(found[at]) == table.duration_ns[row]
    assert [len(offsets) for offsets in moved.values()] == [1, 1, 1]
    for step, (offset,) in moved.items():
        begins = [begin_ns(event) for at, event in drawn.of("ideal").items() if at[0] == step]
        assert min(begins) == table.start_ns[table.step == step].min() + offset


def with_ideal(ready: Prepared, by_optype: NDArray[np.float64]) -> Prepared:
    """Other ideal durations."""
    return replace(ready, engine=Engine(ready.window, Ideal(by_optype)))


def test_steps_stand_apart_where_the_ideal_takes_longer(tmp_path: Path) -> None:
    """The mean of a noisy job can be worse than its best step."""
    ready = prepared()
    assert steps_apart(draw(tmp_path, with_ideal(ready, ready.ideal.by_optype * 2)))


def test_steps_stand_apart_where_an_op_begins_before_its_step(tmp_path: Path) -> None:
    """Times that restart in every step can be below 0 in a damaged trace."""
    job = quiet(dp=2, pp=2, steps=3)
    early = (job.table.step > 0) & (job.table.optype == OpType.PARAMS_ALL_GATHER)
    table = replace(
        job.table,
        start_ns=job.table.start_ns - 10**10 * early,
        duration_ns=job.table.duration_ns + 10**10 * early,
    )
    assert steps_apart(draw(tmp_path, prepare(table, job.job)))


def test_the_ideal_of_a_rank_waits_for_longer_ones_in_the_same_step(tmp_path: Path) -> None:
    """One structure has other ideal times in steps in which others have more microbatches."""
    job, more = (quiet(dp=2, pp=2, steps=2, microbatches=count) for count in (4, 6))
    other = (more.table.step == 1) & (more.table.dp == 1)
    table = concat(
        [
            job.table.take((job.table.step == 0) | (job.table.dp == 0)),
            more.table.take(other),
        ]
    )
    ready = prepare(table, job.job)
    drawn = draw(tmp_path, ready)
    assert ideal_lasts(drawn) == pytest.approx(ready.engine.ideal_step_ns, abs=2)
    # Two more microbatches take 31 ms each, a send included.
    waits = [drawn.of("ideal")[step, 0, 0, "grads-reduce-scatter", 0]["dur"] for step in (0, 1)]
    assert waits == pytest.approx([6_000, 68_000], abs=0.01)


@pytest.mark.parametrize("fields", SCHEDULES[:5], ids=str)
def test_a_job_in_which_all_is_ideal_is_drawn_twice_alike(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """Waiting included: an op of a group starts when it is posted, not when its transfer does."""
    drawn = draw(tmp_path, prepared(quiet(**{"dp": 2, "pp": 3, "microbatches": 6, **fields})))
    actual, ideal = drawn.of("actual"), drawn.of("ideal")
    assert set(actual) == set(ideal)
    for at, event in actual.items():
        assert begin_ns(event) == pytest.approx(begin_ns(ideal[at]), abs=2)
        assert end_ns(event) == pytest.approx(end_ns(ideal[at]), abs=2)


def test_waiting_is_until_the_last_of_the_group_started(tmp_path: Path) -> None:
    """Also over all DP ranks; the rest of the op is the transfer; local ops have none."""
    ready = prepared(faults=(SlowCompute(stage=1, dp=2, forward=2.0),))
    found = draw(tmp_path, ready).of("actual")
    meetings: dict[Any, list[Event]] = defaultdict(list)
    for (step, _, _, name, _), event in found.items():
        if name in {op.label for op in LOCAL}:
            assert "wait_us" not in event["args"]
        else:
            # Whoever meets ends at the same ns, and hardly anybody else.
            meetings[step, name.partition("-")[0], end_ns(event)].append(event)
    assert {len(events) for events in meetings.values()} == {2, 3, 9}
    for events in meetings.values():
        latest = max(begin_ns(event) for event in events)
        for event in events:
            assert round(event["args"]["wait_us"] * 1e3) == latest - begin_ns(event)


def test_a_garbage_collection_is_drawn_where_it_takes_time(tmp_path: Path) -> None:
    """The recorder writes one of no length into every step, which is no event."""
    job = generate(Scenario(dp=2, pp=1, steps=2))
    table = job.table
    one = np.flatnonzero(table.optype == OpType.GC)[0]
    duration = table.duration_ns.copy()
    duration[one] = 1000
    drawn = draw(tmp_path, prepare(replace(table, duration_ns=duration), job.job))
    assert Counter(at[3] for at in drawn.of("actual"))["gc"] == 1
    # Its mean over all workers and steps is an ideal duration above 0.
    assert Counter(at[3] for at in drawn.of("ideal"))["gc"] == 4


def test_ops_that_were_filled_in_are_marked(tmp_path: Path) -> None:
    """In args, category and colour; the ideal run knows no difference."""
    job = generate(Scenario(dp=4, pp=2, steps=3))
    lost = (job.table.step == 1) & (job.table.dp == 1) & (job.table.seq == 2)
    lost &= np.isin(job.table.optype, list(STREAM_COMPUTE))
    # The last row has a microbatch, which is nobody else's.
    order = np.argsort(job.table.microbatch, kind="stable")
    drawn = draw(tmp_path, prepare(job.table.take(order[~lost[order]]), job.job))
    marked = {at for at, event in drawn.of("actual").items() if event["args"].get("filled")}
    assert marked == set(rows(job.table.take(lost)))
    for at, event in drawn.of("actual").items():
        assert (event["cat"] == "actual,filled") == (at in marked)
        assert (event.get("cname") == "grey") == (at in marked)
        assert ("microbatch" in event["args"]) == ("compute" in event["name"] and at not in marked)
    for event in drawn.of("ideal").values():
        assert event["cat"] == "ideal"
        assert "cname" not in event
        assert "filled" not in event["args"]


def test_args_say_which_op_it_is(tmp_path: Path) -> None:
    """Microbatch and model chunk as in the trace, and the rank that the layout gives the worker."""
    ready = prepared(schedule="interleaved", vpp=2, tp=4)
    table, drawn = ready.table, draw(tmp_path, ready)
    for found in (drawn.of("actual"), drawn.of("ideal")):
        for at, row in rows(table).items():
            args = found[at]["args"]
            assert args.get("microbatch", -1) == table.microbatch[row]
            assert args.get("chunk", -1) == table.chunk[row]
            assert args["rank"] == table.rank[row]


# --- what does not fit ----------------------------------------------------------------------


@pytest.mark.parametrize("late_ns, row", [(3_000, ""), (15_000_000, " (2)")])
def test_an_op_that_ends_after_the_next_began_hides_nothing(
    tmp_path: Path, late_ns: int, row: str
) -> None:
    """Slightly: it is cut, its args keep the length. More: the next one moves to a row below."""
    job = quiet(dp=2, pp=2, schedule="gpipe", microbatches=4)
    late = np.flatnonzero((job.table.microbatch == 1) & (job.table.dp == 0))[0]
    duration = job.table.duration_ns.copy()
    duration[late] += late_ns
    drawn = draw(tmp_path, prepare(replace(job.table, duration_ns=duration), job.job))
    forwards = [drawn.of("actual")[0, 0, 0, "forward-compute", seq] for seq in range(4)]
    threads = [drawn.threads[event["pid"], event["tid"]] for event in forwards]
    assert threads == [f"stage 0 · compute{end}" for end in ("", "", row, row)]
    assert forwards[1]["dur"] + forwards[1]["args"].get("cut_us", 0) == 10_000 + late_ns / 1e3
    cuts = [event["args"]["cut_us"] for event in drawn.ops if "cut_us" in event["args"]]
    assert cuts == ([] if row else [3])
    order = {drawn.threads[at]: place for at, place in drawn.order("thread").items()}
    assert order[threads[1]] <= order[threads[2]] < order["stage 0 · forward-send"]


def test_damaged_clocks_never_draw_a_negative_duration(tmp_path: Path) -> None:
    """Not even where the usual transfer ends before it begins."""
    ready = prepared(quiet(dp=2, pp=2))
    by_optype = ready.ideal.by_optype.copy()
    by_optype[[OpType.FORWARD_SEND, OpType.FORWARD_RECV]] = -3e6
    found = draw(tmp_path, with_ideal(ready, by_optype)).of("ideal")
    assert found[0, 0, 0, "forward-send", 0]["dur"] == 0
    assert min(event["dur"] for event in found.values()) == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(0, 120))))
def test_ops_side_by_side_keep_their_start_and_nearly_all_of_their_length(
    ops: list[tuple[int, int, int]],
) -> None:
    """Whatever was recorded, no two of a thread and row overlap."""
    thread, start, duration = (np.array([op[at] for op in ops], np.int64) for at in range(3))
    end, row = side_by_side(thread.astype(np.intp), start, start + duration)
    assert (end <= start + duration).all()
    assert (start + duration - end <= MAX_CUT_RATIO * duration).all()
    placed = sorted(zip(thread.tolist(), row.tolist(), start.tolist(), end.tolist(), strict=True))
    for before, after in pairwise(placed):
        assert before[:2] != after[:2] or before[3] <= after[2]


# --- the file -------------------------------------------------------------------------------


def test_events_are_what_perfetto_reads(tmp_path: Path) -> None:
    """Types of the Trace Event Format; names and places of each process and thread."""
    drawn = draw(tmp_path, prepared())
    assert list(drawn.document) == ["displayTimeUnit", "otherData", "traceEvents"]
    assert drawn.document["displayTimeUnit"] == "ms"
    assert {event["ph"] for event in drawn.all} == {"X", "M"}
    for event in drawn.ops:
        assert set(event) <= {"ph", "name", "cat", "cname", "pid", "tid", "ts", "dur", "args"}
        assert type(event["ts"]) is type(event["dur"]) is float
        assert type(event["pid"]) is type(event["tid"]) is int
        assert event["pid"] in drawn.processes
        assert (event["pid"], event["tid"]) in drawn.threads
    for event in drawn.all:
        assert event["pid"] > 0
        # A thread numbered as its process is its main thread, which Perfetto moves to the top.
        assert event.get("tid", -1) not in drawn.processes
    assert set(drawn.order("process")) == set(drawn.processes)
    assert set(drawn.order("thread")) == set(drawn.threads)


def test_actual_and_ideal_of_a_rank_stand_together(tmp_path: Path) -> None:
    """Processes by DP rank, threads by stage, then stream."""
    drawn = draw(tmp_path, prepared(dp=2, pp=2))
    places = drawn.order("process")
    names = [drawn.processes[pid] for pid in sorted(places, key=lambda pid: places[pid])]
    assert names == ["DP 0 · actual", "DP 0 · ideal", "DP 1 · actual", "DP 1 · ideal"]
    order = drawn.order("thread")
    one = sorted((at for at in order if at[0] == min(places)), key=lambda at: order[at])
    streams = "compute", "forward-send", "backward-recv", "DP collectives", "end of step"
    others = "compute", "forward-recv", "backward-send", *streams[3:]
    expected = [f"stage 0 · {name}" for name in streams] + [f"stage 1 · {name}" for name in others]
    assert [drawn.threads[at] for at in one] == expected


def test_a_name_ending_in_gz_is_compressed(tmp_path: Path) -> None:
    """The same text, and the same bytes each time."""
    ready = prepared()
    plain, packed, again = (tmp_path / name for name in ("a.json", "a.json.gz", "b.json.gz"))
    for out in (plain, packed, again):
        write_timeline(ready, out)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.read_bytes() == again.read_bytes()


def test_a_job_name_can_hold_anything(tmp_path: Path) -> None:
    """Quotes, control characters, broken UTF-8."""
    name = 'a "job"\\\n\x1b[31m \udc80 ü'
    ready = replace(prepared(), job=Job(name, Layout(dp=3, pp=3)))
    assert draw(tmp_path, ready).document["otherData"]["job"] == name


def test_progress_counts_steps_of_ranks(tmp_path: Path) -> None:
    """Each is one call."""
    calls: list[tuple[str, int, int]] = []
    ready = prepared(dp=2, steps=2)
    write_timeline(ready, tmp_path / "t.json", progress=lambda *call: calls.append(call))
    assert calls == [("timeline", done, 4) for done in range(1, 5)]


def test_an_older_timeline_is_replaced_and_a_link_followed(tmp_path: Path) -> None:
    """The link stays one; the file has the usual mode."""
    file, link = tmp_path / "file.json", tmp_path / "link.json.gz"
    file.write_text("old")
    link.symlink_to(file)
    write_timeline(prepared(), link)
    assert link.is_symlink()
    assert gzip.decompress(file.read_bytes()).startswith(b'{"displayTimeUnit"')
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode


# --- when it cannot be written --------------------------------------------------------------


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_full_disk_is_one_sentence_and_leaves_the_older_file(
    tmp_path: Path, name: str, share: float
) -> None:
    """Whether it is full at once, on the way, or when the last byte is written."""
    ready, out = prepared(dp=8), tmp_path / name
    write_timeline(ready, out)
    room = round(out.stat().st_size * share) - (share > 0)
    out.write_text("old")
    with files_up_to(room):
        message = failing(ready, out)
    assert f"found {out}: {os.strerror(errno.EFBIG)}: make room" in message
    assert out.read_text() == "old"
    assert names(tmp_path) == [name]


def names(folder: Path) -> list[str]:
    """What is in a folder."""
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file of this process grows beyond this: what a full disk does, without one."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def failing(ready: Prepared, out: Path) -> str:
    """What is said when it cannot be written: one line, by the rules of the house."""
    with pytest.raises(ConfigError) as caught:
        write_timeline(ready, out)
    message = str(caught.value)
    assert message.isprintable()
    assert re.match(r"expected .+, found .+: .+", message)
    return message


@pytest.mark.parametrize(
    "out, message",
    [
        ("", "found the folder"),
        ("no/t.json", "found none at"),
        ("file/t.json", "found none at"),
        ("x" * 300, "File name too long"),
        ("pipe", "a device or pipe"),
        ("lin\ne/t.json", r"lin\ne: make it"),
    ],
)
def test_a_place_that_holds_no_file_is_one_sentence(tmp_path: Path, out: str, message: str) -> None:
    """Folders, devices, names that cannot be; nothing there is changed."""
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    assert message in failing(prepared(), tmp_path / out)
    assert names(tmp_path) == before


def test_a_folder_without_permission_is_one_sentence(tmp_path: Path) -> None:
    """Also for root, who needs no permission, and so becomes someone else here."""
    ready, user = prepared(), os.geteuid()
    (tmp_path / "closed").mkdir(mode=0o500)
    os.seteuid(user or 65534)
    try:
        message = failing(ready, tmp_path / "closed" / "t.json")
    finally:
        os.seteuid(user)
    assert "Permission denied: name another file" in message


@pytest.mark.parametrize("error", [OSError("the terminal is gone"), KeyboardInterrupt()], ids=repr)
def test_an_error_from_elsewhere_passes_and_leaves_no_file(
    tmp_path: Path, error: BaseException
) -> None:
    """It is not the file's, so the message must not say so."""

    def fail(*_: object) -> None:
        raise error

    for name in ("t.json", "t.json.gz"):
        # What is left to write when the file is closed does not fit either; the first error counts.
        with pytest.raises(type(error)) as caught, files_up_to(0):
            write_timeline(prepared(), tmp_path / name, progress=fail)
        assert caught.value is error
    assert names(tmp_path) == []


# --- the public example ---------------------------------------------------------------------


def published(folder: Path, name: str) -> dict[Key, Event]:
    """Events of a published timeline: stages are tens of threads, halved among the DP ranks."""
    events = json.loads(gzip.decompress((folder / f"{name}.json.gz").read_bytes()))
    found = {}
    for event in events:
        if event["ph"] == "X":
            stage = event["tid"] // 5 // 2
            args = event["args"]
            found[args["step"], event["pid"], stage, event["name"], args["seq_id"]] = event
    return found


def within_step(found: dict[Key, Event], of: Callable[[Event], float]) -> dict[Key, float]:
    """Values since the first forward compute of each step: steps are set apart differently."""
    first = {at[0]: of(event) for at, event in found.items() if at[1:] == FIRST_FORWARD}
    return {at: of(event) - first[at[0]] for at, event in found.items() if at[3] != "gc"}


def test_times_of_st_agree_with_the_published_timelines(traces: Path, tmp_path: Path) -> None:
    """Theirs show the transfer alone: an op here, less its waiting; cut ends are whole again."""
    folder = traces / "straggler-analysis"
    trace = load([folder / "trace-ST.parquet"])
    drawn = draw(tmp_path, prepare(trace.table, trace.job))
    actual, theirs = drawn.of("actual"), published(folder, "timeline-ST")
    begins = within_step(actual, lambda one: one["ts"] + one["args"].get("wait_us", 0.0))
    assert begins == pytest.approx(within_step(theirs, lambda one: float(one["ts"])), abs=1)
    for at, event in actual.items():
        transfer = event["dur"] - event["args"].get("wait_us", 0.0)
        whole = transfer + event["args"].get("cut_us", 0.0)
        assert whole == pytest.approx(theirs[at]["dur"], abs=1)
    expected = within_step(published(folder, "ideal-timeline-ST"), lambda e: e["ts"] + e["dur"])
    ends = within_step(drawn.of("ideal"), lambda e: e["ts"] + e["dur"])
    assert ends == pytest.approx(expected, rel=1e-5, abs=1)
