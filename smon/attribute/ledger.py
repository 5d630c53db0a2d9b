"""A ledger of the lost time that adds up: from the ideal to the recorded step time, by factor.

Each compute duration is a product, type mean × stage × worker × step × microbatch; a factor that
is off counts as 1. Simulated with every combination of factors on and off, the Shapley values are
the one fair split of the difference: they add up to it, and no order of the factors is preferred
(L. S. Shapley, "A value for n-person games", 1953). See ``docs/method.md`` section 5.

Flow: `smon.simulate`, `smon.attribute.slowdown` → **here** → `smon.analysis`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import comb

import numpy as np
from numpy.typing import NDArray

from smon.attribute.slowdown import StepTimes
from smon.graph.structure import Structure
from smon.ops import STREAM_COMPUTE, OpType
from smon.simulate.engine import Engine
from smon.simulate.ideal import Ideal
from smon.simulate.lanes import meeting
from smon.simulate.window import Part, Window

Floats = NDArray[np.float64]
Indices = NDArray[np.intp]

#: Windows with more ops are simulated on a sample of their steps. The 32 simulations of 0.93 M ops
#: (4,096 GPUs) take 0.04 s, so those of a sampled window take about 0.1 s.
MAX_OPS = 2_000_000

#: At least so many steps are simulated, however large they are.
MIN_STEPS = 4

#: A total below this share of the step time is rounding: nothing is lost, and shares are 0.
_ROUNDING_RATIO = 1e-9


class Factor(StrEnum):
    """What the lost time is split by."""

    #: The stage, or model chunk of it, is longer than the mean on the median DP rank.
    STAGE = "stage"
    #: The worker is slower than its stage, in all steps alike.
    WORKER = "worker"
    #: The worker is slower in this step than it usually is.
    STEP = "step"
    #: The op is longer than the others of its worker in this step.
    MICROBATCH = "microbatch"
    #: Transfers, and all other ops outside of the compute stream, differ from their ideal.
    COMMUNICATION = "communication"
    #: Ops start later than what they depend on allows.
    LAUNCH_DELAY = "launch_delay"


class LaunchDelays(StrEnum):
    """How launch delays enter the ledger."""

    #: As what they add to T: recorded − T. The other factors split T − T_ideal.
    LAST = "last"
    #: As a factor like all others. A receive that is recorded only once its data are there counts
    #: as delayed all the time that it waits for a straggler, so this moves what stragglers cost to
    #: the delays: 51 % of what is lost in AR, where all delays together add 0.7 % to T.
    SHAPLEY = "shapley"


@dataclass(frozen=True, slots=True)
class LedgerPart:
    """What one factor adds to the ideal step time.

    Attributes
    ----------
    excess_ns
        Mean over the steps; negative if the factor makes them shorter.
    share
        Of the recorded minus the ideal step time; 0 if these are equal.
    """

    factor: Factor
    excess_ns: float
    share: float


#: The factors of a compute duration: the bits of a row of `_Switched`, lowest first.
_OF_COMPUTE = (Factor.STAGE, Factor.WORKER, Factor.STEP, Factor.MICROBATCH)
_ROWS = 1 << len(_OF_COMPUTE)


def ledger(
    window: Window,
    ideal: Ideal,
    engine: Engine,
    times: StepTimes,
    *,
    delays: LaunchDelays = LaunchDelays.LAST,
    max_ops: int = MAX_OPS,
) -> tuple[LedgerPart, ...]:
    """Split the lost time by factor.

    Parameters
    ----------
    times
        Of the same window.
    delays
        How launch delays enter.
    max_ops
        Larger windows are sampled, see `steps_used`.

    Returns
    -------
    tuple of LedgerPart
        One per `Factor`, in its order. The excesses add up to mean(replayed) − mean(ideal) over
        all steps, also if only some are simulated.
    """
    replayed, simulated, base = (
        float(np.mean(one)) for one in (times.replayed, times.simulated, times.ideal)
    )
    together = delays is LaunchDelays.SHAPLEY
    steps = steps_used(window, times, max_ops=max_ops)
    excess = shapley(_values(window, ideal, engine, steps, with_delays=together))
    if together:
        excess = _settled(excess, replayed - base)
    else:
        excess = np.append(_settled(excess, simulated - base), replayed - simulated)
    total = replayed - base
    share = excess / total if abs(total) > _ROUNDING_RATIO * base else np.zeros(len(excess))
    return tuple(
        LedgerPart(*part) for part in zip(Factor, excess.tolist(), share.tolist(), strict=True)
    )


def steps_used(window: Window, times: StepTimes, *, max_ops: int = MAX_OPS) -> Indices:
    """(used,) indices of the steps that the ledger simulates, ascending.

    All of them, up to `max_ops`. Of more, an even sample from the step that loses least to the one
    that loses most; a sample even in time could meet every garbage collection, or none.
    """
    count = len(window.steps)
    ops = sum(part.work.size for part in window.parts)
    wanted = max(max_ops * count // max(ops, 1), MIN_STEPS)
    if wanted >= count:
        return np.arange(count)
    order = np.argsort(times.replayed - times.ideal, kind="stable")
    middle = (2 * np.arange(wanted) + 1) * count // (2 * wanted)
    return np.sort(order[middle])


def ledger_note(window: Window, times: StepTimes, *, max_ops: int = MAX_OPS) -> str | None:
    """A sentence for the report if only some steps were simulated; None if all were."""
    used, count = len(steps_used(window, times, max_ops=max_ops)), len(window.steps)
    if used == count:
        return None
    return (
        f"the ledger was simulated on {used} of {count} steps, chosen evenly from the one that "
        "loses least to the one that loses most; it adds up to the mean of all steps"
    )


def shapley(values: Floats) -> Floats:
    """(k,) mean of what each of k factors adds, over all orders in which they are switched on.

    Parameters
    ----------
    values
        (2^k,) bit i of the index says whether factor i is on.
    """
    count = len(values).bit_length() - 1
    masks = np.arange(len(values))
    # How often exactly n given factors come before another one.
    weight = np.array([1.0 / (count * comb(count - 1, n)) for n in range(count)])
    result = np.empty(count)
    for factor in range(count):
        without = masks[masks >> factor & 1 == 0]
        added = values[without | 1 << factor] - values[without]
        result[factor] = weight[np.bitwise_count(without)] @ added
    return result


def _settled(excess: Floats, total: float) -> Floats:
    """The same parts, adding up to `total`: what is missing is spread by their size.

    It is rounding if all steps were simulated; otherwise, what the sample missed.
    """
    size = np.abs(excess)
    if not size.any():
        size = np.ones(len(excess))
    settled: Floats = excess + (total - excess.sum()) * (size / size.sum())
    return settled


def _values(
    window: Window, ideal: Ideal, engine: Engine, steps: Indices, *, with_delays: bool
) -> Floats:
    """(2^factors,) mean step times in ns, launch delays being the highest bit, if any.

    Combinations of the compute factors run side by side; communication and launch delays are the
    same op for op in all of them, so they take runs of their own.
    """
    kinds = _kinds(window, ideal)
    if len(steps) < len(window.steps):
        window = _only_steps(window, steps)
        engine = Engine(window, ideal, like=engine)
    switched = _Switched(window, kinds)
    values = []
    for delayed in (False, True) if with_delays else (False,):
        for communication in (False, True):
            switched.communication = communication
            run = engine.run(switched, delays=switched if delayed else None)
            values.append(run.step_ns.mean(axis=1))
    return np.concatenate(values)


# --- the model of compute durations ------------------------------------------------------------

#: Computes of one type on one model chunk of one stage.
_Key = tuple[OpType, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Kind:
    """Mean durations of the computes of one kind, in ns, each above 0.

    Attributes
    ----------
    ideal, stage
        Of the op type; and of the median DP rank of this stage.
    worker
        (dp_ranks,) of each worker; of the stage where it is absent.
    """

    ideal: float
    stage: float
    worker: Floats


def _kinds(window: Window, ideal: Ideal) -> dict[_Key, _Kind]:
    """The kinds that occur, over all steps; without types that take no time."""
    total: dict[_Key, Floats] = {}
    count: dict[_Key, Floats] = {}
    for part in window.parts:
        for key, slots in _computes(part.graph.structure):
            zero = np.zeros(window.dp_ranks)
            work = part.work[slots].sum(axis=0)
            total[key] = total.get(key, zero) + np.bincount(part.dp, work, window.dp_ranks)
            lanes = np.bincount(part.dp, minlength=window.dp_ranks)
            count[key] = count.get(key, zero) + len(slots) * lanes
    return {
        key: _kind(float(ideal.by_optype[key[0]]), total[key], count[key])
        for key in total
        if ideal.by_optype[key[0]] > 0.0
    }


def _computes(structure: Structure) -> Iterator[tuple[_Key, Indices]]:
    """Slots of each kind of compute."""
    for (stage, optype), slots in structure.slots.items():
        if optype in STREAM_COMPUTE:
            chunks = structure.chunk[slots]
            for chunk in np.unique(chunks).tolist():
                yield (optype, stage, chunk), slots[chunks == chunk]


def _kind(ideal: float, total: Floats, count: Floats) -> _Kind:
    mean = total / np.maximum(count, 1.0)
    median = float(np.median(mean[count > 0]))
    # A factor of 0 could not be undone by those that follow: they take it over.
    stage = median if median > 0.0 else ideal
    return _Kind(ideal, stage, np.where(mean > 0.0, mean, stage))


class _Switched:
    """Every combination of the compute factors, side by side; the rest recorded or ideal.

    Bit i of the number of a row says whether factor i of `_OF_COMPUTE` is on.

    Attributes
    ----------
    communication
        Whether ops outside of the compute stream take what was recorded.
    """

    what_ifs = _ROWS

    def __init__(self, window: Window, kinds: dict[_Key, _Kind]) -> None:
        self.window = window
        self.communication = False
        self._models = [_model(part, kinds) for part in window.parts]

    def row(self, part: int, op: int) -> Floats | None:
        """(rows, L) durations of a compute, overwritten by the next of its kind; (L,) of others."""
        model = self._models[part][op]
        if model is None:
            return self.window.parts[part].work[op] if self.communication else None
        rows, last = model
        half = _ROWS // 2
        np.multiply(rows[:half], last, out=rows[half:])
        return rows

    def delay(self, part: int, op: int) -> Floats:
        """(L,) recorded launch delays."""
        delay: Floats = self.window.parts[part].delay[op]
        return delay


def _model(part: Part, kinds: dict[_Key, _Kind]) -> list[tuple[Floats, Floats] | None]:
    """By op, the rows of its kind and its own (L,) last factor; None for ops of no kind.

    The rows are one array for all ops of a kind. Their lower half has the last factor off, their
    upper half is for the op at hand.
    """
    model: list[tuple[Floats, Floats] | None] = [None] * len(part.work)
    for key, slots in _computes(part.graph.structure):
        kind = kinds.get(key)
        if kind is None:
            continue
        work = part.work[slots]
        worker = kind.worker[part.dp]
        mean = work.mean(axis=0)
        step = np.where(mean > 0.0, mean, worker)
        factors = (kind.stage / kind.ideal, worker / kind.stage, step / worker)
        rows = _combinations(kind.ideal, factors, part.lanes)
        for slot, microbatch in zip(slots.tolist(), work / step, strict=True):
            model[slot] = rows, microbatch
    return model


def _combinations(ideal: float, factors: Sequence[Floats | float], lanes: int) -> Floats:
    """(rows, L) durations with each combination of these factors; the upper half is not set."""
    rows = np.full((_ROWS, lanes), ideal)
    number = np.arange(_ROWS // 2)
    for bit, factor in enumerate(factors):
        rows[number[number >> bit & 1 == 1]] *= factor
    return rows


def _only_steps(window: Window, steps: Indices) -> Window:
    """The window reduced to some of its steps."""
    place = np.full(len(window.steps), -1)
    place[steps] = np.arange(len(steps))
    parts = [
        _only_lanes(part, np.flatnonzero(place[part.step] >= 0), place)
        for part in window.parts
        if (place[part.step] >= 0).any()
    ]
    meet = meeting([part.step for part in parts], len(steps))
    return replace(window, steps=window.steps[steps], parts=tuple(parts), meeting=meet)


def _only_lanes(part: Part, lanes: Indices, place: Indices) -> Part:
    return replace(
        part,
        step=place[part.step[lanes]],
        dp=part.dp[lanes],
        row=part.row.take(lanes, axis=1),
        start=part.start.take(lanes, axis=1),
        end=part.end.take(lanes, axis=1),
        work=part.work.take(lanes, axis=1),
        delay=part.delay.take(lanes, axis=1),
    )
