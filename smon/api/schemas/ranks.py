"""One rank of a job, and how far the numbers of a job can be trusted."""

from __future__ import annotations

from pydantic import Field

from smon.api.schemas.base import ID_EXAMPLE, Model, Ratio, Seconds, Step, Time
from smon.api.schemas.fleet import AgentModel


class PlaceModel(Model):
    """Coordinates of a rank; those of its worker are `dp` and `stage`."""

    dp: int = Field(description="DP rank", examples=[9])
    stage: int = Field(description="pipeline stage", examples=[0])
    tp: int = Field(description="TP rank", examples=[0])
    cp: int = Field(description="CP rank", examples=[0])


class WorkerStepModel(Model):
    """The rank's worker in one step; null where it, or every peer, is absent."""

    step: Step
    slowdown: Ratio | None = Field(description="exact S_w of the step", examples=[1.283])
    compute_s: Seconds | None = Field(description="its forwards and backwards", examples=[2.31])
    wait_s: Seconds | None = Field(description="in which it only waits for peers", examples=[0.0])
    peers_compute_s: Seconds | None = Field(
        description="median of the other DP ranks of its stage", examples=[1.44]
    )
    peers_wait_s: Seconds | None = Field(description="likewise", examples=[0.878])


class CounterModel(Model):
    """One counter of the rank; lists of equal length."""

    name: str = Field(description="of the counter", examples=["gpu_clock_mhz"])
    steps: list[int] = Field(description="ascending", examples=[[58, 59]])
    values: list[float] = Field(description="of this rank", examples=[[1238.0, 1238.0]])
    median: list[float | None] = Field(
        description="of all other ranks that report it", examples=[[1980.0, 1980.0]]
    )
    others: int = Field(description="how many these are", examples=[15])


class HappeningModel(Model):
    """Something that took time besides computing."""

    kind: str = Field(description="gc, checkpoint …", examples=["gc"])
    step: Step
    rank: int | None = Field(description="null: the whole job", examples=[9])
    duration_s: Seconds


class EvidenceModel(Model):
    """Side evidence of the rank in the steps of the answer."""

    counters: list[CounterModel] = Field(description="by name, at most 64")
    happenings: list[HappeningModel] = Field(description="newest first, at most 200")
    complete: bool = Field(
        description="false: there is more than is read at once, or some is damaged",
        examples=[True],
    )


class NeighbourModel(Model):
    """Another rank of the same host."""

    rank: int = Field(description="global rank", examples=[10])
    slowdown: Ratio | None = Field(description="S_w of its worker", examples=[1.001])


class WindowSlowdownModel(Model):
    """The rank's worker over one window."""

    window_id: str = Field(description="id of the window", examples=[ID_EXAMPLE])
    number: int = Field(description="number of the window", examples=[31])
    first_step: Step
    last_step: Step
    slowdown: Ratio | None = Field(description="exact S_w", examples=[1.283])


class RankModel(Model):
    """One rank of one attempt of a job."""

    job_id: str = Field(description="id of the job", examples=[ID_EXAMPLE])
    attempt: int = Field(description="number of the attempt", examples=[0])
    rank: int = Field(description="global rank", examples=[9])
    place: PlaceModel
    worker_rank: int = Field(
        description="first rank of its worker: durations are of the worker", examples=[9]
    )
    host: str | None = Field(description="where it runs", examples=["gpu-node-17"])
    gpu_uuid: str | None = Field(description="UUID of its GPU", examples=["GPU-5d1a93c2"])
    slowdown: Ratio | None = Field(description="exact S_w in the newest report", examples=[1.283])
    approx_slowdown: Ratio | None = Field(description="the paper's min()", examples=[1.28])
    finding_ids: list[str] = Field(
        description="findings of the attempt that named it, last seen first",
        examples=[[ID_EXAMPLE]],
    )
    steps: list[WorkerStepModel] = Field(description="ascending, at most 2,000")
    windows: list[WindowSlowdownModel] = Field(description="newest first, at most 8")
    evidence: EvidenceModel
    neighbours: list[NeighbourModel] = Field(description="of the same host, at most 64")


class SkipReasonModel(Model):
    """Why steps were left out."""

    reason: str = Field(
        description="without the place", examples=["4 of 12 forward-compute are missing"]
    )
    steps: int = Field(description="how many", examples=[3])
    first_step: Step
    last_step: Step


