from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smon.errors import TraceError
from smon.trace.events import Collective, Kind, Phase, RankEvents
from smon.trace.formats import kineto
from smon.trace.load import load
from tests.kineto_files import Ddp, Event, ddp_events, document, write_ddp, write_json

JOB = Ddp(ranks=2, steps=3)
Change = Callable[[dict[str, Any]], object]


def rank_file(folder: Path, change: Change | None = None, name: str = "trace.json") -> Path:
    """The file of rank 0, its document changed."""
    whole = document(JOB, 0, ddp_events(JOB)[0])
    if change is not None:
        change(whole)
    return write_json(folder / name, whole)


def read(path: Path) -> RankEvents:
    """The one rank of a file."""
    (events,) = kineto.read(path).events
    return events


def transfers(events: RankEvents) -> RankEvents:
    """Its communication."""
    return events.of_kind(Kind.COLLECTIVE, Kind.P2P)


def events_of(whole: dict[str, Any], **wanted: object) -> list[Event]:
    """Events of a document with these values."""
    return [
        event
        for event in whole["traceEvents"]
        if all(event.get(key) == value for key, value in wanted.items())
    ]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RankEvents:
    """Rank 0 of the job, nothing changed."""
    return read(rank_file(tmp_path_factory.mktemp("plain")))


# --- what a file says -------------------------------------------------------------------------


def test_collectives_have_group_number_size_and_step(plain: RankEvents) -> None:
    """The arguments of NCCL kernels are read: three buckets per step, numbered over the job."""
    found = transfers(plain)
    assert set(found.collective.tolist()) == {Collective.ALL_REDUCE}
    assert found.seq.tolist() == list(range(9))
    assert found.size_bytes.tolist() == [24_000_000] * 9
    assert found.step.tolist() == [10, 10, 10, 11, 11, 11, 12, 12, 12]
    (group,) = plain.groups
    assert group.ranks == (0, 1)
    assert {plain.groups[number] for number in found.group.tolist()} == {group}


def test_gpu_events_belong_to_the_step_that_launched_them(plain: RankEvents) -> None:
    """The GPU runs 30 ms behind its host: by their own time many kernels are in the wrong step."""
    kernels = plain.of_kind(Kind.COMPUTE)
    spans = {step.number: step for step in plain.steps}
    late = sum(
        not spans[step].start_ns <= start <= spans[step].end_ns
        for step, start in zip(kernels.step.tolist(), kernels.start_ns.tolist(), strict=True)
    )
    assert Counter(kernels.step.tolist()) == {10: 20, 11: 20, 12: 20}
    assert late > 0


def test_phases_come_from_annotations_and_from_launches_inside_autograd(plain: RankEvents) -> None:
    """Forward and optimizer by annotation, backward by the thread of autograd."""
    kernels = plain.of_kind(Kind.COMPUTE)
    assert Counter(kernels.phase.tolist()) == {
        Phase.FORWARD: 12, Phase.BACKWARD: 36, Phase.OPTIMIZER: 12,
    }  # fmt: skip


def test_times_count_from_the_base_of_the_file(tmp_path: Path, plain: RankEvents) -> None:
    """``baseTimeNanoseconds`` + µs; an old file has none, and unix µs."""

    def old(whole: dict[str, Any]) -> None:
        base = whole.pop("baseTimeNanoseconds") // 1000
        for event in whole["traceEvents"]:
            if event["ph"] == "X":
                event["ts"] += base

    shifted = read(rank_file(tmp_path, old))
    assert len(shifted) == len(plain)
    # Unix µs in float64 come in steps of 0.25 µs.
    assert np.abs(shifted.start_ns - plain.start_ns).max() <= 250


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "worker.txt", "x.gz"])
@pytest.mark.parametrize("packed", [True, False])
def test_gzip_and_plain_are_told_apart_by_content(
    tmp_path: Path, plain: RankEvents, name: str, *, packed: bool
) -> None:
    """Either may stand under any name."""
    text = json.dumps(document(JOB, 0, ddp_events(JOB)[0])).encode()
    path = tmp_path / name
    path.write_bytes(gzip.compress(text) if packed else text)
    assert kineto.recognises(path.read_bytes()[: 1 << 16], path)
    assert np.array_equal(read(path).start_ns, plain.start_ns)


def test_categories_of_old_files_mean_the_same(tmp_path: Path, plain: RankEvents) -> None:
    """Kernel, Operator and Runtime were renamed in 2022."""
    renamed = {"kernel": "Kernel", "cpu_op": "Operator", "cuda_runtime": "Runtime"}

    def old(whole: dict[str, Any]) -> None:
        for event in whole["traceEvents"]:
            event["cat"] = renamed.get(event.get("cat"), event.get("cat"))

    found = read(rank_file(tmp_path, old))
    assert np.array_equal(found.phase, plain.phase)
    assert np.array_equal(found.collective, plain.collective)


