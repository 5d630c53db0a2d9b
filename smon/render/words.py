"""Sentences: what an on-call person reads first, and what each finding says."""

from __future__ import annotations

import math
from typing import Final

from smon.report import Finding, FixPart, JobReport, Where

#: As in `smon.diagnose.thresholds`, which the renderer does not know; a test compares them.
ATTRIBUTION_THRESHOLD: Final = 1.03
#: From here on, launch delays are worth a sentence; as `LATE_SHARE` there.
LAUNCH_THRESHOLD: Final = 1.03

#: So many findings are named before their evidence.
_MAX_MORE: Final = 8

#: Causes in words.
CAUSES: Final = {
    "slow_gpu": "slow GPU",
    "thermal": "GPU slowed down by heat",
    "slow_forward": "slow forward",
    "slow_backward": "slow backward",
    "stage_partition": "more work than the other stages",
    "sequence_length": "sequences of uneven length",
    "moe_load": "uneven load of the experts",
    "gc": "garbage collection pauses",
    "dataloader": "waiting for the data loader",
    "host_contention": "late launches on a busy host",
    "slow_link": "slow network",
    "flapping_link": "flapping network link",
    "job_wide": "the whole job got slower",
    "checkpoint": "pauses between steps",
    "warmup": "warm-up",
    "hang": "hangs",
    "unknown": "no known cause",
    "congestion": "congested network",
    "nvlink": "slow links inside the node",
    "allocator": "memory allocator retries",
}


def printable(text: str) -> str:
    """Text with control characters made visible: names come from other people's files."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def seconds(value: float | None) -> str:
    """Three significant digits; ms below one second."""
    if value is None:
        return "unknown"
    unit, scaled = ("ms", value * 1e3) if abs(value) < 1.0 else ("s", value)
    digits = 0 if scaled == 0 else max(0, 2 - math.floor(math.log10(abs(scaled))))
    return f"{scaled:.{min(digits, 3)}f} {unit}"


def verdict_lines(report: JobReport) -> list[str]:
    """The verdict, what it costs, and what to do, each in one line."""
    slowdown = report.slowdown.paper
    if slowdown is None:
        return _without_times(report)
    runs = f"This job runs at {slowdown:.3f} × its ideal step time"
    if report.findings:
        return [action(report, report.findings[0]), f"{runs}: {_lost(report)}."]
    if slowdown < ATTRIBUTION_THRESHOLD:
        late = report.slowdown.launch
        if late is not None and late >= LAUNCH_THRESHOLD:
            return [f"{runs}, and late launches add {late - 1:.1%}: no cause was found for them."]
        return [f"No straggler. {runs}."]
    return [f"{runs}: {_lost(report)}.", _unexplained(report)]


def _without_times(report: JobReport) -> list[str]:
    """The verdict of a report without step times: a hang, or why there is none."""
    if report.findings:
        others = [one for one in report.findings[1:_MAX_MORE] if one.scope == "rank"]
        more = [place(report, finding) for finding in others]
        also = [f"Also suspect: {', '.join(more)}."] if more else []
        return [action(report, report.findings[0]), *also]
    if report.series is not None and report.verdict == "none":
        return [f"No burst and no slower level in {report.window.steps_used:,} step times."]
    if report.verdict == "insufficient_data" and report.series is not None:
        return [f"Insufficient data: {report.quality.notes[-1]}."]
    if not report.window.steps and report.quality.notes:
        return [f"Insufficient data: {printable(report.quality.notes[-1])}."]
    return [f"Insufficient data: {report.window.steps_used} usable steps."]


def action(report: JobReport, finding: Finding) -> str:
    """The one line to act on: who, why, how much, and what to do."""
    cause = CAUSES.get(finding.cause, finding.cause.replace("_", " "))
    line = f"{place(report, finding)}: {cause}"
    if finding.verdict == "hang":
        line += "" if finding.persistence.onset_step is not None else f" {_hanging(finding)}"
    else:
        line += f", +{seconds(finding.excess_s)} per step ({finding.excess_share:.1%})"
    return f"{line}. Next: {printable(finding.next[0])}" if finding.next else f"{line}."


def headline(report: JobReport, finding: Finding) -> str:
    """Who, why, how much, when: one line for one finding."""
    cause = CAUSES.get(finding.cause, finding.cause.replace("_", " "))
    if finding.verdict == "hang":
        return f"{place(report, finding)}: {cause} {_hanging(finding)}"
    cost = f"+{seconds(finding.excess_s)} per step ({finding.excess_share:.1%})"
    return f"{place(report, finding)}: {cause}, {cost}, {_when(finding)}"


def _hanging(finding: Finding) -> str:
    """The step that does not end; where steps are unknown, the collective."""
    step = finding.persistence.onset_step
    return f"at {printable(finding.phase)}" if step is None else f"in step {step}"


def place(report: JobReport, finding: Finding) -> str:
    """Where a finding is, in the job's own terms."""
    where = finding.where
    named = {
        "rank": f"Rank {where.rank}{_coordinates(where)}",
        "tp_group": f"TP group of rank {where.rank}{_coordinates(where)}",
        "node": f"Node of rank {where.rank}{_coordinates(where)}",
        "stage": f"Stage {where.stage}, on every DP rank",
        "dp_group": f"DP group of stage {where.stage}",
        "ep_group": f"EP group of stage {where.stage}",
        "pp_group": f"Pipeline of DP rank {where.dp}",
        "leaf": f"Leaf switch {printable(where.leaf or 'unknown')}",
        "job": "Whole job",
    }
    if finding.scope == "node" and where.rank is None:
        return f"Node {printable(where.node or 'unknown')}"
    if finding.scope == "dp_group" and where.ranks:
        return f"Group of ranks {', '.join(map(str, where.ranks))}"
    if finding.scope == "stage" and report.job.layout.dp == 1:
        return f"Stage {where.stage}"
    return named.get(finding.scope, finding.scope)


