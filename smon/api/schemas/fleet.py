"""Hosts, fleet, agents, version."""

from __future__ import annotations

from pydantic import Field

from smon.api.schemas.base import ID_EXAMPLE, Model, Time
from smon.api.schemas.jobs import JobModel
from smon.store.queries.hosts import HostKind


class HostModel(Model):
    """A host or GPU with all that was found about it."""

    id: str = Field(description="name of the host, or UUID of the GPU", examples=["gpu-node-17"])
    kind: HostKind = Field(description="host or gpu", examples=["host"])
    jobs: int = Field(description="jobs in which it was a suspect", examples=[2])
    findings: int = Field(description="findings about it", examples=[3])
    open_findings: int = Field(description="of these, open", examples=[1])
    causes: list[str] = Field(description="most frequent first", examples=[["thermal"]])
    gpu_hours_per_day: float = Field(description="what its open ones waste", examples=[310.0])
    cost_per_day: float | None = Field(description="the same in money", examples=[None])
    first_s: Time
    last_s: Time


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
    excess_s: float | None = Field(description="seconds per step", examples=[0.412])
    excess_share: float | None = Field(description="of the recorded step time", examples=[0.162])
    gpu_hours_per_day: float = Field(description="what it wastes", examples=[310.0])
    cost_per_day: float | None = Field(description="the same in money", examples=[None])
    opened_s: Time
    last_s: Time
    cleared_s: Time | None


class HostDetailModel(Model):
    """A host or GPU, and each finding about it."""

    host: HostModel
    findings: list[SuspicionModel] = Field(description="last seen first, at most 500")


class WasteBinModel(Model):
    """Jobs that lose more than `above` and at most `up_to` of their GPU time."""

    above: float = Field(description="low end, not included", examples=[0.05])
    up_to: float = Field(description="high end, included", examples=[0.1])
    jobs: int = Field(description="how many", examples=[4])


class CauseModel(Model):
    """What one cause wastes, over all jobs whose dearest finding it is."""

    cause: str = Field(description="cause; unknown where nothing was found", examples=["slow_gpu"])
    jobs: int = Field(description="how many", examples=[2])
    gpu_hours_per_day: float = Field(description="what they waste", examples=[5570.0])
    cost_per_day: float | None = Field(description="the same in money", examples=[None])


class FleetModel(Model):
    """The jobs with data in the last days, in a few numbers."""

    days: float = Field(description="how far back", examples=[7])
    jobs: int = Field(description="with data since then", examples=[12])
    running: int = Field(description="of these, running", examples=[3])
    analysed: int = Field(description="of these, with a result", examples=[12])
    slowed: int = Field(
        description="analysed jobs at 1.1 times their ideal or slower", examples=[4]
    )
    slowed_share: float | None = Field(description="of the analysed ones", examples=[0.333])
    gpu_hours_per_day: float = Field(description="what all of them waste", examples=[7920.0])
    cost_per_day: float | None = Field(description="the same in money", examples=[None])
    waste: list[WasteBinModel] = Field(description="distribution of the waste")
    causes: list[CauseModel] = Field(description="dearest first")
    worst_jobs: list[JobModel] = Field(description="dearest first, at most 10")
    worst_hosts: list[HostModel] = Field(description="in most jobs first, at most 10")


class AgentModel(Model):
    """One stream: a producer process of a job attempt on a host, as its agent reports it."""

    stream_id: str = Field(
        description="id of the stream", examples=["8a6f1c9e-52d7-4c1b-9a53-0f5f6f1c2b7d"]
    )
    host: str = Field(description="where it runs", examples=["gpu-node-17"])
    source: str = Field(description="kind of its source", examples=["recorder"])
    job_id: str = Field(description="id of the job", examples=[ID_EXAMPLE])
    job: str = Field(description="name of the job", examples=["llama-70b-pretrain"])
    attempt: int = Field(description="number of the attempt", examples=[0])
    ranks: int = Field(description="how many ranks it delivers; 0: not known", examples=[8])
    epoch: int = Field(description="grows when a spool is made anew", examples=[0])
    ended: bool = Field(description="whether it is complete", examples=[False])
    end_reason: str | None = Field(description="why it ended", examples=[None])
    down: bool = Field(
        description="not ended, and no heartbeat for SMON_AGENT_DOWN_S", examples=[False]
    )
    steps_done: int | None = Field(description="last step that is complete", examples=[1240])
    events: int = Field(description="ops that have come", examples=[101_520])
    lost_events: int = Field(description="ops that were lost on the way", examples=[0])
    last_data_s: Time
    heartbeat_age_s: float | None = Field(
        description="since the last heartbeat, seconds", examples=[4.2]
    )
    spool_bytes: int | None = Field(description="what it still holds", examples=[0])
    oldest_unsent_s: float | None = Field(
        description="age of the oldest of that, seconds", examples=[0.0]
    )
    dropped: dict[str, int] | None = Field(
        description="events that it dropped, by reason", examples=[{}]
    )


class VersionModel(Model):
    """What this server is."""

    version: str = Field(description="version of SMon", examples=["0.2.0"])
    protocol: int = Field(description="version of the agents' protocol", examples=[1])
    report_schema: str = Field(description="schema of reports", examples=["smon.report/1"])
    tenant_id: str = Field(description="whose token this is", examples=["default"])
    scopes: list[str] = Field(description="what the token allows", examples=[["read"]])
