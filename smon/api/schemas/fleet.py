"""Fleet, agents, version."""

from __future__ import annotations

from pydantic import Field

from smon.api.schemas.base import ID_EXAMPLE, Model, Time
from smon.api.schemas.hosts import HostModel
from smon.api.schemas.jobs import JobModel
from smon.store.queries.jobs import JobState


class WasteBinModel(Model):
    """Jobs that lose more than `above` and at most `up_to` of their GPU time."""

    above: float = Field(description="low end, not included", examples=[0.05])
    up_to: float = Field(description="high end, included", examples=[0.1])
    jobs: int = Field(description="how many", examples=[4])


class CauseModel(Model):
    """What one cause wastes now, over all jobs that are not over whose first finding it is."""

    cause: str = Field(description="cause; unknown where nothing was found", examples=["slow_gpu"])
    jobs: int = Field(description="how many", examples=[2])
    gpu_hours_per_day: float = Field(description="what they waste", examples=[5570.0])
    cost_per_day: float | None = Field(description="the same in money", examples=[None])


class LostCauseModel(Model):
    """What one cause took in the period: windows whose first finding it was."""

    cause: str = Field(description="cause; unknown where nothing was found", examples=["slow_gpu"])
    jobs: int = Field(description="how many lost time by it", examples=[2])
    lost_gpu_hours: float = Field(description="GPU-hours", examples=[31_400.0])
    lost_cost: float | None = Field(description="the same in money", examples=[None])


class LostJobModel(Model):
    """What one job lost in the period."""

    job_id: str = Field(description="id of the job", examples=[ID_EXAMPLE])
    name: str = Field(description="name of the job", examples=["llama-70b-pretrain"])
    cause: str = Field(description="what took most of it", examples=["slow_gpu"])
    gpu_hours: float = Field(description="of its analysed windows", examples=[344_064.0])
    lost_gpu_hours: float = Field(description="of these, lost", examples=[31_400.0])
    lost_share: float = Field(description="the same as a part", examples=[0.0913])
    lost_cost: float | None = Field(description="the same in money", examples=[None])


class PeriodModel(Model):
    """What was lost in the period: its analysed windows, added up.

    A window loses its waste times its mean step time, its number of steps and its GPUs.
    """

    begin_s: Time
    end_s: Time
    jobs: int = Field(description="with an analysed window in the period", examples=[9])
    gpu_hours: float = Field(description="of these windows", examples=[612_000.0])
    lost_gpu_hours: float = Field(description="of these, lost", examples=[39_800.0])
    lost_share: float | None = Field(description="the same as a part", examples=[0.065])
    lost_cost: float | None = Field(description="the same in money", examples=[None])
    ran_gpu_hours: float = Field(
        description="that jobs ran in the period, from their first data to their last",
        examples=[640_000.0],
    )
    covered_ratio: float | None = Field(
        description="the part of it that has been analysed", examples=[0.956]
    )
    causes: list[LostCauseModel] = Field(description="dearest first")
    worst: list[LostJobModel] = Field(description="dearest jobs first, at most 10")


class FleetModel(Model):
    """The jobs with data in the last days: as they are now, and what they lost in that time."""

    days: float = Field(description="how far back", examples=[7])
    jobs: int = Field(description="with data since then", examples=[12])
    running: int = Field(description="of these, running", examples=[3])
    analysed: int = Field(description="of these, with a result", examples=[12])
    slowed: int = Field(
        description="analysed jobs at 1.1 times their ideal or slower", examples=[4]
    )
    slowed_share: float | None = Field(description="of the analysed ones", examples=[0.333])
    gpu_hours_per_day: float = Field(
        description="what they waste now; live jobs that are over waste nothing", examples=[7920.0]
    )
    cost_per_day: float | None = Field(description="the same in money", examples=[None])
    states: dict[JobState, int] = Field(
        description="how many jobs are in each state", examples=[{"slow": 4, "healthy": 8}]
    )
    waste: list[WasteBinModel] = Field(description="how the analysed jobs spread")
    causes: list[CauseModel] = Field(description="what is wasted now, dearest first")
    worst_jobs: list[JobModel] = Field(description="that waste most now, at most 10")
    worst_hosts: list[HostModel] = Field(description="in most jobs first, at most 10")
    period: PeriodModel
    unplaced: int = Field(
        description="analysed jobs whose windows all lie outside the period, or have no unix time",
        examples=[3],
    )


class AgentModel(Model):
    """One stream: a producer process of a job attempt on a host, as its agent reports it."""

    stream_id: str = Field(
        description="id of the stream", examples=["8a6f1c9e-52d7-4c1b-9a53-0f5f6f1c2b7d"]
    )
    host: str = Field(description="where it runs", examples=["gpu-node-17"])
    source: str = Field(description="kind of its source", examples=["recorder"])
    version: str | None = Field(description="version of the agent", examples=["0.2.0"])
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
    cpu_ratio: float | None = Field(
        description="part of one core that the agent takes, as it says", examples=[0.004]
    )
    rss_bytes: float | None = Field(
        description="memory of the agent, as it says", examples=[25_000_000.0]
    )
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
