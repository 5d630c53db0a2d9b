"""What the agents of a job on 10,000 GPUs send, at two rates, to one server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.proof.child import run
from tests.proof.line import Form, Goal, Line, at_least, at_most, exactly

#: The short form has 40 hosts that send each second what the two rates are of so many.
_OPTIONS: Final = {
    Form.SHORT: ("--hosts=40", "--flush=1", "--seconds=2.5", "--events", "38400", "160000"),
    Form.LONG: ("--hosts=1250", "--flush=10", "--seconds=60", "--events", "120000", "1000000"),
}

#: Share of what is offered that must be acknowledged while it is sent.
_SHARE: Final = 0.95

#: An acknowledgement that takes a hundredth of the interval between two flushes holds up nobody;
#: with eight times the events in a batch, a tenth of it.
_P99_S: Final = (0.1, 1.0)

#: What is in the log at the end is stored within half of the time that it was sent in.
_DRAINED: Final = 0.5

_MEMORY_MIB: Final = 1024


def prove(form: Form, folder: Path) -> Line:
    """Send at each rate, from a process that does nothing else, and wait until all is stored."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "tests.load.hosts", f"--folder={folder}", *_OPTIONS[form]]
    loads: list[dict[str, Any]] = json.loads(run(command).checked().output)
    goals = (*_stored(loads), *_quick(loads))
    return Line("load", form, goals, {"runs": loads}, round(time.monotonic() - begin, 1))


def _stored(loads: Sequence[dict[str, Any]]) -> Iterator[Goal]:
    yield exactly("batches refused", sum(load["refused"] for load in loads), 0)
    yield exactly("connections lost", sum(load["connections_lost"] for load in loads), 0)
    for load in loads:
        name = f"{load['events_per_s_offered']:,} events/s"
        wrong = sum(
            abs(load[where] - load["events"]) for where in ("events_of_streams", "events_in_files")
        )
        yield exactly(f"events lost or stored twice, {name}", wrong, 0)
        yield at_most(f"memory of the server, MiB, {name}", load["most_mib"], _MEMORY_MIB)


def _quick(loads: Sequence[dict[str, Any]]) -> Iterator[Goal]:
    for load, p99_s in zip(loads, _P99_S, strict=True):
        name = f"{load['events_per_s_offered']:,} events/s"
        least = _SHARE * load["events_per_s_offered"]
        yield at_least(f"acknowledged per second, {name}", load["events_per_s"], least, timed=True)
        yield at_most(
            f"99th percentile of the acknowledgement, s, {name}", load["p99_s"], p99_s, timed=True
        )
        yield at_most(f"until all is stored, s, {name}",
                      load["until_stored_s"], _DRAINED * load["seconds"], timed=True)  # fmt: skip
