"""What a layer costs, what the loss and the embedding cost, and what limits a stage's memory.

Flow: `smon.diagnose.evidence` → **here** → `smon.plan.layers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from smon.diagnose.evidence import Evidence, Floats, nanmedian
from smon.errors import ConfigError
from smon.ops import STREAM_COMPUTE, OpType
from smon.plan.found import without_them
from smon.simulate.cube import Changes
from smon.simulate.window import Window

#: If nobody says how many layers a stage has, moves are in twelfths of a stage.
SHARES: Final = 12


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """What the stages of a job take, per microbatch.

    Attributes
    ----------
    counts
        (stages,) layers of each; in units of 1/`SHARES` of a stage where they are not known.
    known
        Whether the counts were given.
    time
        By op type of the compute stream, (stages,) ns.
    layer, loss, embedding
        By op type, ns of one layer (or unit), of the last stage's and the first stage's extra.
    in_flight
        (stages,) most microbatches whose activations a stage holds at once.
    """

    counts: NDArray[np.int64]
    known: bool
    time: dict[OpType, Floats]
    layer: dict[OpType, float]
    loss: dict[OpType, float]
    embedding: dict[OpType, float]
    in_flight: NDArray[np.int64]

    @property
    def activations(self) -> int:
        """Most layers × microbatches in flight on any stage today."""
        return int((self.counts * self.in_flight).max())

    def factors(self, splits: NDArray[np.int64]) -> dict[OpType, Floats]:
        """By op type, (splits, stages) durations under other splits over those of today.

        Parameters
        ----------
        splits
            (splits, stages) layers per stage.
        """
        moved = splits - self.counts
        return {
            optype: np.maximum(1.0 + moved * self.layer[optype] / time, 1e-3)
            for optype, time in self.time.items()
        }

    def total(self, split: NDArray[np.int64]) -> Floats:
        """(stages,) ns that all computes of one microbatch take under a split."""
        factors = self.factors(split[None])
        parts = [self.time[optype] * factor[0] for optype, factor in factors.items()]
        return np.asarray(np.sum(parts, axis=0), float)


def measure_stages(
    evidence: Evidence, undone: Changes, layers: Sequence[int] | None
) -> Stages | None:
    """Fit what a layer costs; None if layers cannot be moved, or the fit makes no sense.

    Parameters
    ----------
    undone
        What undoes slow workers: they are not the stage's.
    layers
        Layers of each stage, if known.

    Raises
    ------
    ConfigError
        `layers` does not fit the pipeline.
    """
    window = evidence.window
    if layers is not None:
        _check(layers, window.stages)
    if window.stages == 1 or _interleaved(window):
        return None
    time = _times(evidence, undone)
    if not time or any(not (part > 0).all() for part in time.values()):
        return None
    counts = _guessed(time) if layers is None else np.array(layers, np.int64)
    fits = {optype: _fit(counts, part) for optype, part in time.items()}
    if any(layer <= 0 for layer, _, _ in fits.values()):
        return None
    return Stages(
        counts=counts,
        known=layers is not None,
        time=time,
        layer={optype: fit[0] for optype, fit in fits.items()},
        loss={optype: fit[1] for optype, fit in fits.items()},
        embedding={optype: fit[2] for optype, fit in fits.items()},
        in_flight=_in_flight(window),
    )


def _check(layers: Sequence[int], stages: int) -> None:
    if len(layers) != stages or min(layers) < 1:
        raise ConfigError(
            f"expected the layers of {stages} stages, each at least 1, found "
            f"{','.join(map(str, layers))}: give one number per stage"
        )


def _interleaved(window: Window) -> bool:
    """Whether a stage has several model chunks: its layers are not moved as one then."""
    return any(int(part.graph.structure.chunk.max(initial=0)) > 0 for part in window.parts)


def _times(evidence: Evidence, undone: Changes) -> dict[OpType, Floats]:
    """By op type, (stages,) mean duration of the middle replica."""
    times = {}
    for optype in sorted(STREAM_COMPUTE):
        cube = without_them(evidence, undone, optype)
        if cube.size == 0:
            continue
        known = ~np.isnan(cube)
        count = known.sum(axis=(0, 3))
        total = np.where(known, cube, 0.0).sum(axis=(0, 3))
        mean = np.full(count.shape, np.nan)
        np.divide(total, count, out=mean, where=count > 0)
        times[optype] = nanmedian(mean, 0)
    return times


def _guessed(time: dict[OpType, Floats]) -> NDArray[np.int64]:
    """All stages alike, but inner stages as many units as they take long.

    The first and the last stage may have an embedding or a loss layer: what they take more than
    the others is not taken for layers.
    """
    total = np.sum(list(time.values()), axis=0)
    stages = len(total)
    inner = np.arange(1, stages - 1) if stages > 2 else np.arange(1)  # noqa: PLR2004
    reference = float(np.median(total[inner]))
    counts = np.maximum(np.round(SHARES * total / reference), 1).astype(np.int64)
    outer = [0, stages - 1]
    counts[outer] = np.minimum(counts[outer], SHARES)
    guessed: NDArray[np.int64] = counts
    return guessed


def _fit(counts: NDArray[np.int64], time: Floats) -> tuple[float, float, float]:
    """Least squares of layer, loss and embedding; an extra below zero is none."""
    stages = len(time)
    first, last = np.eye(stages)[[0, -1]]
    columns = [counts.astype(float), last, first]
    # Two stages cannot tell the loss from the embedding: the loss is the dearer one.
    use = [0, 1, 2] if stages > 2 else [0, 1]  # noqa: PLR2004
    while True:
        answer = np.linalg.lstsq(np.stack([columns[i] for i in use], 1), time, rcond=None)[0]
        fitted = dict(zip(use, answer.tolist(), strict=True))
        extras = [i for i in use if i > 0 and fitted[i] < 0]
        if not extras:
            return fitted[0], fitted.get(1, 0.0), fitted.get(2, 0.0)
        use.remove(min(extras, key=lambda i: fitted[i]))


def _in_flight(window: Window) -> NDArray[np.int64]:
    """(stages,) forwards ahead of backwards at most, in the observed order of the computes."""
    structure = window.parts[0].graph.structure
    most = []
    for order in structure.compute_order:
        optype = structure.optype[order]
        step = (optype == OpType.FORWARD_COMPUTE).astype(int)
        step -= optype == OpType.BACKWARD_COMPUTE
        most.append(int(np.cumsum(step).max(initial=1)))
    return np.array(most, np.int64)
