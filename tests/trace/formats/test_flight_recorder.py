from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from smon.errors import MetaError, NothingUsableError, TraceError
from smon.topology import Layout
from smon.trace.dumps import Progress
from smon.trace.events import Collective
from smon.trace.formats import flight_recorder
from smon.trace.load import load
from tests.hangs.builders import WORLD, Document, Group, dump, entry, read, write
from tests.kineto_files import Ddp, ddp_events, document

PIPE = Group("43", (0, 4, 8, 12), 6, "PIPELINE_MODEL_PARALLEL_GROUP")
NVRX = "nvrx-flight-recorder"


# --- the public sets ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpu_error_1st", "lock_gil_2nd"])
def test_the_layout_follows_from_the_groups(traces: Path, name: str) -> None:
    """TP 2 × DP 2 × PP 4 with EP 4, in the order tp-dp-pp."""
    trace = load([traces / NVRX / name])
    assert trace.job.layout == Layout(dp=2, pp=4, tp=2, ep=4)
    assert [dump.rank for dump in trace.dumps] == list(range(16))
    assert {dump.backend for dump in trace.dumps} <= {"nccl", None}


@pytest.mark.parametrize("name", ["gpu_error_1st", "lock_gil_2nd"])
def test_pickles_and_their_json_copy_say_the_same(traces: Path, name: str) -> None:
    """Ranks come from the names of the pickles, and from the keys of the copy."""
    pickles = load([traces / NVRX / name]).dumps
    copy = load([traces / NVRX / f"{name}.json.gz"]).dumps
    for one, other in zip(pickles, copy, strict=True):
        assert (one.rank, one.calls, one.messages) == (other.rank, other.calls, other.messages)
        assert set(one.groups) == set(other.groups)


def test_the_status_of_groups_without_entries_is_found_by_order(traces: Path) -> None:
    """Rank 10 lists nothing; its groups and the numbers of its status count in the same order."""
    silent = load([traces / NVRX / "lock_gil_2nd"]).dumps[10]
    by_name = {
        group.description: progress
        for group, progress in zip(silent.groups, silent.progress, strict=True)
    }
    assert silent.silent
    assert by_name["EXPERT_MODEL_PARALLEL_GROUP"] == Progress(20_946, 20_946)
    assert by_name["TENSOR_MODEL_PARALLEL_GROUP"] == Progress(31_442, 31_442)


def test_dumps_of_gloo_are_read(traces: Path) -> None:
    """They list no members, every state is `scheduled`, and all is retired."""
    folder = traces / "torch-gloo-2pp2dp" / "healthy"
    trace = load(sorted(folder.glob("flight_recorder_rank*.json")))
    assert [dump.entries for dump in trace.dumps] == [25] * 4
    assert not any(dump.calls or dump.messages for dump in trace.dumps)
    assert {dump.backend for dump in trace.dumps} == {"gloo"}


def test_beside_ops_dumps_are_left_out(traces: Path) -> None:
    """A folder with ops and dumps is analysed by its ops, and says so."""
    trace = load([traces / "torch-gloo-2pp2dp" / "healthy"])
    assert len(trace.table)
    assert any("4 files of dumps of Flight Recorder" in note for note in trace.notes)


def test_a_declared_layout_is_checked_against_the_groups(traces: Path) -> None:
    """It must have the sizes that the groups have."""
    with pytest.raises(MetaError, match=r"dp1-pp4-tp4.*dp2-pp4-tp2"):
        load([traces / NVRX / "lock_gil_2nd"], layout=Layout(dp=1, pp=4, tp=4))
    declared = Layout(dp=2, pp=4, tp=2)
    trace = load([traces / NVRX / "lock_gil_2nd"], layout=declared)
    assert trace.job.layout == Layout(dp=2, pp=4, tp=2, ep=4)


# --- what is in a dump --------------------------------------------------------------------------


