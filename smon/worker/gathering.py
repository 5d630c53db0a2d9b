"""Which files of ranks belong together, and when there are enough of them. No input or output.

Flow: `smon.store.files`, `smon.store.captures` → **here** → `smon.worker.captures`. The rules
stand in ``docs/reference/windows.md`` section 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from smon.store.captures import CaptureInfo, OpenCapture
from smon.store.files import FileInfo
from smon.store.windows import Ready
from smon.wire.parts import FileFormat
from smon.worker.assembly import MAX_NAMED

_NS: Final = 10**9

#: Dumps of one hang are made within a few minutes: each rank's watchdog has its own time. So far
#: apart, too, may files come that know neither steps nor times.
TOGETHER_NS: Final = 300 * _NS

#: Portions of logs follow each other, and clocks differ a little: so much of a file must overlap.
LEAST_SHARE: Final = 0.1

#: Encoded bytes of one capture: what a worker holds in memory is a few times that.
MAX_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class Choice:
    """Where a file goes.

    Attributes
    ----------
    into
        Captures that take it, the best first; none: a new one.
    late
        It belongs to a capture that has been analysed.
    full
        It belongs to a capture that is too large for it.
    """

    into: tuple[CaptureInfo, ...] = ()
    late: bool = False
    full: bool = False


def choose(file: FileInfo, captures: Sequence[CaptureInfo]) -> Choice:
    """Where a file goes, among captures of its attempt and format.

    A capture has one file of each rank: a second one is of another moment.
    """
    fitting = [
        (together(file, capture.files), capture)
        for capture in captures
        if file.rank is None or all(one.rank != file.rank for one in capture.files)
    ]
    fitting = [each for each in fitting if each[0] > 0]
    fitting.sort(key=_by_overlap)
    takers = [capture for _, capture in fitting if capture.takes_files]
    if not takers:
        return Choice(late=bool(fitting))
    roomy = tuple(one for one in takers if _bytes(one.files) + file.bytes <= MAX_BYTES)
    return Choice(roomy, full=not roomy)


def _by_overlap(each: tuple[int, CaptureInfo]) -> int:
    return -each[0]


def _bytes(files: Sequence[FileInfo]) -> int:
    return sum(one.bytes for one in files)


def together(file: FileInfo, others: Sequence[FileInfo]) -> int:
    """How much a file has in common with a capture: steps or ns; 0: it does not belong to it."""
    if file.format is FileFormat.FLIGHT_RECORDER:
        return _near(_moment(file), [_moment(one) for one in others])
    steps = _overlap(
        (file.first_step, file.last_step), [(one.first_step, one.last_step) for one in others]
    )
    if steps is not None:
        return steps
    times = _overlap((file.start_ns, file.end_ns), [(one.start_ns, one.end_ns) for one in others])
    if times is not None:
        length = (file.end_ns or 0) - (file.start_ns or 0) + 1
        return times if times >= LEAST_SHARE * length else 0
    return _near(file.created_ns, [one.created_ns for one in others])


def _moment(file: FileInfo) -> int:
    """When a dump was made, or came."""
    return file.created_ns if file.end_ns is None else file.end_ns


def _near(moment: int, others: Sequence[int]) -> int:
    """How near a moment is to a span of moments, at most `TOGETHER_NS`; 0: too far."""
    distance = max(min(others) - moment, moment - max(others), 0)
    return max(TOGETHER_NS - distance, 0)


def _overlap(
    mine: tuple[int | None, int | None], others: Sequence[tuple[int | None, int | None]]
) -> int | None:
    """Length of what a range shares with the span of others; None where one side knows none."""
    firsts = [first for first, _ in others if first is not None]
    lasts = [last for _, last in others if last is not None]
    first, last = mine
    if first is None or last is None or not firsts or not lasts:
        return None
    return max(min(last, max(lasts)) - max(first, min(firsts)) + 1, 0)


# --- when a capture is ready --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Waits:
    """How long ranks are waited for since the last file, of attempts that go on and that are over.

    Seconds.
    """

    usual_s: float
    over_s: float


def readiness(capture: OpenCapture, waits: Waits, now: int) -> Ready | None:
    """How a capture is to be analysed; None if it is worth waiting."""
    missing = missing_ranks(capture)
    if missing == ():
        return Ready(capture.window_id)
    wait_s = waits.over_s if capture.over else waits.usual_s
    if capture.updated_ns + int(wait_s * _NS) > now:
        return None
    if missing is None:
        return Ready(capture.window_id, "nothing came any more; the number of ranks is not known")
    reason = f"nothing came any more: {len(missing)} of {_world(capture)} ranks sent no file"
    return Ready(capture.window_id, reason, missing[:MAX_NAMED], len(missing))


def missing_ranks(capture: OpenCapture) -> tuple[int, ...] | None:
    """Ranks that have sent no file; None if it is not known how many there are.

    Files of unknown ranks count as those of the first ranks that are missing.
    """
    world = _world(capture)
    if world is None:
        return None
    have = {one.rank for one in capture.files}
    unknown = sum(one.rank is None for one in capture.files)
    return tuple([rank for rank in range(world) if rank not in have][unknown:])


def _world(capture: OpenCapture) -> int | None:
    """Ranks of the job; a layout of one rank is what an agent says that does not know."""
    said = [one.world_size for one in capture.files if one.world_size is not None]
    declared = capture.layout.world_size
    known = [*said, *([declared] if declared > 1 else [])]
    return max(known, default=None)
