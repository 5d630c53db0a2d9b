"""From the last event of a step to its times and findings in REST, for running jobs.

Twice: a job of 1,024 workers whose agents send over real HTTP; and one of 16,384 GPUs whose steps
are stored as the server's drain stores them, so that the running diagnosis is measured alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tests.proof.child import measured
from tests.proof.line import Form, Goal, Line, at_most, exactly

#: In short every step waits until the one before has its report: a busy machine is no failure.
_SENT: Final = {
    Form.SHORT: [
        "--dp=8", "--pp=4", "--steps=10", "--agents=4", "--microbatches=8", "--interval=0.1",
        "--patient",
    ],
    Form.LONG: [
        "--dp=128", "--pp=8", "--steps=100", "--agents=128", "--microbatches=16", "--interval=5",
    ],
}  # fmt: skip

#: A step of this job takes 14 s; here they come faster.
_STORED: Final = {
    Form.SHORT: [
        "--dp=8", "--pp=4", "--tp=8", "--steps=8", "--microbatches=16", "--interval=0.1",
        "--patient", "--stored",
    ],
    Form.LONG: [
        "--dp=128", "--pp=16", "--tp=8", "--steps=25", "--microbatches=64", "--interval=8",
        "--stored",
    ],
}  # fmt: skip

#: Steps of a fault before somebody is named; more would be slow, fewer rash.
_STEPS_TO_NAME: Final = 8

#: Seconds of the worst step, of each job.
_SENT_S: Final = 10
_STORED_S: Final = 2


def prove(form: Form, folder: Path) -> Line:
    """Play both jobs, with a worker that becomes slow."""
    begin = time.monotonic()
    sent = measured("tests.load.live", _SENT[form])
    stored = measured("tests.load.live", _STORED[form])
    goals = (
        *_goals("sent over HTTP", sent, _SENT_S),
        *_goals("large job, as stored", stored, _STORED_S),
    )
    figures = {"jobs": [{"job": "sent over HTTP", **sent}, {"job": "as stored", **stored}]}
    return Line("live", form, goals, figures, round(time.monotonic() - begin, 1))


def _goals(job: str, found: Mapping[str, Any], worst_s: float) -> Iterator[Goal]:
    named = found["named_at_step"]
    late = _STEPS_TO_NAME + 1 if named is None else int(named) - int(found["onset_step"])
    yield at_most(f"{job}: steps of the fault before its worker is named", late, _STEPS_TO_NAME)
    yield Goal(
        f"{job}: the worker is not named before the fault", int(late >= 0), "1", met=late >= 0
    )
    yield exactly(f"{job}: steps without a report in REST", found["never_seen"], 0)
    yield at_most(
        f"{job}: worst step, from its last event to its findings in REST, s",
        found["worst_s"],
        worst_s,
        timed=True,
    )