def test_unfinished_calls_are_kept_and_finished_ones_counted(tmp_path: Path) -> None:
    """Finished is what is completed or retired."""
    found = read(
        tmp_path / "rank_3",
        dump(
            entry(WORLD, 1, state="completed"),
            entry(WORLD, 2, retired=True),
            entry(WORLD, 3, "nccl:_reduce_scatter_base", state="started"),
            entry(WORLD, 4, "nccl:broadcast"),
        ),
    )
    assert [(call.seq, call.kind) for call in found.calls] == [
        (3, Collective.REDUCE_SCATTER),
        (4, Collective.BROADCAST),
    ]
    assert (found.entries, found.progress) == (4, (Progress(4, 2),))
    assert (found.rank, found.world_size, found.calls[0].shape) == (3, 4, "4096 × 5120")


def test_the_peer_of_a_message_is_a_place_in_its_group(tmp_path: Path) -> None:
    """``2->3`` in the group of ranks 0, 4, 8, 12 goes from rank 8 to rank 12."""
    found = read(
        tmp_path / "rank8",
        dump(
            entry(PIPE, 5, "nccl:send 2->3"),
            entry(PIPE, 6, "nccl:recv 2<-1"),
            entry(PIPE, 7, "nccl:recv 2<-9"),
            groups=(PIPE,),
        ),
    )
    assert [(call.kind, call.peer) for call in found.messages] == [
        (Collective.SEND, 12),
        (Collective.RECV, 4),
        (Collective.RECV, None),
    ]


def test_the_status_is_keyed_by_another_number_than_the_groups(tmp_path: Path) -> None:
    """Group 43 has number 6: what stands under 43 is another one's."""
    group = Group("43", (0, 1, 2, 3), 6)
    found = read(
        tmp_path / "rank0",
        dump(entry(group, 8), groups=(group,), status={"6": (9, 7), "43": (99, 98)}),
    )
    assert found.progress == (Progress(9, 7),)


def test_the_status_of_a_group_with_messages_does_not_count(tmp_path: Path) -> None:
    """Messages and collectives share its counter."""
    found = read(
        tmp_path / "rank0",
        dump(
            entry(PIPE, 700, "nccl:send 0->1"),
            entry(PIPE, 26),
            groups=(PIPE,),
            status={"6": (701, 699)},
        ),
    )
    assert found.progress == (Progress(26, 25),)


def test_a_status_that_contradicts_an_entry_is_not_spread_by_order(tmp_path: Path) -> None:
    """Order only tells if all that is known agrees with it."""
    other = Group("7", (0, 1), 3)
    found = read(
        tmp_path / "rank0",
        dump(
            # By order, number 0 would be group 0.
            entry(other, 5, pg_id=0),
            groups=(WORLD, other),
            status={"0": (5, 4), "3": (9, 9)},
        ),
    )
    assert found.progress == (Progress(None, None), Progress(5, 4))


@pytest.mark.parametrize(
    "name, rank",
    [
        ("_dump_10", 10),
        ("nccl_trace_rank_7", 7),
        ("flight_recorder_rank3.json", 3),
        ("job-42.rank-5.2026.json", 5),
        ("dump12.pickle", 12),
    ],
)
def test_the_rank_is_in_the_name_of_the_file(tmp_path: Path, name: str, rank: int) -> None:
    """A number after `rank`, else the last one."""
    assert read(tmp_path / name, dump(entry(WORLD, 1))).rank == rank


def test_a_dump_that_says_its_rank_is_believed(tmp_path: Path) -> None:
    """More than the name."""
    assert read(tmp_path / "rank_1", {**dump(entry(WORLD, 1)), "rank": 2}).rank == 2


def test_a_dump_of_no_rank_says_what_was_looked_for(tmp_path: Path) -> None:
    """Neither in the file nor in its name."""
    path = tmp_path / "dump.json"
    path.write_text(json.dumps(dump(entry(WORLD, 1))))
    with pytest.raises(TraceError, match="looked for rank and a number"):
        flight_recorder.read(path)


