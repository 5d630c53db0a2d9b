"""What the notifier counts.

Flow: `smon.notify.notifier` → **here** → ``/metrics`` of the worker.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_DELAYS: Final = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Result(StrEnum):
    """What became of a try to send a message."""

    DELIVERED = "delivered"
    FAILED = "failed"
    GIVEN_UP = "given_up"


class NotifyMetrics:
    """Counters of the notifiers of one worker.

    Parameters
    ----------
    registry
        Where they are collected.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.messages = Counter(
            "smon_notify_messages_total",
            "Messages by channel and what became of them; every failed try counts.",
            ["channel", "result"],
            registry=registry,
        )
        self.withheld = Counter(
            "smon_notify_withheld_total",
            "Looks at a message that was not sent yet, because the data could not be trusted.",
            ["channel"],
            registry=registry,
        )
        self.waiting = Gauge(
            "smon_notify_waiting",
            "Messages that are due or wait for another try, of all workers.",
            ["channel"],
            registry=registry,
        )
        self.delay = Histogram(
            "smon_notify_delay_seconds",
            "From a change in a finding's life to the receiver's answer, with all that held it up.",
            ["channel"],
            buckets=_DELAYS,
            registry=registry,
        )
