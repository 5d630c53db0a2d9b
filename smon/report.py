"""JobReport: what one analysis of one window of one job says. Schema ``smon.report/1``.

The hinge of SMon: the analysis half makes it, the serving half (API, dashboard, metrics) and the
terminal show it. Seconds are floats; unknown numbers are None, with the reason in
``quality.notes``. Field names are a contract: additions are allowed, nothing is renamed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

SCHEMA: Final = "smon.report/1"

#: Order of the keys in the document.
_ORDER: Final = (
    "schema",
    "job",
    "window",
    "quality",
    "step_time",
    "slowdown",
    "waste_ratio",
    "per_step",
    "by_optype",
    "by_dp_rank",
    "by_stage",
    "workers",
    "worker_share",
    "last_stage_share",
    "ledger",
    "verdict",
    "findings",
    "fixes",
    "cost",
)

#: Fewer steps cannot show anything but themselves (``docs/method.md`` section 6.3).
MIN_STEPS: Final = 2


@dataclass(frozen=True, slots=True)
class LayoutPart:
    """Sizes of the parallel dimensions."""

    dp: int
    pp: int
    tp: int
    cp: int
    ep: int
    vpp: int


@dataclass(frozen=True, slots=True)
class JobPart:
    """Which job this is; `world_size` is its number of GPUs."""

    job_id: str
    attempt: int
    layout: LayoutPart
    world_size: int


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """A step that was left out, and why."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class WindowPart:
    """Which steps the report is about.

    Attributes
    ----------
    first_step, last_step
        Of the steps seen.
    steps, steps_used
        How many were seen, and how many analysed.
    coverage_ratio
        Ops present over ops expected, over all steps seen and all workers of the layout.
    """

    first_step: int
    last_step: int
    steps: int
    steps_used: int
    skipped: tuple[SkippedStep, ...]
    coverage_ratio: float


@dataclass(frozen=True, slots=True)
class ClockPart:
    """How well the clocks of the hosts agree; None where it was not measured."""

    aligned: bool | None
    residual_s: float | None
    offsets: tuple[dict[str, float | int | str], ...] = ()


@dataclass(frozen=True, slots=True)
class QualityPart:
    """How far the numbers can be trusted.

    Attributes
    ----------
    simulation_error_ratio
        Mean of |replayed - recorded| / recorded step time: 0 if the graph is right; None where no
        step could be used.
    """

    simulation_error_ratio: float | None
    clock: ClockPart
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StepTime:
    """Mean step times over the used steps: as recorded, without launch delays, and ideal.

    None where no step could be used.
    """

    recorded_s: float | None
    simulated_s: float | None
    ideal_s: float | None


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Slowdown S under named references (``docs/method.md`` section 5).

    Attributes
    ----------
    paper
        mean(T) / mean(T_ideal), Eq. 1; None where no step could be used.
    repaired
        T over T with the suspects' compute replaced by their peers'; None without suspects.
    history
        T over the job's own earlier windows; None without any.
    ci95
        95 % bootstrap interval of `paper` over steps; None with fewer than two steps.
    launch
        mean(recorded) / mean(T).
    """

    paper: float | None
    repaired: float | None
    history: float | None
    ci95: tuple[float, float] | None
    launch: float | None


@dataclass(frozen=True, slots=True)
class StepPart:
    """One step; the `by_` maps are S_t, S_dp and S_stage of this step."""

    step: int
    recorded_s: float
    simulated_s: float
    ideal_s: float
    slowdown: float
    by_optype: dict[str, float]
    by_dp_rank: dict[str, float]
    by_stage: dict[str, float]


@dataclass(frozen=True, slots=True)
class WorkerPart:
    """One worker: `slowdown` is the exact S_w, `approx_slowdown` the paper's min()."""

    dp: int
    stage: int
    rank: int
    host: str | None
    slowdown: float | None
    approx_slowdown: float | None


@dataclass(frozen=True, slots=True)
class Where:
    """Coordinates of a finding, in the job's own terms; None where one does not apply."""

    rank: int | None = None
    dp: int | None = None
    stage: int | None = None
    tp: int | None = None
    node: str | None = None
    gpu_uuid: str | None = None
    leaf: str | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of several explanations, or one of several places, that cannot be told apart."""

    cause: str
    where: Where
    tell_apart: str = ""


@dataclass(frozen=True, slots=True)
class PersistencePart:
    """When a finding was there: `share` of the steps; kinds as in ``docs/causes.md``."""

    kind: str
    share: float
    onset_step: int | None
    period: int | None


@dataclass(frozen=True, slots=True)
class Victims:
    """Workers that only wait for the suspects; `ranks` are the first sixteen of `count`."""

    count: int
    ranks: tuple[int, ...]
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of lost time (``docs/causes.md``).

    Attributes
    ----------
    severity
        info, warning or critical.
    excess_s, excess_share
        Step time that goes away with the cause, simulated; and as share of the recorded step time.
    confidence
        From 0 to 1; `evidence` says what it rests on.
    next
        What to type or to change, most useful first.
    """

    severity: str
    verdict: str
    cause: str
    scope: str
    where: Where
    phase: str
    optypes: tuple[str, ...]
    excess_s: float
    excess_share: float
    persistence: PersistencePart
    confidence: float
    evidence: tuple[str, ...]
    victims: Victims | None
    candidates: tuple[Candidate, ...]
    next: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """What one factor adds to the ideal step time."""

    factor: str
    excess_s: float
    share: float


@dataclass(frozen=True, slots=True)
class FixPart:
    """What one fix would buy, simulated on the job's own trace.

    Attributes
    ----------
    speedup
        Step time today over step time with the fix.
    gpu_hours_per_day, cost_per_day
        What it saves; money only if a price was given.
    changes_optimisation
        Whether the model would be trained differently.
    """

    fix: str
    detail: str
    step_time_s: float
    speedup: float
    gpu_hours_per_day: float
    cost_per_day: float | None
    assumptions: tuple[str, ...] = ()
    changes_optimisation: bool = False


@dataclass(frozen=True, slots=True)
class Cost:
    """What the slowdown wastes per day, in GPU-hours and, if a price is given, in money."""

    gpu_hours_per_day: float | None
    cost_per_day: float | None
    price_per_gpu_hour: float | None


@dataclass(frozen=True, slots=True)
class JobReport:
    """The whole report; see ``docs/reference/report.md``."""

    job: JobPart
    window: WindowPart
    quality: QualityPart
    step_time: StepTime
    slowdown: Slowdown
    waste_ratio: float | None
    per_step: tuple[StepPart, ...]
    by_optype: dict[str, float]
    by_dp_rank: dict[str, float]
    by_stage: dict[str, float]
    workers: tuple[WorkerPart, ...]
    worker_share: float | None
    last_stage_share: float | None
    cost: Cost
    verdict: str = "none"
    ledger: tuple[LedgerEntry, ...] = ()
    findings: tuple[Finding, ...] = ()
    fixes: tuple[FixPart, ...] = ()
    schema: str = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers, in the order of the contract."""
        plain = _plain(self)
        return {name: plain[name] for name in _ORDER}

    def to_json(self, *, indent: int | None = None) -> str:
        """One JSON document; never NaN or infinity."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:  # noqa: ANN401 - any part of a report
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
