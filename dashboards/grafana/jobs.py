"""The dashboard "SMon: jobs": which jobs lose time, how much, why, and who is suspected.

Flow: metrics of running jobs (`smon.metrics`) → **here** → ``jobs.json``. Every server of a
database publishes the same jobs, so each expression takes the maximum over servers before it adds.
"""

from __future__ import annotations

from typing import Final

from dashboards.grafana.panels import (
    HIDDEN,
    RATIO_STEPS,
    SOME_STEPS,
    WASTE_STEPS,
    Column,
    Json,
    Panel,
    Query,
    Row,
    board,
    chosen,
    datasource,
    series,
    stat,
    table,
)

NAME: Final = "jobs"

_OF: Final = '{train_job=~"$train_job"}'
_JOB: Final = "tenant, train_job"
_LEGEND: Final = "{{train_job}} {{tenant}}"
_SEVERITIES: Final = {1: "information", 2: "warning", 3: "critical"}

#: The page of the job, whose address stands in a hidden column.
_PAGE: Final = "${__data.fields.Page}"


def _max(metric: str, *labels: str) -> str:
    """A metric of the chosen jobs, once, however many servers publish it."""
    return f"max by ({', '.join([_JOB, *labels])}) ({metric}{_OF})"


_GPUS_LOST: Final = f"{_max('smon_job_waste_ratio')} * {_max('smon_job_gpus')}"


def dashboard() -> Json:
    """The whole of it."""
    return board(
        "smon-jobs",
        "SMon: jobs",
        "Which training jobs are slower than they should be, by how much, why, and since when.",
        (
            Row("Now", (*_totals(), _jobs(), _findings(), _suspects())),
            Row("Over time", _over_time()),
            Row("How far to trust it", _quality()),
        ),
        (datasource(), chosen("train_job", "Job", "smon_job_info", "train_job")),
    )


def _totals() -> tuple[Panel, ...]:
    hours = f"24 * sum({_GPUS_LOST})"
    return (
        stat("Jobs", "Jobs that run now.", Query(f"count({_max('smon_job_info')})"), "none"),
        stat(
            "Jobs with findings",
            "Jobs in which something of severity warning or above costs time.",
            Query(f"count(max by ({_JOB}) (smon_finding_severity{_OF}) >= 2) or vector(0)"),
            "none",
            steps=SOME_STEPS,
        ),
        stat(
            "GPUs lost",
            "As many GPUs as the waste of all jobs is worth: sum of waste × GPUs.",
            Query(f"sum({_GPUS_LOST})"),
            "none",
            decimals=1,
        ),
        stat(
            "GPU-hours lost per day",
            "What all jobs waste in a day, if it goes on like this.",
            Query(hours),
            "none",
            decimals=0,
        ),
        stat(
            "Cost per day",
            "The same in money. Needs SMON_PRICE_PER_GPU_HOUR.",
            Query(f"{hours} * scalar(max(smon_gpu_hour_price))"),
            "currencyUSD",
            decimals=0,
        ),
        stat(
            "Incomplete or not aligned",
            "Jobs of which less than 95 % of the ops arrive, or whose clocks do not agree: their "
            "findings may change, and their alerts are held back.",
            Query(
                f"count(({_max('smon_job_coverage_ratio')} < 0.95) "
                f"or (min by ({_JOB}) (smon_job_clocks_aligned{_OF}) == 0)) or vector(0)"
            ),
            "none",
            steps=SOME_STEPS,
        ),
    )


def _jobs() -> Panel:
    columns = (
        Column("train_job", "Job", link=_PAGE),
        Column("tenant", "Tenant"),
        Column("Value #B", "Slowdown S", decimals=3, steps=RATIO_STEPS),
        Column("Value #C", "Waste", "percentunit", 1, WASTE_STEPS),
        Column("Value #D", "Step time", "s"),
        Column("Value #E", "Ideal", "s"),
        Column("Value #F", "GPUs", decimals=0),
        Column("Value #G", "GPU-hours lost per day", decimals=0),
        Column("Value #H", "Ops that arrived", "percentunit", 1),
        Column("layout", "Layout"),
        Column("attempt", "Attempt"),
        Column("url", "Page", link=HIDDEN),
    )
    queries = (
        Query(_max("smon_job_info", "url", "layout", "attempt")),
        Query(_max("smon_job_slowdown_ratio")),
        Query(_max("smon_job_waste_ratio")),
        Query(_max("smon_job_step_seconds")),
        Query(_max("smon_job_ideal_step_seconds")),
        Query(_max("smon_job_gpus")),
        Query(f"24 * {_GPUS_LOST}"),
        Query(_max("smon_job_coverage_ratio")),
    )
    return table(
        "Jobs, worst first",
        "The latest steps of each running job. Slowdown S is step time over the step time without "
        "stragglers and imbalance; waste is 1 - 1/S. A click on a job opens its page.",
        queries,
        columns,
        sort="GPU-hours lost per day",
    )


