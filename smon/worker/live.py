"""The running diagnosis: after every step of a live job, what is wrong now.

Flow: ``attempts.ready_step`` (`smon.worker.assembly`) → **here** → ``attempts.live_report``,
``steps``, ``findings``. One worker at a time follows an attempt, under a lease with a fence; the
cost of a step does not grow with the age of the job (``docs/reference/windows.md`` section 6).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlalchemy.orm import Session

from smon.analysis import (
    Options,
    Study,
    empty_report,
    outline_of,
    planned_fixes,
    report_of,
    study,
)
from smon.diagnose.history import History
from smon.errors import FencedError, NothingUsableError, SMonError, StoreError
from smon.prepare import prepare
from smon.report import Finding, FixPart, JobReport, Outline
from smon.store import findings, steps
from smon.store import windows as table
from smon.store.findings import Source
from smon.store.results import numbers_of, packed
from smon.store.windows import AttemptInfo, Follow
from smon.trace.context import Context
from smon.trace.table import OpTable
from smon.worker import life
from smon.worker.leases import Leases
from smon.worker.material import (
    HISTORY_WINDOWS,
    complete,
    history_from,
    job_of,
    starts_of,
    with_hosts,
)
from smon.worker.matrix import workers_file
from smon.worker.service import Service
from smon.worker.trailing import Trailing, most_steps, plan_reading, read_new

_LOG: Final = logging.getLogger(__name__)

#: The latest steps that are looked at by themselves as well: with 8, a worker that becomes slow is
#: found after 4 steps, and is gone after 5; with 24 alone it takes 6 and 13.
SHORT_STEPS: Final = 8

#: Of jobs so large that no more steps than these are looked at, the latest are not looked at again.
ONE_LOOK_STEPS: Final = 12

#: Above so many ops what fixes would buy, a third of the cost of an analysis and more, is worked
#: out after the step has its report, and only when the findings change, and every so many steps.
PLAN_OPS: Final = 500_000
PLAN_STEPS: Final = 8

#: All attempts together keep at most so many times ``live_max_ops`` ops in memory.
MAX_KEPT: Final = 4

#: An attempt without a new step for so long is forgotten: most are over. If one comes again, its
#: latest steps are read again.
FORGET_S: Final = 600.0

#: After a failure an attempt is left alone for so long.
PAUSE_S: Final = 2.0

_NS: Final = 10**9

Check = Callable[..., None]


@dataclass(frozen=True, slots=True)
class _Planned:
    """What fixes would buy, as of a step and of the findings that were there then."""

    step: int
    keys: frozenset[str]
    fixes: tuple[FixPart, ...]


@dataclass(frozen=True, slots=True)
class _Fixes:
    """Fixes for a report, and whether they are of its own findings, or nearly."""

    fixes: tuple[FixPart, ...]
    fresh: bool


@dataclass(slots=True, eq=False)
class _Followed:
    """What a worker knows of an attempt that it follows.

    Attributes
    ----------
    fence
        Under which it was followed last: if another one lies between, somebody else has followed.
    at_ns
        When it was followed last.
    memory
        Of the last analysis.
    planned
        Fixes of an analysis that worked them out.
    history
        What is usual for the job, as of the window `history_of`.
    hosts
        Host of each rank, as its stream says.
    """

    fence: int
    at_ns: int = 0
    trailing: Trailing = field(default_factory=Trailing)
    memory: life.Memory = field(default_factory=life.Memory)
    planned: _Planned | None = None
    history: History | None = None
    history_of: int = -1
    hosts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Whole:
    """A whole report.

    Attributes
    ----------
    workers
        The file of every worker in each step.
    unplanned
        If what fixes would buy is still to be worked out: of what, and how.
    """

    report: JobReport
    workers: bytes | None = None
    unplanned: tuple[Study, Options] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """What one analysis gives.

    Attributes
    ----------
    rest
        Works out the whole report.
    """

    outline: Outline
    context: Context
    rows: list[steps.StepRow]
    rest: Callable[[], _Whole]

    @property
    def speaks(self) -> bool:
        """Whether it can say what is there and what is not."""
        return self.outline.verdict != "insufficient_data"


class Live:
    """Follows the live attempts that are due, one after the other.

    Parameters
    ----------
    service, leases
        Of the worker.
    plan_ops
        See `PLAN_OPS`.
    """

    def __init__(self, service: Service, leases: Leases, plan_ops: int = PLAN_OPS) -> None:
        self._service = service
        self._leases = leases
        self._plan_ops = plan_ops
        self._followed: dict[str, _Followed] = {}
        self._paused: dict[str, int] = {}

    @property
    def rows_read(self) -> int:
        """Ops read from files, of the attempts that are followed now."""
        return sum(one.trailing.rows_read for one in self._followed.values())

    def follows(self, within_s: float) -> bool:
        """Whether a step has been analysed within so many seconds."""
        since_ns = self._service.clock() - int(within_s * _NS)
        return any(one.at_ns >= since_ns for one in self._followed.values())

    def run(self) -> bool:
        """Analyse the attempt that has waited longest; False if none has.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        service = self._service
        now, lease_s = service.clock(), service.settings.lease_s
        # A pause that ends later than any can is of before the clock was set back.
        latest = now + int(PAUSE_S * _NS)
        self._paused = {name: at for name, at in self._paused.items() if now < at <= latest}
        with service.database.read() as session:
            attempt_id = table.live_due(session, service.name, now, lease_s, self._paused)
        if attempt_id is None:
            return self._end_one(now)
        with service.database.write() as session:
            follow = table.live_claim(session, attempt_id, service.name, now, lease_s)
        if follow is not None:
            self._try(follow)
        return True

    def _try(self, follow: Follow) -> None:
        try:
            with self._leases.holding(follow) as lease:
                self._follow(follow, lease.check)
        except FencedError as error:
            self._followed.pop(follow.attempt_id, None)
            _LOG.info("%s", error)
        except StoreError as error:
            self._pause(follow, error)
        except Exception:  # noqa: BLE001  # a failure of one attempt must not end the others
            self._service.metrics.errors.labels("live").inc()
            _LOG.exception("the running diagnosis of attempt %s failed", follow.attempt_id)
            self._followed.pop(follow.attempt_id, None)
            self._pass_over(follow)

    def _pause(self, follow: Follow, error: StoreError) -> None:
        """Not now: files may be missing for a moment, or the store."""
        _LOG.warning("the running diagnosis of attempt %s waits: %s", follow.attempt_id, error)
        self._followed.pop(follow.attempt_id, None)
        self._paused[follow.attempt_id] = self._service.clock() + int(PAUSE_S * _NS)

    def _pass_over(self, follow: Follow) -> None:
        """Leave the new steps out: the same failure again and again would help nobody."""
        self._paused[follow.attempt_id] = self._service.clock() + int(PAUSE_S * _NS)
        try:
            with self._service.database.write() as session:
                attempt = table.attempt(session, follow.attempt_id)
                if attempt is not None:
                    table.live_update(session, follow, {"live_step": attempt.ready_step})
        except StoreError as error:
            _LOG.warning("attempt %s cannot be passed over: %s", follow.attempt_id, error)

    # --- one attempt --------------------------------------------------------------------------

    def _follow(self, follow: Follow, check: Check) -> None:
        service = self._service
        begin = service.clock()
        followed = self._known(follow)
        with service.database.read() as session:
            attempt = table.attempt(session, follow.attempt_id)
            if attempt is None or attempt.ready_step is None:
                return
            plan = plan_reading(session, followed.trailing, attempt, service.settings)
            first = table.first_step_seen(session, attempt.id)
            self._refresh_history(followed, attempt, session=session)
            followed.hosts = table.hosts_of(session, attempt.id)
        before = followed.trailing.rows_read
        changed = read_new(service.objects, followed.trailing, plan, service.settings)
        service.metrics.rows.inc(followed.trailing.rows_read - before)
        check()
        made = self._analyse(followed, attempt, _Scope(first, changed), check)
        # Of a large job, who is slow need not wait for the ledger.
        early = followed.trailing.rows > self._plan_ops
        if early:
            self._write(follow, attempt, followed, made, {})
        whole = made.rest()
        check()
        values = self._values(attempt, whole)
        if early:
            with service.database.write() as session:
                table.live_update(session, follow, values)
        else:
            self._write(follow, attempt, followed, made, values)
        if whole.unplanned is not None:
            self._plan(follow, attempt, followed, whole.report, *whole.unplanned)
        service.metrics.seconds.labels("live").observe((service.clock() - begin) / 1e9)

    def _known(self, follow: Follow) -> _Followed:
        """What is in memory of an attempt, if nobody else has followed it meanwhile."""
        known = self._followed.pop(follow.attempt_id, None)
        if known is None or known.fence != follow.fence - 1:
            known = _Followed(follow.fence)
        known.fence, known.at_ns = follow.fence, self._service.clock()
        self._followed[follow.attempt_id] = known
        self._evict()
        return known

    def _evict(self) -> None:
        """Forget attempts that are over, or silent; if memory is short, those longest ago first."""
        most = MAX_KEPT * self._service.settings.live_max_ops
        since_ns = self._service.clock() - int(FORGET_S * _NS)
        while len(self._followed) > 1 and (
            next(iter(self._followed.values())).at_ns < since_ns
            or sum(one.trailing.rows for one in self._followed.values()) > most
        ):
            del self._followed[next(iter(self._followed))]

    def _refresh_history(
        self, followed: _Followed, attempt: AttemptInfo, *, session: Session
    ) -> None:
        """Look up what is usual when a window has ended since."""
        size = attempt.window_steps
        if not size or attempt.ready_step is None:
            return
        numbers = followed.trailing.numbers()
        first = numbers[0] if numbers else attempt.ready_step
        if attempt.ready_step // size == followed.history_of:
            return
        reports = table.earlier_reports(session, attempt, first, HISTORY_WINDOWS)
        followed.history = history_from(reports, attempt.job)
        followed.history_of = attempt.ready_step // size

    def _analyse(
        self, followed: _Followed, attempt: AttemptInfo, scope: _Scope, check: Check
    ) -> _Made:
        numbers = followed.trailing.numbers()
        context = with_hosts(followed.trailing.context(), followed.hosts)
        ops = followed.trailing.table() if numbers else None
        options = Options(
            notes=attempt.notes,
            price_per_gpu_hour=self._service.settings.price,
            history=followed.history,
            progress=check,
        )
        try:
            whole, notes = complete(ops, attempt)
            options = replace(options, notes=notes)
            given = whole, context, options
            outline, rest = self._outline(followed, attempt, scope, given)
        except NothingUsableError as error:
            outline, rest = _nothing(attempt, error, options)
        except StoreError:
            raise
        except SMonError as error:
            outline, rest = _nothing(attempt, NothingUsableError(str(error)), options)
        starts = {} if ops is None else starts_of(ops)
        rows = steps.rows_of(outline, starts, scope.new_steps(attempt, numbers))
        return _Made(outline, context, rows, rest)

    def _outline(
        self,
        followed: _Followed,
        attempt: AttemptInfo,
        scope: _Scope,
        given: tuple[OpTable, Context, Options],
    ) -> tuple[Outline, Callable[[], _Whole]]:
        ops, context, options = given
        check = options.progress
        grid = followed.trailing.grid(ops)
        prepared = prepare(ops, job_of(attempt), context, grid=grid)
        studied = study(prepared, check, options.history)
        outline = outline_of(studied)
        short = self._latest(followed, attempt, context, options)
        merged, followed.memory = life.combined(
            outline.findings,
            outline.findings if short is None else short,
            followed.memory,
            from_start=scope.from_start(followed.trailing.numbers()),
        )
        if outline.verdict != "insufficient_data":
            verdict = merged[0].verdict if merged else "none"
            outline = replace(outline, findings=tuple(merged), verdict=verdict)
        return outline, lambda: self._whole(followed, attempt, studied, outline, options)

    def _whole(
        self,
        followed: _Followed,
        attempt: AttemptInfo,
        studied: Study,
        outline: Outline,
        options: Options,
    ) -> _Whole:
        known = self._fixes(followed, attempt, studied, options)
        report = report_of(studied, replace(options, fixes=known.fixes))
        return _Whole(
            report=replace(report, findings=outline.findings, verdict=outline.verdict),
            workers=workers_file(studied).to_pybytes(),
            unplanned=None if known.fresh else (studied, options),
        )

    def _fixes(
        self, followed: _Followed, attempt: AttemptInfo, studied: Study, options: Options
    ) -> _Fixes:
        """What fixes would buy; of a large job it may be what it was some steps before."""
        step = attempt.ready_step or 0
        keys = _keys(studied)
        known = followed.planned
        if followed.trailing.rows <= self._plan_ops:
            fixes, _ = planned_fixes(studied, options)
            followed.planned = _Planned(step, keys, fixes)
            return _Fixes(fixes, fresh=True)
        fresh = known is not None and known.keys == keys and step - known.step < PLAN_STEPS
        return _Fixes(() if known is None else known.fixes, fresh=fresh)

    def _plan(
        self,
        follow: Follow,
        attempt: AttemptInfo,
        followed: _Followed,
        report: JobReport,
        studied: Study,
        options: Options,
    ) -> None:
        """Work out what fixes would buy, and put it into a report that is written already."""
        fixes, notes = planned_fixes(studied, options)
        followed.planned = _Planned(attempt.ready_step or 0, _keys(studied), fixes)
        quality = replace(report.quality, notes=(*report.quality.notes, *notes))
        whole = replace(report, fixes=fixes, quality=quality)
        with self._service.database.write() as session:
            table.live_update(session, follow, {"live_report": packed(whole)})

    def _latest(
        self, followed: _Followed, attempt: AttemptInfo, context: Context, options: Options
    ) -> Sequence[Finding] | None:
        """Findings of the latest steps alone; None if they are all there are, or say nothing."""
        trailing = followed.trailing
        count = len(trailing.steps)
        most = most_steps(self._service.settings, trailing.rows / max(count, 1))
        if count <= SHORT_STEPS or most <= ONE_LOOK_STEPS:
            return None
        try:
            ops, _ = complete(followed.trailing.table(SHORT_STEPS), attempt)
            grid = followed.trailing.grid(ops, SHORT_STEPS)
            prepared = prepare(ops, job_of(attempt), context, grid=grid)
            return study(prepared, options.progress, options.history).diagnosis.findings
        except NothingUsableError:
            return None

    def _values(self, attempt: AttemptInfo, whole: _Whole) -> dict[str, Any]:
        """Columns of an attempt whose step has its report."""
        now = self._service.clock()
        return {
            "live_step": attempt.ready_step,
            "live_report": packed(whole.report),
            "live_workers": whole.workers,
            **{f"live_{name}": value for name, value in numbers_of(whole.report).items()},
            "live_coverage_ratio": whole.report.window.coverage_ratio,
            "live_analysed_ns": now,
            "live_lease_ns": now + int(self._service.settings.lease_s * _NS),
        }

    def _write(
        self,
        follow: Follow,
        attempt: AttemptInfo,
        followed: _Followed,
        made: _Made,
        values: Mapping[str, Any],
    ) -> None:
        """Write steps and findings, and with them, if there are any, the values of the attempt."""
        service = self._service
        now = service.clock()
        lease_ns = now + int(service.settings.lease_s * _NS)
        ids = _ids(attempt)
        terms = life.Terms(followed.trailing.numbers(), service.settings.clear_steps)
        with service.database.write() as session:
            table.live_update(session, follow, {"live_lease_ns": lease_ns, **values})
            steps.put_steps(session, ids, made.rows, now)
            if made.speaks:
                since = terms.front - life.REOPEN_STEPS
                known = findings.known_findings(session, attempt.id, since, Source.OPS)
                seen = life.seen_in(made.outline, made.context)
                changed = life.changes(known, seen, terms)
                findings.write_changes(session, ids, changed, life.times_of(changed, now))
        skipped = [row.skipped for row in made.rows if row.skipped is not None]
        service.metrics.count_steps(len(made.rows) - len(skipped), skipped)

    # --- the end ------------------------------------------------------------------------------

    def _end_one(self, now: int) -> bool:
        """Close the findings of an attempt that is over; False if there is none."""
        service = self._service
        before = now - int(service.settings.step_timeout_s * _NS)
        with service.database.read() as session:
            over = findings.attempts_over(session, before)
        for tenant_id, job_id, attempt_id in over:
            with service.database.write() as session:
                lease_s = service.settings.lease_s
                if table.live_claim(session, attempt_id, service.name, now, lease_s) is None:
                    continue
                known = findings.known_findings(session, attempt_id, None)
                ids = {"tenant_id": tenant_id, "job_id": job_id, "attempt_id": attempt_id}
                changed = life.ended(known)
                findings.write_changes(session, ids, changed, life.times_of(changed, now))
            self._followed.pop(attempt_id, None)
            return True
        return False


