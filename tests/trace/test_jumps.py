"""Clocks that were set while a job ran."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smon.analysis import analyze
from smon.ops import DP_COLLECTIVES
from smon.synth import causes
from smon.synth.presets import scenario
from smon.synth.scenario import Synthetic, generate
from smon.trace.jumps import MIN_JUMP_NS, Jump, without_jumps
from smon.trace.table import OpTable

_HOUR_NS = 3600 * 10**9
_STEPS = 16


def made(dp: int = 4, *, slow: bool = False) -> Synthetic:
    """A job in unix time; one worker of it may be slow from step 4 on."""
    faults = (causes.slow_gpu(1, 0, 1.6, first=4),) if slow else ()
    return generate(
        scenario("slow-worker", dp=dp, pp=2, tp=1, microbatches=4, steps=_STEPS, causes=faults)
    )


def set_clock(table: OpTable, dp: int, step: int, ahead_ns: int) -> OpTable:
    """The same ops, but the clock of all stages of a DP rank is set before a step."""
    mine = (table.dp == dp) & (table.step >= step)
    return replace(table, start_ns=table.start_ns + np.where(mine, ahead_ns, 0))


def test_without_jumps_the_table_stays_what_it_is() -> None:
    """The very same object, also if a worker is slow."""
    for slow in (False, True):
        table = made(slow=slow).table
        assert without_jumps(table)[0] is table


@pytest.mark.parametrize("ahead_ns", [_HOUR_NS, -_HOUR_NS, 100_000_000, -30_000_000])
def test_a_jump_is_found_and_taken_off(ahead_ns: int) -> None:
    """Step, workers and size; times are again what they were, to the noise of one end."""
    table = made().table
    back, jumps = without_jumps(set_clock(table, 3, 9, ahead_ns))
    assert [(jump.dp, jump.stage, jump.step) for jump in jumps] == [(3, 0, 9), (3, 1, 9)]
    assert all(abs(jump.ahead_ns - ahead_ns) < 1_000_000 for jump in jumps)
    assert np.abs(back.start_ns - table.start_ns).max() < 1_000_000


@pytest.mark.parametrize("ahead_ns", [_HOUR_NS, -_HOUR_NS, 100_000_000])
@pytest.mark.parametrize("step", [1, 8, _STEPS - 1])
def test_nobody_is_blamed_for_a_clock_that_was_set(ahead_ns: int, step: int) -> None:
    """The report is that of the job with good clocks, and a note says what was done."""
    job = made()
    report = analyze(set_clock(job.table, 3, step, ahead_ns), job.job)
    assert report.verdict == "none"
    assert not report.findings
    assert any("was set" in note for note in report.quality.notes)


def test_a_straggler_is_still_found_beside_a_jump() -> None:
    """One does not hide the other."""
    job = made(slow=True)
    report = analyze(set_clock(job.table, 3, 9, -_HOUR_NS), job.job)
    sound = analyze(job.table, job.job)
    assert report.verdict == sound.verdict == "straggler"
    assert [one.cause for one in report.findings] == [one.cause for one in sound.findings]


@pytest.mark.parametrize("ahead_ns", [_HOUR_NS, -_HOUR_NS])
@pytest.mark.parametrize("dp", [0, 1])
def test_of_two_replicas_the_one_that_was_set_is_put_right(dp: int, ahead_ns: int) -> None:
    """No third tells which of two has jumped, but only one of them took a plausible time."""
    back, jumps = without_jumps(set_clock(made(2).table, dp, 9, ahead_ns))
    assert {(jump.dp, jump.step) for jump in jumps} == {(dp, 9)}
    assert np.abs(back.start_ns - made(2).table.start_ns).max() < 1_000_000


@pytest.mark.parametrize("ahead_ns", [_HOUR_NS, -_HOUR_NS])
@pytest.mark.parametrize("ranks", [(2, 3), (1, 2, 3)])
def test_most_ranks_may_be_on_the_host_that_was_set(ranks: tuple[int, ...], ahead_ns: int) -> None:
    """The majority does not decide what is no plausible time."""
    table = made().table
    jumped = table
    for dp in ranks:
        jumped = set_clock(jumped, dp, 9, ahead_ns)
    back, jumps = without_jumps(jumped)
    assert {(jump.dp, jump.step) for jump in jumps} == {(dp, 9) for dp in ranks}
    assert np.abs(back.start_ns - table.start_ns).max() < 1_000_000


def test_a_drift_is_no_jump() -> None:
    """A clock that gains a fiftieth moves by 20 ms in each step of a second."""
    table = made().table
    begin = table.start_ns.min()
    gained = np.where(table.dp == 3, (table.start_ns - begin) // 50, 0)
    assert without_jumps(replace(table, start_ns=table.start_ns + gained))[1] == ()


def test_steps_without_collectives_go_with_the_one_before() -> None:
    """They are on the same clock."""
    table = made().table
    kept = (table.step != 10) | ~np.isin(table.optype, [int(op) for op in DP_COLLECTIVES])
    table = table.take(kept)
    back, jumps = without_jumps(set_clock(table, 3, 9, _HOUR_NS))
    assert {jump.step for jump in jumps} == {9}
    assert np.abs(back.start_ns - table.start_ns).max() < 1_000_000


def test_what_is_there_twice_counts_once() -> None:
    """The second with another end, of a collective or not: no clock was set."""
    table = made().table
    rows = np.flatnonzero(np.isin(table.optype, [int(op) for op in DP_COLLECTIVES]))[::7]
    twice = table.take(np.concatenate([np.arange(len(table)), rows]))
    second = np.arange(len(twice)) >= len(table)
    twice = replace(twice, duration_ns=twice.duration_ns + np.where(second, 10**9, 0))
    assert without_jumps(twice)[0] is twice


@pytest.mark.parametrize("late_ns", [20_000_000, 10**9])
def test_one_collective_that_ends_late_is_no_jump(late_ns: int) -> None:
    """One of a step, or all of one step: a clock that is set stays set."""
    table = made().table
    late = (table.dp == 3) & np.isin(table.optype, [int(op) for op in DP_COLLECTIVES])
    late &= table.step == 9
    for those in (late & (table.optype == table.optype[late][0]), late):
        slower = replace(table, duration_ns=table.duration_ns + np.where(those, late_ns, 0))
        assert without_jumps(slower)[0] is slower


def test_times_that_begin_anew_in_every_step_have_no_jumps() -> None:
    """And neither has a window of one step."""
    table = made().table
    relative = replace(set_clock(table, 3, 9, _HOUR_NS), step_relative=True)
    assert without_jumps(relative)[0] is relative
    single = table.between(3, 3)
    assert without_jumps(single)[0] is single


@settings(max_examples=25, deadline=None)
@given(
    dp=st.integers(0, 3),
    step=st.integers(1, _STEPS - 1),
    ahead_ns=st.integers(-_HOUR_NS, _HOUR_NS).filter(lambda ns: abs(ns) > 2 * MIN_JUMP_NS),
)
def test_every_large_jump_is_found(dp: int, step: int, ahead_ns: int) -> None:
    """Whoever it is, and whenever."""
    jumps: tuple[Jump, ...] = without_jumps(set_clock(_SOUND, dp, step, ahead_ns))[1]
    assert {(jump.dp, jump.step) for jump in jumps} == {(dp, step)}


_SOUND = made().table
