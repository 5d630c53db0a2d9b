"""The page of all proofs: what was measured, against what it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tests.proof.line import Goal, Line

#: In the order of the page: what each shows.
ABOUT: Final[Mapping[str, str]] = {
    "scale": "Analysis of large jobs: from a Parquet file to a report with the exact slowdown of "
    "every worker, ledger, findings and fixes, by `smon analyze --json` in a process of its own.",
    "method": "Side by side with the published method, on equal input: a plain implementation of "
    "it, which also gives the published answers of the public traces, and SMon. Both simulate a "
    "whole op over all steps and DP ranks at once; the published method simulates the job anew "
    "for each DP rank and each stage, and cannot afford to for each worker. Seconds are CPU time "
    "of one process, without reading files. What every worker one by one would take is "
    "extrapolated from a few of them.",
    "live": "Running jobs in which one worker becomes slow: how long from the last event of a step "
    "to its times and findings in REST; ledger and shares of a large job follow with the report. "
    "One of 1,024 workers, whose agents send over HTTP; and one of "
    "16,384 GPUs with 766,208 ops a step, whose steps are stored as the server's drain stores "
    "them, so that two cores are left for the running diagnosis.",
    "ingest": "One server process, batches of 1,584 events over real HTTP, synced to disk before "
    "they are acknowledged.",
    "load": "The agents of a job on 10,000 GPUs: 1,250 hosts, a connection each, that send what "
    "they have every 10 s at moments hashed as those of real agents; at the rate of a job's ops, "
    "and at that of its collectives layer by layer as well. The generator shares the cores.",
    "overload": "Ten times as much as a server is to take: first ten times the requests per second "
    "of a tenant, by agents that come again without waiting; then ten times as many large, slow "
    "bodies as there is memory for, by agents that wait as they are told. Another tenant sends a "
    "little all the while, and a real agent of the crowded tenant is watched.",
    "soak": "An hour on one server with a worker: jobs that begin and end, live and recorded; real "
    "agents that come, are killed and go; pages, REST and metrics read. What is kept goes after "
    "five minutes. Growth is the median of the slopes between all pairs of samples, from the "
    "second quarter on.",
    "kills": "Agents, servers and the database are killed at random under load, servers with what "
    "a power cut does to their disks; then the stored events are compared with those written. "
    "[Faults](faults.md) explains how.",
    "bodies": "Damaged bodies and heads over real HTTP, most with a digest that fits the damage; "
    "and bombs, bodies that would be a thousand times larger once unpacked.",
    "corpora": "Text that means harm, wherever a server takes text: paths out of a folder, SQL, "
    "addresses that lead inside, heads of requests that mean two things, forged tokens, markup in "
    "names. At every route that the server lists, its pages and its ops port, with two tenants; "
    "secret files lie beside its data. [Faults](faults.md#hostile-text).",
    "crash": "Decoders with a planted defect: they decode, and then die of bodies that say so, by "
    "a wrong pointer, an abort, a loop in native code, too much memory, or SIGKILL. Such bodies "
    "come over HTTP beside healthy streams, and then lie in the log of a server that starts.",
    "operations": "A backup is made while batches come, the server dies, a restored one takes its "
    "place and is sent everything again; servers start on data and logs of every released schema, "
    "and take what agents of every version of the protocol send; processes at work are stopped, "
    "servers restarted in turn; and all that was written is searched for secrets. "
    "[Releases](releases.md).",
    "workers": "Windows of small jobs on PostgreSQL, analysed by worker processes: a backlog that "
    "one and two of them drain, and one whose workers are killed while they have a window.",
    "cluster": "Windows of small jobs on PostgreSQL and an S3 server, analysed on a Ray cluster: "
    "one worker claims them, nodes analyse them, and nodes are killed while they do, as by a power "
    "cut. The nodes, the database and the servers share this machine.",
    "log": "The server's log and an agent's spool on a disk that lies: one byte of a segment is "
    "changed, over and over, and all that was written is read back. And how long a server takes to "
    "find what is in its log after a crash.",
    "network": "Agents and server in network namespaces, and a wire between them that loses "
    "packets in both directions, resets connections, or is cut; then a relay that breaks "
    "connections in the middle of requests and answers. [Faults](faults.md#bad-networks).",
    "clocks": "A job that nobody slows down, on two hosts. The clock of one of them, and that of "
    "the server, are set ahead and back, and right again, or gain time, while agents send. "
    "[Faults](faults.md#clocks).",
    "clients": "Clients that connect from many addresses and send nothing, heads or bodies byte by "
    "byte, or nothing more after an answer, and come again when they are cut off; among them, "
    "agents send batches of 1,584 events at a steady rate. [Faults](faults.md#slow-clients).",
    "alerts": "A rank of a running job becomes slow, and the server is killed while Prometheus has "
    "the alert pending, and while it fires; each time it is away for at least one scrape. "
    "[Faults](faults.md#alerts-across-a-restart).",
    "fleet": "A month of jobs on hosts that chance gives them, a few of them bad; other jobs are "
    "slow for reasons of their own. All are imported into a real server; a host that is a suspect "
    "in two jobs counts as flagged.",
    "sizes": "What a job costs the service: bytes of each event on the wire and at rest, CPU time "
    "and memory of server and worker, rows of a window. [Scale](scale.md) reckons with it.",
    "readers": "Damaged copies of public traces, read and analysed in guarded processes. "
    "[Faults](faults.md#damaged-and-hostile-files) says what counts as a failure.",
}

NAMES: Final = tuple(ABOUT)

#: Why a goal is missed, and what would mend it, by (proof, goal).
MISSED: Final[Mapping[tuple[str, str], str]] = {}

_HEAD: Final = """# Proof

