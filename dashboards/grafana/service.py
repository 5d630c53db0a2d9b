"""The dashboard "SMon: service": does SMon itself take in, store and analyse what comes.

Flow: metrics of servers and workers (``docs/reference/metrics.md``) → **here** → ``service.json``.
Servers and workers each have their own figures; they are added, or shown by process.
"""

from __future__ import annotations

from typing import Final

from dashboards.grafana.panels import (
    BAD_STEPS,
    SOME_STEPS,
    Json,
    Panel,
    Query,
    Row,
    board,
    chosen,
    datasource,
    series,
    stat,
)

NAME: Final = "service"

_OF: Final = '{instance=~"$instance"}'
_WHERE: Final = "{{instance}}"
_WINDOW: Final = "$__rate_interval"


def _rate(metric: str, *labels: str) -> str:
    """Per second, added over the chosen processes, apart by labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return f"sum{by} (rate({metric}{_OF}[{_WINDOW}]))"


def _quantile(share: float, histogram: str, *labels: str) -> str:
    by = ", ".join(["le", *labels])
    return f"histogram_quantile({share}, sum by ({by}) (rate({histogram}_bucket{_OF}[{_WINDOW}])))"


def dashboard() -> Json:
    """The whole of it."""
    return board(
        "smon-service",
        "SMon: service",
        "Whether SMon itself works: ingest, log, agents, analysis, notification, processes.",
        (
            Row("Now", _totals()),
            Row("Ingest", _ingest()),
            Row("Log and store", _log()),
            Row("Agents", _agents()),
            Row("Analysis", _analysis()),
            Row("Notification", _notification()),
            Row("Processes", _processes()),
        ),
        (datasource(), chosen("instance", "Process", "smon_build_info", "instance")),
    )


def _totals() -> tuple[Panel, ...]:
    return (
        stat(
            "Processes",
            "Servers and workers that are scraped.",
            Query(f"count(smon_build_info{_OF})"),
            "none",
        ),
        stat(
            "Agents",
            "Streams with a heartbeat of late, over all servers.",
            Query(f"sum(smon_agent_streams{_OF})"),
            "none",
        ),
        stat("Events", "Ops that are taken in.", Query(_rate("smon_ingest_events_total")), "ops"),
        stat(
            "Waiting in the log",
            "Acknowledged and not stored yet; it should stay small.",
            Query(f"sum(smon_wal_bytes{_OF})"),
            "bytes",
        ),
        stat(
            "Read-only servers",
            "Servers whose disk takes no more: agents keep their data until it does.",
            Query(f"sum(smon_wal_read_only{_OF})"),
            "none",
            steps=BAD_STEPS,
        ),
        stat(
            "Failures in 15 minutes",
            "Of workers, of moves to the store, and of messages.",
            Query(
                " + ".join(
                    f"(sum(increase({metric}{_OF[:-1]}{more}}}[15m])) or vector(0))"
                    for metric, more in (
                        ("smon_worker_errors_total", ""),
                        ("smon_drain_failures_total", ""),
                        ("smon_notify_messages_total", ',result="given_up"'),
                    )
                )
            ),
            "none",
            decimals=0,
            steps=SOME_STEPS,
        ),
    )


def _ingest() -> tuple[Panel, ...]:
    return (
        series(
            "Events taken in",
            "Ops acknowledged as new, by server.",
            (Query(_rate("smon_ingest_events_total", "instance"), _WHERE),),
            "ops",
        ),
        series(
            "Bytes taken in",
            "Encoded bytes of batches, by server.",
            (Query(_rate("smon_ingest_bytes_total", "instance"), _WHERE),),
            "Bps",
        ),
        series(
            "Time to acknowledge",
            "From the last byte of a batch to its answer: it waits for one sync of the disk.",
            (
                Query(_quantile(0.5, "smon_ingest_ack_seconds"), "median"),
                Query(_quantile(0.99, "smon_ingest_ack_seconds"), "99 %"),
            ),
            "s",
        ),
        series(
            "Requests by status",
            "200 is taken in; 401 is a wrong token, 422 a batch that breaks the protocol, 429 and "
            "503 that too much comes at once, 507 a full disk.",
            (Query(_rate("smon_ingest_requests_total", "status"), "{{status}}"),),
            "reqps",
        ),
        series(
            "Refused requests by problem",
            "docs/reference/problems.md has each problem. Nothing here is as it should be.",
            (Query(_rate("smon_ingest_refused_total", "problem"), "{{problem}}"),),
            "reqps",
        ),
        series(
            "Connections",
            "Open ones by server; refused and too slow ones per second.",
            (
                Query(f"sum by (instance) (smon_ingest_connections{_OF})", f"{_WHERE} open"),
                Query(
                    _rate("smon_ingest_connections_refused_total", "limit"), "refused: {{limit}}"
                ),
                Query(_rate("smon_ingest_requests_too_slow_total"), "too slow"),
            ),
            "none",
        ),
    )


def _log() -> tuple[Panel, ...]:
    return (
        series(
            "Waiting in the log, by server",
            "Bytes that are acknowledged and not stored yet, by server.",
            (Query(f"sum by (instance) (smon_wal_bytes{_OF})", _WHERE),),
            "bytes",
        ),
        series(
            "Age of the oldest batch in the log",
            "Usually below a few seconds; above 120 s (dashed) a server is not ready.",
            (Query(f"max by (instance) (smon_drain_lag_seconds{_OF})", _WHERE),),
            "s",
            steps=((None, "text"), (120, "red")),
        ),
        series(
            "Time of a sync of the disk",
            "Every acknowledgement waits for one. Above 100 ms (dashed), the disk is too slow.",
            (
                Query(_quantile(0.5, "smon_wal_fsync_seconds"), "median"),
                Query(_quantile(0.99, "smon_wal_fsync_seconds"), "99 %"),
            ),
            "s",
            steps=((None, "text"), (0.1, "orange")),
        ),
        series(
            "Moves from the log to the store",
            "Time of one move, and moves that failed per second: database or object store.",
            (
                Query(_quantile(0.99, "smon_drain_seconds"), "99 % of a move"),
                Query(_rate("smon_drain_failures_total"), "failed per second"),
            ),
            "s",
        ),
    )


def _agents() -> tuple[Panel, ...]:
    return (
        series(
            "Agents by server",
            "Streams with a heartbeat of late, by server.",
            (Query(f"sum by (instance) (smon_agent_streams{_OF})", _WHERE),),
            "none",
            width=8,
        ),
        series(
            "Waiting on the hosts",
            "Bytes in the spools of agents that are not sent yet; more while no server answers.",
            (Query(f"sum by (instance) (smon_agent_spool_bytes{_OF})", _WHERE),),
            "bytes",
            width=8,
        ),
        series(
            "Lost events by reason",
            "Ops that agents dropped, or that agents and servers had to give up. Nothing here is "
            "as it should be.",
            (
                Query(_rate("smon_agent_dropped_total", "reason"), "dropped: {{reason}}"),
                Query(_rate("smon_ingest_lost_events_total", "reason"), "given up: {{reason}}"),
            ),
            "ops",
            width=8,
        ),
    )


def _analysis() -> tuple[Panel, ...]:
    return (
        series(
            "Analysis is behind by",
            "The job that has waited longest for its running diagnosis.",
            (Query(f"max(smon_analysis_lag_seconds{_OF})", "longest"),),
            "s",
            width=8,
        ),
        series(
            "Windows per minute",
            "By what became of them: done; retried, fenced: once more; failed: given up.",
            (Query(f"60 * {_rate('smon_windows_total', 'state')}", "{{state}}"),),
            "none",
            width=8,
        ),
        series(
            "Time of an analysis",
            "Of the running diagnosis (live) and of whole windows.",
            (
                Query(_quantile(0.5, "smon_analysis_seconds", "kind"), "{{kind}}, median"),
                Query(_quantile(0.99, "smon_analysis_seconds", "kind"), "{{kind}}, 99 %"),
            ),
            "s",
            width=8,
        ),
        series(
            "Steps",
            "Steps that were used, and that were left out by reason: usually warm-up.",
            (
                Query(_rate("smon_steps_analyzed_total"), "used"),
                Query(_rate("smon_steps_skipped_total", "reason"), "left out: {{reason}}"),
            ),
            "ops",
            width=8,
        ),
        series(
            "Failures of workers",
            "That nobody expected, by what was being done; the log of the worker has more.",
            (Query(_rate("smon_worker_errors_total", "work"), "{{work}}"),),
            "ops",
            width=8,
        ),
        series(
            "Series of jobs",
            "Series that each server publishes of running jobs; those left out are too many.",
            (
                Query(f"max by (instance) (smon_job_metrics_series{_OF})", _WHERE),
                Query(f"max(smon_job_metrics_dropped_series{_OF})", "left out"),
            ),
            "none",
            width=8,
        ),
    )


def _notification() -> tuple[Panel, ...]:
    return (
        series(
            "Messages per minute",
            "By channel and what became of them. Empty where no channel is set.",
            (
                Query(
                    f"60 * {_rate('smon_notify_messages_total', 'channel', 'result')}",
                    "{{channel}}: {{result}}",
                ),
            ),
            "none",
            width=8,
        ),
        series(
            "Messages that wait",
            "Due, withheld because the data cannot be trusted, or waiting for another try.",
            (Query(f"max by (channel) (smon_notify_waiting{_OF})", "{{channel}}"),),
            "none",
            width=8,
        ),
        series(
            "From finding to receiver",
            "95 % of messages take no longer, with all that holds them up.",
            (Query(_quantile(0.95, "smon_notify_delay_seconds", "channel"), "{{channel}}"),),
            "s",
            width=8,
        ),
    )


def _processes() -> tuple[Panel, ...]:
    return (
        series(
            "Processors in use",
            "By process.",
            (Query(_rate("process_cpu_seconds_total", "instance"), _WHERE),),
            "none",
            width=8,
        ),
        series(
            "Memory",
            "Resident memory by process.",
            (Query(f"max by (instance) (process_resident_memory_bytes{_OF})", _WHERE),),
            "bytes",
            width=8,
        ),
        series(
            "Open files",
            "By process; connections are files.",
            (Query(f"max by (instance) (process_open_fds{_OF})", _WHERE),),
            "none",
            width=8,
        ),
    )
