"""One step of some workers, as a page draws it."""

from __future__ import annotations

from pydantic import Field

from smon.api.schemas.base import ID_EXAMPLE, Model, Seconds
from smon.store.queries.chosen import Role


class TimelinePlaceModel(Model):
    """A worker."""

    dp: int = Field(description="DP rank", examples=[2])
    stage: int = Field(description="pipeline stage", examples=[1])
    rank: int = Field(description="global rank", examples=[6])


class TimelineRowModel(TimelinePlaceModel):
    """A row of the timeline."""

    host: str | None = Field(description="host", examples=["gpu-node-17"])
    role: Role = Field(description="why it is shown", examples=["suspect"])
    compute_s: float | None = Field(
        description="time of its forwards and backwards in the step", examples=[1.24]
    )
    wait_s: float | None = Field(
        description="time in which its communication waits for peers and it computes nothing",
        examples=[0.02],
    )


class TimelineColumnsModel(Model):
    """The marks, in columns of one length; by row, then start."""

    row: list[int] = Field(description="index into `rows`", examples=[[0, 0]])
    kind: list[int] = Field(description="0: actual, 1: ideal", examples=[[0, 1]])
    type: list[int] = Field(description="index into `types`", examples=[[0, 0]])
    start_s: list[float] = Field(description="since the start of the step", examples=[[0.04, 0.04]])
    duration_s: list[float] = Field(description="waiting included", examples=[[0.0112, 0.01]])
    wait_s: list[float] = Field(
        description="of this, waiting for peers, before anything else", examples=[[0.0, 0.0]]
    )
    microbatch: list[int | None] = Field(description="number, if it has one", examples=[[0, 0]])
    filled: list[bool] = Field(
        description="not recorded; filled in from peers", examples=[[False, False]]
    )
    count: list[int] = Field(
        description="ops in the mark; more than one: short neighbours, the longest gives the type",
        examples=[[1, 1]],
    )


class TimelineLongestModel(TimelinePlaceModel):
    """The worker that computes longest, against the others of its stage."""

    compute_s: Seconds
    peers_s: float = Field(description="median of the others", examples=[1.03])
    late_s: float | None = Field(
        description="how long after the median of the others it comes to `meeting`",
        examples=[0.205],
    )
    meeting: str | None = Field(
        description="last collective of the replicas", examples=["grads-reduce-scatter"]
    )


class TimelineWaitModel(TimelinePlaceModel):
    """The worst of the waits of one op type for one worker."""

    op: str = Field(description="op type that waited", examples=["grads-reduce-scatter"])
    waited_for: TimelinePlaceModel = Field(description="who came last")
    microbatch: int | None = Field(description="number, if it has one", examples=[None])
    start_s: Seconds
    wait_s: float = Field(description="how long it waited", examples=[0.205])
    ideal_s: float = Field(description="how long in the ideal run", examples=[0.001])
    workers: int = Field(description="workers that waited with it, it included", examples=[3])


class TimelineMarksModel(Model):
    """One step of some workers, thinned to what a screen shows."""

    window_id: str = Field(description="id of the window", examples=[ID_EXAMPLE])
    step: int = Field(description="number of the step", examples=[1240])
    skipped: str | None = Field(
        description="why the analysis left the step out", examples=["warm-up of the job"]
    )
    recorded_s: Seconds
    ideal_s: Seconds
    begin_s: float = Field(description="range shown, since the start of the step", examples=[0.0])
    end_s: float = Field(description="its end", examples=[1.44])
    length_s: float = Field(description="until the end of both runs", examples=[1.44])
    ops: int = Field(description="ops in the range", examples=[12300])
    alone: int = Field(description="of these, ops with a mark of their own", examples=[4210])
    workers_asked: int = Field(
        description="workers that were asked for; `rows` holds the first 24", examples=[24]
    )
    rows: list[TimelineRowModel] = Field(description="workers, from top to bottom")
    types: list[str] = Field(description="op types", examples=[["forward-compute"]])
    marks: TimelineColumnsModel = Field(description="what is drawn")
    longest: TimelineLongestModel | None = Field(description="null without peers")
    waits: list[TimelineWaitModel] = Field(
        description="waits that exceed those of the ideal run most, the worst first"
    )
    notes: list[str] = Field(description="how it was made", examples=[[]])
