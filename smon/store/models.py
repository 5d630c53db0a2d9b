"""The SQL tables. Times are unix nanoseconds (``_ns``); ids are issued by the server.

One history of migrations (``migrations/``) makes these on SQLite and PostgreSQL; a test compares
the two. Every table that belongs to a tenant has its id, and every query asks for it.
"""

from __future__ import annotations

import secrets
import uuid
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


def new_id() -> str:
    """An id for a row, 16 characters, random."""
    return secrets.token_hex(8)


def new_uuid() -> str:
    """A UUID, as streams have."""
    return str(uuid.uuid4())


class Mode(StrEnum):
    """How a trace comes in: while the job runs, or afterwards."""

    LIVE = "live"
    RECORDED = "recorded"


class TimeBase(StrEnum):
    """What op times count from: 1970, or the start of each step."""

    UNIX = "unix"
    STEP = "step"


class WindowState(StrEnum):
    """OPEN: data may come. READY: complete, or waited long enough. CLAIMED: a worker has it."""

    OPEN = "open"
    READY = "ready"
    CLAIMED = "claimed"
    DONE = "done"
    FAILED = "failed"


class WindowKind(StrEnum):
    """What a window is analysed from.

    STEPS: ops of a run of steps. CAPTURE: files of ranks, of a moment. Each is numbered from 0.
    Where one report stands for an attempt, that of ops does: ``steps`` sorts after ``capture``.
    """

    STEPS = "steps"
    CAPTURE = "capture"


class FileState(StrEnum):
    """GATHERING: parts are missing. WHOLE: all have come, unchecked. PLACED: in a capture."""

    GATHERING = "gathering"
    WHOLE = "whole"
    PLACED = "placed"


class WorkState(StrEnum):
    """State of an import or of a task."""

    UPLOADING = "uploading"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class FindingState(StrEnum):
    """OPEN: there as of the last analysis. CLEARED: not any more, or the job is over."""

    OPEN = "open"
    CLEARED = "cleared"


