"""What servers of SMon need, reckoned from what was measured: the table of ``docs/scale.md``.

Each row is events per second times a figure of the proofs `sizes`, `load` and `live`. Cores are
those of the machine that was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tests.proof.line import Line

#: GPUs of all jobs together.
FLEETS: Final = (1_000, 10_000, 100_000)

#: Ops of a GPU in the worst case of the public traces, per second; and with the collectives of
#: each layer. `PROTOCOL` reckons with the same.
OPS_PER_S: Final = 12
LAYERS_PER_S: Final = 100

_HOST: Final = 8
_FLUSH_S: Final = 10
_DAY_S: Final = 86_400
_RETENTION_DAYS: Final = 30

#: Steps of a window, and seconds of a step: for what is counted by windows.
_WINDOW_STEPS: Final = 40
_STEP_S: Final = 10

#: A process is not to be busy for more of its time than this: bursts, and others on the machine.
_BUSY: Final = 0.5

BEGIN: Final = "<!-- reckoned: begin -->"
END: Final = "<!-- reckoned: end -->"


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of the lines that the table needs; µs of CPU time and bytes are per event."""

    sent: float
    at_rest: float
    server_us: float
    window_us: float
    live_us: float
    result_bytes: float
    window_kib: float

    @staticmethod
    def of(lines: Sequence[Line]) -> Measured | None:
        """From the lines that are there; None if some are not."""
        found = {line.proof: line.figures for line in lines}
        if not {"sizes", "live", "load"} <= found.keys():
            return None
        sizes, jobs = found["sizes"], found["live"]["jobs"]
        # At the rate of ops alone: batches are smaller, so an event costs more.
        ops = found["load"]["runs"][0]
        return Measured(
            sent=sizes["bytes_per_event_sent"],
            at_rest=sizes["bytes_per_event_in_files_once_compacted"],
            server_us=1e6 * ops["server_cpu"] / ops["events_per_s"],
            window_us=sizes["worker_cpu_us_per_event"],
            live_us=_dearest(jobs),
            result_bytes=sizes["result_bytes_per_worker_and_window"],
            window_kib=sizes["kib_per_window_in_the_database"],
        )


def _dearest(jobs: Sequence[Mapping[str, Any]]) -> float:
    return max(float(job["worker_cpu_us_per_event"]) for job in jobs)


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    of: Callable[[Measured, float], str]


def _cores(us: float, events_per_s: float) -> str:
    return _amount(us * events_per_s / 1e6)


def _processes(us: float, events_per_s: float) -> str:
    return f"{max(math.ceil(us * events_per_s / 1e6 / _BUSY), 1):,}"


_ROWS: Final = (
    _Row("events per second", lambda _, rate: f"{rate:,.0f}"),
    _Row("requests per second", lambda _, rate: f"{rate / OPS_PER_S / _HOST / _FLUSH_S:,.0f}"),
    _Row("network, MB/s", lambda found, rate: _amount(found.sent * rate / 1e6)),
    _Row("servers: cores busy", lambda found, rate: _cores(found.server_us, rate)),
    _Row("server processes", lambda found, rate: _processes(found.server_us, rate)),
    _Row("workers: cores busy, steps of running jobs",
         lambda found, rate: _cores(found.live_us, rate)),
    _Row("workers: cores busy, windows", lambda found, rate: _cores(found.window_us, rate)),
    _Row("worker processes",
         lambda found, rate: _processes(found.live_us + found.window_us, rate)),
    _Row("event files, GB per day",
         lambda found, rate: _amount(found.at_rest * rate * _DAY_S / 1e9)),
    _Row(f"event files, TB in {_RETENTION_DAYS} days",
         lambda found, rate: _amount(found.at_rest * rate * _DAY_S * _RETENTION_DAYS / 1e12)),
    _Row("results of workers, GB per day",
         lambda found, rate: _amount(
             found.result_bytes * rate / OPS_PER_S / _HOST * _windows_per_day() / 1e9)),
)  # fmt: skip


def _windows_per_day() -> float:
    return _DAY_S / (_WINDOW_STEPS * _STEP_S)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def table(lines: Sequence[Line]) -> str:
    """Markdown; what is missing where it cannot be reckoned."""
    found = Measured.of(lines)
    if found is None:
        return "The proofs `sizes`, `load` and `live` have not all been run in full.\n"
    heads = ["", *(f"{gpus:,} GPUs" for gpus in FLEETS)]
    rows = [[row.name, *(row.of(found, OPS_PER_S * gpus) for gpus in FLEETS)] for row in _ROWS]
    text = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]
    return "\n".join([_of_what(found), "", *text]) + "\n"


def _of_what(found: Measured) -> str:
    return (
        f"Reckoned with {found.sent:.3g} bytes of an event on the wire and {found.at_rest:.3g} at "
        f"rest; with {found.server_us:.3g} µs of CPU time of a server for each event, "
        f"{found.live_us:.3g} µs of a worker while the job runs, and {found.window_us:.3g} µs when "
        f"its window is complete; a window takes {found.window_kib:.3g} KiB of the database. "
        f"Processes are counted so that none is busy for more than {_BUSY:.0%} of its time; steps "
        f"take {_STEP_S} s, windows {_WINDOW_STEPS} steps."
    )


def written(page: str, lines: Sequence[Line]) -> str:
    """The page with the table of these lines.

    Raises
    ------
    ValueError
        The page has no place for it.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected {BEGIN} and {END} in the page")
    return f"{before}{BEGIN}\n\n{table(lines)}\n{END}{after}"
