from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.load.samples import BOUNDED, Process, Sample, Series, files_by_kind, slope_per_min
from tests.proof.soak import Outcome, _flat, slopes_of
from tests.service import sqlite_url

_EVERY_S = 10.0
_LOOKS = 360


def _outcome(
    rss_mib: Callable[[float], float] = lambda _: 0.0,
    pieces: Callable[[float], float] = lambda _: 0.0,
    files: Callable[[float], float] = lambda _: 0.0,
    rows: Callable[[float], float] = lambda _: 0.0,
) -> Outcome:
    """An hour of samples of a noisy server, with something more, by minutes since the start."""
    noise = np.random.default_rng(7)
    series = Series()
    for look in range(_LOOKS):
        at_s = look * _EVERY_S
        minute = at_s / 60
        # It grows at first, as every process does, and then breathes as jobs come and go.
        start = 20 * min(minute / 10, 1.0)
        wave = np.sin(minute / 3)
        process = Process(
            180 + start + 4 * wave + noise.normal(0, 3) + rss_mib(minute),
            int(40 + 5 * wave + noise.integers(0, 4) + pieces(minute)),
            int(12 + pieces(minute)),
        )
        kinds = {"log": 2, "events": int(90 + 15 * wave + noise.integers(0, 9) + files(minute))}
        each = int(100 + 20 * wave + noise.integers(0, 20))
        tables = {**dict.fromkeys(BOUNDED, each), "steps": each + int(rows(minute))}
        sample = Sample(at_s, {"server": process, "worker": process}, kinds, tables)
        series.samples.append(sample)
    return Outcome(series=series)


def _missed(outcome: Outcome) -> set[str]:
    return {goal.what for goal in _flat(outcome, timed=False) if not goal.met}


def test_a_server_that_breathes_does_not_grow() -> None:
    """Noise, waves, and growth in the first quarter of an hour are no leak."""
    assert _missed(_outcome()) == set()


@pytest.mark.parametrize("role", ["server", "worker"])
def test_a_leak_of_memory_is_seen(role: str) -> None:
    """A mebibyte a minute, which is half of what one sample differs from the next."""
    assert f"MiB of memory of the {role}, more per minute" in _missed(
        _outcome(rss_mib=lambda minute: minute)
    )


def test_a_leak_of_descriptors_and_threads_is_seen() -> None:
    """One a minute."""
    missed = _missed(_outcome(pieces=lambda minute: minute))
    assert "descriptors of the server, more per minute" in missed
    assert "threads of the worker, more per minute" in missed


def test_a_leak_of_files_is_seen() -> None:
    """One a minute, among a hundred that come and go."""
    assert _missed(_outcome(files=lambda minute: minute)) == {"files and folders, more per minute"}


def test_a_table_that_retention_forgets_is_seen() -> None:
    """Two rows a minute, beside those of all other tables."""
    assert _missed(_outcome(rows=lambda minute: 2 * minute)) == {
        "rows that retention bounds, more per minute"
    }


def test_a_slope_is_that_of_a_line() -> None:
    """A quarter of wild samples does not move it."""
    at_s = np.arange(100.0)
    values = 5 + at_s / 2
    assert slope_per_min(at_s.tolist(), values.tolist()) == pytest.approx(30)
    values[::4] = 1e6
    assert slope_per_min(at_s.tolist(), values.tolist()) == pytest.approx(30, rel=0.2)
    assert slope_per_min([1.0], [2.0]) == 0.0
    assert slope_per_min([1.0, 1.0], [2.0, 3.0]) == 0.0


def test_a_process_is_looked_at_as_it_is(tmp_path: Path) -> None:
    """A descriptor more is one more."""
    series = Series()
    url = sqlite_url(tmp_path / "sql")
    series.take(os.getpid(), tmp_path, url)
    with (tmp_path / "open").open("w"):
        series.take(os.getpid(), tmp_path, url)
    before, after = (each.processes["server"] for each in series.samples)
    assert after.descriptors == before.descriptors + 1
    assert before.rss_mib > 1
    assert "server" in series.roles()
    assert series.restarts(["server", "worker"]) == 0


def test_files_are_told_apart(tmp_path: Path) -> None:
    """Segments of the log, files of events, what is not finished, and the rest."""
    for name in (
        "wal/1.wal",
        "objects/events/job=a/b.parquet",
        "objects/events/c.partial",
        "smon.db",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert files_by_kind(tmp_path) == {
        "log": 1, "events": 1, "unfinished": 1, "other": 1, "folders": 4,
    }  # fmt: skip


def test_slopes_name_what_grows() -> None:
    """Each by its own unit."""
    samples = _outcome(rss_mib=lambda minute: 3 * minute).series.after(0.25)
    slopes = slopes_of(samples, "server")
    assert slopes["MiB of memory"] == pytest.approx(3, abs=0.3)
    assert abs(slopes["threads"]) < 0.05
