"""One section of a page: if it cannot be made, it says so, and the others stand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from smon.errors import SMonError

_LOG: Final = logging.getLogger(__name__)

View = TypeVar("View")


@dataclass(frozen=True, slots=True)
class Part(Generic[View]):
    """A section, or why it cannot be shown; `value` None without a problem: nothing to show."""

    value: View | None
    problem: str = ""


def part(make: Callable[[], View | None]) -> Part[View]:
    """A section, or why it cannot be shown: a report may be damaged, or of another version."""
    try:
        return Part(make())
    except SMonError as error:
        return Part(None, str(error))
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        _LOG.warning("a part of a page cannot be shown", exc_info=error)
        return Part(None, "the report does not have what it needs")