def test_the_type_of_messages_is_that_of_the_call_that_launched_them(tmp_path: Path) -> None:
    """An all-to-all runs kernels of messages; the annotation around the launch tells."""

    def messages(whole: dict[str, Any]) -> None:
        kernels = [e for e in events_of(whole, cat="kernel") if e["name"].startswith("nccl")]
        for kernel in kernels:
            kernel["name"] = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)"
            launch = kernel["args"]["correlation"]
            kernel["args"] = {"correlation": launch}
            call = next(
                e
                for e in events_of(whole, cat="cuda_runtime")
                if e["args"]["correlation"] == launch
            )
            whole["traceEvents"].append(
                {
                    **call,
                    "cat": "user_annotation",
                    "name": "nccl:all_to_all",
                    "args": {"Input Dims": [[8, 4]], "Input type": ["float"]},
                }
            )

    found = transfers(read(rank_file(tmp_path, messages)))
    assert set(found.collective.tolist()) == {Collective.ALL_TO_ALL}
    assert set(found.size_bytes.tolist()) == {128}


# --- who ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["rank1.pt.trace.json", "rank-1.json", "rank[1].json", "x_rank_1_step.json"]
)
def test_a_rank_may_come_from_the_name_of_a_file_with_a_world_size(
    tmp_path: Path, name: str
) -> None:
    """``distributedInfo`` without rank: the name tells, and a note says so."""
    path = rank_file(tmp_path, lambda whole: whole["distributedInfo"].pop("rank"), name)
    found = read(path)
    assert found.rank == 1
    assert any("comes from the file's name" in note for note in found.notes)


def test_groups_may_be_strings_or_fewer_than_declared(tmp_path: Path) -> None:
    """Members as text are read; a rank lists only its own groups, and the notes say so."""

    def change(whole: dict[str, Any]) -> None:
        info = whole["distributedInfo"]
        info["pg_count"] = 71
        info["pg_config"][0]["ranks"] = "[0, 1]"

    found = read(rank_file(tmp_path, change))
    assert found.groups[0].ranks == (0, 1)
    assert any("1 of 71 process groups" in note for note in found.notes)


@pytest.mark.parametrize(
    "change, looked_for",
    [
        pytest.param(lambda whole: whole.pop("distributedInfo"), "distributedInfo", id="no rank"),
        pytest.param(
            lambda whole: whole.update(distributedInfo={"backend": "nccl"}), "rank", id="no world"
        ),
        pytest.param(
            lambda whole: whole.update(
                traceEvents=[e for e in whole["traceEvents"] if "ccl" not in e["name"]]
            ),
            "ncclDevKernel",
            id="no collective",
        ),
        pytest.param(
            lambda whole: whole.update(
                traceEvents=[e for e in whole["traceEvents"] if "Step#" not in e["name"]]
            ),
            "ProfilerStep#N",
            id="no step",
        ),
        pytest.param(lambda whole: whole.pop("traceEvents"), "traceEvents", id="no events"),
        pytest.param(
            lambda whole: whole["distributedInfo"].update(rank=9), "rank 9", id="rank beyond"
        ),
    ],
)
def test_a_file_that_says_nothing_fails_and_says_what_was_looked_for(
    tmp_path: Path, change: Change, looked_for: str
) -> None:
    """No collective, no step, no rank: an analysis of nothing would find no straggler."""
    with pytest.raises(TraceError, match=looked_for):
        read(rank_file(tmp_path, change))


# --- what a file survives -------------------------------------------------------------------------


def each_event(change: Callable[[Event], object]) -> Change:
    """A change of every event."""

    def whole(document: dict[str, Any]) -> None:
        for event in document["traceEvents"]:
            change(event)

    return whole


HARMLESS: dict[str, Change] = {
    "process ids that are text": each_event(lambda e: e.update(pid=f"python {e['pid']}")),
    "process ids that are negative": each_event(lambda e: e.update(pid=-1 - int(e["pid"]))),
    "no names of threads": lambda whole: whole.update(
        traceEvents=[e for e in whole["traceEvents"] if e["ph"] != "M"]
    ),
    "many names of threads": lambda whole: whole.update(
        traceEvents=events_of(whole, ph="M") * 2_000 + events_of(whole, ph="X")
    ),
    "no device properties": lambda whole: whole.pop("deviceProperties"),
    "a device that is not the rank": each_event(
        lambda e: e["args"].update(device=5) if "correlation" in e["args"] else None
    ),
    "text where a number is due": lambda whole: whole.update(record_shapes="nan", host_name=None),
    "events of other kinds": lambda whole: whole["traceEvents"].extend(
        [{"ph": "f", "cat": "ac2g", "id": 1, "ts": 3}, {"ph": "i", "name": "Iteration"}]
    ),
    "phases in capitals": lambda whole: whole.update(displayTimeUnit="ns"),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS.keys())
