"""What the page of a host or GPU shows, ready for its template.

Flow: `smon.store.queries.hosts` → **here** → `dashboards.web.pages`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dashboards.web.figures.strip import Span, Strip, strip_of
from dashboards.web.links import host_link, rank_link
from dashboards.web.views.hosts import causes_of
from smon.api.words import cause_words
from smon.nodes import cordon, drain, is_node
from smon.render.tables import Cell
from smon.store.models import FindingState
from smon.store.queries.agents import AgentRow
from smon.store.queries.hosts import (
    HostDetail,
    HostKind,
    HostRow,
    Standing,
    Suspicion,
)
from smon.store.queries.presence import Presence

#: Findings and jobs that the page shows; the CSV file and REST have all that are kept.
_MAX_LINES: Final = 100
_MAX_JOBS: Final = 12

_COLUMNS: Final = (
    *("finding_id", "job_id", "job", "attempt", "host", "gpu_uuid", "rank", "state", "severity"),
    *("cause", "scope", "excess_s", "excess_share", "gpus", "first_step", "last_step"),
    *("gpu_hours_per_day", "cost_per_day", "lost_gpu_hours", "lost_cost"),
    *("opened_s", "last_s", "cleared_s"),
)


@dataclass(frozen=True, slots=True)
class HostParts:
    """What the store knows of a host or GPU."""

    detail: HostDetail
    standing: Standing
    agents: Sequence[AgentRow]


@dataclass(frozen=True, slots=True)
class SuspicionLine:
    """One finding, its cause in words, and the pages of the job and of the rank."""

    one: Suspicion
    cause: str
    job_link: str
    rank_link: str | None


@dataclass(frozen=True, slots=True)
class PresenceLine:
    """One job that runs here, with the page of each of its ranks."""

    one: Presence
    ranks: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class Command:
    """One command to type, and what it is for."""

    purpose: str
    text: str


@dataclass(frozen=True, slots=True)
class HostView:
    """The page of a host or GPU.

    Attributes
    ----------
    state
        Name of the colours of the verdict: critical, slow, healthy.
    urgent
        Whether the commands are shown at once.
    """

    host: HostRow
    noun: str
    sentence: str
    lines: tuple[str, ...]
    state: str
    urgent: bool
    commands: tuple[Command, ...]
    not_a_node: bool
    hosts_of_gpu: tuple[str, ...]
    gpus_of_host: tuple[str, ...]
    strip: Strip | None
    findings: tuple[SuspicionLine, ...]
    findings_count: int
    running: tuple[PresenceLine, ...]
    agents: tuple[AgentRow, ...]
    csv: str
    rest: str


def host_view(parts: HostParts, now_s: float) -> HostView:
    """The page of a host or GPU."""
    detail = parts.detail
    row, is_gpu = detail.host, detail.host.kind is HostKind.GPU
    hosts = tuple(dict.fromkeys(one.host for one in detail.findings if one.host))
    node = (hosts[0] if hosts else None) if is_gpu else row.id
    link = host_link(row.id)
    return HostView(
        host=row,
        noun="GPU" if is_gpu else "host",
        sentence=record_words(row),
        lines=_lines(row, parts.standing),
        state=_state(row),
        urgent=row.recurs or row.open_findings > 0,
        commands=commands_for(node, row) if node else (),
        not_a_node=node is not None and not is_node(node),
        hosts_of_gpu=hosts if is_gpu else (),
        gpus_of_host=()
        if is_gpu
        else tuple(dict.fromkeys(one.gpu_uuid for one in detail.findings if one.gpu_uuid)),
        strip=_strip(detail.findings, now_s),
        findings=tuple(_line(one) for one in detail.findings[:_MAX_LINES]),
        findings_count=row.findings,
        running=tuple(
            PresenceLine(one, tuple((rank, rank_link(one.job_id, rank)) for rank in one.ranks))
            for one in detail.running
        ),
        agents=tuple(parts.agents),
        csv=link + ("&" if "?" in link else "?") + "as=csv",
        rest=f"/api/v1{link}" if "?" not in link else "",
    )


def record_words(row: HostRow) -> str:
    """What the record of a host or GPU means, in one sentence."""
    if row.jobs == 0:
        return "Never a suspect."
    if row.recurs:
        return f"A suspect in {row.jobs} jobs: it recurs and is worth a repair."
    often = "" if row.findings == 1 else f", {row.findings} times there"
    now = " now" if row.open_findings else ""
    return f"A suspect{now} in 1 job{often}: no pattern across jobs."


def _lines(row: HostRow, standing: Standing) -> tuple[str, ...]:
    if row.jobs == 0:
        return ("No finding names it, in any job that this server knows.",)
    noun = "GPUs" if row.kind is HostKind.GPU else "hosts"
    now = {0: "Nothing is open now.", 1: "1 finding is open now."}
    recur = "recurs" if standing.recurring == 1 else "recur"
    others = "none is in more jobs" if standing.worse == 0 else f"{standing.worse} in more jobs"
    compared = (
        f"Of {standing.suspects:,} {noun} that were ever suspects, {standing.recurring:,} "
        f"{recur}; {others} than this one."
    )
    return (
        f"Causes, most frequent first: {causes_of(row)}.",
        now.get(row.open_findings, f"{row.open_findings} findings are open now."),
        *((compared,) if standing.suspects > 1 else ()),
    )


def _state(row: HostRow) -> str:
    if row.jobs == 0:
        return "healthy"
    return "critical" if row.recurs or row.open_findings else "slow"


def commands_for(node: str, row: HostRow) -> tuple[Command, ...]:
    """What to type to look at a node, and to take it out; none where the name is not a node's."""
    if not is_node(node):
        return ()
    reason = f"smon_{row.causes[0]}" if row.causes else "smon"
    found = [
        Command("Slurm: no new jobs", drain(node, reason)),
        Command("Slurm: restart a job without it", f"sbatch --exclude={node} JOB_SCRIPT"),
    ]
    if (cordoned := cordon(node)) is not None:
        found.append(Command("Kubernetes: no new pods", cordoned))
    found.append(Command("Test it (on the node, once no job is on it)", "dcgmi diag -r 2"))
    return tuple(found)


def _line(one: Suspicion) -> SuspicionLine:
    return SuspicionLine(
        one=one,
        cause=cause_words(one.cause),
        job_link=f"/jobs/{one.job_id}",
        rank_link=None if one.rank is None else rank_link(one.job_id, one.rank, one.attempt),
    )


def _strip(found: Sequence[Suspicion], now_s: float) -> Strip | None:
    """Findings over time, one row for each job; what is open reaches to now."""
    spans: dict[str, list[Span]] = {}
    for one in found:
        is_open = one.state == FindingState.OPEN
        end = now_s if is_open else one.cleared_s if one.cleared_s is not None else one.last_s
        words = f"{cause_words(one.cause)}, attempt {one.attempt}"
        if one.rank is not None:
            words += f", rank {one.rank}"
        row = spans.setdefault(one.job_id, [])
        row.append(Span(one.opened_s, max(end, one.opened_s), words, is_open=is_open))
    names = {one.job_id: one.job for one in found}
    rows = [(names[job], f"/jobs/{job}", each) for job, each in list(spans.items())[:_MAX_JOBS]]
    return strip_of(rows) if rows else None


def host_rows(found: Sequence[Suspicion]) -> tuple[tuple[str, ...], list[dict[str, Cell]]]:
    """Names of the columns of the CSV file, and its rows."""
    return _COLUMNS, [{name: getattr(one, name) for name in _COLUMNS} for one in found]