def _findings() -> Panel:
    columns = (
        Column("train_job", "Job"),
        Column("tenant", "Tenant"),
        Column("cause", "Cause"),
        Column(
            "Value #A",
            "Severity",
            steps=((None, "text"), (2, "orange"), (3, "red")),
            words=_SEVERITIES,
        ),
        Column("Value #B", "Costs per step", "s"),
        Column("Value #C", "Share of the step", "percentunit", 1, WASTE_STEPS),
        Column("Value #D", "Since step", decimals=0),
        Column("Value #E", "GPU-hours per day", decimals=0),
    )
    gpus = f"on ({_JOB}) group_left () {_max('smon_job_gpus')}"
    queries = (
        Query(_max("smon_finding_severity", "cause")),
        Query(_max("smon_job_excess_seconds", "cause")),
        Query(_max("smon_job_excess_ratio", "cause")),
        Query(_max("smon_finding_onset_step", "cause")),
        Query(f"24 * {_max('smon_job_excess_ratio', 'cause')} * {gpus}"),
    )
    return table(
        "Open findings, dearest first",
        "What costs time now, by cause: the dearest finding of each. What to do stands on the page "
        "of the job and in the runbook of the cause.",
        queries,
        columns,
        sort="GPU-hours per day",
    )


def _suspects() -> Panel:
    columns = (
        Column("train_job", "Job"),
        Column("tenant", "Tenant"),
        Column("slot", "Place"),
        Column("Value #A", "Rank", decimals=0),
        Column("cause", "Cause"),
        Column("Value #B", "Costs per step", "s"),
    )
    queries = (
        Query(_max("smon_suspect_rank", "slot", "cause")),
        Query(_max("smon_suspect_excess_seconds", "slot", "cause")),
    )
    return table(
        "Suspects",
        "Ranks that all others wait for, at most ten of a job, dearest first. Their hosts stand on "
        "the page of the job.",
        queries,
        columns,
        sort="Costs per step",
        height=7,
    )


def _over_time() -> tuple[Panel, ...]:
    return (
        series(
            "Waste by job",
            "Part of the GPU time that is lost: 1 - 1/S. Dashed: 10 % and 20 %.",
            (Query(_max("smon_job_waste_ratio"), _LEGEND),),
            "percentunit",
            steps=WASTE_STEPS,
        ),
        series(
            "Slowdown by job",
            "Step time over ideal step time: 1 is as quick as it can be.",
            (Query(_max("smon_job_slowdown_ratio"), _LEGEND),),
            "none",
        ),
        series(
            "Step time and ideal",
            "Mean over the latest steps. The space between the two is what could be gained.",
            (
                Query(_max("smon_job_step_seconds"), f"{_LEGEND} recorded"),
                Query(_max("smon_job_ideal_step_seconds"), f"{_LEGEND} ideal"),
            ),
            "s",
        ),
        series(
            "Costs per step by cause",
            "Step time that would go away with each cause. Causes can hide behind each other, so "
            "these do not add up.",
            (Query(_max("smon_job_excess_seconds", "cause"), f"{_LEGEND} {{{{cause}}}}"),),
            "s",
        ),
    )


def _quality() -> tuple[Panel, ...]:
    return (
        series(
            "Analysis is behind by",
            "For how long the running diagnosis has been overdue; a few seconds are usual.",
            (Query(_max("smon_analysis_lag_seconds"), _LEGEND),),
            "s",
            width=8,
        ),
        series(
            "Ops that arrived",
            "Of those expected in the latest steps. Below 95 % (dashed), alerts are held back.",
            (Query(_max("smon_job_coverage_ratio"), _LEGEND),),
            "percentunit",
            width=8,
            steps=((None, "red"), (0.95, "text")),
        ),
        series(
            "Agents",
            "Streams of the chosen jobs: up, down (no heartbeat), ended.",
            (Query(f"sum by (state) ({_max('smon_job_agents', 'state')})", "{{state}}"),),
            "none",
            width=8,
        ),
    )
