"""A synthetic job: what is asked for, and the op table with its true answer that comes of it.

Flow: command line and tests → **here** → `smon.trace.table.OpTable`, `smon.trace.context.Context`
and `smon.synth.truth.Truth`. `generate` shows the whole pipeline of calls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.synth.evidence import Witness, gather
from smon.synth.record import Clocks, assemble
from smon.synth.run import Run, run_job
from smon.synth.spec import MAX_OPS, Scenario
from smon.synth.truth import Truth
from smon.synth.twin import true_answer
from smon.trace.context import Context
from smon.trace.meta import Job
from smon.trace.table import OpTable

__all__ = ["MAX_OPS", "Scenario", "Synthetic", "generate"]


@dataclass(frozen=True, slots=True, eq=False)
class Synthetic:
    """A generated job.

    Attributes
    ----------
    table
        All ops with their times, in order of step, dp, stage, op type, seq. The times are true,
        unless the scenario has wrong clocks.
    job
        Its name and layout.
    step_seconds
        True step time, first start to last end over all workers, in s; shape ``(steps,)``.
    context
        Side evidence, as far as the scenario asks for it.
    truth
        What is wrong with the job, and what it costs.
    """

    table: OpTable
    job: Job
    step_seconds: NDArray[np.float64]
    context: Context
    truth: Truth


def generate(scenario: Scenario) -> Synthetic:
    """Run the job and record every op of every worker.

    The job is run again without its faults, and with each cause alone, to know what they cost.

    Raises
    ------
    ConfigError
        Steps would be longer than a trace can hold.
    """
    run = run_job(scenario, scenario.all_faults)
    return Synthetic(
        table=assemble(
            run.batches,
            scenario.layout,
            run.origins,
            Clocks.of(scenario.all_faults, scenario.dp, scenario.pp),
            step_relative=scenario.step_relative,
        ),
        job=Job(scenario.name, scenario.layout),
        step_seconds=run.span_ns / 1e9,
        context=_context(scenario, run),
        truth=true_answer(scenario, run),
    )


def _context(scenario: Scenario, run: Run) -> Context:
    origins = None if scenario.step_relative else run.origins
    witnesses = [
        Witness(draft, batch, scenario.layout, origins)
        for draft, batch in zip(run.drafts, run.batches, strict=True)
    ]
    return gather(
        witnesses, scenario.all_faults, scenario.evidence, scenario.machines, scenario.layout
    )
