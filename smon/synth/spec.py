"""What a synthetic job is to be: sizes, durations, noise, causes, and what is recorded of it.

Flow: `smon.synth.presets`, command line and tests → **here** → `smon.synth.scenario.generate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from smon.errors import ConfigError
from smon.synth.evidence import Evidence, Machines
from smon.synth.faults.base import Extent, Fault, check_range
from smon.synth.schedule import Schedule, Shape
from smon.synth.timing import Durations, Noise
from smon.synth.truth import Cause
from smon.topology import MAX_SIZE, Layout

#: 8 million ops take 0.6 GB while they are made: this many take about 16 GB.
MAX_OPS: Final = 200_000_000

_LARGEST_INT16: Final = np.iinfo(np.int16).max
_LARGEST_INT32: Final = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True)
class Scenario:
    """A job to generate.

    Attributes
    ----------
    schedule
        Name of a `Schedule`.
    dp, pp, tp, vpp, ep
        Sizes of the parallel dimensions; EP divides DP. Interleaving needs PP and VPP of at least
        2; the other schedules have VPP 1. Each (dp, stage) is one worker; TP only spaces the
        global ranks.
    microbatches
        Per data-parallel rank and step; a multiple of PP with interleaving.
    steps, first_step
        Number of steps, and the number of the first one.
    seed
        The same seed gives the same table; runs that differ in faults only share all draws.
    overlap
        Gradients are reduced while the backward still runs (only matters with DP above 1).
    record_noops
        Keep the sends and receives at both ends of the model, which a profiler shows with
        interleaving although nothing is sent.
    step_microbatches, step_dp
        Other numbers of microbatches, and smaller DP sizes, in some steps, by step number.
    durations, noise
        How long ops take.
    causes
        What goes wrong, and how a diagnosis should call it.
    faults
        More that goes wrong, of which the true answer says nothing.
    evidence
        Kinds of side evidence that are recorded.
    machines
        Hosts and switches; not recorded unless given.
    step_relative
        Times start at 0 in every step; otherwise steps follow each other `gap_s` apart, the first
        at `start_unix_s`.
    name
        Name of the job.

    Raises
    ------
    ConfigError
        A value, or a combination of values, that no job can have.
    """

    schedule: str = Schedule.ONE_F_ONE_B
    dp: int = 4
    pp: int = 4
    tp: int = 1
    vpp: int = 1
    ep: int = 1
    microbatches: int = 8
    steps: int = 4
    first_step: int = 0
    seed: int = 0
    overlap: bool = False
    record_noops: bool = False
    step_microbatches: Mapping[int, int] = field(default_factory=dict)
    step_dp: Mapping[int, int] = field(default_factory=dict)
    durations: Durations = field(default_factory=Durations)
    noise: Noise = field(default_factory=Noise)
    causes: tuple[Cause, ...] = ()
    faults: tuple[Fault, ...] = ()
    evidence: frozenset[Evidence] = frozenset()
    machines: Machines = field(default_factory=Machines)
    step_relative: bool = False
    start_unix_s: int = 1_700_000_000
    gap_s: float = 0.05
    name: str = "synthetic"

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_schedule(self)
        _check_steps(self)
        _check_faults(self)

    @property
    def step_numbers(self) -> range:
        """Numbers of all steps."""
        return range(self.first_step, self.first_step + self.steps)

    @property
    def layout(self) -> Layout:
        """Sizes of the job."""
        return Layout(dp=self.dp, pp=self.pp, tp=self.tp, ep=self.ep, vpp=self.vpp)

    @property
    def extent(self) -> Extent:
        """The job as faults see it."""
        return Extent(np.array(self.step_numbers), self.dp, self.pp, self.seed)

    @property
    def all_faults(self) -> tuple[Fault, ...]:
        """Those of all causes, and those without one."""
        return (*(fault for cause in self.causes for fault in cause.faults), *self.faults)

    def shape(self, step: int) -> Shape:
        """Structure of one step."""
        return Shape(
            schedule=Schedule(self.schedule),
            dp=self.step_dp.get(step, self.dp),
            pp=self.pp,
            vpp=self.vpp,
            microbatches=self.step_microbatches.get(step, self.microbatches),
            overlap=self.overlap,
        )


def _check_sizes(scenario: Scenario) -> None:
    for name in ("dp", "pp", "tp", "vpp", "ep", "microbatches", "steps"):
        _check_whole(name, getattr(scenario, name), 1, MAX_SIZE)
    for name in ("first_step", "seed", "start_unix_s"):
        _check_whole(name, getattr(scenario, name), 0, 1 << 32)
    check_range("gap_s", scenario.gap_s, 0.0, 1e6)
    _check_whole("pp × vpp", scenario.pp * scenario.vpp, 1, _LARGEST_INT16)
    _check_whole("dp × pp × tp", scenario.layout.world_size, 1, _LARGEST_INT32)
    if scenario.dp % scenario.ep:
        raise ConfigError(
            f"ep must divide dp {scenario.dp}, found {scenario.ep}: use ep 1, or another dp"
        )


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            f"{name} must be a whole number from {low} to {high}, found {value!r}: "
            "give a number in this range"
        )


def _check_schedule(scenario: Scenario) -> None:
    names = [schedule.value for schedule in Schedule]
    if scenario.schedule not in names:
        raise ConfigError(
            f"schedule must be one of {', '.join(names)}, found {scenario.schedule!r}: choose one"
        )
    if scenario.schedule == Schedule.INTERLEAVED:
        _check_interleaved(scenario)
    elif scenario.vpp > 1:
        raise ConfigError(
            f"schedule {scenario.schedule} has one model chunk per stage, found vpp "
            f"{scenario.vpp}: use schedule interleaved, or vpp 1"
        )
    elif scenario.record_noops:
        raise ConfigError(
            f"no-ops are recorded with schedule interleaved only, found {scenario.schedule}: "
            "leave record_noops out"
        )


def _check_interleaved(scenario: Scenario) -> None:
    if min(scenario.pp, scenario.vpp) < 2:  # noqa: PLR2004  # fewer have nothing to interleave
        raise ConfigError(
            f"schedule interleaved needs pp and vpp of at least 2, found pp {scenario.pp} and "
            f"vpp {scenario.vpp}: raise them, or use schedule 1f1b"
        )
    for microbatches in (scenario.microbatches, *scenario.step_microbatches.values()):
        if microbatches % scenario.pp:
            raise ConfigError(
                f"schedule interleaved needs a multiple of pp {scenario.pp} microbatches, "
                f"found {microbatches}: round it"
            )


def _check_steps(scenario: Scenario) -> None:
    variations = (
        ("step_microbatches", scenario.step_microbatches, MAX_SIZE),
        ("step_dp", scenario.step_dp, scenario.dp),
    )
    for name, values, high in variations:
        for step, value in values.items():
            if step not in scenario.step_numbers:
                raise ConfigError(
                    f"{name} names step {step}, expected steps {scenario.first_step} to "
                    f"{scenario.step_numbers[-1]}: correct the step"
                )
            _check_whole(f"{name} of step {step}", value, 1, high)
    ops = sum(_about_ops(scenario.shape(step)) for step in scenario.step_numbers)
    if ops > MAX_OPS:
        raise ConfigError(
            f"the job would have {ops:,} ops, expected at most {MAX_OPS:,}: "
            "ask for fewer steps, microbatches or workers"
        )


def _about_ops(shape: Shape) -> int:
    """Upper bound: three computes, four sends and receives, nine ops at start and end."""
    return shape.dp * shape.pp * shape.vpp * (7 * shape.microbatches + 9)


def _check_faults(scenario: Scenario) -> None:
    for fault in scenario.all_faults:
        for dp, stage in fault.places():
            if stage is not None:
                _check_whole("stage of a fault", stage, 0, scenario.pp - 1)
            if dp is not None:
                _check_whole("dp of a fault", dp, 0, scenario.dp - 1)
