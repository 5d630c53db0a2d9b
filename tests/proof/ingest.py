"""Batches over real HTTP as fast as they are taken, and at a steady rate."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from tests.proof.child import measured
from tests.proof.line import Form, Line, at_least, at_most, exactly

_SECONDS: Final = {Form.SHORT: 2.0, Form.LONG: 20.0}

#: What one process should take, requests per second of 1,584 events.
_RATE: Final = 800.0


def prove(form: Form, folder: Path) -> Line:
    """All it can, then 800 requests a second; every event is stored in the end."""
    begin, seconds = time.monotonic(), _SECONDS[form]
    options = ["--json", f"--seconds={seconds}", f"--folder={folder}"]
    most = measured("tests.load.ingest", options)
    steady = measured("tests.load.ingest", [*options, f"--rate={_RATE}"])
    loads = {"all it can": most, "800/s": steady}
    missing = sum(load["acknowledged_events"] - load["stored_events"] for load in loads.values())
    goals = (
        exactly("batches refused", sum(load["refused"] for load in loads.values()), 0),
        exactly("acknowledged events that are not stored", max(missing, 0), 0),
        at_least("requests per second", most["requests_per_s"], _RATE, timed=True),
        at_least("events per second", most["events_per_s"], 1_000_000, timed=True),
        at_most("99th percentile of the acknowledgement at 800 requests/s, s",
                steady["p99_s"], 0.1, timed=True),
    )  # fmt: skip
    figures = {"runs": [{"run": name, **load} for name, load in loads.items()]}
    return Line("ingest", form, goals, figures, round(time.monotonic() - begin, 1))
