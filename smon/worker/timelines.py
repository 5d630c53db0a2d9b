"""Timelines of stored windows: a trace file, or one step of some workers as marks for a page.

Only the row groups of the steps that are drawn are read, a bounded number of ops at a time; ideals
and clocks are those of the whole window, so that what is drawn agrees with its report.

Flow: `smon.store.events`, `smon.store.results` → **here** (`smon.timeline`) → `smon.worker.tasks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from smon.attribute.occupied import compute_and_wait
from smon.errors import ConfigError, NothingUsableError, StoreError, TraceError
from smon.prepare import Prepared, prepare
from smon.simulate.ideal import Ideal
from smon.store.events import read_context, read_ops
from smon.store.queries.tasks import workers_path_of
from smon.timeline import Choice, Kind
from smon.timeline.events import Drawing, closing, opening
from smon.timeline.marks import Totals, marks
from smon.timeline.reference import Reference, unpacked
from smon.trace.context import Context
from smon.worker.material import complete, job_of, with_hosts
from smon.worker.matrix import REFERENCE_KEY
from smon.worker.service import Service
from smon.worker.windows import Material, gather, need_ops, steps_present

#: Called as the work goes on; raises to end it.
Check = Callable[..., None]

#: A trace file has at most about so many ops, some 200 MB: of more, Perfetto makes a slow page.
MAX_EVENTS: Final = 1_000_000
#: And so many are read for it, half a minute's work.
MAX_READ: Final = 5_000_000
#: Steps are read and simulated together up to so many ops, so that memory stays bounded.
PART_OPS: Final = 400_000
#: Steps whose reasons for being left out stand in the file; the rest are counted.
_MAX_REASONS: Final = 100


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one timeline may cost, see the constants above."""

    events: int = MAX_EVENTS
    read: int = MAX_READ
    part: int = PART_OPS


@dataclass(frozen=True, slots=True)
class TimelineOptions:
    """Which part of a window is drawn as a trace file; `steps`: first and last, None: all."""

    window_id: str
    choice: Choice
    steps: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class MarksOptions:
    """Which step of a window is drawn as marks, and (dp, stage) of the workers."""

    window_id: str
    step: int
    workers: tuple[tuple[int, int], ...]


def timeline_options(options: Mapping[str, Any]) -> TimelineOptions:
    """The options of a task, as the API writes them.

    Raises
    ------
    ConfigError
        They are none.
    """
    kind = options.get("kind", "both")
    kinds = frozenset(each for each in Kind if kind in ("both", each.label))
    if not kinds:
        raise ConfigError("expected a window, and actual, ideal or both")
    return TimelineOptions(
        _window_id(options),
        Choice(kinds, frozenset(_numbers(options.get("dp"))), _stages(options)),
        _range(options.get("steps")),
    )


def marks_options(options: Mapping[str, Any]) -> MarksOptions:
    """As `timeline_options`, of a step for a page.

    Raises
    ------
    ConfigError
        They are none.
    """
    step, workers = options.get("step"), options.get("workers")
    if not isinstance(step, int) or not isinstance(workers, list):
        raise ConfigError("expected the number of a step, and workers")
    pairs = [_numbers(one) for one in workers]
    if any(len(pair) != 2 for pair in pairs):  # noqa: PLR2004  # DP rank and stage
        raise ConfigError("expected a DP rank and a stage of each worker")
    return MarksOptions(_window_id(options), step, tuple((dp, stage) for dp, stage in pairs))


def _window_id(options: Mapping[str, Any]) -> str:
    window_id = options.get("window_id")
    if not isinstance(window_id, str):
        raise ConfigError("expected a window, and actual, ideal or both")
    return window_id


def _stages(options: Mapping[str, Any]) -> frozenset[int]:
    return frozenset(_numbers(options.get("stage")))


def _numbers(value: object) -> list[int]:
    values = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(one, int) for one in values):
        raise ConfigError("expected numbers of DP ranks and stages")
    return list(values)