What SMon holds at the size of the largest jobs, and under what goes wrong. Written by `make proof` from `docs/proof.jsonl`: do not edit. Each proof is a command, `python -m tests.proof NAME`, that prints its figures as one line of JSON; `--short` is the form that CI runs. Goals about speed depend on the machine, which stands beside them; nothing else does. Machines that look alike differ: on others with two cores, the same command has taken twice as long.
"""  # noqa: E501  # a paragraph of a page


def page(lines: Sequence[Line]) -> str:
    """Markdown."""
    return "\n".join([_HEAD, *_summary(lines), *(text for line in lines for text in _part(line))])


def _summary(lines: Sequence[Line]) -> list[str]:
    goals = [goal for line in lines for goal in line.goals]
    met = sum(goal.met for goal in goals)
    return [f"{len(lines)} proofs, {len(goals)} goals, {met} of them met.\n"]


def _part(line: Line) -> list[str]:
    rows = ["| what | measured | goal | met |", "| --- | --- | --- | --- |"]
    rows += [_row(line.proof, goal) for goal in line.goals]
    return [
        f"## {line.proof}\n",
        ABOUT[line.proof] + "\n",
        f"{line.date}; {line.machine}; {line.seconds:,.0f} s.\n",
        *rows,
        "",
        *_figures(line.figures),
        "",
    ]


def _row(proof: str, goal: Goal) -> str:
    met = "yes" if goal.met else f"**no**: {MISSED.get((proof, goal.what), 'not yet looked into')}"
    return f"| {goal.what} | {number(goal.measured)} | {goal.limit} | {met} |"


def number(value: object) -> str:
    """A figure as people read it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def _figures(figures: Mapping[str, Any]) -> list[str]:
    """Plain figures as a list, lists of like records as tables."""
    plain = {name: value for name, value in figures.items() if not isinstance(value, list | dict)}
    text = [f"* {name.replace('_', ' ')}: {number(value)}" for name, value in plain.items()]
    for name, value in figures.items():
        records = value if isinstance(value, list) else [value] if isinstance(value, dict) else []
        if records and all(isinstance(record, dict) for record in records):
            text += ["", f"{name.replace('_', ' ').capitalize()}:", "", *_table(records)]
    return text


def _table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for record in records for name in record))
    head = [name.replace("_", " ") for name in names]
    rows = [[number(record.get(name, "")) for name in names] for record in records]
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(names), *rows)]
