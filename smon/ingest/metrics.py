"""Metrics of ingest: names, labels, meaning, once (``docs/reference/metrics.md``).

Flow: `smon.ingest`, `smon.api.agents` → **here** → the registry that ``/metrics`` prints. Labels
are from closed sets; no stream, job, host or step is ever one.
"""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from smon.store.files import Dropped

#: An acknowledgement takes a sync of the disk: from half a millisecond to seconds.
_ACK_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_SYNC_BUCKETS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_DRAIN_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

#: Reasons of agents and server that become labels; all others are ``other``.
REASONS: Final = frozenset(
    {
        "damaged",
        "decoder-died",
        "device-behind",
        "device-never-passed",
        "disk-full",
        "not-on-server",
        "queue-full",
        "refused",
        "spool-full",
        "stream-capture",
        "too-large",
        "undecodable",
    }
)


def reason_label(reason: str) -> str:
    """The label of a reason that an agent gives: what it sends must not make new series."""
    if reason.startswith("refused-"):
        return "refused"
    return reason if reason in REASONS else "other"


class WalMetrics:
    """Metrics of the write-ahead log."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.bytes = Gauge(
            "smon_wal_bytes", "Bytes of the log that are not stored yet.", registry=registry
        )
        self.records = Gauge(
            "smon_wal_records", "Batches in the log that are not stored yet.", registry=registry
        )
        self.fsync_seconds = Histogram(
            "smon_wal_fsync_seconds",
            "Time of one sync of the log.",
            buckets=_SYNC_BUCKETS,
            registry=registry,
        )
        self.damaged = Counter(
            "smon_wal_damaged_total",
            "Stretches of the log that held no sound record when it was read; torn: the end of a "
            "segment that a crash cut off, which was never acknowledged.",
            ["kind"],
            registry=registry,
        )
        for kind in ("damaged", "torn", "undecodable"):
            self.damaged.labels(kind)
        self.read_only = Gauge(
            "smon_wal_read_only",
            "1 while the log takes no batches because its disk does not.",
            registry=registry,
        )


class DecoderMetrics:
    """Metrics of the processes that decode bodies."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.up = Gauge(
            "smon_ingest_decoder_up",
            "0 while bodies are refused because no process can be started that decodes them.",
            registry=registry,
        )
        self.up.set(1)
        self.deaths = Counter(
            "smon_ingest_decoder_deaths_total",
            "Processes that ended while they decoded bodies, by cause: crash, killed, memory, "
            "time; all: the process that starts them.",
            ["cause"],
            registry=registry,
        )
        for cause in ("crash", "killed", "memory", "time", "all"):
            self.deaths.labels(cause)


class IngestMetrics:
    """Metrics of requests, batches, the drain and agents."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.wal = WalMetrics(registry)
        self.decoder = DecoderMetrics(registry)
        self.requests = Counter(
            "smon_ingest_requests_total",
            "Ingest requests that were answered, by status code.",
            ["status"],
            registry=registry,
        )
        self.batches = Counter(
            "smon_ingest_batches_total",
            "Batches, by what became of them.",
            ["result"],
            registry=registry,
        )
        self.stored = self.batches.labels("stored")
        self.duplicate = self.batches.labels("duplicate")
        self.refused_batches = self.batches.labels("refused")
        self.events = Counter(
            "smon_ingest_events_total", "Ops that were acknowledged.", registry=registry
        )
        self.bytes = Counter(
            "smon_ingest_bytes_total", "Encoded bytes that were acknowledged.", registry=registry
        )
        self.refused = Counter(
            "smon_ingest_refused_total",
            "Ingest requests that were refused, by problem.",
            ["problem"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "smon_ingest_in_flight_bytes",
            "Encoded bytes of batches that are being taken in.",
            registry=registry,
        )
        self.ack_seconds = Histogram(
            "smon_ingest_ack_seconds",
            "From the last byte of a batch to its acknowledgement.",
            buckets=_ACK_BUCKETS,
            registry=registry,
        )
        self.lost_events = Counter(
            "smon_ingest_lost_events_total",
            "Ops that agents or the server had to give up, by reason.",
            ["reason"],
            registry=registry,
        )
        self.drain_seconds = Histogram(
            "smon_drain_seconds",
            "Time of one move from the log to files and database.",
            buckets=_DRAIN_BUCKETS,
            registry=registry,
        )
        self.drain_failures = Counter(
            "smon_drain_failures_total",
            "Moves that failed and are tried again: database or object store.",
            registry=registry,
        )
        self.drain_duplicates = Counter(
            "smon_drain_duplicates_total",
            "Batches in the log that were found to be stored already.",
            registry=registry,
        )
        self.drain_lag_seconds = Gauge(
            "smon_drain_lag_seconds",
            "Age of the oldest batch in the log that is not stored yet.",
            registry=registry,
        )
        self.quarantined = Counter(
            "smon_drain_quarantined_total",
            "Batches that were acknowledged but cannot be stored, by reason.",
            ["reason"],
            registry=registry,
        )
        for reason in ("undecodable", "decoder-died", "stream-removed"):
            self.quarantined.labels(reason)
        self.files_dropped = Counter(
            "smon_ingest_files_dropped_total",
            "Files of ranks that were not taken, by reason.",
            ["reason"],
            registry=registry,
        )
        for dropped in (Dropped.CONTRADICTION, Dropped.TOO_MANY):
            self.files_dropped.labels(dropped.value)
        self.streams = Gauge(
            "smon_agent_streams",
            "Streams of which a heartbeat came lately (agent_down_s).",
            registry=registry,
        )
        self.spool_bytes = Gauge(
            "smon_agent_spool_bytes",
            "Bytes in the spools of these streams that are not sent yet.",
            registry=registry,
        )
        self.dropped = Counter(
            "smon_agent_dropped_total",
            "Events that agents say they have dropped, by reason.",
            ["reason"],
            registry=registry,
        )
