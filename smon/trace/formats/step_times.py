"""Step-time series: JSON of named series by step, as Megatron-LM keeps for its tests.

``{"iteration-time": {"start_step": 1, "step_interval": 5, "values": {"1": 9.5, "5": "nan"}}}``.
Only the whole job's step time is in it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from smon.errors import TraceError
from smon.trace.formats.reading import (
    GZIP_MAGIC,
    Reading,
    inflated,
    printable,
    quoted,
    reading_from,
)
from smon.trace.series import StepSeries, usable

NAME: Final = "step-times"
LOOKS_FOR: Final = 'JSON series with "start_step", "step_interval" and "values"'
SELF_DESCRIBED: Final = True

_SEARCHED_BYTES: Final = 1 << 16
_MAX_BYTES: Final = 1 << 28

#: What the step time is called, by version.
_NAMES: Final = ("iteration-time", "iteration_timing_avg")


def recognises(head: bytes, path: Path) -> bool:  # noqa: ARG001  # the signature of all readers
    """Whether the file, unpacked if need be, begins with a named series."""
    text = inflated(head, _SEARCHED_BYTES)
    begins = text.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"{")
    return begins and all(mark in text for mark in (b'"start_step"', b'"values"'))


def read(path: Path) -> Reading:
    """Read the step times of a job.

    Raises
    ------
    TraceError
        The file cannot be read, is damaged, or has no usable step time.
    """
    name = printable(path)
    with reading_from(path):
        data = _data(path)
    try:
        raw = json.loads(data.decode("utf-8", "replace"), strict=False)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{name}: damaged or truncated: {quoted(error)}") from error
    if not isinstance(raw, dict):
        raise TraceError(f"{name}: expected series by name, found a {type(raw).__name__}")
    series = next((raw[key] for key in _NAMES if isinstance(raw.get(key), dict)), None)
    if series is None:
        found = ", ".join(printable(key) for key in list(raw)[:5])
        raise TraceError(f"{name}: no step times: looked for {' or '.join(_NAMES)}, found {found}")
    dropped: Counter[str] = Counter()
    steps, seconds = usable(_values(series), dropped)
    if not len(steps):
        reasons = ", ".join(f"{count} × {reason}" for reason, count in sorted(dropped.items()))
        raise TraceError(f"{name}: no usable step time; found {reasons or 'no value'}")
    return Reading(
        series=StepSeries(steps, seconds, dropped=tuple(sorted((+dropped).items()))),
    )


def _data(path: Path) -> bytes:
    with path.open("rb") as raw:
        packed = raw.peek(2)[:2] == GZIP_MAGIC
        file = gzip.GzipFile(fileobj=raw) if packed else raw
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise TraceError(f"{printable(path)}: more than {_MAX_BYTES >> 20} MiB: it is no series")
    return data


def _values(series: Mapping[str, Any]) -> Iterator[tuple[int, object]]:
    """(step, value) pairs; of a list the steps follow from its first step and interval."""
    values = series.get("values")
    if isinstance(values, dict):
        for key, value in values.items():
            yield _step(key), value
    elif isinstance(values, list):
        first, interval = _step(series.get("start_step")), _step(series.get("step_interval"))
        for at, value in enumerate(values):
            yield max(first, 0) + at * max(interval, 1), value


def _step(value: object) -> int:
    """A step; -1 for anything else."""
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 16 else -1  # noqa: PLR2004  # no step
