"""Pages from templates: escaped by default, nothing fetched from elsewhere.

Flow: `dashboards.web.views` → **here** → `smon.api.pages`.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dashboards.web import text
from dashboards.web.views import STATES
from smon import __version__

_HERE: Final = Path(__file__).resolve().parent

#: Style sheet, script and icon of the pages.
STATIC: Final = _HERE / "static"


def page(template: str, **values: Any) -> str:  # noqa: ANN401  # what the template shows
    """A page as HTML."""
    return _environment().get_template(template).render(**values)


@lru_cache(maxsize=1)
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        duration=text.duration,
        difference=text.difference,
        percent=text.percent,
        times=text.times,
        gpu_hours=text.gpu_hours,
        money=text.money,
        age=text.age,
        utc=text.utc,
        whole=text.whole,
        bytes_of=text.bytes_of,
    )
    made.globals.update(states=STATES, version=__version__)
    return made