class Base(DeclarativeBase):
    """Base of all tables; constraints get names, which migrations need."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {  # noqa: RUF012  # SQLAlchemy wants a plain class attribute
        int: BigInteger().with_variant(Integer(), "sqlite"),
        dict[str, Any]: JSON(),
        list[Any]: JSON(),
        bytes: LargeBinary(),
        str: String(),
        float: Float(53),
        bool: Boolean(),
    }


class Tenant(Base):
    """Whoever shares one server with others and must not see their jobs."""

    __tablename__ = "tenants"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    name: Mapped[str] = mapped_column(unique=True)
    created_ns: Mapped[int]


class Token(Base):
    """A secret that opens routes; only its SHA-256 is kept."""

    __tablename__ = "tokens"

    kid: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str]
    sha256: Mapped[str]
    #: Space-separated: ingest, read, admin.
    scopes: Mapped[str]
    created_ns: Mapped[int]
    expires_ns: Mapped[int | None]
    revoked_ns: Mapped[int | None]
    last_used_ns: Mapped[int | None]


class Job(Base):
    """A training job, by the name that its owner gives it."""

    __tablename__ = "jobs"
    __table_args__ = (UniqueConstraint("tenant_id", "name"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    name: Mapped[str]
    created_ns: Mapped[int]
    last_data_ns: Mapped[int] = mapped_column(index=True)
    pinned: Mapped[bool] = mapped_column(default=False)


class Attempt(Base):
    """One run of a job, from start or restart to its end: one layout, one set of streams.

    `ready_step`: last step that all ranks have delivered. `live_step`: last step that the running
    diagnosis has seen. The `live_` lease says which worker follows the attempt.
    """

    __tablename__ = "attempts"
    __table_args__ = (UniqueConstraint("job_id", "number"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    number: Mapped[int]
    dp: Mapped[int]
    pp: Mapped[int]
    tp: Mapped[int]
    cp: Mapped[int]
    ep: Mapped[int]
    vpp: Mapped[int]
    mode: Mapped[str]
    time_base: Mapped[str]
    #: 0: the whole attempt is one window.
    window_steps: Mapped[int]
    #: What the source of a recorded trace has to say about it, for the report.
    notes: Mapped[list[Any]]
    created_ns: Mapped[int]
    last_data_ns: Mapped[int] = mapped_column(index=True)
    #: Set when every stream has ended, or when a later attempt has begun.
    ended_ns: Mapped[int | None]
    end_reason: Mapped[str | None]
    #: Grows with every commit of events, so that workers see what is new.
    revision: Mapped[int] = mapped_column(default=0)
    ready_step: Mapped[int | None]
    live_step: Mapped[int | None]
    live_owner: Mapped[str | None]
    live_fence: Mapped[int] = mapped_column(default=0)
    live_lease_ns: Mapped[int] = mapped_column(default=0)
    live_analysed_ns: Mapped[int | None]
    #: What lists show of that report, so that they need not open it.
    live_verdict: Mapped[str | None]
    live_slowdown: Mapped[float | None]
    live_waste_ratio: Mapped[float | None]
    live_recorded_s: Mapped[float | None]
    live_ideal_s: Mapped[float | None]
    live_aligned: Mapped[bool | None]
    live_coverage_ratio: Mapped[float | None]
    #: Latest report of the running diagnosis: JSON in zstd.
    live_report: Mapped[bytes | None] = mapped_column(deferred=True)
    #: Parquet of every worker in each of its steps, as beside the report of a window.
    live_workers: Mapped[bytes | None] = mapped_column(deferred=True)


class Stream(Base):
    """One producer process of one job attempt on one host."""

    __tablename__ = "streams"
    __table_args__ = (UniqueConstraint("tenant_id", "key"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=new_uuid)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), index=True)
    #: Chosen by the producer: who asks again with it gets the same stream.
    key: Mapped[str]
    host: Mapped[str] = mapped_column(index=True)
    source: Mapped[str]
    #: Global ranks that it delivers; empty: not known.
    ranks: Mapped[list[Any]]
    epoch: Mapped[int]
    #: All ops up to this step have come, counting only batches without a gap before them.
    steps_done: Mapped[int | None]
    ended: Mapped[bool] = mapped_column(default=False)
    end_reason: Mapped[str | None]
    events: Mapped[int] = mapped_column(default=0)
    lost_events: Mapped[int] = mapped_column(default=0)
    created_ns: Mapped[int]
    last_data_ns: Mapped[int]
    heartbeat_ns: Mapped[int | None]
    heartbeat: Mapped[dict[str, Any] | None]


class Coverage(Base):
    """Which sequence numbers of a stream's epoch are stored: the truth about duplicates.

    `ranges`: ``[[first, last], …]``, both included, ascending. `pending_steps`: ``[[seq, step]]``
    of batches beyond the first gap, whose `steps_done` counts once the gap is filled. `awaited`:
    those of the ranges that an agent gave up because this database lacked what a server had
    acknowledged; a server that comes back may still have them in its log.
    """

    __tablename__ = "coverage"

    stream_id: Mapped[str] = mapped_column(ForeignKey("streams.id"), primary_key=True)
    epoch: Mapped[int] = mapped_column(primary_key=True)
    ranges: Mapped[list[Any]]
    pending_steps: Mapped[list[Any]]
    awaited: Mapped[list[Any]]
    end_seq: Mapped[int | None]


class ClockSample(Base):
    """Offset of an agent's clock to the server's, as probed."""

    __tablename__ = "clock_samples"

    stream_id: Mapped[str] = mapped_column(ForeignKey("streams.id"), primary_key=True)
    at_ns: Mapped[int] = mapped_column(primary_key=True, index=True)
    offset_ns: Mapped[int]
    error_ns: Mapped[int]


class Window(Base):
    """A run of steps of one attempt, or a capture of it, that is analysed as a whole.

    `revision` counts the commits of events; `analysed_revision` is the one that the result is of.
    """

    __tablename__ = "windows"
    __table_args__ = (
        UniqueConstraint("attempt_id", "kind", "number"),
        Index("ix_windows_work", "state", "lease_ns"),
        Index("ix_windows_tenant", "tenant_id", "updated_ns"),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), index=True)
    kind: Mapped[str] = mapped_column(default=WindowKind.STEPS)
    number: Mapped[int]
    first_step: Mapped[int]
    last_step: Mapped[int]
    #: Ops; of a capture 0.
    rows: Mapped[int] = mapped_column(default=0)
    state: Mapped[str] = mapped_column(default=WindowState.OPEN)
    #: Why it is ready although somebody is missing, or why it failed.
    reason: Mapped[str | None]
    #: Ranks that had not delivered when it became ready; at most 64 are named.
    missing: Mapped[list[Any] | None]
    missing_count: Mapped[int] = mapped_column(default=0)
    opened_ns: Mapped[int]
    updated_ns: Mapped[int] = mapped_column(index=True)
    ready_ns: Mapped[int | None]
    revision: Mapped[int] = mapped_column(default=0)
    analysed_revision: Mapped[int | None]
    owner: Mapped[str | None]
    fence: Mapped[int] = mapped_column(default=0)
    lease_ns: Mapped[int] = mapped_column(default=0)
    tries: Mapped[int] = mapped_column(default=0)
    pinned: Mapped[bool] = mapped_column(default=False)
    compacted_ns: Mapped[int | None]
    #: Set when retention has removed its event files.
    expired_ns: Mapped[int | None]


class EventFile(Base):
    """A file of ops (Parquet), of side evidence (JSON), or a part of a file of a rank.

    Side evidence without a step belongs to the attempt: no window, steps -1. So does a part until
    its file is in a capture.
    """

    __tablename__ = "event_files"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_uuid)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), index=True)
    window_id: Mapped[str | None] = mapped_column(ForeignKey("windows.id"), index=True)
    #: ``ops``, ``context`` or ``part``.
    kind: Mapped[str]
    #: Below the root of the event files.
    path: Mapped[str] = mapped_column(unique=True)
    rows: Mapped[int]
    bytes: Mapped[int]
    first_step: Mapped[int]
    last_step: Mapped[int]
    created_ns: Mapped[int] = mapped_column(index=True)
    #: Replaced by another file; goes once no reader can be in it.
    doomed_ns: Mapped[int | None] = mapped_column(index=True)


class SentFile(Base):
    """A file of one rank that comes in parts (`smon.store.files`), and then is in a capture.

    `have`: ``[[part, path]]`` of those that have come, below the root of the event files.
    """

    __tablename__ = "sent_files"
    __table_args__ = (
        UniqueConstraint("attempt_id", "key"),
        Index("ix_sent_files_state", "state", "created_ns"),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"))
    window_id: Mapped[str | None] = mapped_column(ForeignKey("windows.id"), index=True)
    key: Mapped[str]
    state: Mapped[str]
    name: Mapped[str]
    format: Mapped[str]
    rank: Mapped[int | None]
    world_size: Mapped[int | None]
    sha256: Mapped[str]
    bytes: Mapped[int]
    parts: Mapped[int]
    first_step: Mapped[int | None]
    last_step: Mapped[int | None]
    start_ns: Mapped[int | None]
    end_ns: Mapped[int | None]
    have: Mapped[list[Any]]
    created_ns: Mapped[int]


class FileDrop(Base):
    """Files of an attempt that were not used, by reason (`smon.store.files.Dropped`)."""

    __tablename__ = "file_drops"

    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    reason: Mapped[str] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    files: Mapped[int]
    #: Of the last of them.
    name: Mapped[str]
    last_ns: Mapped[int]


class Result(Base):
    """The report of a window: exactly one per code version."""

    __tablename__ = "results"
    __table_args__ = (
        UniqueConstraint("window_id", "code_version"),
        Index("ix_results_tenant", "tenant_id", "created_ns"),
        # All that the sum of a period reads: the rows themselves are as large as their reports.
        Index("ix_results_loss", "window_id", "created_ns", "cause", "recorded_s", "waste_ratio"),
    )

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), index=True)
    window_id: Mapped[str] = mapped_column(ForeignKey("windows.id"))
    code_version: Mapped[str]
    revision: Mapped[int]
    fence: Mapped[int]
    created_ns: Mapped[int] = mapped_column(index=True)
    analysis_s: Mapped[float]
    #: What lists show, so that they need not open the report.
    verdict: Mapped[str]
    cause: Mapped[str | None]
    slowdown: Mapped[float | None]
    waste_ratio: Mapped[float | None]
    recorded_s: Mapped[float | None]
    ideal_s: Mapped[float | None]
    #: Whether the clocks of its hosts agreed; None: not measured.
    aligned: Mapped[bool | None]
    coverage_ratio: Mapped[float]
    #: JSON of schema smon.report/1, in zstd.
    report: Mapped[bytes] = mapped_column(deferred=True)
    #: Parquet of every worker in every step, below the root of the event files.
    workers_path: Mapped[str | None]


class StepResult(Base):
    """What is known of one step: the newest analysis that saw it."""

    __tablename__ = "steps"

    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    recorded_s: Mapped[float | None]
    simulated_s: Mapped[float | None]
    ideal_s: Mapped[float | None]
    slowdown: Mapped[float | None]
    #: Why it was left out, if it was.
    skipped: Mapped[str | None]
    #: When it began, if the trace has unix time.
    start_ns: Mapped[int | None]
    analysed_ns: Mapped[int]


class Finding(Base):
    """Something that was found, over its life: opened, still there, cleared."""

    __tablename__ = "findings"
    __table_args__ = (Index("ix_findings_life", "attempt_id", "state", "key"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    attempt_id: Mapped[str] = mapped_column(ForeignKey("attempts.id"))
    #: Cause, scope and place: the same finding in the next analysis has the same key.
    key: Mapped[str]
    #: What it was found in (`smon.store.findings.Source`).
    source: Mapped[str] = mapped_column(default="ops")
    state: Mapped[str]
    verdict: Mapped[str]
    cause: Mapped[str]
    scope: Mapped[str]
    severity: Mapped[str]
    rank: Mapped[int | None]
    dp: Mapped[int | None]
    stage: Mapped[int | None]
    host: Mapped[str | None] = mapped_column(index=True)
    gpu_uuid: Mapped[str | None] = mapped_column(index=True)
    excess_s: Mapped[float | None]
    excess_share: Mapped[float | None]
    onset_step: Mapped[int | None]
    opened_step: Mapped[int]
    opened_ns: Mapped[int]
    last_step: Mapped[int]
    last_ns: Mapped[int] = mapped_column(index=True)
    cleared_step: Mapped[int | None]
    cleared_ns: Mapped[int | None]
    #: The finding as the report has it, of the last analysis that saw it.
    document: Mapped[dict[str, Any]]


class FindingEvent(Base):
    """One change in a finding's life."""

    __tablename__ = "finding_events"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    finding_id: Mapped[str] = mapped_column(ForeignKey("findings.id"), index=True)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"))
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    at_ns: Mapped[int] = mapped_column(index=True)
    step: Mapped[int]
    #: ``opened``, ``severity``, ``cleared``, ``reopened``.
    event: Mapped[str]
    severity: Mapped[str]
    excess_s: Mapped[float | None]


