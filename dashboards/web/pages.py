"""Pages from templates: escaped by default, nothing fetched from elsewhere.

Flow: `dashboards.web.views` → **here** → `smon.api.pages`.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dashboards.web import links, text
from dashboards.web.views.common import STATES
from smon import __version__
from smon.render import amounts

_HERE: Final = Path(__file__).resolve().parent

#: Style sheet, script and icon of the pages.
STATIC: Final = _HERE / "static"


def page(template: str, **values: Any) -> str:  # noqa: ANN401  # what the template shows
    """A page as HTML."""
    return _environment().get_template(template).render(**values)


@lru_cache(maxsize=1)
def files_version() -> str:
    """What addresses of `STATIC` files end with: browsers keep a file until this changes."""
    contents = hashlib.sha256()
    for path in sorted(STATIC.iterdir()):
        contents.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"{__version__}-{contents.hexdigest()[:12]}"


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
        gpu_time=amounts.gpu_time,
        dollars=amounts.dollars,
        host_link=links.host_link,
    )
    made.globals.update(
        states=STATES, release=__version__, version=files_version(), rank_link=links.rank_link
    )
    return made
