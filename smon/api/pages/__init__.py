"""Pages for people; one module for each, put together here."""

from __future__ import annotations

from starlette.routing import BaseRoute

from smon.api.pages.common import failed_page, wants_page
from smon.api.pages.fleet import fleet_routes
from smon.api.pages.heat import heat_routes
from smon.api.pages.host import host_routes
from smon.api.pages.job import job_routes
from smon.api.pages.login import login_routes
from smon.api.pages.quality import quality_routes
from smon.api.pages.rank import rank_routes
from smon.api.pages.report import report_routes
from smon.api.pages.runbooks import runbook_routes
from smon.api.pages.static import static_routes
from smon.api.pages.timeline import timeline_routes

__all__ = ["failed_page", "page_routes", "wants_page"]


def page_routes() -> list[BaseRoute]:
    """The routes of all pages."""
    return [
        *fleet_routes(),
        *report_routes(),
        *job_routes(),
        *heat_routes(),
        *host_routes(),
        *rank_routes(),
        *quality_routes(),
        *timeline_routes(),
        *login_routes(),
        *runbook_routes(),
        *static_routes(),
    ]
