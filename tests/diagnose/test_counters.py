"""Counters are evidence beside durations, and only against those of other ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from smon.analysis import Options, analyze
from smon.report import Finding, JobReport
from smon.synth.presets import scenario
from smon.synth.scenario import Synthetic, generate
from smon.trace.context import Context, Counters

RANK = 9


@cache
def job(name: str) -> Synthetic:
    """A scenario."""
    return generate(scenario(name))


def readings(name: str, values: dict[int, list[float]], steps: list[int]) -> Counters:
    """Values of a counter by rank, one for each step."""
    rows = [
        (step, rank, value)
        for rank, own in values.items()
        for step, value in zip(steps, own, strict=True)
    ]
    step, rank, value = zip(*rows, strict=True)
    return Counters(
        np.array(step, np.int64),
        np.array(rank, np.int32),
        np.full(len(rows), name),
        np.array(value, np.float64),
    )


def joined(*tables: Counters) -> Counters:
    """Several counters."""
    columns = ("step", "rank", "name", "value")
    return Counters(*(np.concatenate([getattr(each, name) for each in tables]) for name in columns))


def found(made: Synthetic, *tables: Counters) -> JobReport:
    """The report of a job with these counters, and no other side evidence."""
    context = Context(counters=joined(*tables)) if tables else Context()
    return analyze(made.table, made.job, Options(), context)


def first(report: JobReport) -> Finding:
    """The one finding."""
    (finding,) = report.findings
    return finding


def sampled(own: list[float], others: float, ranks: int = 16) -> dict[int, list[float]]:
    """A suspect's values beside those of all others."""
    return {rank: own if rank == RANK else [others] * len(own) for rank in range(ranks)}


#: One reading in ten steps, as agents take them.
STEPS = list(range(0, 60, 10))
FALLING = [1980.0, 1900.0, 1500.0, 1300.0, 1240.0, 1240.0]


def test_a_clock_that_falls_with_its_gpu_is_heat() -> None:
    """Six readings in sixty steps are enough."""
    clock = readings("gpu_clock_mhz", sampled(FALLING, 1980.0), STEPS)
    report = found(job("C02-no-counters"), clock)
    assert first(report).cause == "thermal"
    assert "GPU clock 1980 → 1240 MHz, elsewhere 1980" in first(report).evidence


def test_a_clock_that_falls_everywhere_is_nobodys_heat() -> None:
    """What all GPUs do alike does not explain why one is slow."""
    clock = readings("gpu_clock_mhz", dict.fromkeys(range(16), FALLING), STEPS)
    assert first(found(job("C02-no-counters"), clock)).cause == "slow_gpu"


def test_hosts_need_not_be_read_in_the_same_steps() -> None:
    """Agents read when they like: periods are compared, not steps."""
    mine = readings("gpu_clock_mhz", {RANK: FALLING}, STEPS)
    others = [rank for rank in range(16) if rank != RANK]
    rest = readings(
        "gpu_clock_mhz", {rank: [1980.0] * 6 for rank in others}, [s + 3 for s in STEPS]
    )
    assert first(found(job("C02-no-counters"), joined(mine, rest))).cause == "thermal"


@pytest.mark.parametrize(
    "own, others, cause",
    [(1.0, 0.0, "thermal"), (0.5, 0.0, "thermal"), (1.0, 1.0, "slow_gpu"), (0.0, 0.0, "slow_gpu")],
)
def test_a_thermal_flag_counts_against_those_of_others(
    own: float, others: float, cause: str
) -> None:
    """In a warm room every GPU may have it set."""
    flag = readings("gpu_throttle_thermal", sampled([own] * 6, others), STEPS)
    assert first(found(job("C02-no-counters"), flag)).cause == cause


def test_what_is_as_elsewhere_is_said_in_one_sentence() -> None:
    """The one who is called at night reads what differs first."""
    alike = {"gpu_clock_mhz": 1980.0, "gpu_temperature_c": 71.0, "pcie_width": 16.0}
    tables = [readings(name, sampled([value] * 6, value), STEPS) for name, value in alike.items()]
    power = readings("gpu_power_w", sampled([412.0] * 6, 655.0), STEPS)
    evidence = first(found(job("C02-no-counters"), *tables, power)).evidence
    assert evidence[-2:] == (
        "GPU power 412 W, elsewhere 655",
        "as elsewhere: GPU clock 1980 MHz, GPU temperature 71 °C, PCIe width 16 lanes",
    )


@pytest.mark.parametrize(
    "name, own, others",
    [
        ("gpu_throttle_power", 1.0, 0.0),
        ("gpu_throttle_thermal", 1.0, 0.0),
        ("gpu_throttle_hw", 1.0, 0.0),
        ("pcie_gen", 1.0, 5.0),
        ("pcie_width", 8.0, 16.0),
        ("nvlink_crc", 250.0, 0.0),
        ("gpu_ecc_corrected", 40.0, 0.0),
        ("gpu_clock_mhz", 1400.0, 1980.0),
        ("nic_errors", 1e6, 0.0),
        ("nic_link_downs", 3.0, 0.0),
        ("host_cpu_ratio", 1.0, 0.1),
        ("gpu_lost", 1.0, 0.0),
    ],
)
def test_a_counter_alone_is_no_finding(name: str, own: float, others: float) -> None:
    """All of them occur on machines that lose no time."""
    made = job("N-counters")
    steps = sorted({int(step) for step in made.table.step})
    ranks = made.job.layout.world_size
    table = readings(name, sampled([own] * len(steps), others, ranks), steps)
    whole = replace(made.context, counters=joined(made.context.counters, table))
    report = analyze(made.table, made.job, Options(), whole)
    assert (report.verdict, report.findings) == ("none", ())


def test_counters_change_no_cost_and_no_place() -> None:
    """They say why, not how much or where."""
    clock = readings("gpu_clock_mhz", sampled(FALLING, 1980.0), STEPS)
    with_clock = first(found(job("C02-no-counters"), clock))
    without = first(found(job("C02-no-counters")))
    assert with_clock.excess_s == without.excess_s
    assert with_clock.where == without.where