def test_the_traces_of_a_profiler_are_not_taken_for_dumps(tmp_path: Path) -> None:
    """Kineto lists process groups too."""
    content = json.dumps(document(Ddp(), 0, ddp_events(Ddp())[0])).encode()
    assert not flight_recorder.recognises(content, tmp_path / "rank0.json")


# --- what it survives ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.4", "2.5", "2.7", "2.9", "2.10"])
def test_every_known_version_is_read_without_a_word(tmp_path: Path, version: str) -> None:
    """2.4 is the first that lists the members of groups."""
    assert read(tmp_path / "rank0", dump(entry(WORLD, 1), version=version)).notes == ()


def test_an_old_version_is_refused(tmp_path: Path) -> None:
    """It does not say who belongs to a group."""
    with pytest.raises(TraceError, match=r"2\.4 or later, found 2\.3"):
        read(tmp_path / "rank0", dump(entry(WORLD, 1), version="2.3"))


@pytest.mark.parametrize("version", ["2.11", "3.0", "", None])
def test_an_unknown_version_is_read_with_a_note(tmp_path: Path, version: str | None) -> None:
    """Fields are added, not renamed, so far."""
    found = read(tmp_path / "rank0", {**dump(entry(WORLD, 1)), "version": version})
    assert found.entries == 1
    assert "read like 2.10" in found.notes[0]


def test_a_dump_without_entries_is_one_of_a_rank_that_called_nothing(tmp_path: Path) -> None:
    """A rank that hangs before its first collective leaves 87 bytes."""
    empty = {"version": "2.9", "pg_config": {}, "nccl_version": "2.27.3", "pg_status": {}}
    for number, content in enumerate((empty, pickle.dumps({**empty, "entries": []}, 2))):
        found = read(tmp_path / f"rank_{number}", content)
        assert found.silent
        assert found.groups == ()


def test_a_dump_whose_entries_are_unusable_is_not_silent(tmp_path: Path) -> None:
    """Only a dump that lists nothing is evidence of a rank that called nothing."""
    broken: list[object] = [5, {}, {"process_group": ["0"], "profiling_name": "nccl:x"}]
    found = read(tmp_path / "rank0", {**dump(), "entries": broken})
    assert not found.silent
    assert found.dropped == (("entry of Flight Recorder without a group, a name or a number", 3),)


def test_repeated_entries_count_once(tmp_path: Path) -> None:
    """By their number and time."""
    found = read(tmp_path / "rank0", dump(entry(WORLD, 1), entry(WORLD, 1), entry(WORLD, 2)))
    assert [call.seq for call in found.calls] == [1, 2]
    assert found.dropped == (("entry of Flight Recorder that is there twice", 1),)


def test_numbers_as_text_are_read(tmp_path: Path) -> None:
    """JSON of PyTorch 2.13 writes those of the status as text, and -1 for none yet."""
    raw = dump(entry(WORLD, 8, collective_seq_id="8"), status={"0": (0, 0)})
    raw["pg_status"]["0"] = {"last_enqueued_collective": "9", "last_completed_collective": "-1"}
    assert read(tmp_path / "rank0", raw).progress == (Progress(9, 7),)
    raw["entries"] = []
    assert read(tmp_path / "rank0", raw).progress == (Progress(9, 0),)


def test_members_are_a_list_or_text(tmp_path: Path) -> None:
    """And none at all if one of them is no rank."""
    for ranks, expected in (
        ([0, 1], (0, 1)),
        ("[0, 1]", (0, 1)),
        ("[]", ()),
        ("[0, x]", ()),
        (None, ()),
        ([-1], ()),
    ):
        raw = dump(entry(WORLD, 1))
        raw["pg_config"]["0"]["ranks"] = ranks
        assert read(tmp_path / "rank0", raw).groups[0].ranks == expected


