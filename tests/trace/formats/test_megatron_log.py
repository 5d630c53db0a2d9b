from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from smon.errors import TraceError
from smon.topology import Layout
from smon.trace.formats import megatron_log
from smon.trace.series import NO_VALUE, NOT_POSSIBLE, TWICE, StepSeries
from tests.trace.formats.test_fuzz import mutants

WORLD = (
    "using world size: 64, data-parallel-size: 1, tensor-model-parallel size: 4, "
    "pipeline-model-parallel size: 16 \n"
)


def line(step: int, value: object = 2711.1) -> str:
    """What the log says of a step."""
    return (
        f" iteration {step:8d}/    1000 | consumed samples: {step * 4:12d} | elapsed time per "
        f"iteration (ms): {value} | learning rate: 3.750E-05 | global batch size:     4 |"
    )


def read(path: Path, content: str | bytes) -> StepSeries:
    """The series of a log."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert megatron_log.recognises(path.read_bytes()[: 1 << 16], path)
    series = megatron_log.read(path).series
    assert series is not None
    return series


@pytest.mark.parametrize("name, points", [("meg_gpt2_base", 9), ("meg_gpt2_perf", 4)])
def test_the_public_logs_are_read(traces: Path, tmp_path: Path, name: str, points: int) -> None:
    """Their first step stands thousands of lines after the head that is recognised by."""
    (path,) = (traces / "megatron-logs").glob(f"{name}*.gz")
    series = read(tmp_path / "x.out", path.read_bytes())
    assert len(series) == points
    assert series.layout == Layout(dp=1, pp=16, tp=4)
    assert {len(part.high_s) for part in series.sections} >= {points}


def test_glued_lines_are_told_apart(tmp_path: Path) -> None:
    """Ranks write to the same file without waiting for each other."""
    text = (
        line(10) + "[Rank 51] (after 10 iterations) memory (MB) | allocated: 19494.4[Rank 49] (a"
        + line(20, 2750) + line(30, 2800) + "\n"
    )  # fmt: skip
    series = read(tmp_path / "x.out", text)
    assert series.steps.tolist() == [10, 20, 30]
    assert series.seconds.tolist() == [2.7111, 2.75, 2.8]


def test_parts_of_the_step_in_one_line(tmp_path: Path) -> None:
    """Only those that follow a step: what came before is set-up."""
    text = (
        "time (ms) | load-checkpoint: 0.46\n" + line(10) + "\ntime (ms) | forward-compute: 264.79 "
        "| backward-params-all-reduce: 24.39\n"
    )  # fmt: skip
    sections = {part.name: part.high_s for part in read(tmp_path / "x.out", text).sections}
    assert list(sections) == ["forward-compute", "backward-params-all-reduce"]
    assert sections["forward-compute"] == pytest.approx((0.26479,))
    assert sections["backward-params-all-reduce"] == pytest.approx((0.02439,))


def test_parts_of_the_step_in_lines_with_lowest_and_highest(tmp_path: Path) -> None:
    """As newer versions write them."""
    text = line(10) + (
        "\n(min, max) time across ranks (ms):\n"
        "    forward-backward ...............................: (2409.63, 2411.10)\n"
        "    optimizer ......................................: 95.20\n"
    )
    found = {part.name: (part.low_s, part.high_s) for part in read(tmp_path / "x", text).sections}
    assert found == {
        "forward-backward": ((2.40963,), (2.4111,)),
        "optimizer": ((0.0952,), (0.0952,)),
    }


def test_values_that_are_no_time_are_left_out_and_counted(tmp_path: Path) -> None:
    """And a step that comes twice, after a restart, has the later value."""
    values = [(1, "nan"), (2, 0), (3, "2711,5"), (4, 1e15), (5, 10), (5, 20), (6, "1.2.3")]
    series = read(tmp_path / "x.out", "\n".join(line(*pair) for pair in values))
    assert dict(zip(series.steps.tolist(), series.seconds.tolist(), strict=True)) == {
        3: 2.7115,
        5: 0.02,
    }
    assert dict(series.dropped) == {NO_VALUE: 2, NOT_POSSIBLE: 2, TWICE: 1}


def test_seconds_carriage_returns_and_broken_text(tmp_path: Path) -> None:
    """Progress bars end lines with a return; names are not always UTF-8."""
    text = b"bar \xff\xfe\r" + line(10).replace("(ms): 2711.1", "(s): 2.5").encode() + b"\r\x1b[0m"
    assert read(tmp_path / "x.out", text).seconds.tolist() == [2.5]


def test_a_log_that_is_still_packed_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """Cut off anywhere."""
    whole = gzip.compress("\n".join(line(step, 2000 + step) for step in range(1, 400)).encode())
    series = read(tmp_path / "x.gz", whole[:-20])
    assert 100 < len(series) <= 399


@pytest.mark.parametrize(
    "text, layout",
    [
        (WORLD, Layout(dp=1, pp=16, tp=4)),
        (WORLD.replace("size: 4,", "size: 5,"), None),
        (
            "using world size: 16, data-parallel size: 2, context-parallel size: 2, "
            "hierarchical context-parallel sizes: None, tensor-model-parallel size: 2, "
            "pipeline-model-parallel size: 2\n",
            Layout(dp=2, pp=2, tp=2, cp=2),
        ),
        ("", None),
    ],
)
def test_the_layout_is_that_of_the_log_if_its_sizes_agree(
    tmp_path: Path, text: str, layout: Layout | None
) -> None:
    """Old and new wording."""
    assert read(tmp_path / "x.out", text + line(1)).layout == layout


def test_lines_of_the_straggler_detector_are_quoted(traces: Path, tmp_path: Path) -> None:
    """With what they are, and nothing made of them."""
    raw = (traces / "megatron-logs" / "straggler_detector_readme.log").read_text()
    series = read(tmp_path / "x.log", line(10) + "\n" + raw)
    (quote,) = series.statements
    assert "throughput 296.02 TF (rank 0) to 297.32 TF (rank 8)" in quote
    assert "684 W, written as 683801 W (rank 18)" in quote
    watts = raw.replace("601796W", "601W").replace("683801W", "684W")
    assert (
        "power 601 W (rank 8) to 684 W (rank 18)" in read(tmp_path / "y.log", watts).statements[0]
    )


@pytest.mark.parametrize("text", ["", "some other log\n" * 9, '{"iteration": 1}', "\0\0"])
def test_other_text_is_not_taken_for_a_log(tmp_path: Path, text: str) -> None:
    """Only what has a step, or lines of the detector."""
    path = tmp_path / "x.out"
    path.write_text(text)
    assert not megatron_log.recognises(text.encode(), path)


def test_a_log_without_a_step_says_what_was_looked_for(tmp_path: Path) -> None:
    """The words are there, and no number."""
    path = tmp_path / "x.out"
    path.write_text("elapsed time per iteration (ms): none\n")
    with pytest.raises(TraceError, match="no step: looked for"):
        megatron_log.read(path)


def test_mutants_are_survived(tmp_path: Path) -> None:
    """A series or one clear line."""
    whole = (WORLD + "\n".join(line(step) for step in range(1, 30))).encode()
    path = tmp_path / "x.out"
    for content in mutants(6, whole):
        path.write_bytes(content)
        try:
            series = megatron_log.read(path).series
        except TraceError:
            continue
        assert series is not None
        assert np.isfinite(series.seconds).all()
