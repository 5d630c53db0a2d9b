"""Names of all metrics that processes of SMon publish."""

from __future__ import annotations

from functools import cache

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from smon.api.protocol import bounded_protocol
from smon.config import Settings
from smon.ingest.metrics import IngestMetrics
from smon.metrics.jobs import JobCollector
from smon.metrics.process import register_links, register_process
from smon.notify.metrics import NotifyMetrics
from smon.store.database import Database
from smon.worker.service import Metrics


@cache
def published() -> frozenset[str]:
    """Families of servers and workers, as a scrape names them."""
    settings = Settings(price_per_gpu_hour=1.0)
    registry = CollectorRegistry()
    register_process(registry, "all")
    register_links(registry, settings)
    bounded_protocol(settings, registry)
    for make in (IngestMetrics, Metrics, NotifyMetrics):
        make(registry)
    jobs = JobCollector(Database("sqlite://"), settings).describe()
    names = {_name(one) for one in (*registry.collect(), *jobs)}
    return frozenset(name for name in names if name.startswith("smon_"))


def _name(family: Metric) -> str:
    return f"{family.name}_total" if family.type == "counter" else str(family.name)
