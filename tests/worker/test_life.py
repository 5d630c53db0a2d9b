from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from smon.report import Finding, PersistencePart, Where
from smon.store.findings import (
    Event,
    Known,
    Seen,
    findings_since,
    known_findings,
    write_changes,
)
from smon.store.models import Finding as FindingRow
from smon.store.models import FindingEvent, FindingState
from smon.topology import Layout
from smon.trace.context import Context
from smon.worker import life
from smon.worker.life import Memory, Terms, changes, combined, ended, key_of, settled
from tests.worker.feed import S, Store

#: Steps without a finding that clear it.
CLEAR = 3


def finding(
    cause: str = "slow_gpu",
    *,
    share: float = 0.15,
    severity: str = "warning",
    kind: str = "persistent",
    verdict: str = "straggler",
    onset: int | None = None,
    **where: Any,  # noqa: ANN401  # scope, and fields of Where
) -> Finding:
    """A finding about rank 6, unless told otherwise."""
    scope = where.pop("scope", "rank")
    place = Where(**{"rank": 6, "dp": 2, "stage": 1, **where})
    return Finding(
        severity=severity,
        verdict=verdict,
        cause=cause,
        scope=scope,
        where=place,
        phase="compute",
        optypes=(),
        excess_s=share,
        excess_share=share,
        persistence=PersistencePart(kind, 1.0, onset, None),
        confidence=0.9,
        evidence=(),
        victims=None,
        candidates=(),
        next=(),
    )


def seen(one: Finding) -> Seen:
    """As an analysis gives it."""
    return Seen(key_of(one), one.severity, one, {"cause": one.cause}, "host-1", None)


# --- what is the same finding -----------------------------------------------------------------


def test_a_finding_is_known_by_cause_scope_and_place() -> None:
    """Not by how much it costs, how sure it is, or what is known of the host by now."""
    one = finding()
    assert key_of(one) == "slow_gpu|rank|rank=6"
    assert key_of(finding(share=0.5, severity="critical", node="n1", gpu_uuid="GPU-1")) == key_of(
        one
    )
    others = [
        finding("thermal"),
        finding(scope="tp_group"),
        finding(rank=7),
        finding(rank=None, dp=None, stage=1),
        finding(rank=None, dp=None, stage=None, node="n1"),
        finding(rank=None, dp=None, stage=None, leaf="leaf-1"),
        finding(rank=None, dp=None, stage=None),
    ]
    assert len({key_of(each) for each in [one, *others]}) == len(others) + 1


def test_which_ranks_of_many_are_named_makes_no_other_finding() -> None:
    """Lists of ranks change from window to window."""
    first = finding("gc", scope="job", rank=None, dp=None, stage=None, ranks=(1, 2))
    assert key_of(first) == key_of(replace(first, where=replace(first.where, ranks=(3,))))


# --- the life of one, in a store --------------------------------------------------------------


class Life:
    """Steps of a job, each with an analysis."""

    def __init__(self, store: Store) -> None:
        self.store = store
        stream = store.stream(Layout(dp=4, pp=2))
        self.ids = {
            "tenant_id": store.tenant_id,
            "job_id": stream.job_id,
            "attempt_id": stream.attempt_id,
        }
        self.steps: list[int] = []

    def step(self, number: int, *found: Finding) -> None:
        """One more step, and what its analysis finds."""
        self.steps = [*self.steps, number][-24:]
        self.store.clock.go_on(1)
        terms = Terms(self.steps, CLEAR)
        with self.store.database.write() as session:
            since = terms.front - life.REOPEN_STEPS
            known = known_findings(session, self.ids["attempt_id"], since)
            changed = changes(known, [seen(one) for one in found], terms)
            times = life.times_of(changed, self.store.clock())
            write_changes(session, self.ids, changed, times)

    def run(self, numbers: Sequence[int], *found: Finding) -> None:
        """Some steps with the same findings."""
        for number in numbers:
            self.step(number, *found)

    def rows(self) -> list[FindingRow]:
        """All findings, oldest first."""
        return sorted(self.store.all(FindingRow), key=lambda row: row.opened_ns)

    def events(self) -> list[tuple[str, int]]:
        """All events in order."""
        rows = sorted(self.store.all(FindingEvent), key=lambda row: row.at_ns)
        return [(row.event, row.step) for row in rows]


@pytest.fixture
def job(store: Store) -> Life:
    """A live job."""
    return Life(store)


def test_a_finding_opens_stays_and_clears(job: Life) -> None:
    """Cleared after three steps without it; `cleared_step` is the first of these."""
    job.run(range(3))
    job.run(range(3, 8), finding(onset=2))
    (row,) = job.rows()
    assert (row.state, row.opened_step, row.onset_step, row.last_step) == ("open", 3, 2, 7)
    job.run([8, 9])
    assert job.rows()[0].state == FindingState.OPEN
    job.step(10)
    (row,) = job.rows()
    assert (row.state, row.last_step, row.cleared_step) == ("cleared", 7, 8)
    assert row.cleared_ns == job.store.clock()
    assert (row.host, row.rank, row.dp, row.stage) == ("host-1", 6, 2, 1)
    assert job.events() == [("opened", 3), ("cleared", 8)]


