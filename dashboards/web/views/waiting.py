"""What a job waits for before anything can be said, and what to do about it.

Flow: `smon.store.queries` → **here** → `dashboards.web.views.job`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smon.store.models import Mode, WindowState
from smon.store.queries.jobs import AttemptRow, JobRow
from smon.store.queries.spans import StreamTotals
from smon.store.queries.windows import WindowRow


@dataclass(frozen=True, slots=True)
class Waiting:
    """Sentences, most important first, and commands."""

    lines: tuple[str, ...]
    commands: tuple[str, ...]


def waiting_for(
    job: JobRow,
    attempts: Sequence[AttemptRow],
    windows: Sequence[WindowRow],
    streams: StreamTotals,
    server: str,
) -> Waiting:
    """What a job without any report waits for."""
    if not attempts:
        return Waiting(
            ("No agent has sent anything for this job yet.",),
            (f"smon-agent run --server {server}",),
        )
    attempt = attempts[0]
    commands = []
    if attempt.mode == Mode.LIVE and not streams.streams:
        commands.append(f"smon-agent run --server {server}")
    if streams.down:
        commands.append("smon-agent check")
    return Waiting(tuple(_lines(job, attempt, windows, streams)), tuple(commands))


def _lines(
    job: JobRow, attempt: AttemptRow, windows: Sequence[WindowRow], streams: StreamTotals
) -> Iterator[str]:
    failed = [window for window in windows if window.state == WindowState.FAILED]
    if failed:
        yield f"Window {failed[0].number} could not be analysed: {failed[0].reason or 'no reason'}."
    elif attempt.mode == Mode.LIVE:
        ready = "none yet" if attempt.ready_step is None else f"step {attempt.ready_step}"
        yield (
            f"It waits for two steps that all ranks have delivered; last such step: {ready}. "
            f"{streams.streams:,} streams from {streams.hosts:,} hosts send; the job has "
            f"{job.gpus or 0:,} GPUs."
        )
    else:
        yield "The data are there, and wait for a worker process that is free to analyse them."
    if streams.down:
        yield f"{streams.down:,} agents are silent: look at what they see on their hosts."
    if not streams.streams and attempt.mode == Mode.LIVE:
        yield "No stream has been opened: is the agent running on the GPU hosts?"
