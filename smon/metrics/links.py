"""Where people are sent: pages of jobs, and runbooks.

Flow: `smon.config` → **here** → `smon.metrics.jobs`, `smon.metrics.process`, and from there the
annotations of alerts, which ask Prometheus for these addresses.
"""

from __future__ import annotations

from typing import Final

from smon.config import Settings

_EVERYWHERE: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104  # compared, not bound


def pages_url(settings: Settings) -> str:
    """Address of the pages without a slash at its end; empty if nobody has said it.

    Without ``SMON_PUBLIC_URL`` it is where the server listens, if that is one address.
    """
    if settings.public_url:
        return settings.public_url.rstrip("/")
    if settings.host in _EVERYWHERE or not settings.port:
        return ""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{settings.port}"


def runbooks_url(settings: Settings) -> str:
    """Address below which runbooks lie: a setting, or the pages of this server."""
    return settings.runbook_url.rstrip("/") or f"{pages_url(settings)}/runbooks"
