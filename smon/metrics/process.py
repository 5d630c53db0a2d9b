"""What every process of SMon says of itself: its version, and where people find more.

Flow: `smon.api.serve`, `smon.commands.worker` → **here** → the registry of the process.
"""

from __future__ import annotations

import platform

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector

from smon import __version__
from smon.config import Settings
from smon.metrics.links import pages_url, runbooks_url


def register_process(registry: CollectorRegistry, role: str) -> None:
    """Publish version, role, and what the operating system knows: memory, CPU, open files."""
    info = Gauge(
        "smon_build_info",
        "1; the labels say which version of SMon this process runs, and what it does.",
        ["version", "python", "role"],
        registry=registry,
    )
    info.labels(__version__, platform.python_version(), role).set(1)
    ProcessCollector(registry=registry)


def register_links(registry: CollectorRegistry, settings: Settings) -> None:
    """Publish where pages and runbooks are, for the annotations of alerts, and what a GPU costs."""
    links = Gauge(
        "smon_links_info",
        "1; the labels say where the pages are and where the runbooks are.",
        ["pages", "runbooks"],
        registry=registry,
    )
    links.labels(pages_url(settings), runbooks_url(settings)).set(1)
    if settings.price is not None:
        price = Gauge(
            "smon_gpu_hour_price", "Price of a GPU hour, as the settings say.", registry=registry
        )
        price.set(settings.price)
