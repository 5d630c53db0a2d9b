"""Room for as many open connections as the settings allow.

Shells and containers begin with 1,024 descriptors for a process, and let it have many more if it
asks. Without them a server stops accepting long before ``SMON_MAX_CONNECTIONS``.

Flow: `smon.api.serve` → **here**.
"""

from __future__ import annotations

import logging
import resource
from typing import Final

_log = logging.getLogger(__name__)

#: For the log, files of events, the database, decoders, and pages of people.
OTHERS: Final = 512


def ask_for(connections: int) -> bool:
    """Allow this process so many connections besides its files; False if the system refuses.

    What it may have already is never lowered.
    """
    wanted = connections + OTHERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return True
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        _log.warning(
            "expected %d descriptors, for SMON_MAX_CONNECTIONS=%d and files, found at most %d: "
            "raise the limit (`ulimit -Hn`, LimitNOFILE), or set SMON_MAX_CONNECTIONS to %d",
            wanted, connections, most, max(most - OTHERS, 1),
        )  # fmt: skip
    return most >= wanted
