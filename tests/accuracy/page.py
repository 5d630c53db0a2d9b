"""The page: the numbers of the study in plain words, as Markdown.

Flow: `tests.accuracy.summary` and `tests.accuracy.real` → **here** → ``docs/accuracy.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tests.accuracy.real import RealTrace
from tests.accuracy.summary import BANDS, CauseRow, Failure, Rate, Summary, upper_bound
from tests.accuracy.windows import Outcome

#: Seeds that stand for a kind of failure.
_EXAMPLES: Final = 6

_INTRO: Final = """\
# Accuracy

How often SMon is right, measured on random synthetic jobs whose true answer is known. Written by \
`make accuracy`: do not edit. [Causes](causes.md) explains the words.

The seeds are kept for this report: thresholds were set on others. The jobs are simulated, \
with noise on every op; real jobs have noise and faults that no one has thought of, so the \
numbers say how well the tests do what they are meant to do, not how often they will be right on a \
cluster."""

_FAILS: Final = """\
Every way in which an answer was wrong, and how often; one window can appear more than once. \
*Called* means that the cause was missed and another one was named instead; *extra finding* is one \
beside the true causes. *Cost* is what the true cause costs, as a share of the step. Each seed is \
one window: `python -m tests.accuracy.study --show SEED` (with the `--windows` and `--seed` of \
this run) generates and analyses it again, and prints the true answer and the findings."""


@dataclass(frozen=True, slots=True)
class Run:
    """How the study was run."""

    windows: int
    clean: int
    seed: int
    seconds: float
    cores: int
    date: str
    version: str
    python: str


def page(run: Run, outcomes: Sequence[Outcome], summary: Summary, real: Sequence[RealTrace]) -> str:
    """The whole document."""
    parts = [
        _INTRO,
        _headline(summary),
        _what_was_run(run, outcomes),
        _false_alarms(summary),
        _per_cause(summary.rows),
        _by_size(summary.rows),
        _confusion(summary),
        _pairs(summary),
        _silences(summary),
        _real(real),
        _failures(summary.failures),
    ]
    return "\n\n".join(parts) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def percent(value: float | None, digits: int = 1) -> str:
    """A share in words; a dash if there is none."""
    return "–" if value is None or not math.isfinite(value) else f"{value * 100:.{digits}f} %"


def rate(value: Rate) -> str:
    """A rate with what it is made of; only a full one is 100 %."""
    if value.ratio is None:
        return "–"
    shown = percent(value.ratio)
    shown = "99.9 %" if shown == "100.0 %" and value.hits < value.of else shown
    return f"{shown} ({value.hits:,} of {value.of:,})"


def _headline(summary: Summary) -> str:
    found = Rate(sum(row.found for row in summary.rows), sum(row.due for row in summary.rows))
    rows = [
        ("Clean windows with a false alarm", rate(summary.clean)),
        (
            "95 % upper bound of that rate",
            f"{1000 * upper_bound(summary.clean.hits, summary.clean.of):.1f} per 1,000",
        ),
        ("Single cause of at least 10 % of the step: cause right", rate(summary.big_cause)),
        ("Single cause of at least 10 % of the step: place right", rate(summary.big_place)),
        ("Single cause of any size worth reporting: found", rate(found)),
        ("Two causes at once: both found", rate(summary.pairs.both_found)),
    ]
    return table(("", "result"), rows)


def _what_was_run(run: Run, outcomes: Sequence[Outcome]) -> str:
    shapes = [outcome.shape for outcome in outcomes]
    groups = ("clean", "alone", "pair", "recording")
    number = {name: sum(one.case.group == name for one in outcomes) for name in groups}
    workers = [shape["dp"] * shape["pp"] for shape in shapes]
    hosts = sorted({shape["ranks_per_host"] for shape in shapes})
    rows = [
        ("windows", f"{len(outcomes):,}, each of another job"),
        ("of these", _kinds(number)),
        ("workers", f"{_range(workers)}, half of the jobs above {_median(workers):,}"),
        ("DP", _range([shape["dp"] for shape in shapes])),
        ("PP", _range([shape["pp"] for shape in shapes])),
        ("microbatches", _range([shape["microbatches"] for shape in shapes])),
        ("steps", _range([shape["steps"] for shape in shapes])),
        ("ranks per host", ", ".join(str(number) for number in hosts)),
        ("seeds", f"{run.seed} to {run.seed + len(outcomes) - 1}"),
        ("date", run.date),
        ("machine", f"{run.cores} cores, {run.seconds / 60:.1f} minutes, Python {run.python}"),
        ("version", f"SMon {run.version}"),
    ]
    text = (
        "A cause costs from about 1 % to 100 % of the healthy step, in pairs 5 % to 20 % each. "
        "Half of the jobs have hosts, counters, or other side evidence, each on its own."
    )
    return f"## What was run\n\n{table(('', 'value'), rows)}\n\n{text}"


def _kinds(number: dict[str, int]) -> str:
    return (
        f"{number['clean']:,} clean, {number['alone']:,} with one cause, "
        f"{number['pair']:,} with two, {number['recording']:,} clean ones that are badly recorded"
    )


def _range(values: Sequence[int]) -> str:
    return f"{min(values, default=0):,} to {max(values, default=0):,}"


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2] if values else 0


def _false_alarms(summary: Summary) -> str:
    rows = []
    named = (("clean", summary.clean), ("wrong clock, lost data", summary.recording))
    for name, count in named:
        per = "–" if count.ratio is None else f"{1000 * count.ratio:.1f}"
        bound = f"{1000 * upper_bound(count.hits, count.of):.1f}"
        rows.append((name, f"{count.of:,}", str(count.hits), per, bound))
    head = ("healthy jobs", "windows", "with a finding", "per 1,000", "95 % upper bound")
    text = (
        "Any finding at all counts, of whatever severity. The bound is that of Clopper and "
        "Pearson, one-sided; without a false alarm it is the rule of three."
    )
    return f"## False alarms\n\n{table(head, rows)}\n\n{text}"


def _per_cause(rows: Iterable[CauseRow]) -> str:
    head = (
        *("cause", "windows", "due", "found", "place right", "kind right"),
        *("cost off by, median", "p90", "90 % found from"),
    )
    lines = [
        (
            f"`{row.cause}`",
            str(row.windows),
            str(row.due),
            _part(row.found, row.due),
            _part(row.place, row.found),
            _part(row.kind, row.found),
            percent(row.error_median),
            percent(row.error_p90),
            _limit(row),
        )
        for row in rows
    ]
    text = (
        "Windows with this cause alone. *Due* are those that cost at least 1 % of the step "
        "(`job_wide`: a rise of 3 %); the others need not be reported. *Place right* and *kind "
        "right* are of those found. The cost counts as exact between what the cause adds to a "
        "healthy job and what its removal gains. *90 % found from* is the detection limit: of all "
        "windows that cost at least this share of the step, nine in ten were found; ≤ where that "
        "holds down to the smallest that was tried, a "
        "dash where it holds nowhere."
    )
    return f"## Each cause alone\n\n{table(head, lines)}\n\n{text}"


def _part(hits: int, of: int) -> str:
    return "–" if of == 0 else f"{hits} ({hits / of:.0%})".replace("%)", " %)")


def _limit(row: CauseRow) -> str:
    if row.limit is None:
        return "–"
    return f"{'≤ ' if row.limit <= row.tried else ''}{percent(row.limit)}"


def _by_size(rows: Iterable[CauseRow]) -> str:
    head = ["cause", *(_band(low, high) for low, high in pairwise(BANDS))]
    lines = [
        [f"`{row.cause}`", *(f"{band.hits} of {band.of}" if band.of else "" for band in row.bands)]
        for row in rows
        if any(band.of for band in row.bands)
    ]
    return f"### Found, by share of the step\n\n{table(head, lines)}"


def _band(low: float, high: float) -> str:
    top = "and more" if math.isinf(high) else f"to {percent(high, 0)}"
    return f"{percent(low, 0)} {top}"


def _confusion(summary: Summary) -> str:
    true = list(dict.fromkeys(cause for cause, _ in sorted(summary.confusion)))
    said = list(dict.fromkeys(sorted(cause for _, cause in summary.confusion)))
    head = ["true \\ first finding", *(f"`{cause}`" for cause in said)]
    lines = [
        [f"`{row}`", *(str(summary.confusion[row, cell] or "") for cell in said)] for row in true
    ]
    text = (
        "Rows are what is true, columns what the first finding says; windows with one cause that "
        "is due, and healthy ones (`none`, and those that are badly recorded). Without counters "
        "`thermal` cannot be told from `slow_gpu`, which is then the right answer."
    )
    return f"## What is taken for what\n\n{table(head, lines)}\n\n{text}"


def _pairs(summary: Summary) -> str:
    pairs = summary.pairs
    rows = [
        ("both found", rate(pairs.both_found)),
        ("both found, at the right places", rate(pairs.both_placed)),
        ("a finding beside the two", rate(pairs.extra)),
    ]
    missed = [f"`{cause}` {one.hits} of {one.of}" for cause, one in pairs.missed if one.hits]
    text = f"Missed: {', '.join(missed) or 'none'}."
    return f"## Two causes at once\n\n{table(('', 'windows'), rows)}\n\n{text}"


def _silences(summary: Summary) -> str:
    quiet = summary.silences
    rings = summary.rings
    said = ", ".join(f"{number} × `{cause}`" for cause, number in rings.most_common())
    lines = [
        f"Of {quiet.windows:,} windows with something to report, {quiet.nothing} got no finding, "
        f"{quiet.unknown} only `unknown`, and in {quiet.failed} the analysis gave up. In "
        f"{quiet.clocks} of all windows the clocks could not be aligned, so that the network was "
        "not judged.",
        f"In a job of one stage a slow ring has no peers: {rings.total()} windows with one are "
        f"left out of all rates. What was said first of them: {said or 'there are none'}.",
    ]
    return "## Abstentions\n\n" + "\n\n".join(lines)


def _real(real: Sequence[RealTrace]) -> str:
    if not real:
        return "## Real traces\n\nNot there in this run: expected in `../shared/traces`."
    rows = [
        (f"`{one.name}`", one.known, f"`{one.verdict}`", " ".join(_cell(one.lines))) for one in real
    ]
    return f"## Real traces\n\n{table(('trace', 'known', 'verdict', 'what is said'), rows)}"


def _cell(lines: Iterable[str]) -> list[str]:
    return [line.replace("|", "\\|") for line in lines if not line.startswith("Next:")]


def _failures(failures: Sequence[Failure]) -> str:
    classes: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        classes.setdefault((failure.cause, failure.what), []).append(failure)
    ordered = sorted(classes.items(), key=lambda item: (-len(item[1]), item[0]))
    rows = [
        (
            f"`{cause}`",
            what,
            _number(members, "pair", other=True),
            _number(members, "pair"),
            _shares(members),
            _seeds(members),
        )
        for (cause, what), members in ordered
    ]
    head = ("true cause", "what is wrong", "alone", "in pairs", "cost", "seeds")
    body = table(head, rows) if rows else "Nowhere."
    return f"## Where it fails\n\n{_FAILS}\n\n{body}"


def _number(members: Iterable[Failure], group: str, *, other: bool = False) -> str:
    return str(sum((member.group == group) is not other for member in members) or "")


def _shares(members: Iterable[Failure]) -> str:
    """From the least to the most that the true causes cost."""
    shares = sorted(member.share for member in members if member.share)
    if not shares:
        return ""
    low, high = percent(shares[0]), percent(shares[-1])
    return low if low == high else f"{low} to {high}"


def _seeds(members: Sequence[Failure]) -> str:
    seeds = list(dict.fromkeys(str(member.seed) for member in members))
    more = len(seeds) - _EXAMPLES
    return ", ".join(seeds[:_EXAMPLES]) + (f", and {more} more" if more > 0 else "")
