"""Jobs that look as if somebody were to blame: faults that `smon synth` does not have."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smon.analysis import analyze
from smon.ops import OpType
from smon.report import Finding, JobReport
from smon.synth.faults import Fault
from smon.synth.faults.base import Draft
from smon.synth.scenario import generate
from smon.synth.spec import Scenario
from smon.trace.context import Context, Microbatches

COMPUTES = (OpType.FORWARD_COMPUTE, OpType.BACKWARD_COMPUTE)


@dataclass(frozen=True)
class Slow(Fault):
    """Computes of one DP rank take longer, on some stages and in some steps; by default in all."""

    dp: int
    factor: float
    stages: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    optypes: tuple[OpType, ...] = COMPUTES

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        hit = np.isin(draft.steps, self.steps) if self.steps else np.ones(len(draft.steps), bool)
        for stage in self.stages or range(draft.plan.shape.pp):
            draft.work[draft.cells(draft.rows(stage, *self.optypes), hit, self.dp)] *= self.factor


@dataclass(frozen=True)
class UnevenData(Fault):
    """Microbatches of random length (log-normal), long on all stages alike."""

    spread: float
    seed: int = 0

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        shape = draft.plan.shape
        rows = draft.rows(None, *COMPUTES)
        for index, step in enumerate(draft.steps.tolist()):
            random = np.random.default_rng([self.seed, step])
            length = np.exp(random.normal(0, self.spread, (shape.dp, shape.microbatches)))
            draft.work[rows, index, :] *= length[:, draft.plan.microbatch[rows]].T


@dataclass(frozen=True)
class UnlikeDevices(Fault):
    """Healthy GPUs: normally distributed around each other by 1 %, and by 2 % at most."""

    seed: int

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        shape = draft.plan.shape
        unlike = np.random.default_rng(self.seed).normal(0, 0.01, (shape.pp, shape.dp))
        for stage, factors in enumerate(1 + np.clip(unlike, -0.02, 0.02)):
            draft.work[draft.rows(stage, *COMPUTES)] *= factors[None, None, :]


@dataclass(frozen=True)
class LossChunk(Fault):
    """The last model chunk of the last stage has the loss layer."""

    forward: float = 1.9
    backward: float = 1.35

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        plan = draft.plan
        for optype, factor in zip(COMPUTES, (self.forward, self.backward), strict=True):
            rows = draft.rows(plan.shape.pp - 1, optype)
            draft.work[rows[plan.chunk[rows] == plan.shape.vpp - 1]] *= factor


@dataclass(frozen=True)
class Late(Fault):
    """Worker (2, 1) launches ops of one type late, every so many steps."""

    optype: OpType
    seconds: float
    every: int = 1
    everybody: bool = False

    def apply(self, draft: Draft) -> None:
        """See `Fault.apply`."""
        hit = draft.steps % self.every == 0
        for dp in range(draft.plan.shape.dp) if self.everybody else (2,):
            cells = draft.cells(draft.rows(1, self.optype), hit, dp)
            draft.delays[cells] += int(self.seconds * 1e9)


def report_of(job: Scenario, context: Context | None = None) -> JobReport:
    """What is said of a job."""
    made = generate(job)
    return analyze(made.table, made.job, context=context)


def named(report: JobReport) -> set[tuple[int | None, int | None]]:
    """(dp, stage) of the workers whose devices are called slow."""
    return {
        (found.where.dp, found.where.stage)
        for found in report.findings
        if found.verdict == "straggler"
    }


def causes(report: JobReport) -> list[str]:
    """Causes in the order of the report."""
    return [found.cause for found in report.findings]


def candidates(found: Finding) -> set[str]:
    """Causes that cannot be told apart."""
    return {candidate.cause for candidate in found.candidates}


def lengths(job: Scenario, of_dp: dict[int, float]) -> Context:
    """Side evidence: Σlen² of every microbatch, times a factor on some DP ranks."""
    shape = (job.steps, job.dp, job.microbatches)
    step, dp, microbatch = (part.ravel() for part in np.indices(shape))
    factor: NDArray[np.float64] = np.array([of_dp.get(rank, 1.0) for rank in range(job.dp)])
    return Context(
        microbatches=Microbatches(
            step.astype(np.int64),
            dp.astype(np.int32),
            microbatch.astype(np.int32),
            np.full(step.size, 8192),
            factor[dp] * 8192.0 * 2048.0,
        )
    )