def test_a_short_absence_is_none(job: Life) -> None:
    """Two steps without it change nothing."""
    job.step(0, finding())
    job.run([1, 2])
    job.step(3, finding())
    assert job.events() == [("opened", 0)]
    assert job.rows()[0].last_step == 3


def test_what_comes_back_soon_is_the_same(job: Life) -> None:
    """One row; what happened to it is told by events."""
    job.step(0, finding())
    job.run(range(1, 10))
    job.step(10, finding())
    (row,) = job.rows()
    assert (row.state, row.opened_step, row.cleared_step, row.cleared_ns) == ("open", 0, None, None)
    assert job.events() == [("opened", 0), ("cleared", 1), ("reopened", 10)]


def test_what_comes_back_much_later_is_another_one(job: Life) -> None:
    """After `REOPEN_STEPS`."""
    job.step(0, finding())
    job.run(range(1, life.REOPEN_STEPS + 5))
    job.step(life.REOPEN_STEPS + 5, finding())
    assert [row.state for row in job.rows()] == ["cleared", "open"]


def test_a_finding_near_its_threshold_does_not_fill_the_tables(job: Life) -> None:
    """There every other time, for 600 steps: one row, few events."""
    for number in range(600):
        near = [finding()] if number % 2 == 0 else []
        job.step(number, *near)
    assert len(job.rows()) == 1
    assert job.events() == [("opened", 0)]


def test_a_finding_that_comes_and_goes_slowly_has_one_row(job: Life) -> None:
    """Five steps there, five not, for 500 steps."""
    for number in range(500):
        there = [finding()] if number // 5 % 2 == 0 else []
        job.step(number, *there)
    assert len(job.rows()) == 1
    assert len(job.events()) == 100


def test_severity_rises_at_once_and_falls_when_that_is_clear(job: Life) -> None:
    """An excess around a threshold makes no events."""
    job.step(0, finding(share=0.09, severity="info"))
    job.step(1, finding(share=0.11))
    for number in range(2, 100):
        near = 0.095 if number % 2 else 0.105
        job.step(number, finding(share=near, severity="info" if near < 0.1 else "warning"))
    assert job.events() == [("opened", 0), ("severity", 1)]
    job.step(100, finding(share=0.07, severity="info"))
    assert job.events()[-1] == ("severity", 100)
    assert job.rows()[0].severity == "info"


@pytest.mark.parametrize(
    "before, now, share, shown",
    [
        ("info", "warning", 0.1, "warning"),
        ("info", "critical", 0.2, "critical"),
        ("critical", "warning", 0.19, "critical"),
        ("critical", "warning", 0.15, "warning"),
        ("critical", "info", 0.05, "info"),
        ("warning", "info", 0.081, "warning"),
        ("warning", "info", 0.079, "info"),
        ("warning", "warning", 0.12, "warning"),
    ],
)
def test_severity_as_it_is_shown(before: str, now: str, share: float, shown: str) -> None:
    """Up at once; down below four fifths of what the higher one needs."""
    assert settled(before, now, share) == shown


def test_findings_live_side_by_side(job: Life) -> None:
    """Each has its own life."""
    other = finding("slow_link", verdict="link", rank=9)
    job.run(range(4), finding(), other)
    job.run(range(4, 8), other)
    states = {row.cause: row.state for row in job.rows()}
    assert states == {"slow_gpu": "cleared", "slow_link": "open"}


def test_an_onset_that_is_known_later_is_noted(job: Life) -> None:
    """And one that has left the window is kept."""
    job.step(5, finding())
    assert job.rows()[0].onset_step is None
    job.step(6, finding(onset=4))
    job.step(7, finding())
    assert job.rows()[0].onset_step == 4


def test_sampled_steps_are_counted_not_subtracted(job: Life) -> None:
    """Three analysed steps clear it, whatever their numbers."""
    job.step(0, finding())
    job.run([10, 20])
    assert job.rows()[0].state == FindingState.OPEN
    job.step(30)
    assert job.rows()[0].cleared_step == 10


def test_several_steps_at_once_count_as_several(job: Life) -> None:
    """One analysis may cover all that became ready meanwhile."""
    job.step(0, finding())
    job.steps += [1, 2, 3]
    job.step(4)
    assert job.rows()[0].cleared_step == 1


def test_no_finding_outlives_its_job() -> None:
    """It ends as it was, at the last step that had it."""
    known = [
        Known("a", "k", FindingState.OPEN, "warning", None, 1, 9, None),
        Known("b", "l", FindingState.CLEARED, "warning", None, 1, 3, 4),
    ]
    assert [(one.event, one.step, one.known) for one in ended(known)] == [
        (Event.ENDED, 9, known[0])
    ]


