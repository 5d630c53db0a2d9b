"""The running diagnosis: after every step of a live job, what is wrong now.

Flow: ``attempts.ready_step`` (`smon.worker.assembly`) → **here** → ``attempts.live_report``,
``steps``, ``findings``. One worker at a time follows an attempt, under a lease with a fence; the
cost of a step does not grow with the age of the job (``docs/reference/windows.md`` section 6).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from sqlalchemy.orm import Session

from smon.analysis import Options, empty_report, report_of, study
from smon.diagnose.history import History
from smon.errors import FencedError, NothingUsableError, SMonError, StoreError
from smon.prepare import prepare
from smon.report import Finding, JobReport
from smon.store import findings, steps
from smon.store import windows as table
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
from smon.worker.service import Service
from smon.worker.trailing import Trailing, plan_reading, read_new

_LOG: Final = logging.getLogger(__name__)

#: The latest steps that are looked at by themselves as well: with 8, a worker that becomes slow is
#: found after 4 steps, and is gone after 5; with 24 alone it takes 6 and 13.
SHORT_STEPS: Final = 8

#: All attempts together keep at most so many times ``live_max_ops`` ops in memory.
MAX_KEPT: Final = 4

#: After a failure an attempt is left alone for so long.
PAUSE_S: Final = 2.0

_NS: Final = 10**9

Check = Callable[..., None]


@dataclass(slots=True, eq=False)
class _Followed:
    """What a worker knows of an attempt that it follows.

    Attributes
    ----------
    fence
        Under which it was followed last: if another one lies between, somebody else has followed.
    memory
        Of the last analysis.
    history
        What is usual for the job, as of the window `history_of`.
    hosts
        Host of each rank, as its stream says.
    """

    fence: int
    trailing: Trailing = field(default_factory=Trailing)
    memory: life.Memory = field(default_factory=life.Memory)
    history: History | None = None
    history_of: int = -1
    hosts: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Made:
    """What one analysis gives."""

    report: JobReport
    context: Context
    rows: list[steps.StepRow]
    used: int
    speaks: bool


class Live:
    """Follows the live attempts that are due, one after the other.

    Parameters
    ----------
    service, leases
        Of the worker.
    """

    def __init__(self, service: Service, leases: Leases) -> None:
        self._service = service
        self._leases = leases
        self._followed: dict[str, _Followed] = {}
        self._paused: dict[str, int] = {}

    @property
    def rows_read(self) -> int:
        """Ops read from files, of the attempts that are followed now."""
        return sum(one.trailing.rows_read for one in self._followed.values())

    def run(self) -> bool:
        """Analyse the attempt that has waited longest; False if none has.

        Raises
        ------
        StoreError
            The database cannot be used.
        """
        service = self._service
        now = service.clock()
        self._paused = {name: until for name, until in self._paused.items() if until > now}
        with service.database.read() as session:
            attempt_id = table.live_due(session, service.name, now, self._paused)
        if attempt_id is None:
            return self._end_one(now)
        with service.database.write() as session:
            follow = table.live_claim(
                session, attempt_id, service.name, now, service.settings.lease_s
            )
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
        self._write(follow, attempt, followed, made)
        service.metrics.seconds.labels("live").observe((service.clock() - begin) / 1e9)

    def _known(self, follow: Follow) -> _Followed:
        """What is in memory of an attempt, if nobody else has followed it meanwhile."""
        known = self._followed.pop(follow.attempt_id, None)
        if known is None or known.fence != follow.fence - 1:
            known = _Followed(follow.fence)
        known.fence = follow.fence
        self._followed[follow.attempt_id] = known
        self._evict()
        return known

    def _evict(self) -> None:
        """Forget the attempts that have not been looked at for longest, if memory is short."""
        most = MAX_KEPT * self._service.settings.live_max_ops
        while (
            len(self._followed) > 1
            and sum(one.trailing.rows for one in self._followed.values()) > most
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
            report = self._report(followed, attempt, scope, (whole, context, options))
        except NothingUsableError as error:
            report = empty_report(job_of(attempt), error, options)
        except StoreError:
            raise
        except SMonError as error:
            report = empty_report(job_of(attempt), NothingUsableError(str(error)), options)
        starts = {} if ops is None else starts_of(ops)
        rows = steps.rows_of(report, starts, scope.new_steps(attempt, numbers))
        used = sum(row.skipped is None for row in rows)
        return _Made(report, context, rows, used, report.verdict != "insufficient_data")

    def _report(
        self,
        followed: _Followed,
        attempt: AttemptInfo,
        scope: _Scope,
        given: tuple[OpTable, Context, Options],
    ) -> JobReport:
        ops, context, options = given
        check = options.progress
        studied = study(prepare(ops, job_of(attempt), context), check, options.history)
        report = report_of(studied, options)
        long = report.findings
        short = self._latest(followed, attempt, context, options)
        merged, followed.memory = life.combined(
            long,
            long if short is None else short,
            followed.memory,
            from_start=scope.from_start(followed.trailing.numbers()),
        )
        if report.verdict == "insufficient_data":
            return report
        verdict = merged[0].verdict if merged else "none"
        return replace(report, findings=tuple(merged), verdict=verdict)

    def _latest(
        self, followed: _Followed, attempt: AttemptInfo, context: Context, options: Options
    ) -> Sequence[Finding] | None:
        """Findings of the latest steps alone; None if they are all there are, or say nothing."""
        if len(followed.trailing.steps) <= SHORT_STEPS:
            return None
        try:
            ops, _ = complete(followed.trailing.table(SHORT_STEPS), attempt)
            prepared = prepare(ops, job_of(attempt), context)
            return study(prepared, options.progress, options.history).diagnosis.findings
        except NothingUsableError:
            return None

    def _write(
        self, follow: Follow, attempt: AttemptInfo, followed: _Followed, made: _Made
    ) -> None:
        service = self._service
        now = service.clock()
        values = {
            "live_step": attempt.ready_step,
            "live_report": packed(made.report),
            **{f"live_{name}": value for name, value in numbers_of(made.report).items()},
            "live_analysed_ns": now,
            "live_lease_ns": now + int(service.settings.lease_s * _NS),
        }
        ids = _ids(attempt)
        terms = life.Terms(followed.trailing.numbers(), service.settings.clear_steps)
        with service.database.write() as session:
            table.live_update(session, follow, values)
            steps.put_steps(session, ids, made.rows, now)
            if made.speaks:
                since = terms.front - life.REOPEN_STEPS
                known = findings.known_findings(session, attempt.id, since)
                seen = life.seen_in(made.report, made.context)
                changed = life.changes(known, seen, terms)
                findings.write_changes(session, ids, changed, life.times_of(changed, now))
        service.metrics.count_steps(
            made.used, [row.skipped for row in made.rows if row.skipped is not None]
        )

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


def _ids(attempt: AttemptInfo) -> dict[str, str]:
    return {
        "tenant_id": attempt.tenant_id,
        "job_id": attempt.job_id,
        "attempt_id": attempt.id,
    }
