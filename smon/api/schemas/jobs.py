"""Jobs, windows, workers, history, findings, plans."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from smon.api.schemas.base import ID_EXAMPLE, Model, Ratio, Seconds, Step, Time
from smon.store.queries.jobs import JobState


class LayoutModel(Model):
    """Sizes of the parallel dimensions."""

    dp: int = Field(description="data-parallel size", examples=[32])
    pp: int = Field(description="pipeline stages", examples=[8])
    tp: int = Field(description="tensor-parallel size", examples=[8])
    cp: int = Field(description="context-parallel size", examples=[1])
    ep: int = Field(description="expert-parallel size", examples=[1])
    vpp: int = Field(description="model chunks per stage", examples=[1])


class OpenFindingModel(Model):
    """The finding that matters most now."""

    id: str = Field(description="id of the finding", examples=[ID_EXAMPLE])
    severity: str = Field(description="info, warning or critical", examples=["critical"])
    verdict: str = Field(description="what kind of answer it is", examples=["straggler"])
    cause: str = Field(description="why", examples=["slow_gpu"])
    since_step: Step
    since_s: Time
    headline: str = Field(
        description="who, why, how much, when: one line",
        examples=["Rank 42 (DP rank 5, stage 1): slow GPU, +412 ms per step (16.2%), since step 8"],
    )


class JobModel(Model):
    """A job with its newest attempt and the newest numbers known of it."""

    id: str = Field(description="id of the job", examples=[ID_EXAMPLE])
    name: str = Field(description="as its owner calls it", examples=["llama-70b-pretrain"])
    state: JobState = Field(
        description="`health`, or ended for a live job that is over", examples=["critical"]
    )
    health: JobState = Field(
        description="critical or slow (there is a finding, or S ≥ 1.1), incomplete (ranks are "
        "missing), not_aligned (clocks disagree), waiting (nothing analysed yet), or healthy",
        examples=["critical"],
    )
    running: bool = Field(description="whether its newest attempt goes on", examples=[True])
    pinned: bool = Field(description="whether its events are kept for ever", examples=[False])
    attempt: int | None = Field(description="number of the newest attempt", examples=[0])
    mode: str | None = Field(description="live or recorded", examples=["live"])
    layout: LayoutModel | None = Field(description="of the newest attempt")
    gpus: int | None = Field(description="number of GPUs", examples=[2048])
    created_s: Time
    last_data_s: Time
    last_step: Step | None
    verdict: str | None = Field(
        description="of the newest analysis; null before the first", examples=["straggler"]
    )
    sentence: str = Field(
        description="the verdict in words, for people",
        examples=["No straggler. This job runs at 1.010 × its ideal step time."],
    )
    slowdown: Ratio | None
    waste_ratio: float | None = Field(
        description="part of the GPU time that is lost", examples=[0.113]
    )
    recorded_s: Seconds | None
    ideal_s: Seconds | None
    gpu_hours_per_day: float | None = Field(
        description="what the slowdown wastes", examples=[5570.0]
    )
    cost_per_day: float | None = Field(
        description="the same in money; null without SMON_PRICE_PER_GPU_HOUR", examples=[11140.0]
    )
    coverage_ratio: float | None = Field(
        description="ops present over ops expected in the last window", examples=[1.0]
    )
    missing_count: int = Field(
        description="ranks that had not delivered when the last window was analysed", examples=[0]
    )
    open_findings: int = Field(
        description="findings that hold now, or held at its end", examples=[1]
    )
    finding: OpenFindingModel | None = Field(description="the one that matters most")


class AttemptModel(Model):
    """One run of a job, from start or restart to its end."""

    number: int = Field(description="restart count", examples=[0])
    layout: LayoutModel = Field(description="sizes of the parallel dimensions")
    mode: str = Field(description="live or recorded", examples=["live"])
    time_base: str = Field(description="op times count from: unix or step", examples=["unix"])
    window_steps: int = Field(description="steps of a window; 0: the attempt is one", examples=[40])
    notes: list[str] = Field(description="what its source has to say", examples=[[]])
    created_s: Time
    last_data_s: Time
    ended_s: Time | None
    end_reason: str | None = Field(description="why it ended", examples=[None])
    ready_step: Step | None
    live_step: Step | None
    live_analysed_s: Time | None


class MissingModel(Model):
    """Ranks that had not delivered when the last window was analysed."""

    count: int = Field(description="how many", examples=[0])
    ranks: list[int] = Field(description="the first 64 of them", examples=[[]])
    reason: str | None = Field(description="why it was not waited for them", examples=[None])
    since_s: Time | None


class AgentsModel(Model):
    """The agents of a job in numbers; `GET /api/v1/agents?job=` has each."""

    total: int = Field(description="streams of the newest data, at most 500", examples=[256])
    down: int = Field(description="of these, without heartbeat for too long", examples=[0])
    ended: int = Field(description="of these, complete", examples=[0])


class JobDetailModel(JobModel):
    """A job with all that its page shows above the first chart."""

    lines: list[str] = Field(
        description="the verdict, what it costs, what to do: a line each",
        examples=[["No straggler. This job runs at 1.010 × its ideal step time."]],
    )
    attempts: list[AttemptModel] = Field(description="newest first, at most 50")
    missing: MissingModel
    agents: AgentsModel
    findings: list[FindingModel] = Field(description="open ones, last seen first, at most 50")


class WindowModel(Model):
    """A window, and the newest result of it; null where there is none yet."""

    id: str = Field(description="id of the window", examples=[ID_EXAMPLE])
    attempt: int = Field(description="number of the attempt", examples=[0])
    kind: str = Field(
        description="steps: made of ops; capture: made of files that hold no ops",
        examples=["steps"],
    )
    number: int = Field(description="number of the window among those of its kind", examples=[31])
    first_step: Step | None
    last_step: Step | None
    rows: int = Field(description="ops that have come", examples=[812_160])
    state: str = Field(description="open, ready, claimed, done or failed", examples=["done"])
    reason: str | None = Field(
        description="why it was analysed incomplete, or failed", examples=[None]
    )
    missing: list[int] = Field(description="ranks that were missing, the first 64", examples=[[]])
    missing_count: int = Field(description="how many", examples=[0])
    opened_s: Time
    updated_s: Time
    ready_s: Time | None
    pinned: bool = Field(description="whether its events are kept for ever", examples=[False])
    expired: bool = Field(description="whether its events are gone", examples=[False])
    analysed_s: Time | None
    analysis_s: Seconds | None
    code_version: str | None = Field(description="which code analysed it", examples=["0.2.0"])
    verdict: str | None = Field(description="of its report", examples=["straggler"])
    cause: str | None = Field(description="of its first finding", examples=["slow_gpu"])
    slowdown: Ratio | None
    waste_ratio: float | None = Field(
        description="part of the GPU time that is lost", examples=[0.113]
    )
    recorded_s: Seconds | None
    ideal_s: Seconds | None
    coverage_ratio: float | None = Field(
        description="ops present over ops expected", examples=[1.0]
    )


class EventModel(Model):
    """One change in a finding's life."""

    at_s: Time
    step: Step
    event: str = Field(description="opened, severity, cleared, reopened", examples=["opened"])
    severity: str = Field(description="from then on", examples=["critical"])
    excess_s: Seconds | None


