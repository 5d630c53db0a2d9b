from __future__ import annotations

from pathlib import Path

import pytest

from smon.hangs.waits import Waits, waits_of
from smon.trace.load import load
from tests.hangs.builders import WORLD, Document, Group, dump, entry, write

LEFT, RIGHT = Group("1", (0, 1), 1), Group("2", (1, 2), 2)
PIPE = Group("9", (0, 1, 2, 3), 3, "PIPELINE_MODEL_PARALLEL_GROUP")


def waits(folder: Path, documents: dict[int, Document]) -> Waits:
    """Who waits for whom in these dumps."""
    return waits_of(load([write(folder, documents)]).dumps)


def test_the_faults_of_the_public_sets_are_found(traces: Path) -> None:
    """Ranks 12 and 14 by what their GPUs did not finish, 10 and 15 by what they did not call."""
    sets = traces / "nvrx-flight-recorder"
    gpu = waits_of(load([sets / "gpu_error_1st"]).dumps)
    assert gpu.roots() == [12]
    assert sorted(gpu.behind) == [12, 14]
    gil = waits_of(load([sets / "lock_gil_2nd"]).dumps)
    assert gil.roots() == [10, 15]
    assert not gil.behind


def test_who_has_not_called_what_others_called_is_waited_for(tmp_path: Path) -> None:
    """By the last number that each has called in the group."""
    found = waits(
        tmp_path,
        {
            0: dump(entry(WORLD, 8), entry(WORLD, 9)),
            1: dump(entry(WORLD, 8)),
            2: dump(status={"0": (7, 7)}),
            3: dump(entry(WORLD, 8)),
        },
    )
    (stall,) = found.stalls
    assert (stall.seq, stall.arrived, stall.missing) == (8, (0, 1, 3), (2,))
    assert stall.last[2] == 7
    assert found.waiting_for(2) == (0, 1, 3)


def test_a_rank_that_waits_itself_is_a_victim(tmp_path: Path) -> None:
    """Rank 1 does not come to the left group because rank 2 does not come to the right one."""
    left, right = {"0": (1, 1), "1": (4, 4), "2": (3, 2)}, {"0": (1, 1), "2": (2, 2)}
    found = waits(
        tmp_path,
        {
            0: dump(entry(LEFT, 5), groups=(WORLD, LEFT)),
            1: dump(entry(RIGHT, 3), groups=(WORLD, LEFT, RIGHT), status=left),
            2: dump(entry(WORLD, 1, retired=True), groups=(WORLD, RIGHT), status=right),
            3: dump(),
        },
    )
    assert found.roots() == [2]
    assert found.waiting_for(2) == (0, 1)


def test_ranks_that_wait_for_each_other_are_a_circle(tmp_path: Path) -> None:
    """Collectives in another order: nobody is free, nobody is named alone."""
    first, second = LEFT, Group("3", (0, 1), 3)
    groups = (WORLD, first, second)
    found = waits(
        tmp_path,
        {
            0: dump(entry(first, 5), groups=groups, status={"0": (1, 1), "1": (5, 4), "3": (7, 7)}),
            1: dump(
                entry(second, 8), groups=groups, status={"0": (1, 1), "1": (4, 4), "3": (8, 7)}
            ),
        },
    )
    assert found.roots() == []
    assert found.circle() == (0, 1)


def test_a_dump_that_does_not_say_is_not_blamed(tmp_path: Path) -> None:
    """It lists calls of another group, and its status is of nobody knows which."""
    found = waits(
        tmp_path,
        {
            0: dump(entry(LEFT, 5), groups=(WORLD, LEFT)),
            1: dump(entry(RIGHT, 3), groups=(WORLD, LEFT, RIGHT)),
            2: dump(entry(RIGHT, 3), groups=(WORLD, RIGHT)),
        },
    )
    left = next(stall for stall in found.stalls if stall.group.name == "1")
    assert (left.missing, left.unclear) == ((), (1,))
    assert found.roots() == []


def test_a_rank_without_a_dump_is_waited_for_if_all_others_came(tmp_path: Path) -> None:
    """And not if somebody with a dump is missing: that one is known not to have come."""
    came = {rank: dump(entry(WORLD, 8)) for rank in (0, 1, 2)}
    assert waits(tmp_path / "a", came).roots() == [3]
    behind = {**came, 2: dump(status={"0": (7, 7)})}
    assert waits(tmp_path / "b", behind).roots() == [2]


def test_what_peers_finished_and_one_rank_did_not_shows_who_stopped(tmp_path: Path) -> None:
    """Only where everybody meets: the root of a broadcast may be done before the others come."""
    others = {rank: dump(entry(WORLD, 9), status={"0": (9, 8)}) for rank in (0, 1, 2)}
    calls = [entry(WORLD, seq) for seq in (6, 7, 8, 9)]
    found = waits(tmp_path / "a", {**others, 3: dump(*calls, status={"0": (9, 5)})})
    assert list(found.behind) == [3]
    (behind,) = found.behind[3]
    assert (behind.first, behind.last, behind.peers) == (6, 8, (0, 1, 2))
    assert found.roots() == []
    casts = [entry(WORLD, seq, "nccl:broadcast") for seq in (6, 7, 8, 9)]
    assert not waits(tmp_path / "b", {**others, 3: dump(*casts, status={"0": (9, 5)})}).behind


@pytest.mark.parametrize("sends, absent", [(2, 1), (0, 0)])
def test_messages_are_counted_by_peer(tmp_path: Path, sends: int, absent: int) -> None:
    """Who has called fewer of them than the other end is waited for."""
    groups = (WORLD, PIPE)
    sent = [entry(PIPE, 10 + n, "nccl:send 0->1") for n in range(sends)]
    found = waits(
        tmp_path,
        {
            0: dump(*sent, entry(PIPE, 50, "nccl:recv 0<-3"), groups=groups),
            1: dump(entry(PIPE, 20, "nccl:recv 1<-0"), groups=groups),
            3: dump(entry(PIPE, 30, "nccl:send 3->0"), groups=groups),
        },
    )
    assert [(message.waiter, message.absent) for message in found.messages] == [
        (1 - absent, absent)
    ]
    assert found.message_roots() == [absent]


def test_who_calls_something_else_than_most_is_odd(tmp_path: Path) -> None:
    """The same number of the same group must be the same collective."""
    documents = {rank: dump(entry(WORLD, 8)) for rank in range(3)}
    found = waits(tmp_path, {**documents, 3: dump(entry(WORLD, 8, "nccl:barrier"))})
    assert found.stalls[0].odd == ((3, "barrier"),)


def test_groups_of_one_name_and_other_members_are_not_mixed(tmp_path: Path) -> None:
    """Names are only unique together with members."""
    first, second = Group("1", (0, 1), 1), Group("1", (2, 3), 1)
    found = waits(
        tmp_path,
        {
            0: dump(entry(first, 5), groups=(WORLD, first)),
            1: dump(entry(first, 5), groups=(WORLD, first)),
            2: dump(entry(second, 9), groups=(WORLD, second)),
            3: dump(groups=(WORLD, second), status={"0": (0, 0), "1": (8, 8)}),
        },
    )
    assert found.roots() == [3]
    assert {stall.group.ranks: stall.missing for stall in found.stalls} == {
        (0, 1): (),
        (2, 3): (3,),
    }
