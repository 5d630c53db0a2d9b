"""What a rank did in its segments: forward, backward, other kernels, or nothing.

Flow: `smon.trace.events`, `smon.collectives.segments` → **here** → `smon.collectives.findings`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from smon.collectives.coverage import Coverage
from smon.collectives.segments import Floats, Structure
from smon.trace.events import Kind, Phase, RankEvents
from smon.trace.words import phase_of


class Part(StrEnum):
    """What a part of a segment was spent on."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    #: Waiting for data, as annotations of the loader say.
    DATA = "data"
    #: Kernels that no launch or annotation assigns to a phase.
    KERNELS = "other kernels"
    #: No kernel at all on the GPU.
    IDLE = "idle"
    #: Of traces without kernels: what no annotation covers.
    UNKNOWN = "unknown"


_PHASES: Final = {
    Phase.FORWARD: Part.FORWARD,
    Phase.BACKWARD: Part.BACKWARD,
    Phase.OPTIMIZER: Part.OPTIMIZER,
}


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """Segments by part; ``S`` steps, ``W`` ranks.

    Attributes
    ----------
    parts
        (S, W) ns in each step, summed over its segments.
    kernels
        Whether all ranks recorded kernels, so that idle time is known.
    phases
        Whether forward and backward are told apart on all ranks.
    """

    parts: Mapping[Part, Floats]
    kernels: bool
    phases: bool


def activity_of(ranks: tuple[RankEvents, ...], structure: Structure) -> Activity:
    """Split the segments of a structure."""
    shape = structure.segment.shape[0], structure.segment.shape[2]
    parts = {part: np.zeros(shape) for part in Part}
    for at, rank in enumerate(ranks):
        spans = structure.since[:, :, at], structure.start[:, :, at], structure.segment[:, :, at]
        for part, time in _of_rank(rank, *spans).items():
            parts[part][:, at] = time
    kernels = all(rank.on_gpu for rank in ranks)
    phases = all((rank.phase == Phase.BACKWARD).any() for rank in ranks)
    return Activity(parts, kernels, phases)


def _of_rank(rank: RankEvents, begin: Floats, end: Floats, segment: Floats) -> dict[Part, Floats]:
    """(S,) ns of each part, of (S, J) segments."""
    origin = int(rank.start_ns.min()) if len(rank) else 0

    def covered(events: RankEvents) -> Floats:
        within: Floats = Coverage.of(events, origin).within(begin, end).sum(axis=1)
        return within

    total = np.nansum(segment, axis=1)
    compute = rank.of_kind(Kind.COMPUTE)
    busy = covered(compute)
    parts = {part: covered(compute.take(compute.phase == phase)) for phase, part in _PHASES.items()}
    # Streams run side by side: what phases share must not count twice.
    of_phases = sum(parts.values(), np.zeros(len(total)))
    parts[Part.KERNELS] = np.maximum(busy - of_phases, 0.0)
    rest = np.maximum(total - np.maximum(busy, of_phases), 0.0)
    loads = [number for number, name in enumerate(rank.names) if phase_of(name) is Phase.DATA]
    parts[Part.DATA] = np.minimum(covered(rank.take(np.isin(rank.name, loads))), rest)
    parts[Part.IDLE if rank.on_gpu else Part.UNKNOWN] = rest - parts[Part.DATA]
    return parts
