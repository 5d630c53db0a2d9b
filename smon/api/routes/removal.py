"""Files of what is removed go after its rows: a crash in between leaves files without a row."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from smon.errors import StoreError
from smon.store.objects import Objects

_log = logging.getLogger(__name__)


def remove(objects: Objects, paths: Iterable[str]) -> None:
    """Remove files; of those that cannot be removed, the log has the reason.

    What stays is found by the next comparison of files and rows (``smon db check``).
    """
    for path in paths:
        try:
            objects.delete(path)
        except StoreError as error:
            _log.warning("%s", error)