def test_what_is_odd_but_harmless_changes_nothing(
    tmp_path: Path, plain: RankEvents, change: Change
) -> None:
    """Each of these occurs in public traces."""
    found = read(rank_file(tmp_path, change))
    assert np.array_equal(found.start_ns, plain.start_ns)
    assert np.array_equal(found.step, plain.step)
    assert np.array_equal(found.collective, plain.collective)
    assert found.dropped == ()


def first_kernel(**fields: object) -> Change:
    """A change of the first kernel."""

    def change(whole: dict[str, Any]) -> None:
        events_of(whole, cat="kernel")[0].update(fields)

    return change


COUNTED: dict[str, tuple[Change, str]] = {
    "negative duration": (first_kernel(dur=-3.0), "negative duration"),
    "236 years": (first_kernel(dur=7.4e15), "longer than 7 days"),
    "time 0": (first_kernel(ts=-1.79e15), "far from all others"),
    "time that is none": (first_kernel(ts="None"), "not a number"),
    "duration that is none": (first_kernel(dur="nan"), "not a number"),
    "no time": (first_kernel(ts=None), "not a number"),
    "an event that is no object": (
        lambda whole: whole["traceEvents"].insert(5, [1, 2]),
        "no object",
    ),
    "an event twice": (
        lambda whole: whole["traceEvents"].append(events_of(whole, cat="kernel")[0]),
        "repeats another",
    ),
}


@pytest.mark.parametrize("change, reason", COUNTED.values(), ids=COUNTED.keys())
def test_what_cannot_be_used_is_left_out_and_counted(
    tmp_path: Path, plain: RankEvents, change: Change, reason: str
) -> None:
    """One event is lost, with its reason; all others stay."""
    found = read(rank_file(tmp_path, change))
    assert [(reason in text, count) for text, count in found.dropped] == [(True, 1)]
    lost = len(plain) - len(found)
    assert lost == (
        0 if "twice" in str(change) or reason in {"no object", "repeats another"} else 1
    )


def test_decimal_commas_in_strings_are_read(tmp_path: Path, plain: RankEvents) -> None:
    """Some locales wrote times as text with a comma."""

    def commas(event: Event) -> None:
        if event["ph"] == "X":
            event["ts"] = str(event["ts"]).replace(".", ",")

    assert np.array_equal(read(rank_file(tmp_path, each_event(commas))).start_ns, plain.start_ns)


def test_kernels_without_a_launch_fall_into_the_step_of_their_own_time(tmp_path: Path) -> None:
    """And a note says how many there were."""

    def no_launches(whole: dict[str, Any]) -> None:
        whole["traceEvents"] = [e for e in whole["traceEvents"] if e.get("cat") != "cuda_runtime"]

    found = read(rank_file(tmp_path, no_launches))
    assert any("69 GPU events have no launch" in note for note in found.notes)
    assert set(found.step.tolist()) <= {-1, 10, 11, 12}


def test_kernels_before_their_launch_stay_in_its_step(tmp_path: Path, plain: RankEvents) -> None:
    """The clock of the GPU may be behind that of its host."""

    def earlier(event: Event) -> None:
        if event.get("cat") == "kernel":
            event["ts"] -= 40_000.0

    found = read(rank_file(tmp_path, each_event(earlier)))
    assert Counter(found.step.tolist()) == Counter(plain.step.tolist())


def test_durations_of_zero_are_events(tmp_path: Path, plain: RankEvents) -> None:
    """In some traces two thirds of all durations are 0."""

    def zero(event: Event) -> None:
        if event.get("cat") == "kernel" and "ccl" not in event["name"]:
            event["dur"] = 0

    assert len(read(rank_file(tmp_path, each_event(zero)))) == len(plain)


@pytest.mark.parametrize("size", [0, 1, 87, 400])
def test_a_dump_that_was_cut_off_at_its_start_is_an_error(tmp_path: Path, size: int) -> None:
    """0 bytes, 87 bytes: one line, no traceback."""
    whole = rank_file(tmp_path).read_bytes()
    path = tmp_path / "cut.json"
    path.write_bytes(whole[:size])
    with pytest.raises(TraceError):
        load([path])


