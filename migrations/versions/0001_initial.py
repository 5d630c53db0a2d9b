"""The first schema: tenants, jobs, streams, windows, results, findings, work."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

#: SQLite counts rows of this type by itself; it holds 64 bits there too.
_INT = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:  # noqa: PLR0915  # one statement per table and index
    op.create_table(
        "nodes",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("started_ns", _INT, nullable=False),
        sa.Column("seen_ns", _INT, nullable=False),
        sa.Column("version", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
    )
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_ns", _INT, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tenants")),
        sa.UniqueConstraint("name", name=op.f("uq_tenants_name")),
    )
    op.create_table(
        "imports",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("files", sa.JSON(), nullable=False),
        sa.Column("progress", sa.Float(precision=53), nullable=False),
        sa.Column("phase", sa.String(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("job_id", sa.String(), nullable=True),
        sa.Column("window_id", sa.String(), nullable=True),
        sa.Column("created_ns", _INT, nullable=False),
        sa.Column("finished_ns", _INT, nullable=True),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("fence", _INT, nullable=False),
        sa.Column("lease_ns", _INT, nullable=False),
        sa.Column("tries", _INT, nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_imports_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_imports")),
    )
    op.create_index(op.f("ix_imports_created_ns"), "imports", ["created_ns"], unique=False)
    op.create_index(op.f("ix_imports_state"), "imports", ["state"], unique=False)
    op.create_index(op.f("ix_imports_tenant_id"), "imports", ["tenant_id"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("created_ns", _INT, nullable=False),
        sa.Column("last_data_ns", _INT, nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_jobs_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("tenant_id", "name", name=op.f("uq_jobs_tenant_id")),
    )
    op.create_index(op.f("ix_jobs_last_data_ns"), "jobs", ["last_data_ns"], unique=False)
    op.create_index(op.f("ix_jobs_tenant_id"), "jobs", ["tenant_id"], unique=False)
    op.create_table(
        "tasks",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("options", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("path", sa.String(), nullable=True),
        sa.Column("created_ns", _INT, nullable=False),
        sa.Column("finished_ns", _INT, nullable=True),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("fence", _INT, nullable=False),
        sa.Column("lease_ns", _INT, nullable=False),
        sa.Column("tries", _INT, nullable=False),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_tasks_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tasks")),
        sa.UniqueConstraint("tenant_id", "key", name=op.f("uq_tasks_tenant_id")),
    )
    op.create_index(op.f("ix_tasks_state"), "tasks", ["state"], unique=False)
    op.create_index(op.f("ix_tasks_tenant_id"), "tasks", ["tenant_id"], unique=False)
    op.create_table(
        "tokens",
        sa.Column("kid", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("scopes", sa.String(), nullable=False),
        sa.Column("created_ns", _INT, nullable=False),
        sa.Column("expires_ns", _INT, nullable=True),
        sa.Column("revoked_ns", _INT, nullable=True),
        sa.Column("last_used_ns", _INT, nullable=True),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_tokens_tenant_id")),
        sa.PrimaryKeyConstraint("kid", name=op.f("pk_tokens")),
    )
    op.create_index(op.f("ix_tokens_tenant_id"), "tokens", ["tenant_id"], unique=False)
    op.create_table(
        "attempts",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("number", _INT, nullable=False),
        sa.Column("dp", _INT, nullable=False),
        sa.Column("pp", _INT, nullable=False),
        sa.Column("tp", _INT, nullable=False),
        sa.Column("cp", _INT, nullable=False),
        sa.Column("ep", _INT, nullable=False),
        sa.Column("vpp", _INT, nullable=False),
        sa.Column("mode", sa.String(), nullable=False),
        sa.Column("time_base", sa.String(), nullable=False),
        sa.Column("window_steps", _INT, nullable=False),
        sa.Column("notes", sa.JSON(), nullable=False),
        sa.Column("created_ns", _INT, nullable=False),
        sa.Column("last_data_ns", _INT, nullable=False),
        sa.Column("ended_ns", _INT, nullable=True),
        sa.Column("end_reason", sa.String(), nullable=True),
        sa.Column("revision", _INT, nullable=False),
        sa.Column("ready_step", _INT, nullable=True),
        sa.Column("live_step", _INT, nullable=True),
        sa.Column("live_owner", sa.String(), nullable=True),
        sa.Column("live_fence", _INT, nullable=False),
        sa.Column("live_lease_ns", _INT, nullable=False),
        sa.Column("live_analysed_ns", _INT, nullable=True),
        sa.Column("live_verdict", sa.String(), nullable=True),
        sa.Column("live_slowdown", sa.Float(53), nullable=True),
        sa.Column("live_waste_ratio", sa.Float(53), nullable=True),
        sa.Column("live_recorded_s", sa.Float(53), nullable=True),
        sa.Column("live_ideal_s", sa.Float(53), nullable=True),
        sa.Column("live_aligned", sa.Boolean(), nullable=True),
        sa.Column("live_coverage_ratio", sa.Float(53), nullable=True),
        sa.Column("live_report", sa.LargeBinary(), nullable=True),
        sa.Column("live_workers", sa.LargeBinary(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_attempts_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("job_id", "number", name=op.f("uq_attempts_job_id")),
    )
    op.create_index(op.f("ix_attempts_job_id"), "attempts", ["job_id"], unique=False)
    op.create_index(op.f("ix_attempts_last_data_ns"), "attempts", ["last_data_ns"], unique=False)
    op.create_index(op.f("ix_attempts_tenant_id"), "attempts", ["tenant_id"], unique=False)
    op.create_table(
        "findings",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("attempt_id", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("cause", sa.String(), nullable=False),
        sa.Column("scope", sa.String(), nullable=False),
        sa.Column("severity", sa.String(), nullable=False),
        sa.Column("rank", _INT, nullable=True),
        sa.Column("dp", _INT, nullable=True),
        sa.Column("stage", _INT, nullable=True),
        sa.Column("host", sa.String(), nullable=True),
        sa.Column("gpu_uuid", sa.String(), nullable=True),
        sa.Column("excess_s", sa.Float(precision=53), nullable=True),
        sa.Column("excess_share", sa.Float(precision=53), nullable=True),
        sa.Column("onset_step", _INT, nullable=True),
        sa.Column("opened_step", _INT, nullable=False),
        sa.Column("opened_ns", _INT, nullable=False),
        sa.Column("last_step", _INT, nullable=False),
        sa.Column("last_ns", _INT, nullable=False),
        sa.Column("cleared_step", _INT, nullable=True),
        sa.Column("cleared_ns", _INT, nullable=True),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_findings_attempt_id")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_findings_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_findings_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_findings")),
    )
    op.create_index(op.f("ix_findings_gpu_uuid"), "findings", ["gpu_uuid"], unique=False)
    op.create_index(op.f("ix_findings_host"), "findings", ["host"], unique=False)
    op.create_index(op.f("ix_findings_job_id"), "findings", ["job_id"], unique=False)
    op.create_index(op.f("ix_findings_last_ns"), "findings", ["last_ns"], unique=False)
    op.create_index("ix_findings_life", "findings", ["attempt_id", "state", "key"], unique=False)
    op.create_index(op.f("ix_findings_tenant_id"), "findings", ["tenant_id"], unique=False)
    op.create_table(
        "steps",
        sa.Column("attempt_id", sa.String(), nullable=False),
        sa.Column("step", _INT, nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("recorded_s", sa.Float(precision=53), nullable=True),
        sa.Column("simulated_s", sa.Float(precision=53), nullable=True),
        sa.Column("ideal_s", sa.Float(precision=53), nullable=True),
        sa.Column("slowdown", sa.Float(precision=53), nullable=True),
        sa.Column("skipped", sa.String(), nullable=True),
        sa.Column("start_ns", _INT, nullable=True),
        sa.Column("analysed_ns", _INT, nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_steps_attempt_id")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_steps_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_steps_tenant_id")),
        sa.PrimaryKeyConstraint("attempt_id", "step", name=op.f("pk_steps")),
    )
    op.create_index(op.f("ix_steps_job_id"), "steps", ["job_id"], unique=False)
    op.create_table(
        "streams",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("attempt_id", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("ranks", sa.JSON(), nullable=False),
        sa.Column("epoch", _INT, nullable=False),
        sa.Column("steps_done", _INT, nullable=True),
        sa.Column("ended", sa.Boolean(), nullable=False),
        sa.Column("end_reason", sa.String(), nullable=True),
        sa.Column("events", _INT, nullable=False),
        sa.Column("lost_events", _INT, nullable=False),
        sa.Column("created_ns", _INT, nullable=False),
        sa.Column("last_data_ns", _INT, nullable=False),
        sa.Column("heartbeat_ns", _INT, nullable=True),
        sa.Column("heartbeat", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_streams_attempt_id")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_streams_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_streams_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_streams")),
        sa.UniqueConstraint("tenant_id", "key", name=op.f("uq_streams_tenant_id")),
    )
    op.create_index(op.f("ix_streams_attempt_id"), "streams", ["attempt_id"], unique=False)
    op.create_index(op.f("ix_streams_host"), "streams", ["host"], unique=False)
    op.create_index(op.f("ix_streams_job_id"), "streams", ["job_id"], unique=False)
    op.create_index(op.f("ix_streams_tenant_id"), "streams", ["tenant_id"], unique=False)
    op.create_table(
        "windows",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("attempt_id", sa.String(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("number", _INT, nullable=False),
        sa.Column("first_step", _INT, nullable=False),
        sa.Column("last_step", _INT, nullable=False),
        sa.Column("rows", _INT, nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=True),
        sa.Column("missing", sa.JSON(), nullable=True),
        sa.Column("missing_count", _INT, nullable=False),
        sa.Column("opened_ns", _INT, nullable=False),
        sa.Column("updated_ns", _INT, nullable=False),
        sa.Column("ready_ns", _INT, nullable=True),
        sa.Column("revision", _INT, nullable=False),
        sa.Column("analysed_revision", _INT, nullable=True),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("fence", _INT, nullable=False),
        sa.Column("lease_ns", _INT, nullable=False),
        sa.Column("tries", _INT, nullable=False),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("compacted_ns", _INT, nullable=True),
        sa.Column("expired_ns", _INT, nullable=True),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_windows_attempt_id")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_windows_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_windows_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_windows")),
        sa.UniqueConstraint("attempt_id", "kind", "number", name=op.f("uq_windows_attempt_id")),
    )
    op.create_index(op.f("ix_windows_attempt_id"), "windows", ["attempt_id"], unique=False)
    op.create_index(op.f("ix_windows_job_id"), "windows", ["job_id"], unique=False)
    op.create_index("ix_windows_tenant", "windows", ["tenant_id", "updated_ns"], unique=False)
    op.create_index(op.f("ix_windows_updated_ns"), "windows", ["updated_ns"], unique=False)
    op.create_index("ix_windows_work", "windows", ["state", "lease_ns"], unique=False)
    op.create_table(
        "clock_samples",
        sa.Column("stream_id", sa.String(), nullable=False),
        sa.Column("at_ns", _INT, nullable=False),
        sa.Column("offset_ns", _INT, nullable=False),
        sa.Column("error_ns", _INT, nullable=False),
        sa.ForeignKeyConstraint(
            ["stream_id"], ["streams.id"], name=op.f("fk_clock_samples_stream_id")
        ),
        sa.PrimaryKeyConstraint("stream_id", "at_ns", name=op.f("pk_clock_samples")),
    )
    op.create_index(op.f("ix_clock_samples_at_ns"), "clock_samples", ["at_ns"], unique=False)
    op.create_table(
        "coverage",
        sa.Column("stream_id", sa.String(), nullable=False),
        sa.Column("epoch", _INT, nullable=False),
        sa.Column("ranges", sa.JSON(), nullable=False),
        sa.Column("pending_steps", sa.JSON(), nullable=False),
        sa.Column("awaited", sa.JSON(), nullable=False),
        sa.Column("end_seq", _INT, nullable=True),
        sa.ForeignKeyConstraint(["stream_id"], ["streams.id"], name=op.f("fk_coverage_stream_id")),
        sa.PrimaryKeyConstraint("stream_id", "epoch", name=op.f("pk_coverage")),
    )
    op.create_table(
        "event_files",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("attempt_id", sa.String(), nullable=False),
        sa.Column("window_id", sa.String(), nullable=True),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("rows", _INT, nullable=False),
        sa.Column("bytes", _INT, nullable=False),
        sa.Column("first_step", _INT, nullable=False),
        sa.Column("last_step", _INT, nullable=False),
        sa.Column("created_ns", _INT, nullable=False),
        sa.Column("doomed_ns", _INT, nullable=True),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_event_files_attempt_id")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_event_files_job_id")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_event_files_tenant_id")
        ),
        sa.ForeignKeyConstraint(
            ["window_id"], ["windows.id"], name=op.f("fk_event_files_window_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_event_files")),
        sa.UniqueConstraint("path", name=op.f("uq_event_files_path")),
    )
    op.create_index(op.f("ix_event_files_attempt_id"), "event_files", ["attempt_id"], unique=False)
    op.create_index(op.f("ix_event_files_created_ns"), "event_files", ["created_ns"], unique=False)
    op.create_index(op.f("ix_event_files_doomed_ns"), "event_files", ["doomed_ns"], unique=False)
    op.create_index(op.f("ix_event_files_job_id"), "event_files", ["job_id"], unique=False)
    op.create_index(op.f("ix_event_files_tenant_id"), "event_files", ["tenant_id"], unique=False)
    op.create_index(op.f("ix_event_files_window_id"), "event_files", ["window_id"], unique=False)
    op.create_table(
        "file_drops",
        sa.Column("attempt_id", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("files", _INT, nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("last_ns", _INT, nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_file_drops_attempt_id")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_file_drops_job_id")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_file_drops_tenant_id")
        ),
        sa.PrimaryKeyConstraint("attempt_id", "reason", name=op.f("pk_file_drops")),
    )
    op.create_index(op.f("ix_file_drops_job_id"), "file_drops", ["job_id"], unique=False)
    op.create_table(
        "sent_files",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("attempt_id", sa.String(), nullable=False),
        sa.Column("window_id", sa.String(), nullable=True),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("format", sa.String(), nullable=False),
        sa.Column("rank", _INT, nullable=True),
        sa.Column("world_size", _INT, nullable=True),
        sa.Column("sha256", sa.String(), nullable=False),
        sa.Column("bytes", _INT, nullable=False),
        sa.Column("parts", _INT, nullable=False),
        sa.Column("first_step", _INT, nullable=True),
        sa.Column("last_step", _INT, nullable=True),
        sa.Column("start_ns", _INT, nullable=True),
        sa.Column("end_ns", _INT, nullable=True),
        sa.Column("have", sa.JSON(), nullable=False),
        sa.Column("created_ns", _INT, nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_sent_files_attempt_id")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_sent_files_job_id")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_sent_files_tenant_id")
        ),
        sa.ForeignKeyConstraint(
            ["window_id"], ["windows.id"], name=op.f("fk_sent_files_window_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sent_files")),
        sa.UniqueConstraint("attempt_id", "key", name=op.f("uq_sent_files_attempt_id")),
    )
    op.create_index(op.f("ix_sent_files_job_id"), "sent_files", ["job_id"], unique=False)
    op.create_index("ix_sent_files_state", "sent_files", ["state", "created_ns"], unique=False)
    op.create_index(op.f("ix_sent_files_window_id"), "sent_files", ["window_id"], unique=False)
    op.create_table(
        "finding_events",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("finding_id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("at_ns", _INT, nullable=False),
        sa.Column("step", _INT, nullable=False),
        sa.Column("event", sa.String(), nullable=False),
        sa.Column("severity", sa.String(), nullable=False),
        sa.Column("excess_s", sa.Float(precision=53), nullable=True),
        sa.ForeignKeyConstraint(
            ["finding_id"], ["findings.id"], name=op.f("fk_finding_events_finding_id")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_finding_events_job_id")),
        sa.ForeignKeyConstraint(
            ["tenant_id"], ["tenants.id"], name=op.f("fk_finding_events_tenant_id")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_finding_events")),
    )
    op.create_index(op.f("ix_finding_events_at_ns"), "finding_events", ["at_ns"], unique=False)
    op.create_index(
        op.f("ix_finding_events_finding_id"), "finding_events", ["finding_id"], unique=False
    )
    op.create_index(op.f("ix_finding_events_job_id"), "finding_events", ["job_id"], unique=False)
    op.create_table(
        "results",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("attempt_id", sa.String(), nullable=False),
        sa.Column("window_id", sa.String(), nullable=False),
        sa.Column("code_version", sa.String(), nullable=False),
        sa.Column("revision", _INT, nullable=False),
        sa.Column("fence", _INT, nullable=False),
        sa.Column("created_ns", _INT, nullable=False),
        sa.Column("analysis_s", sa.Float(precision=53), nullable=False),
        sa.Column("verdict", sa.String(), nullable=False),
        sa.Column("cause", sa.String(), nullable=True),
        sa.Column("slowdown", sa.Float(precision=53), nullable=True),
        sa.Column("waste_ratio", sa.Float(precision=53), nullable=True),
        sa.Column("recorded_s", sa.Float(precision=53), nullable=True),
        sa.Column("ideal_s", sa.Float(precision=53), nullable=True),
        sa.Column("aligned", sa.Boolean(), nullable=True),
        sa.Column("coverage_ratio", sa.Float(precision=53), nullable=False),
        sa.Column("report", sa.LargeBinary(), nullable=False),
        sa.Column("workers_path", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_results_attempt_id")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_results_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_results_tenant_id")),
        sa.ForeignKeyConstraint(["window_id"], ["windows.id"], name=op.f("fk_results_window_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_results")),
        sa.UniqueConstraint("window_id", "code_version", name=op.f("uq_results_window_id")),
    )
    op.create_index(op.f("ix_results_attempt_id"), "results", ["attempt_id"], unique=False)
    op.create_index(op.f("ix_results_created_ns"), "results", ["created_ns"], unique=False)
    op.create_index(op.f("ix_results_job_id"), "results", ["job_id"], unique=False)
    op.create_index(
        "ix_results_loss",
        "results",
        ["window_id", "created_ns", "cause", "recorded_s", "waste_ratio"],
        unique=False,
    )
    op.create_index("ix_results_tenant", "results", ["tenant_id", "created_ns"], unique=False)
    op.create_table(
        "notices",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("tenant_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("channel", sa.String(), nullable=False),
        sa.Column("key", sa.String(), nullable=False),
        sa.Column("told_severity", sa.String(), nullable=True),
        sa.Column("opened_ns", _INT, nullable=False),
        sa.Column("told_ns", _INT, nullable=False),
        sa.Column("messages", _INT, nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("given_up", sa.String(), nullable=True),
        sa.Column("error", sa.String(), nullable=True),
        sa.Column("created_ns", _INT, nullable=False),
        sa.Column("finished_ns", _INT, nullable=True),
        sa.Column("owner", sa.String(), nullable=True),
        sa.Column("fence", _INT, nullable=False),
        sa.Column("lease_ns", _INT, nullable=False),
        sa.Column("tries", _INT, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_notices_job_id")),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name=op.f("fk_notices_tenant_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_notices")),
        sa.UniqueConstraint("channel", "job_id", "key", name=op.f("uq_notices_channel")),
    )
    op.create_index(op.f("ix_notices_job_id"), "notices", ["job_id"], unique=False)
    op.create_index(op.f("ix_notices_state"), "notices", ["state"], unique=False)
    op.create_index(op.f("ix_notices_tenant_id"), "notices", ["tenant_id"], unique=False)


def downgrade() -> None:
    # Their indexes go with them.
    op.drop_table("notices")
    op.drop_table("results")
    op.drop_table("finding_events")
    op.drop_table("sent_files")
    op.drop_table("file_drops")
    op.drop_table("event_files")
    op.drop_table("coverage")
    op.drop_table("clock_samples")
    op.drop_table("windows")
    op.drop_table("streams")
    op.drop_table("steps")
    op.drop_table("findings")
    op.drop_table("attempts")
    op.drop_table("tokens")
    op.drop_table("tasks")
    op.drop_table("jobs")
    op.drop_table("imports")
    op.drop_table("tenants")
    op.drop_table("nodes")
