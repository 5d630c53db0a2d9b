"""A live job whose findings come and go, and a channel that is told."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from sqlalchemy import select, update

from smon.notify.address import Target
from smon.notify.message import Form
from smon.notify.metrics import NotifyMetrics
from smon.notify.notifier import Channel, Notifier, Surroundings
from smon.notify.post import Reply
from smon.render.bare import bare_report
from smon.report import ClockPart, Finding, PersistencePart, QualityPart, Where, WindowPart
from smon.store import findings as table
from smon.store.database import Database
from smon.store.findings import Change, Event, Seen
from smon.store.models import Attempt, Notice
from smon.store.results import packed
from smon.topology import Layout
from tests.worker.feed import Store, make_store

LAYOUT = Layout(dp=4, pp=2, tp=8)

PLACE = "slow_gpu|rank|rank=17"

TAKEN = Reply(delivered=True)
BROKEN = Reply(delivered=False, reason="status 500")


def finding(severity: str = "warning", **changes: Any) -> Finding:  # noqa: ANN401  # of Finding
    """A slow GPU, which costs a tenth of the step."""
    plain = Finding(
        severity=severity,
        verdict="straggler",
        cause="slow_gpu",
        scope="rank",
        where=Where(rank=17, dp=2, stage=0, node="node-2"),
        phase="compute",
        optypes=("forward-compute",),
        excess_s=0.0174,
        excess_share=0.1,
        persistence=PersistencePart("onset", 0.82, 30, None),
        confidence=0.93,
        evidence=("1.5 × its peers",),
        victims=None,
        candidates=(),
        next=("dcgmi diag -r 2  # on node-2",),
    )
    return replace(plain, **changes)


def seen(key: str, one: Finding) -> Seen:
    """As an analysis sees it."""
    report = replace(bare_report(LAYOUT), findings=(one,))
    document = report.to_dict()["findings"][0]
    return Seen(key, one.severity, one, document, one.where.node, None)


@dataclass(slots=True, eq=False)
class Post:
    """What was sent, and what it was answered."""

    replies: list[Reply] = field(default_factory=list)
    documents: list[dict[str, Any]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    then: Any = None

    def __call__(self, _target: Target, body: bytes, message_id: str) -> Reply:
        """Send a message."""
        self.ids.append(message_id)
        if self.then is not None:
            self.then()
        reply = self.replies.pop(0) if self.replies else TAKEN
        if reply.delivered:
            self.documents.append(json.loads(body))
        return reply

    def events(self) -> list[tuple[str, str]]:
        """(event, severity) of what was delivered."""
        return [(one["event"], one["finding"]["severity"]) for one in self.documents]


@dataclass(slots=True, eq=False)
class Scene:
    """A live attempt of a job, its findings, and who is told of them."""

    store: Store
    post: Post = field(default_factory=Post)
    step: int = 40
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    metrics: NotifyMetrics | None = None
    attempt: int = 0

    def start(self, attempt: int = 0) -> None:
        """The job starts, or starts again."""
        self.attempt = attempt
        self.store.stream(LAYOUT, attempt=attempt, job="llama")
        self.quality()

    def ids(self) -> dict[str, str]:
        """Of the present attempt."""
        row = self.row()
        return {"tenant_id": row.tenant_id, "job_id": row.job_id, "attempt_id": row.id}

    def row(self) -> Attempt:
        """The present attempt."""
        (found,) = [one for one in self.store.all(Attempt) if one.number == self.attempt]
        assert isinstance(found, Attempt)
        return found

    def quality(self, coverage: float = 1.0, *, aligned: bool | None = True) -> None:
        """What the running diagnosis says of its data."""
        report = replace(
            bare_report(LAYOUT),
            window=WindowPart(0, 1, 2, 2, (), coverage),
            quality=QualityPart(0.0, ClockPart(aligned, None), ()),
        )
        self._set(
            live_report=packed(report),
            live_coverage_ratio=coverage,
            live_aligned=aligned,
        )

    def over(self) -> None:
        """The attempt ends, and with it what was found."""
        self._set(ended_ns=self.store.clock())
        for key in [one.key for one in self._known() if one.state == "open"]:
            self.write(key, Event.ENDED)

    def _set(self, **values: Any) -> None:  # noqa: ANN401  # columns of Attempt
        number = self.attempt

        def change(session: Any) -> None:  # noqa: ANN401  # Session
            session.execute(update(Attempt).where(Attempt.number == number).values(**values))

        self.store.write(change)

    def _known(self) -> list[table.Known]:
        with self.store.database.read() as session:
            return table.known_findings(session, self.row().id, None)

    def write(self, key: str, event: Event, one: Finding | None = None) -> None:
        """One change in the life of a finding."""
        self.step += 1
        known = next((each for each in self._known() if each.key == key), None)
        change = Change(event, self.step, known, None if one is None else seen(key, one))
        with self.store.database.write() as session:
            table.write_changes(
                session, self.ids(), [change], {self.step: self.store.clock.go_on(0.001)}
            )

    def opened(self, severity: str = "warning", key: str = PLACE, **changes: Any) -> None:  # noqa: ANN401
        """A finding is there: for the first time, or again."""
        known = any(one.key == key for one in self._known())
        event = Event.REOPENED if known else Event.OPENED
        self.write(key, event, finding(severity, **changes))

    def graver(self, severity: str, key: str = PLACE) -> None:
        """Its severity changes."""
        self.write(key, Event.SEVERITY, finding(severity))

    def cleared(self, key: str = PLACE) -> None:
        """It is not there any more."""
        self.write(key, Event.CLEARED)

    def notifier(
        self, name: str = "w1", form: Form = Form.JSON, post: Post | None = None
    ) -> Notifier:
        """One that a worker has just started."""
        if self.metrics is None:
            self.metrics = NotifyMetrics(self.registry)
        around = Surroundings(
            self.store.settings,
            self.store.database,
            name,
            self.store.clock,
            self.metrics,
            post or self.post,
        )
        return Notifier(Channel(form, Target("h.example", 443, "/x", secure=True), "shown"), around)

    def notices(self) -> list[Notice]:
        """What channels were told."""
        with self.store.database.read() as session:
            return list(session.scalars(select(Notice).order_by(Notice.created_ns, Notice.id)))

    def count(self, name: str, **labels: str) -> float:
        """A metric of the notifiers."""
        return self.registry.get_sample_value(name, labels) or 0.0


def make_scene(database: Database, folder: Path, **settings: Any) -> Scene:  # noqa: ANN401  # of Settings
    """A job that runs, on a database."""
    scene = Scene(make_store(database, folder, **{"notify_cooldown_s": 900.0, **settings}))
    scene.start()
    return scene
