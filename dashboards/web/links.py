"""Addresses with names in them: names may hold any character.

Flow: `dashboards.web.views`, templates → **here**.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

#: Browsers take these for steps up and down a path, however they are written.
_DOTS: Final = frozenset({".", ".."})


def host_link(name: str) -> str:
    """The page of a host or GPU."""
    quoted = quote(name, safe="")
    return f"/hosts?name={quoted}" if name in _DOTS else f"/hosts/{quoted}"


def rank_link(job_id: str, rank: int, attempt: int | None = None) -> str:
    """The page of a rank of a job, in its newest attempt or in the one given."""
    link = f"/jobs/{quote(job_id, safe='')}/ranks/{rank}"
    return link if attempt is None else f"{link}?attempt={attempt}"
