"""JobReport: what one analysis of one window of one job says. Schema ``smon.report/1``.

The hinge of SMon: the analysis half makes it, the serving half (API, dashboard, metrics) and the
terminal show it. Seconds are floats; unknown numbers are None, with the reason in
``quality.notes``. Field names are a contract: additions are allowed, nothing is renamed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Final

from smon.topology import Layout

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
    "groups",
    "groups_count",
    "collectives",
    "collectives_count",
    "series",
)

#: Above this the replay does not reproduce the trace, and nothing that follows can be trusted; the
#: paper drops such jobs (section 4).
MAX_SIMULATION_ERROR_RATIO: Final = 0.05

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
class WorstPart:
    """The worker that slows a step down most: `slowdown` is its S_w in that step."""

    dp: int
    stage: int
    rank: int
    slowdown: float


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
    worst: WorstPart | None = None


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
class GroupPart:
    """One communicator: its transfers beside those of comparable ones, and who comes last.

    Attributes
    ----------
    kind
        As the keys of `by_optype`.
    dp, stage
        Of a collective over DP ranks: its stage. Of a link: its DP rank and the stage it leads to.
    ranks
        The first sixteen of `members`.
    transfer_p50_s, transfer_p99_s
        From the last arrival to the end.
    peers_p50_s
        Median of the comparable groups.
    last_rank, last_share
        Who comes last most often, and in which part of the transfers.
    """

    kind: str
    dp: int | None
    stage: int | None
    members: int
    ranks: tuple[int, ...]
    transfer_p50_s: float
    transfer_p99_s: float
    peers_p50_s: float | None
    last_rank: int | None
    last_share: float | None


@dataclass(frozen=True, slots=True)
class CollectivePart:
    """One collective of one step: who came last, and what the others waited.

    Attributes
    ----------
    index
        Its place in the step.
    kind
        What it does, e.g. ``all-reduce``.
    group
        The communicator's description, else its name.
    members, ranks
        How many take part (and have a file); the first sixteen of them.
    size_bytes
        Payload.
    transfer_s
        Shortest duration of the members: the last to arrive waits for nobody.
    last_rank
        Who came last.
    late_s
        How long the typical other member waited for it.
    waits_s
        What each of `ranks` waited.
    """

    step: int
    index: int
    kind: str
    group: str
    members: int
    ranks: tuple[int, ...]
    size_bytes: int | None
    transfer_s: float
    last_rank: int
    late_s: float
    waits_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class StretchPart:
    """Consecutive values of a series: a burst, or a level.

    Attributes
    ----------
    points, slow_points
        How many values, and how many of them are slow.
    median_s
        Typical value.
    """

    first_step: int
    last_step: int
    points: int
    slow_points: int
    median_s: float


@dataclass(frozen=True, slots=True)
class SectionPart:
    """One part of the step, as a log has it: medians of its lowest and highest values."""

    name: str
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class SeriesPart:
    """Step times of a whole job, without ranks.

    Attributes
    ----------
    points, warmup_points
        Values, and how many of the first ones are warm-up: all else is about the others.
    median_s, p05_s, p95_s, p99_s, max_s, max_step
        Their distribution, and where the largest is.
    slow_ratio, slow_points
        How many are above `slow_ratio` medians.
    bursts
        Where slow values are dense.
    levels
        Stretches of one typical value each; one if the level never changes.
    """

    points: int
    warmup_points: int
    median_s: float
    p05_s: float
    p95_s: float
    p99_s: float
    max_s: float
    max_step: int
    slow_ratio: float
    slow_points: int
    bursts: tuple[StretchPart, ...]
    levels: tuple[StretchPart, ...]
    sections: tuple[SectionPart, ...]


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
class Outline:
    """What is known of a window first: its steps, and what was found in them.

    The rest of a report takes half as long again.
    """

    window: WindowPart
    per_step: tuple[StepPart, ...]
    verdict: str
    findings: tuple[Finding, ...]

    def findings_as_dicts(self) -> list[dict[str, Any]]:
        """The findings as in `JobReport.to_dict`."""
        return [_plain(finding) for finding in self.findings]


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
    groups: tuple[GroupPart, ...] = ()
    groups_count: int = 0
    collectives: tuple[CollectivePart, ...] = ()
    collectives_count: int = 0
    series: SeriesPart | None = None
    verdict: str = "none"
    ledger: tuple[LedgerEntry, ...] = ()
    findings: tuple[Finding, ...] = ()
    fixes: tuple[FixPart, ...] = ()
    schema: str = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers, in the order of the contract."""
        plain = _plain(self)
        return {name: plain[name] for name in _ORDER}

    @property
    def outline(self) -> Outline:
        """Its steps and findings."""
        return Outline(self.window, self.per_step, self.verdict, self.findings)

    def to_json(self, *, indent: int | None = None) -> str:
        """One JSON document; never NaN or infinity."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """What a report is made with: notes of the reader, and the price of a GPU for one hour."""

    notes: tuple[str, ...] = ()
    price_per_gpu_hour: float | None = None


def job_part(job_id: str, attempt: int, layout: Layout) -> JobPart:
    """Which job a report is about."""
    sizes = LayoutPart(layout.dp, layout.pp, layout.tp, layout.cp, layout.ep, layout.vpp)
    return JobPart(job_id, attempt, sizes, layout.world_size)


def report_without_numbers(
    job: JobPart,
    window: WindowPart,
    notes: tuple[str, ...] = (),
    price_per_gpu_hour: float | None = None,
) -> JobReport:
    """A report in which every number is unknown; `notes` say why."""
    return JobReport(
        job=job,
        window=window,
        quality=QualityPart(None, ClockPart(None, None), notes),
        step_time=StepTime(None, None, None),
        slowdown=Slowdown(None, None, None, None, None),
        waste_ratio=None,
        per_step=(),
        by_optype={},
        by_dp_rank={},
        by_stage={},
        workers=(),
        worker_share=None,
        last_stage_share=None,
        cost=Cost(None, None, price_per_gpu_hour),
        verdict="insufficient_data",
    )


def _plain(value: Any) -> Any:  # noqa: ANN401 - any part of a report
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    names = _names(type(value))  # type: ignore[arg-type]  # every class can be hashed
    if names is not None:
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


@cache
def _names(kind: type[object]) -> tuple[str, ...] | None:
    """Fields of a part of a report, None for plain values: there are few kinds, and many parts."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None