def _range(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    numbers = _numbers(value)
    if len(numbers) != 2 or numbers[0] > numbers[1]:  # noqa: PLR2004  # first and last
        raise ConfigError("expected the first and the last step")
    return numbers[0], numbers[1]


# --- reading --------------------------------------------------------------------------------


class _Source:
    """A stored window, of which parts are prepared as the whole was."""

    def __init__(self, service: Service, window_id: str) -> None:
        self._service = service
        self.material: Material = gather(service, window_id)
        need_ops(self.material)
        self.job = job_of(self.material.attempt)
        self.present = steps_present(service, self.material)
        self.reference = self._reference(window_id)
        self._context: Context | None = None

    def prepared(self, steps: Sequence[int], ideal: Ideal | None = None) -> Prepared:
        """Some steps; `ideal` where the whole window's is not known.

        Raises
        ------
        NothingUsableError
            None of them can be drawn.
        """
        ops = read_ops(self._service.objects, [file.path for file in self.material.ops], only=steps)
        self._service.metrics.rows.inc(len(ops))
        table, _ = complete(ops, self.material.attempt)
        if self.reference is not None:
            table, ideal = self.reference.put_right(table), self.reference.ideal
        return prepare(table, self.job, self._side_evidence(), ideal=ideal)

    def _side_evidence(self) -> Context:
        if self._context is None:
            paths = [file.path for file in self.material.context]
            context = read_context(self._service.objects, paths)
            self._context = with_hosts(context, self.material.hosts)
        return self._context

    def _reference(self, window_id: str) -> Reference | None:
        """What the whole window was measured against; None if it is not kept."""
        with self._service.database.read() as session:
            path = workers_path_of(session, window_id)
        if path is None or self._service.objects.size(path) is None:
            return None
        try:
            with self._service.objects.open(path) as file:
                text = (pq.read_schema(file).metadata or {}).get(REFERENCE_KEY)
            return None if text is None else unpacked(text)
        except (pa.ArrowException, OSError, TraceError) as error:
            raise StoreError(f"cannot read {path}: {error}") from error


# --- a trace file ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which steps go into a file, in parts; and how the file says so."""

    parts: tuple[tuple[int, ...], ...]
    about: dict[str, Any]


def timeline_pieces(
    service: Service, options: TimelineOptions, check: Check, limits: Limits | None = None
) -> Iterator[str]:
    """A trace file, piece by piece.

    What is left out, and why, stands in the file: steps beyond the limits in ``otherData``, steps
    that cannot be drawn in ``leftOut``.

    Raises
    ------
    NothingUsableError
        No step can be drawn, or the events are gone.
    StoreError
        A file cannot be read.
    """
    source = _Source(service, options.window_id)
    limits = limits or Limits()
    plan = _planned(source, options, limits)
    check()
    drawing = Drawing(source.job.layout, options.choice)
    yield opening(source.job, **plan.about)
    left_out: dict[int, str] = {}
    failures: list[NothingUsableError] = []
    ideal: Ideal | None = None
    for steps in plan.parts:
        try:
            prepared = source.prepared(steps, ideal)
        except NothingUsableError as error:
            left_out.update(error.skipped or [(step, str(error)) for step in steps])
            failures.append(error)
            continue
        ideal = prepared.ideal
        left_out.update(prepared.skipped)
        yield from drawing.pieces(prepared, check)
    if len(failures) == len(plan.parts):
        raise failures[0]
    yield closing(**_reasons(left_out))


def _planned(source: _Source, options: TimelineOptions, limits: Limits) -> _Plan:
    first, last = options.steps or (min(source.present), max(source.present))
    asked = {step: rows for step, rows in source.present.items() if first <= step <= last}
    if not asked:
        raise NothingUsableError(
            f"expected steps of this window, {min(source.present)} to {max(source.present)}, "
            f"found {first} to {last}"
        )
    layout = source.job.layout
    share = len(Kind) * options.choice.share(layout.dp, layout.pp)
    chosen: list[int] = []
    read = 0
    for step, rows in asked.items():
        read += rows
        if chosen and (read > limits.read or read * share > limits.events):
            break
        chosen.append(step)
    about: dict[str, Any] = {"steps": f"{chosen[0]}-{chosen[-1]}"}
    if len(chosen) < len(asked):
        about["bounded"] = (
            f"the first {len(chosen)} of {len(asked)} steps asked for: all would be too large; ask "
            "for others with steps=A-B, or for fewer workers with dp and stage"
        )
    if source.reference is None and len(chosen) < len(source.present):
        about["reference"] = "ideal durations are those of the first steps drawn"
    return _Plan(_parts(chosen, asked, limits.part), about)


def _parts(steps: Sequence[int], rows: Mapping[int, int], most: int) -> tuple[tuple[int, ...], ...]:
    """Runs of steps with at most so many ops, or one step."""
    parts: list[list[int]] = []
    size = 0
    for step in steps:
        size += rows[step]
        if not parts or size > most:
            parts.append([])
            size = rows[step]
        parts[-1].append(step)
    return tuple(map(tuple, parts))


def _reasons(left_out: Mapping[int, str]) -> dict[str, Any]:
    if not left_out:
        return {}
    named = [
        {"step": step, "reason": reason} for step, reason in sorted(left_out.items())[:_MAX_REASONS]
    ]
    return {"leftOut": named, "leftOutCount": len(left_out)}


# --- marks for a page -----------------------------------------------------------------------


def step_marks(service: Service, options: MarksOptions, check: Check) -> dict[str, Any]:
    """One step of some workers, as `smon.timeline.marks.marks`; with notes on how it was made.

    Raises
    ------
    NothingUsableError
        The step cannot be drawn, or the events are gone.
    StoreError
        A file cannot be read.
    """
    source = _Source(service, options.window_id)
    if options.step not in source.present:
        raise NothingUsableError(f"the window has no ops of step {options.step}")
    check()
    layout = source.job.layout
    if any(dp >= layout.dp or stage >= layout.pp for dp, stage in options.workers):
        raise ConfigError(f"expected workers of layout {layout}")
    prepared = source.prepared([options.step])
    check()
    document = marks(
        prepared, options.step, options.workers, Totals(*compute_and_wait(prepared.window))
    )
    document["notes"] = (
        ["ideal durations are those of this step alone: the window's are not kept"]
        if source.reference is None
        else []
    )
    return document