@dataclass(frozen=True, slots=True)
class _Scope:
    """Which steps are new.

    Attributes
    ----------
    first
        First step of the attempt; None if it is not known.
    changed
        Steps of which ops have come.
    """

    first: int | None
    changed: Collection[int]

    def from_start(self, numbers: Sequence[int]) -> bool:
        """Whether the first step of the attempt is among these."""
        return bool(numbers) and numbers[0] == self.first

    def new_steps(self, attempt: AttemptInfo, numbers: Sequence[int]) -> set[int]:
        """Steps whose rows are written: new ones, changed ones, and all while a job starts.

        Which steps are warm-up is only known some steps later.
        """
        if self.from_start(numbers):
            return set(numbers)
        seen = -1 if attempt.live_step is None else attempt.live_step
        return {step for step in numbers if step > seen or step in self.changed}


def _nothing(
    attempt: AttemptInfo, error: NothingUsableError, options: Options
) -> tuple[Outline, Callable[[], _Whole]]:
    report = empty_report(job_of(attempt), error, options)
    return report.outline, lambda: _Whole(report)


def _keys(studied: Study) -> frozenset[str]:
    return frozenset(life.key_of(finding) for finding in studied.diagnosis.findings)


def _ids(attempt: AttemptInfo) -> dict[str, str]:
    return {
        "tenant_id": attempt.tenant_id,
        "job_id": attempt.job_id,
        "attempt_id": attempt.id,
    }
