"""Hosts and GPUs that were suspects."""

from __future__ import annotations

from pydantic import Field

from smon.api.schemas.base import ID_EXAMPLE, Model, Time
from smon.store.queries.hosts import HostKind


class HostModel(Model):
    """A host or GPU with all that was found about it."""

    id: str = Field(description="name of the host, or UUID of the GPU", examples=["gpu-node-17"])
    kind: HostKind = Field(description="host or gpu", examples=["host"])
    jobs: int = Field(description="jobs in which it was a suspect", examples=[2])
    findings: int = Field(description="findings about it", examples=[3])
    open_findings: int = Field(description="of these, open", examples=[1])
    causes: list[str] = Field(description="most frequent first", examples=[["thermal"]])
    gpu_hours_per_day: float = Field(
        description="what its open ones waste; the dearest one of each job counts",
        examples=[310.0],
    )
    cost_per_day: float | None = Field(description="the same in money", examples=[None])
    lost_gpu_hours: float = Field(
        description="what all of them have wasted; in each step of a job the dearest one counts",
        examples=[1520.0],
    )
    lost_cost: float | None = Field(description="the same in money", examples=[None])
    first_s: Time | None = Field(description="first suspected; null: never")
    last_s: Time | None = Field(description="last suspected; null: never")


class SuspicionModel(Model):
    """One finding about a host or GPU."""

    finding_id: str = Field(description="id of the finding", examples=[ID_EXAMPLE])
    job_id: str = Field(description="id of the job", examples=[ID_EXAMPLE])
    job: str = Field(description="name of the job", examples=["llama-70b-pretrain"])
    attempt: int = Field(description="number of the attempt", examples=[0])
    host: str | None = Field(description="host", examples=["gpu-node-17"])
    gpu_uuid: str | None = Field(description="UUID of the GPU", examples=["GPU-5d1a93c2"])
    rank: int | None = Field(description="global rank", examples=[42])
    state: str = Field(description="open or cleared", examples=["open"])
    severity: str = Field(description="info, warning or critical", examples=["critical"])
    cause: str = Field(description="why", examples=["thermal"])
    scope: str = Field(description="what it is about", examples=["rank"])
    excess_s: float | None = Field(description="seconds per step", examples=[0.412])
    excess_share: float | None = Field(description="of the recorded step time", examples=[0.162])
    gpus: int = Field(description="of the job: all of them wait", examples=[2048])
    first_step: int = Field(description="of its onset, where known", examples=[1200])
    last_step: int = Field(description="of the last analysis that saw it", examples=[3650])
    gpu_hours_per_day: float = Field(
        description="what it wastes as long as it is there", examples=[310.0]
    )
    cost_per_day: float | None = Field(description="the same in money", examples=[None])
    lost_gpu_hours: float = Field(
        description="what it has wasted: its excess in each of its steps, on all GPUs",
        examples=[574.0],
    )
    lost_cost: float | None = Field(description="the same in money", examples=[None])
    opened_s: Time
    last_s: Time
    cleared_s: Time | None


class PresenceModel(Model):
    """A job that runs on a host now."""

    job_id: str = Field(description="id of the job", examples=[ID_EXAMPLE])
    job: str = Field(description="name of the job", examples=["llama-70b-pretrain"])
    attempt: int = Field(description="number of the attempt", examples=[0])
    streams: int = Field(description="open streams from the host", examples=[8])
    ranks: list[int] = Field(
        description="that these deliver, at most 64; empty: not known", examples=[[40, 41, 42]]
    )
    last_data_s: Time


class HostDetailModel(Model):
    """A host or GPU, each finding about it, and what runs there."""

    host: HostModel
    findings: list[SuspicionModel] = Field(description="last seen first, at most 500")
    running: list[PresenceModel] = Field(
        description="jobs with an open stream from there; of a GPU, from its host"
    )