class ClockModel(Model):
    """The clock of one host against the server's."""

    host: str = Field(description="name of the host", examples=["gpu-node-17"])
    ahead_s: Seconds = Field(
        description="of the server's at the last probe; negative: behind", examples=[0.0021]
    )
    error_s: Seconds = Field(description="by which that may be wrong", examples=[0.0002])
    drift_s: Seconds = Field(description="range in the last hour", examples=[0.0004])
    probes: int = Field(description="in the last hour", examples=[120])
    last_s: Time


class StreamCountsModel(Model):
    """Streams of the attempt taken together."""

    streams: int = Field(description="how many", examples=[256])
    ended: int = Field(description="of these, complete", examples=[0])
    down: int = Field(description="of these, silent", examples=[1])
    events: int = Field(description="ops that have come", examples=[26_000_000])
    lost_events: int = Field(description="ops that are known to be lost", examples=[0])
    spool_bytes: int = Field(description="what agents still hold", examples=[131_072])


class DropModel(Model):
    """Events that agents dropped for one reason."""

    reason: str = Field(description="a word", examples=["spool-full"])
    events: int = Field(description="how many", examples=[1584])
    streams: int = Field(description="of how many streams", examples=[2])


class GapModel(Model):
    """Batches of a stream that are not there."""

    host: str = Field(description="where it runs", examples=["gpu-node-17"])
    source: str = Field(description="kind of its source", examples=["recorder"])
    epoch: int = Field(description="of the numbering", examples=[0])
    holes: list[tuple[int, int]] = Field(
        description="first and last number of what has not come, at most 5", examples=[[[12, 14]]]
    )
    holes_count: int = Field(description="how many holes", examples=[1])
    awaited: list[tuple[int, int]] = Field(
        description="given up by the agent; another server may still have them",
        examples=[[[3, 4]]],
    )


class WindowCoverageModel(Model):
    """How complete one window was when it was analysed."""

    id: str = Field(description="id of the window", examples=[ID_EXAMPLE])
    number: int = Field(description="number of the window", examples=[31])
    first_step: Step
    last_step: Step
    state: str = Field(description="state of the window", examples=["done"])
    reason: str | None = Field(description="why it was ready, or failed", examples=[None])
    coverage_ratio: Ratio | None = Field(
        description="ops present over ops expected", examples=[0.998]
    )
    missing: list[int] = Field(description="ranks, at most 64", examples=[[]])
    missing_count: int = Field(description="how many", examples=[0])


class FileDropModel(Model):
    """Files of ranks that came and are in no report, for one reason."""

    reason: str = Field(
        description="contradiction, digest, incomplete, lost, late or too-many", examples=["late"]
    )
    files: int = Field(description="how many", examples=[2])
    name: str = Field(description="of the last of them", examples=["rank3.pt.trace.json.gz"])
    last_s: Time


class QualityModel(Model):
    """How far the numbers of an attempt can be trusted."""

    job_id: str = Field(description="id of the job", examples=[ID_EXAMPLE])
    attempt: int = Field(description="number of the attempt", examples=[0])
    coverage_ratio: Ratio | None = Field(description="of the newest report", examples=[0.998])
    simulation_error_ratio: Ratio | None = Field(description="of the newest report", examples=[0.0])
    aligned: bool | None = Field(
        description="whether the clocks agree, after correction; null: not measured",
        examples=[True],
    )
    residual_s: Seconds | None = Field(
        description="scatter of ends that should coincide", examples=[0.00021]
    )
    notes: list[str] = Field(description="sentences of the newest report", examples=[[]])
    steps: int = Field(description="steps that are known", examples=[1241])
    skipped: int = Field(description="of these, left out", examples=[3])
    reasons: list[SkipReasonModel] = Field(description="most frequent first, at most 20")
    windows: list[WindowCoverageModel] = Field(description="newest first, at most 120")
    clocks: list[ClockModel] = Field(description="farthest off first, at most 200")
    streams: StreamCountsModel
    agents: list[AgentModel] = Field(description="the worst first, at most 200")
    drops: list[DropModel] = Field(description="most events first, at most 20")
    gaps: list[GapModel] = Field(description="at most 50")
    files_dropped: list[FileDropModel] = Field(description="one for each reason")