class FindingModel(Model):
    """A finding over its life."""

    id: str = Field(description="id of the finding", examples=[ID_EXAMPLE])
    attempt: int = Field(description="number of the attempt", examples=[0])
    state: str = Field(description="open or cleared", examples=["open"])
    severity: str = Field(description="info, warning or critical", examples=["critical"])
    verdict: str = Field(description="what kind of answer it is", examples=["straggler"])
    cause: str = Field(description="why", examples=["slow_gpu"])
    scope: str = Field(description="how much of the job it is about", examples=["rank"])
    rank: int | None = Field(description="global rank", examples=[42])
    dp: int | None = Field(description="DP rank", examples=[5])
    stage: int | None = Field(description="pipeline stage", examples=[1])
    host: str | None = Field(description="host", examples=["gpu-node-17"])
    gpu_uuid: str | None = Field(description="UUID of the GPU", examples=["GPU-5d1a93c2"])
    excess_s: Seconds | None
    excess_share: float | None = Field(description="of the recorded step time", examples=[0.162])
    onset_step: Step | None
    opened_step: Step
    opened_s: Time
    last_step: Step
    last_s: Time
    cleared_step: Step | None
    cleared_s: Time | None
    headline: str = Field(
        description="who, why, how much, when: one line",
        examples=["Rank 42 (DP rank 5, stage 1): slow GPU, +412 ms per step (16.2%), since step 8"],
    )
    document: dict[str, Any] = Field(
        description="the finding as the last report has it (docs/reference/report.md)",
        examples=[{"severity": "critical", "verdict": "straggler", "cause": "slow_gpu"}],
    )
    events: list[EventModel] = Field(description="its changes, oldest first, the last 50")