# --- ranks together -----------------------------------------------------------------------------


def test_a_rank_that_is_missing_empty_or_twice_is_said(tmp_path: Path) -> None:
    """The others are analysed."""
    paths = write_ddp(tmp_path, Ddp(ranks=4, steps=3))
    (tmp_path / "rank1.again.json.gz").write_bytes(paths[1].read_bytes())
    paths[2].write_bytes(b"")
    trace = load([tmp_path])
    assert [rank.rank for rank in trace.events] == [0, 1, 3]
    notes = " ".join(trace.notes)
    assert "another file of rank 1 with the same steps" in notes
    assert "1 of 4 ranks have no file" in notes
    assert "the file is empty" in notes


def test_files_of_other_steps_of_one_rank_are_joined(tmp_path: Path) -> None:
    """A profiler that repeats writes one file per cycle."""
    first = write_ddp(tmp_path / "a", Ddp(ranks=2, steps=3))
    later = Ddp(ranks=2, steps=3, first_step=40, base_ns=1_790_000_060_000_000_000)
    more = write_ddp(tmp_path / "b", later)
    trace = load([*first, *more])
    assert [step.number for step in trace.events[0].steps] == [10, 11, 12, 40, 41, 42]
    assert len(trace.events) == 2


def test_files_of_jobs_of_different_size_are_an_error(tmp_path: Path) -> None:
    """They cannot be one job."""
    first = write_ddp(tmp_path / "a", Ddp(ranks=2, steps=3))
    more = write_ddp(tmp_path / "b", Ddp(ranks=4, steps=3))
    with pytest.raises(TraceError, match="jobs of 2 and 4 ranks"):
        load([first[0], more[1]])


def test_ops_and_kernels_cannot_be_given_one_by_one(tmp_path: Path, traces: Path) -> None:
    """In a folder ops are used; files that are named are meant."""
    paths = write_ddp(tmp_path, Ddp(ranks=2, steps=3))
    folder = traces / "torch-gloo-2pp2dp" / "healthy"
    with pytest.raises(TraceError, match="some files are of ops and some of kernels"):
        load([*paths, folder / "trace.parquet"], meta=folder / "meta.yaml")


# --- public files -------------------------------------------------------------------------------


def test_nccl_parser_config_has_its_collectives(traces: Path) -> None:
    """15 all-reduces and 6 broadcasts, with group and payload, in steps 4 to 6."""
    found = transfers(read(traces / "hta/nccl_parser_config/nccl_data.json.gz"))
    assert Counter(found.collective.tolist()) == {
        Collective.ALL_REDUCE: 15, Collective.BROADCAST: 6,
    }  # fmt: skip
    assert (found.group >= 0).all()
    assert (found.size_bytes > 0).all()
    assert Counter(found.step.tolist()) == {4: 7, 5: 7, 6: 7}


def test_cpu_only_is_rank_34_of_300_with_a_long_step(traces: Path) -> None:
    """Step 553 is twice as long; 11 groups are listed, one more than declared."""
    (path,) = (traces / "hta/cpu_only").iterdir()
    found = read(path)
    assert (found.rank, found.world_size, found.backend) == (34, 300, "gloo")
    assert len(found.groups) == 11
    lengths = {step.number: step.duration_ns for step in found.steps}
    assert lengths[553] / np.median(list(lengths.values())) == pytest.approx(2.0, abs=0.1)
    assert Counter(transfers(found).step.tolist()) == dict.fromkeys(range(551, 556), 2)


def test_df_index_resolver_has_404_all_reduces_in_each_step(traces: Path) -> None:
    """216,092 events; half of the GPU events lie outside every step by their own time."""
    found = transfers(read(traces / "hta/df_index_resolver/df_index_resolver.json.gz"))
    assert set(Counter(found.step.tolist()).values()) == {404}


@pytest.mark.parametrize(
    "name, missing",
    [
        ("distributed_info_unavailable", "whose trace this is"),
        ("rank_unavailable", "whose trace this is"),
        ("mixed_files", "no collective"),
        ("amd_trace", "whose trace this is"),
        ("cupti_profiler", "no step"),
        ("with_gpu_user_annotation", "no step"),
    ],
)
def test_public_files_without_rank_step_or_collective_fail(
    traces: Path, name: str, missing: str
) -> None:
    """Loudly, instead of finding nothing."""
    (path,) = (traces / "hta" / name).iterdir()
    with pytest.raises(TraceError, match=missing):
        read(path)
