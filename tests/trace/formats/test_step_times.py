from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from smon.errors import TraceError
from smon.trace.formats import step_times
from smon.trace.series import NO_VALUE, NOT_POSSIBLE, StepSeries
from tests.trace.formats.test_fuzz import mutants


def document(values: object, **more: object) -> dict[str, object]:
    """Golden values with these step times."""
    series = {"start_step": 1, "end_step": 9, "step_interval": 5, "values": values, **more}
    loss = {**series, "values": {"1": 12.5}}
    return {"lm loss": loss, "iteration-time": series}


def read(path: Path, content: object) -> StepSeries:
    """The series of a file with this content."""
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    assert step_times.recognises(path.read_bytes()[: 1 << 16], path)
    series = step_times.read(path).series
    assert series is not None
    return series


@pytest.mark.parametrize(
    "name, points, missing",
    [("deepseekv3", 9_529, 8), ("gpt3", 12, 13), ("mixtral", 3_094, 1_707)],
)
def test_the_public_series_are_read(
    traces: Path, tmp_path: Path, name: str, points: int, missing: int
) -> None:
    """Values that are `"nan"` are counted."""
    (path,) = (traces / "megatron-step-times").glob(f"{name}*.json.gz")
    series = read(tmp_path / "x.json", path.read_bytes())
    assert (len(series), dict(series.dropped)) == (points, {NO_VALUE: missing})


def test_values_that_are_no_time_are_left_out_and_counted(tmp_path: Path) -> None:
    """By reason; numbers as text and with a decimal comma are read."""
    values = {
        "1": "nan", "2": None, "3": "None", "4": 0, "5": -1.5, "6": 1e9, "7": "1,25", "8": 2,
        "x": 3, "-1": 4, "9": True, "10": [1], "11": "inf", "12": 10**400,
    }  # fmt: skip
    series = read(tmp_path / "x.json", document(values))
    assert series.steps.tolist() == [7, 8]
    assert series.seconds.tolist() == [1.25, 2.0]
    assert dict(series.dropped) == {NO_VALUE: 9, NOT_POSSIBLE: 3}


def test_values_as_a_list_get_their_steps_from_the_interval(tmp_path: Path) -> None:
    """As in files of 2023."""
    old = {"iteration_timing_avg": document([1.0, 2.0])["iteration-time"]}
    series = read(tmp_path / "x.json", old)
    assert series.steps.tolist() == [1, 6]


def test_steps_are_in_order_whatever_the_file_does(tmp_path: Path) -> None:
    """Keys are text: 10 comes before 2 in some files."""
    series = read(tmp_path / "x.json", document({"10": 3.0, "2": 1.0, "9": 2.0}))
    assert np.all(np.diff(series.steps) > 0)
    assert series.seconds.tolist() == [1.0, 2.0, 3.0]


def test_gzip_under_any_name(tmp_path: Path) -> None:
    """Content counts."""
    content = gzip.compress(json.dumps(document({"1": 1.0})).encode())
    assert len(read(tmp_path / "x.json", content)) == 1


@pytest.mark.parametrize(
    "content, message",
    [
        ({"lm loss": {"start_step": 1, "values": {"1": 2.0}}}, "looked for iteration-time"),
        (document({"1": "nan"}), "no usable step time; found 1 ×"),
        (document({}), "no usable step time; found no value"),
        ([document(5)], "expected series by name, found a list"),
        (document(5), "no usable step time; found no value"),
        (json.dumps(document({"1": 1.0})).encode()[:-5], "damaged or truncated"),
    ],
)
def test_a_file_without_step_times_says_what_was_looked_for(
    tmp_path: Path, content: object, message: str
) -> None:
    """No number is made up."""
    path = tmp_path / "x.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(TraceError, match=message):
        step_times.read(path)


def test_mutants_are_survived(tmp_path: Path) -> None:
    """A series or one clear line."""
    whole = json.dumps(document({str(step): 1.5 for step in range(1, 60)})).encode()
    path = tmp_path / "x.json"
    for content in mutants(5, whole):
        path.write_bytes(content)
        try:
            series = step_times.read(path).series
        except TraceError:
            continue
        assert series is not None
        assert np.isfinite(series.seconds).all()
