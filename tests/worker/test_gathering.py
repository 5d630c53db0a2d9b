from __future__ import annotations

from dataclasses import replace

import pytest

from smon.store.captures import CaptureInfo, OpenCapture
from smon.store.files import FileInfo
from smon.store.models import FileState
from smon.topology import Layout
from smon.wire.parts import FileFormat
from smon.worker.gathering import MAX_BYTES, Waits, choose, missing_ranks, readiness

S = 10**9
NOW = 1_800_000_000 * S
WAITS = Waits(usual_s=60.0, over_s=5.0)

FILE = FileInfo(
    id="f",
    tenant_id="t",
    job_id="j",
    attempt_id="a",
    window_id=None,
    state=FileState.WHOLE,
    name="file",
    format=FileFormat.RANK_EVENTS,
    rank=0,
    world_size=4,
    sha256="",
    bytes=1000,
    first_step=10,
    last_step=19,
    start_ns=None,
    end_ns=None,
    created_ns=NOW,
    paths=(),
)
DUMP = replace(FILE, format=FileFormat.FLIGHT_RECORDER, first_step=None, last_step=None)


def steps(rank: int | None, first: int, last: int) -> FileInfo:
    """A file of some steps."""
    return replace(FILE, rank=rank, first_step=first, last_step=last)


def times(rank: int | None, start_s: float, end_s: float) -> FileInfo:
    """A file that knows no steps."""
    blank = replace(FILE, rank=rank, first_step=None, last_step=None)
    return replace(blank, start_ns=NOW + int(start_s * S), end_ns=NOW + int(end_s * S))


def dump(rank: int | None, at_s: float) -> FileInfo:
    """A dump that was made at a time."""
    return replace(DUMP, rank=rank, start_ns=NOW, end_ns=NOW + int(at_s * S))


def capture(*files: FileInfo, name: str = "w", takes: bool = True) -> CaptureInfo:
    """A capture of some files."""
    return CaptureInfo(name, takes, files)


def waiting(*files: FileInfo, layout: Layout | None = None, over: bool = False) -> OpenCapture:
    """A capture that waits since `NOW`."""
    return OpenCapture("w", layout or Layout(dp=1, pp=1), over, NOW, files)


def test_files_whose_steps_overlap_belong_together() -> None:
    """By one step at least."""
    mine = capture(steps(0, 10, 19))
    assert choose(steps(1, 19, 28), [mine]).into == (mine,)
    assert choose(steps(1, 20, 29), [mine]).into == ()
    assert not choose(steps(1, 20, 29), [mine]).late


def test_a_capture_has_one_file_of_each_rank() -> None:
    """The second one of a rank goes elsewhere, and the others follow it."""
    first, second = capture(steps(0, 10, 20), name="1"), capture(steps(0, 20, 30), name="2")
    assert choose(steps(0, 20, 30), [first]).into == ()
    assert choose(steps(1, 20, 30), [first, second]).into == (second, first)


def test_without_steps_times_decide() -> None:
    """They must overlap by a tenth: the portion before may end a little late."""
    mine = capture(times(0, 0, 10))
    assert choose(times(1, 8, 20), [mine]).into == (mine,)
    assert choose(times(1, 9.5, 20), [mine]).into == ()
    assert choose(times(1, 11, 20), [mine]).into == ()


def test_without_either_files_that_come_within_minutes_belong_together() -> None:
    """A file with steps and one without are compared by that, too."""
    blank = replace(FILE, rank=1, first_step=None, last_step=None)
    mine = capture(steps(0, 10, 19))
    assert choose(blank, [mine]).into == (mine,)
    assert choose(replace(blank, created_ns=NOW + 301 * S), [mine]).into == ()


def test_dumps_belong_together_if_they_were_made_within_minutes() -> None:
    """What counts is when they were made, not how far back their entries go."""
    mine = capture(dump(0, 0.0))
    assert choose(dump(1, 290.0), [mine]).into == (mine,)
    assert choose(dump(1, -290.0), [mine]).into == (mine,)
    assert choose(dump(1, 310.0), [mine]).into == ()
    assert choose(replace(DUMP, rank=1), [capture(DUMP)]).into


def test_a_file_that_belongs_to_an_analysed_capture_is_late() -> None:
    """Unless one that takes files fits, too, or the rank has its file there."""
    done = capture(steps(0, 10, 19), takes=False)
    assert choose(steps(1, 10, 19), [done]).late
    assert not choose(steps(1, 10, 19), [done, capture(steps(2, 10, 19))]).late
    assert not choose(steps(0, 10, 19), [done]).late


def test_a_capture_does_not_become_too_large() -> None:
    """A worker reads all of it at once."""
    mine = capture(replace(FILE, bytes=MAX_BYTES - 999))
    choice = choose(steps(1, 10, 19), [mine])
    assert (choice.into, choice.full, choice.late) == ((), True, False)


@pytest.mark.parametrize(
    "files, layout, missing",
    [
        ([steps(0, 1, 2), steps(3, 1, 2)], None, (1, 2)),
        ([steps(0, 1, 2), steps(None, 1, 2), steps(None, 1, 2)], None, (3,)),
        ([replace(FILE, world_size=None)], Layout(dp=2, pp=1), (1,)),
        ([replace(FILE, world_size=None)], None, None),
        ([replace(FILE, world_size=1)], None, ()),
    ],
)
def test_who_is_missing(
    files: list[FileInfo], layout: Layout | None, missing: tuple[int, ...] | None
) -> None:
    """By the size that files or agents say; a layout of one rank says nothing."""
    assert missing_ranks(waiting(*files, layout=layout)) == missing


def test_a_complete_capture_is_ready_at_once() -> None:
    """Nobody is missing."""
    ready = readiness(waiting(*(steps(rank, 1, 2) for rank in range(4))), WAITS, NOW)
    assert ready is not None
    assert (ready.reason, ready.missing_count) == (None, 0)


def test_an_incomplete_capture_waits_since_its_last_file() -> None:
    """Less long if the attempt is over."""
    mine = waiting(steps(0, 1, 2))
    assert readiness(mine, WAITS, NOW + 59 * S) is None
    ready = readiness(mine, WAITS, NOW + 60 * S)
    assert ready is not None
    assert (ready.missing, ready.missing_count) == ((1, 2, 3), 3)
    assert ready.reason == "nothing came any more: 3 of 4 ranks sent no file"
    assert readiness(replace(mine, over=True), WAITS, NOW + 5 * S) is not None


def test_a_capture_of_unknown_size_says_so() -> None:
    """Nobody can be named."""
    ready = readiness(waiting(replace(FILE, world_size=None)), WAITS, NOW + 60 * S)
    assert ready is not None
    assert (ready.missing_count, "not known" in (ready.reason or "")) == (0, True)