def _coordinates(where: Where) -> str:
    parts = [f"DP rank {where.dp}", f"stage {where.stage}"]
    if where.node:
        parts.append(printable(where.node))
    return f" ({', '.join(parts)})"


def _when(finding: Finding) -> str:
    lasting = finding.persistence
    share = f"in {lasting.share:.0%} of the steps"
    if lasting.kind == "periodic" and lasting.period:
        return f"every {lasting.period} steps"
    if lasting.onset_step is not None and lasting.kind in ("onset", "ramp"):
        growing = ", growing" if lasting.kind == "ramp" else ""
        return f"since step {lasting.onset_step}{growing}"
    if lasting.kind == "one_off":
        return f"once, at step {lasting.onset_step}"
    if lasting.kind == "rotating":
        return f"somewhere else each time, {share}"
    return share


def fix_words(fix: FixPart) -> str:
    """What to do, and to what."""
    return f"{fix.fix.replace('_', ' ')}: {printable(fix.detail)}"


def _lost(report: JobReport) -> str:
    cost = report.cost
    lost = f"{max(report.waste_ratio or 0.0, 0.0):.1%} of its GPU time is lost"
    hours = f"{cost.gpu_hours_per_day or 0:,.0f} GPU-hours"
    money = "" if cost.cost_per_day is None else f", ${cost.cost_per_day:,.0f}"
    return f"{lost}, {hours}{money} per day"


def _unexplained(report: JobReport) -> str:
    parts = sorted(report.ledger, key=lambda entry: -entry.excess_s)[:2]
    named = ", ".join(f"{part.factor.replace('_', ' ')} {part.share:.0%}" for part in parts)
    return (
        f"No cause was found that explains it. Largest parts: {named}."
        if named
        else ("No cause was found that explains it.")
    )