class Import(Base):
    """Trace files that somebody uploads, to be read by a worker."""

    __tablename__ = "imports"

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    state: Mapped[str] = mapped_column(index=True)
    #: ``job``, ``attempt``, ``layout``, ``meta``, ``format``: as given.
    options: Mapped[dict[str, Any]]
    #: ``[{"name", "bytes", "sha256"}]`` of the files that have come.
    files: Mapped[list[Any]]
    progress: Mapped[float] = mapped_column(default=0.0)
    phase: Mapped[str | None]
    error: Mapped[str | None]
    job_id: Mapped[str | None]
    window_id: Mapped[str | None]
    created_ns: Mapped[int] = mapped_column(index=True)
    finished_ns: Mapped[int | None]
    owner: Mapped[str | None]
    fence: Mapped[int] = mapped_column(default=0)
    lease_ns: Mapped[int] = mapped_column(default=0)
    tries: Mapped[int] = mapped_column(default=0)


class Task(Base):
    """Something that the API wants a worker to compute: a timeline."""

    __tablename__ = "tasks"
    __table_args__ = (UniqueConstraint("tenant_id", "key"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    #: Kind and parameters: who asks again gets the same task.
    key: Mapped[str]
    kind: Mapped[str]
    options: Mapped[dict[str, Any]]
    state: Mapped[str] = mapped_column(index=True)
    error: Mapped[str | None]
    #: The result, below the root of the event files.
    path: Mapped[str | None]
    created_ns: Mapped[int]
    finished_ns: Mapped[int | None]
    owner: Mapped[str | None]
    fence: Mapped[int] = mapped_column(default=0)
    lease_ns: Mapped[int] = mapped_column(default=0)
    tries: Mapped[int] = mapped_column(default=0)


class Notice(Base):
    """What one channel has been told of one finding of a job, and whether there is more to tell.

    The finding is known by `key` (cause, scope and place), so that it stays the same one over
    restarts of the job. `state`: QUEUED while there is something to tell, FAILED if that was given
    up, DONE otherwise.
    """

    __tablename__ = "notices"
    __table_args__ = (UniqueConstraint("channel", "job_id", "key"),)

    id: Mapped[str] = mapped_column(primary_key=True, default=new_id)
    tenant_id: Mapped[str] = mapped_column(ForeignKey("tenants.id"), index=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    channel: Mapped[str]
    key: Mapped[str]
    #: The gravest severity that was said of it; None: not said to be there.
    told_severity: Mapped[str | None]
    #: When it was last said to be there anew, and when anything was said last.
    opened_ns: Mapped[int] = mapped_column(default=0)
    told_ns: Mapped[int] = mapped_column(default=0)
    #: Messages so far: number of the next one.
    messages: Mapped[int] = mapped_column(default=0)
    state: Mapped[str] = mapped_column(index=True)
    #: What was given up, ``event:severity``, and why.
    given_up: Mapped[str | None]
    error: Mapped[str | None]
    created_ns: Mapped[int]
    finished_ns: Mapped[int | None]
    owner: Mapped[str | None]
    fence: Mapped[int] = mapped_column(default=0)
    lease_ns: Mapped[int] = mapped_column(default=0)
    tries: Mapped[int] = mapped_column(default=0)


class Node(Base):
    """A server or worker process that has been seen."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(primary_key=True)
    role: Mapped[str]
    host: Mapped[str]
    started_ns: Mapped[int]
    seen_ns: Mapped[int]
    version: Mapped[str]