class WorkerModel(Model):
    """One worker of the layout."""

    dp: int = Field(description="DP rank", examples=[5])
    stage: int = Field(description="pipeline stage", examples=[1])
    rank: int = Field(description="global rank of its first GPU", examples=[42])
    host: str | None = Field(description="its host, if known", examples=["gpu-node-17"])
    slowdown: float | None = Field(
        description="exact S_w: slowdown of the job if only this worker were as recorded",
        examples=[1.12],
    )
    approx_slowdown: float | None = Field(
        description="min(S_dp, S_stage); null for a single step", examples=[1.11]
    )
    compute_s: float | None = Field(
        description="seconds of compute in the step; null for a window", examples=[None]
    )
    wait_s: float | None = Field(
        description="seconds of waiting in the step; null for a window", examples=[None]
    )


class HistoryModel(Model):
    """A job over time, in columns of equal length, ascending by step."""

    attempt: int | None = Field(description="number of the attempt", examples=[0])
    steps: int = Field(description="steps before thinning", examples=[3])
    step: list[int] = Field(description="step numbers", examples=[[7, 8, 9]])
    start_s: list[float | None] = Field(
        description="unix time at which it began, if known", examples=[[None, None, None]]
    )
    skipped: list[str | None] = Field(
        description="why it was left out, if it was", examples=[[None, None, None]]
    )
    recorded_s: list[float | None] | None = Field(
        default=None, description="step time, seconds", examples=[[1.21, 1.2, 1.34]]
    )
    simulated_s: list[float | None] | None = Field(
        default=None, description="without launch delays, seconds", examples=[[1.2, 1.19, 1.33]]
    )
    ideal_s: list[float | None] | None = Field(
        default=None, description="ideal step time, seconds", examples=[[1.18, 1.18, 1.18]]
    )
    slowdown: list[float | None] | None = Field(
        default=None, description="S of the step", examples=[[1.017, 1.008, 1.127]]
    )
    waste_ratio: list[float | None] | None = Field(
        default=None, description="1 − 1/S of the step", examples=[[0.017, 0.008, 0.113]]
    )


class FixModel(Model):
    """What one fix would buy, simulated on the job's own trace."""

    fix: str = Field(description="name of the fix", examples=["replace_worker"])
    detail: str = Field(description="what exactly is to be done", examples=["swap rank 42"])
    step_time_s: Seconds
    speedup: float = Field(description="step time now over with it", examples=[1.121])
    gpu_hours_per_day: float = Field(description="what it saves", examples=[5300.0])
    cost_per_day: float | None = Field(description="the same in money", examples=[None])
    assumptions: list[str] = Field(description="what must hold for it", examples=[[]])
    changes_optimisation: bool = Field(
        description="whether the model would be trained differently", examples=[False]
    )


class PlanModel(Model):
    """What fixes would buy, best first, from the newest report of the job."""

    window_id: str | None = Field(
        description="window of the report; null: the running diagnosis", examples=[ID_EXAMPLE]
    )
    first_step: Step
    last_step: Step
    slowdown: Ratio | None
    gpu_hours_per_day: float | None = Field(
        description="what the slowdown wastes", examples=[5570.0]
    )
    cost_per_day: float | None = Field(description="the same in money", examples=[None])
    lines: list[str] = Field(description="the verdict in words", examples=[["No straggler."]])
    fixes: list[FixModel] = Field(description="best first; empty for a healthy job")


JobDetailModel.model_rebuild()