def test_findings_since_a_time(job: Life) -> None:
    """What is open, was there, or changed since then; of this job of this tenant only."""
    job.run(range(4), finding())
    job.run(range(4, 60), finding("slow_link", verdict="link", rank=9))
    half = job.store.clock() - 20 * S

    def asked(tenant: str, job_id: str, since: int) -> list[str]:
        with job.store.database.read() as session:
            return [row.cause for row in findings_since(session, tenant, job_id, since)]

    mine = job.ids["tenant_id"], job.ids["job_id"]
    assert asked(*mine, half) == ["slow_link"]
    assert asked(*mine, 0) == ["slow_link", "slow_gpu"]
    assert asked("other", mine[1], 0) == []
    assert asked(mine[0], "other", 0) == []


# --- from two windows -------------------------------------------------------------------------


def both(
    long: list[Finding], short: list[Finding], gone: set[str] | None = None, *, start: bool = False
) -> tuple[list[str], set[str]]:
    """Causes that are held, and keys that are gone."""
    before = Memory(frozenset(gone or ()), life.PUZZLED)
    found, after = combined(long, short, before, from_start=start)
    return [one.cause for one in found], set(after.gone)


def test_what_is_new_shows_in_the_latest_steps_first() -> None:
    """If it is large and lasts; small things of few steps may be chance."""
    assert both([], [finding()]) == (["slow_gpu"], set())
    assert both([], [finding(share=0.04)]) == ([], set())
    assert both([], [finding(kind="one_off")]) == ([], set())


def test_what_is_over_shows_in_the_latest_steps_first() -> None:
    """A slow device that the latest steps do not have is gone, until they have it again."""
    key = key_of(finding())
    assert both([finding()], []) == ([], {key})
    assert both([finding(share=0.03)], [], {key}) == ([], {key})
    assert both([], [], {key}) == ([], set())
    assert both([finding()], [finding()], {key}) == (["slow_gpu"], set())


@pytest.mark.parametrize(
    "kept",
    [
        finding(share=0.03),
        finding("gc", verdict="host_stall", kind="intermittent"),
        finding("flapping_link", verdict="link", kind="intermittent"),
        finding("job_wide", verdict="job_wide", kind="onset", scope="job"),
        finding("hang", verdict="hang", kind="one_off"),
    ],
)
def test_what_a_few_steps_cannot_see_is_left_to_the_long_window(kept: Finding) -> None:
    """Weak effects, what comes now and then, and changes that lie before the latest steps."""
    assert both([kept], []) == ([kept.cause], set())


def test_what_nobody_explains_needs_both() -> None:
    """While something begins or ends, one window has a part of it that it cannot name."""
    unknown = finding("unknown", verdict="none", kind="persistent", scope="job")
    assert both([unknown], []) == ([], set())
    assert both([], [unknown]) == ([], set())
    assert both([unknown], [unknown]) == (["unknown"], set())


def test_what_nobody_explains_is_said_if_it_stays_so() -> None:
    """A cause that begins costs time before there are steps enough to name it."""
    unknown = finding("unknown", verdict="none", kind="persistent", scope="job")
    memory, said = Memory(), []
    for _ in range(6):
        found, memory = combined([unknown], [unknown], memory, from_start=False)
        said.append(len(found))
    assert said == [0, 0, 0, 1, 1, 1]
    _, memory = combined([finding()], [finding()], memory, from_start=False)
    assert memory.puzzled == 0


def test_only_the_start_of_a_job_warms_up() -> None:
    """A trailing window begins anywhere."""
    warm = finding("warmup", verdict="warmup", kind="one_off", scope="job")
    assert both([warm], [warm]) == ([], set())
    assert both([warm], [], start=True) == (["warmup"], set())


def test_the_graver_severity_and_the_larger_cost_count() -> None:
    """The latest steps say what it costs now; twenty steps are needed to be critical."""
    long = finding(share=0.12, severity="critical", onset=30)
    short = finding(share=0.25, severity="warning")
    (one,), _ = combined([long], [short], Memory(), from_start=False)
    assert (one.severity, one.excess_share, one.persistence.onset_step) == ("critical", 0.25, 30)


def test_a_hang_stands_first() -> None:
    """Then what costs most; what blames nobody comes last."""
    pause = finding("checkpoint", verdict="planned_pause", kind="periodic", share=0.9)
    hang = finding("hang", verdict="hang", kind="one_off", share=0.0)
    causes, _ = both([pause, finding(), hang], [finding()])
    assert causes == ["hang", "slow_gpu", "checkpoint"]


def test_hosts_come_from_the_place_or_from_the_side_evidence() -> None:
    """So that a host can be followed from job to job."""
    from smon.analysis import analyze
    from tests.builders import synthetic_job

    table, job = synthetic_job()
    report = analyze(table, job)
    (one,) = life.seen_in(report.outline, Context(hosts={6: "node-3"}, gpus={6: "GPU-9"}))
    assert (one.host, one.gpu_uuid) == ("node-3", "GPU-9")
    assert one.document["cause"] == "slow_gpu"
    (bare,) = life.seen_in(report.outline, Context())
    assert (bare.host, bare.gpu_uuid) == (None, None)
