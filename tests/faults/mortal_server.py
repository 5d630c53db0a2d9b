"""A server whose decoders can be ended by a sound body (`tests.faults.planted_decoder`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import smon.api.serve
import smon.cli
import smon.ingest.service
from smon.config import Settings
from smon.ingest.fence import Fence
from smon.ingest.metrics import DecoderMetrics
from smon.ingest.service import IngestService, Parts
from tests.faults.planted_decoder import COMMAND

MODULE = "tests.faults.mortal_server"

#: Pauses between tries at a body of the log do not grow beyond this: a dozen kills would take a
#: minute, of which nothing is seen.
_PAUSE_S = 0.5


def mortal(settings: Settings, metrics: DecoderMetrics) -> Fence:
    """Decoders with the defect."""
    return Fence(settings, metrics, COMMAND)


def main(arguments: Sequence[str] | None = None) -> int:
    """As `smon.cli`."""
    serve: Any = smon.api.serve
    service: Any = smon.ingest.service
    service._LAST_PAUSE_S = _PAUSE_S
    serve.IngestService = partial(IngestService, parts=Parts(decoder=mortal))
    return smon.cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
