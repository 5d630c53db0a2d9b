"""Run all steps of a job with some faults: draws → faults → times.

Flow: `smon.synth.spec` → **here** → `smon.synth.record` (the table) and `smon.synth.twin` (the cost
of a fault: the same job is run with and without it).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.errors import ConfigError
from smon.synth.faults.base import NEVER_NS, Draft, Fault
from smon.synth.model import run_step
from smon.synth.plan import make_plan
from smon.synth.record import Batch, step_spans
from smon.synth.schedule import Shape
from smon.synth.spec import Scenario
from smon.synth.timing import apply_faults, draw_delays, draw_work
from smon.trace.schema import MAX_DURATION_NS


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """A job that has run.

    Attributes
    ----------
    drafts, batches
        Steps of one shape each: before, and after.
    origins
        Unix time of each step's first start, ns, by step.
    span_ns
        First start to last end of each step; shape ``(steps,)``.
    pause_s
        Standstill after each step, besides the usual gap; shape ``(steps,)``.
    ended
        Whether the step came to its end; shape ``(steps,)``.
    """

    drafts: tuple[Draft, ...]
    batches: tuple[Batch, ...]
    origins: Mapping[int, int]
    span_ns: NDArray[np.int64]
    pause_s: NDArray[np.float64]
    ended: NDArray[np.bool_]

    @property
    def period_s(self) -> NDArray[np.float64]:
        """Step time with the standstill after it; NaN where a step never ends."""
        return np.where(self.ended, self.span_ns / 1e9 + self.pause_s, np.nan)


def run_job(scenario: Scenario, faults: Sequence[Fault]) -> Run:
    """Run all steps with these faults instead of the scenario's own.

    Raises
    ------
    ConfigError
        Steps would be longer than a trace can hold.
    """
    drafts = tuple(_draft(scenario, shape, steps, faults) for shape, steps in _by_shape(scenario))
    batches = tuple(_run_batch(scenario, draft) for draft in drafts)
    spans = step_spans(batches)
    span_ns = np.array([last - first for first, last in spans.values()], np.int64)
    _check_longest(int(span_ns.max()))
    numbers = np.array(scenario.step_numbers)
    pauses = sum((fault.standstill_s(numbers) for fault in faults), np.zeros(len(numbers)))
    hung = {step for batch in batches for step in batch.hung_steps()}
    return Run(
        drafts,
        batches,
        _origins(scenario, list(spans), span_ns, pauses),
        span_ns,
        pauses,
        ended=np.array([step not in hung for step in spans]),
    )


def _by_shape(scenario: Scenario) -> Iterator[tuple[Shape, tuple[int, ...]]]:
    shapes: dict[Shape, list[int]] = {}
    for step in scenario.step_numbers:
        shapes.setdefault(scenario.shape(step), []).append(step)
    for shape, steps in shapes.items():
        yield shape, tuple(steps)


def _draft(
    scenario: Scenario, shape: Shape, steps: tuple[int, ...], faults: Sequence[Fault]
) -> Draft:
    plan = make_plan(shape)
    work = draw_work(plan, steps, scenario.durations, scenario.noise, scenario.seed)
    delays = draw_delays(plan, steps, scenario.noise, scenario.seed)
    draft = Draft(plan, steps, scenario.seed, work, delays)
    apply_faults(draft, faults)
    return draft


def _run_batch(scenario: Scenario, draft: Draft) -> Batch:
    plan = draft.plan
    noop_ns = round(scenario.durations.noop_s * 1e9)
    work = np.rint(draft.work, out=draft.work).astype(np.int64)
    times = run_step(plan, work, draft.delays_if_any, noop_ns)
    kept = np.ones(len(plan), bool) if scenario.record_noops else plan.real
    start, end = times.start[kept], times.end[kept]
    never = end >= NEVER_NS
    lost = None if draft.lost_if_any is None else draft.lost_if_any[kept]
    return Batch(
        plan,
        kept,
        tuple(draft.steps.tolist()),
        start,
        end,
        never=never if never.any() else None,
        lost=lost,
    )


def _check_longest(step_ns: int) -> None:
    if step_ns > MAX_DURATION_NS:
        raise ConfigError(
            f"a step would take {step_ns / 1e9:.0f} s, expected at most "
            f"{MAX_DURATION_NS / 1e9:.0f} s: use shorter durations or fewer microbatches"
        )


def _origins(
    scenario: Scenario,
    steps: Sequence[int],
    span_ns: NDArray[np.int64],
    pause_s: NDArray[np.float64],
) -> Mapping[int, int]:
    """Unix time at which each step starts, ns."""
    lengths = span_ns + np.rint((pause_s + scenario.gap_s) * 1e9).astype(np.int64)
    starts = scenario.start_unix_s * 10**9 + np.cumsum(lengths) - lengths
    return dict(zip(steps, starts.tolist(), strict=True))
