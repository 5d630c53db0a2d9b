"""Side by side with the published method, on equal input: the same numbers, at what cost.

`tests.proof.published` is the published method as its paper states it, with numpy doing the
arithmetic of a whole op over all steps and DP ranks at once, as in SMon: what differs is how often
the job is simulated. Both get the same op table in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from smon.attribute.slowdown import StepTimes, simulate_all, slowdown
from smon.prepare import prepare
from smon.synth import causes
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.synth.timing import Noise
from tests.proof.line import Form, Goal, Line, at_least, at_most
from tests.proof.published import Published, Slowdowns

_TP: Final = 8

T = TypeVar("T")

#: (DP, PP, microbatches, steps) of the jobs.
_SIZES: Final = {
    Form.SHORT: [(4, 2, 8, 4), (8, 4, 16, 6)],
    Form.LONG: [(16, 4, 16, 10), (32, 8, 32, 10), (64, 8, 32, 10), (128, 16, 64, 10)],
}

#: Workers of each job that are simulated one by one.
_ONE_BY_ONE: Final = 6

#: Mean delay between an op being able to start and starting.
_LAUNCH_DELAY_S: Final = 0.0005

#: Relative difference that is rounding.
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Compared:
    """Both methods on one job.

    Attributes
    ----------
    difference, worker_difference
        Largest relative difference of what both report; and of slowdowns of single workers from
        simulations of their own.
    stand_in_off
        By how much the published stand-in, min(S_dp, S_stage), misses the slowdown of a worker at
        most.
    published_s, smon_s
        What each took: SMon with the slowdown of every worker, the published method without.
    one_worker_s
        A simulation of the whole job for one worker.
    """

    gpus: int
    ops: int
    workers: int
    simulations: int
    difference: float
    worker_difference: float
    stand_in_off: float
    published_s: float
    smon_s: float
    one_worker_s: float

    @property
    def figures(self) -> dict[str, Any]:
        """For the line."""
        return {
            "gpus": self.gpus,
            "ops": self.ops,
            "simulations of the published method": self.simulations,
            "published_s": round(self.published_s, 3),
            "smon_s": round(self.smon_s, 3),
            "workers": self.workers,
            "one_worker_s": round(self.one_worker_s, 4),
            "all workers one by one, extrapolated, s": round(self.one_worker_s * self.workers, 1),
            "stand_in_off": round(self.stand_in_off, 4),
        }


def prove(form: Form, folder: Path) -> Line:
    """Compare both on larger and larger jobs."""
    begin = time.monotonic()
    jobs = [compare(_job(*size)) for size in _SIZES[form]]
    goals = tuple(_goals(jobs))
    figures = {"jobs": [job.figures for job in jobs], **_growth(jobs)}
    return Line("method", form, goals, figures, round(time.monotonic() - begin, 1))


def _goals(jobs: Sequence[Compared]) -> Iterator[Goal]:
    yield at_most(
        "relative difference from the published T, T_ideal, S, S_t, S_stage, S_dp",
        max(job.difference for job in jobs),
        _ROUNDING,
    )
    yield at_most(
        "relative difference of a worker's slowdown from a simulation of its own",
        max(job.worker_difference for job in jobs),
        _ROUNDING,
    )
    last = jobs[-1]
    yield at_least(
        "time of the published method without workers over ours with all, largest job",
        last.published_s / last.smon_s,
        1,
        timed=True,
    )


def _growth(jobs: Sequence[Compared]) -> dict[str, float]:
    """The powers of ops with which both grow, from the first to the last job."""
    ops = np.log([job.ops for job in jobs])
    return {
        f"slope of {name}": round(float(np.polyfit(ops, np.log(seconds), 1)[0]), 3)
        for name, seconds in (
            ("the published method", [job.published_s for job in jobs]),
            ("smon", [job.smon_s for job in jobs]),
        )
    }


def _job(dp: int, pp: int, microbatches: int, steps: int) -> Synthetic:
    """A job with a slow GPU and a long last stage, and launch delays as real ones have."""
    slow = (causes.slow_gpu(dp // 2, 1, 1.3), causes.stage_partition(pp - 1, 1.1, 1.1))
    return generate(
        Scenario(
            dp=dp,
            pp=pp,
            tp=_TP,
            microbatches=microbatches,
            steps=steps,
            seed=dp,
            noise=Noise(launch_delay_s=_LAUNCH_DELAY_S),
            causes=slow,
        )
    )


def compare(made: Synthetic) -> Compared:
    """Both methods on one job."""
    layout = made.job.layout
    theirs, published_s = _timed(lambda: Published(made.table, layout))
    reported, reporting_s = _timed(theirs.slowdowns)
    ours, smon_s = _timed(lambda: _smon(made))
    exact = slowdown(ours.by_worker, ours.ideal)
    chosen = [(place % layout.dp, place // layout.dp) for place in _places(layout.dp * layout.pp)]
    alone, alone_s = _timed(lambda: [theirs.worker_slowdown(*worker) for worker in chosen])
    found = [float(exact[worker]) for worker in chosen]
    stand_ins = [
        (float(exact[dp, stage]), reported.approximate(dp, stage))
        for dp in range(layout.dp)
        for stage in range(layout.pp)
    ]
    return Compared(
        gpus=layout.world_size,
        ops=len(made.table),
        workers=layout.dp * layout.pp,
        simulations=reported.simulations,
        difference=_difference(_pairs(reported, ours)),
        worker_difference=_difference(zip(alone, found, strict=True)),
        stand_in_off=max(abs(one - other) for one, other in stand_ins),
        published_s=published_s + reporting_s,
        smon_s=smon_s,
        one_worker_s=alone_s / len(chosen),
    )


def _places(workers: int) -> list[int]:
    """Numbers of some workers, evenly spread."""
    return sorted({round(place) for place in np.linspace(0, workers - 1, _ONE_BY_ONE).tolist()})


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    """What it gives, and the CPU time that it takes: other processes do not count."""
    begin = time.process_time()
    made = work()
    return made, time.process_time() - begin


def _smon(made: Synthetic) -> StepTimes:
    prepared = prepare(made.table, made.job)
    return simulate_all(prepared.window, prepared.ideal, prepared.engine, lambda *_: None)


def _pairs(theirs: Slowdowns, ours: StepTimes) -> Iterator[tuple[float, float]]:
    """What both report: (published, SMon's)."""
    ideal = ours.ideal
    yield theirs.simulated, float(ours.simulated.mean())
    yield theirs.ideal, float(ideal.mean())
    yield theirs.slowdown, float(slowdown(ours.simulated, ideal))
    for name, times in ours.by_optype.items():
        yield theirs.by_optype[name], float(slowdown(times, ideal))
    for published, times in (
        (theirs.by_stage, ours.by_stage),
        (theirs.by_dp_rank, ours.by_dp_rank),
    ):
        yield from zip(published, slowdown(times, ideal).tolist(), strict=True)


def _difference(pairs: Iterable[tuple[float, float]]) -> float:
    """The largest relative one; NaN never passes for small."""
    return float(np.max([abs(one - other) / abs(other) for one, other in pairs]))