def test_names_are_made_printable(tmp_path: Path) -> None:
    """They go to a terminal and to pages."""
    hostile = Group("1", (0, 1), 1, "\x1b[31mEVIL\n" + "x" * 999)
    found = read(tmp_path / "rank0", dump(entry(hostile, 1), groups=(hostile,)))
    assert found.groups[0].description.isprintable()
    assert len(found.groups[0].description) <= 220


@pytest.mark.parametrize("packed", [False, True])
def test_gzip_under_any_name(tmp_path: Path, packed: bool) -> None:  # noqa: FBT001
    """Content counts."""
    content = json.dumps(dump(entry(WORLD, 1))).encode()
    assert read(tmp_path / "rank_0.json", gzip.compress(content) if packed else content).entries


def test_a_damaged_dump_of_a_folder_is_left_out_with_a_note(tmp_path: Path) -> None:
    """Cut off anywhere, it is not read; its rank then has no dump."""
    whole: dict[int, Document] = {rank: dump(entry(WORLD, 1)) for rank in range(4)}
    write(tmp_path, whole)
    path = tmp_path / "nccl_trace_rank_2"
    path.write_bytes(path.read_bytes()[:-40])
    trace = load([tmp_path])
    assert [each.rank for each in trace.dumps] == [0, 1, 3]
    assert any("rank_2: damaged or truncated" in note for note in trace.notes)


def test_two_dumps_of_a_rank_count_once(tmp_path: Path) -> None:
    """The fuller one, with a note."""
    write(tmp_path, {0: dump(entry(WORLD, 1)), 1: dump(entry(WORLD, 1))})
    more = dump(entry(WORLD, 1), entry(WORLD, 2))
    (tmp_path / "old_rank_0.json").write_text(json.dumps(more))
    trace = load([tmp_path])
    assert [each.entries for each in trace.dumps] == [2, 1]
    assert any("two dumps of rank 0" in note for note in trace.notes)


def test_dumps_of_two_jobs_are_an_error(tmp_path: Path) -> None:
    """Their worlds differ."""
    small = Group("0", (0, 1), 0, "default_pg")
    write(tmp_path, {0: dump(entry(WORLD, 1)), 1: dump(entry(small, 1), groups=(small,))})
    with pytest.raises(TraceError, match="jobs of 2 and 4 ranks"):
        load([tmp_path])


def test_a_dump_of_a_rank_beyond_the_job_is_an_error(tmp_path: Path) -> None:
    """As when the number in the file's name is that of something else."""
    write(tmp_path, {9: dump(entry(WORLD, 1))})
    with pytest.raises(TraceError, match="ranks below 4, found a dump of rank 9"):
        load([tmp_path])


def test_dumps_have_no_ops(tmp_path: Path) -> None:
    """Planning and sending say so."""
    write(tmp_path, {0: dump(entry(WORLD, 1))})
    with pytest.raises(NothingUsableError, match="dumps of Flight Recorder"):
        load([tmp_path]).ops()


# --- pickles ------------------------------------------------------------------------------------


class Runs:
    """Pickled as a call of `os.mkdir`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_pickles_of_every_protocol_are_read(tmp_path: Path, protocol: int) -> None:
    """PyTorch writes protocol 2; a copy may have another."""
    content = pickle.dumps(dump(entry(WORLD, 1)), protocol)
    assert read(tmp_path / "rank_0", content).entries == 1


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_hostile_pickle_is_refused_and_nothing_runs(tmp_path: Path, protocol: int) -> None:
    """However much the rest of it looks like a dump."""
    raw = {**dump(entry(WORLD, 1)), "more": Runs(tmp_path / "made")}
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps(raw, protocol))
    with pytest.raises(TraceError, match="rank_0: the pickle refers to code"):
        load([path])
    assert not (tmp_path / "made").exists()
