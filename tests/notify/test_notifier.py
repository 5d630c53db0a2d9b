from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update

from smon.notify.message import Form
from smon.notify.notifier import LEASE_S, MAX_TRIES, OVERLAP_S, WITHHELD_S, channels_of
from smon.notify.post import Reply
from smon.store.database import Database
from smon.store.models import Finding, FindingEvent, Notice
from smon.store.queries.admin import delete_job
from tests.notify.receiver import SECRET
from tests.notify.scene import BROKEN, PLACE, Post, Scene, make_scene

OTHER = "slow_link|rank|rank=3"


def test_one_message_when_it_opens_one_when_it_is_graver_one_when_it_clears(both: Scene) -> None:
    """And none in between, however often anybody looks."""
    notifier = both.notifier()
    for severity in ("opened", "critical", "warning", "critical", "cleared"):
        if severity == "opened":
            both.opened()
        elif severity == "cleared":
            both.cleared()
        else:
            both.graver(severity)
        for _ in range(3):
            notifier.run()
            both.store.clock.go_on(1)
    assert both.post.events() == [
        ("opened", "warning"),
        ("severity", "critical"),
        ("cleared", "critical"),
    ]
    assert len(set(both.post.ids)) == 3
    assert both.count("smon_notify_messages_total", channel="webhook", result="delivered") == 3


def test_nothing_is_said_twice_after_a_restart(both: Scene) -> None:
    """What was said stands in the database."""
    both.opened()
    both.notifier().run()
    both.notifier("w2").run()
    both.cleared()
    both.notifier("w3").run()
    both.notifier("w4").run()
    assert [event for event, _ in both.post.events()] == ["opened", "cleared"]


def test_several_workers_say_it_once(both: Scene) -> None:
    """Whoever claims it first; the others find nothing to do while it is being sent."""
    other = both.notifier("w2")
    both.post.then = other.run
    both.opened()
    both.notifier("w1").run()
    other.run()
    assert [event for event, _ in both.post.events()] == ["opened"]


def test_each_channel_is_told(scene: Scene) -> None:
    """Webhook and Slack know nothing of each other."""
    slack = Post()
    scene.opened()
    scene.notifier().run()
    scene.notifier(form=Form.SLACK, post=slack).run()
    scene.notifier(form=Form.SLACK, post=slack).run()
    assert (len(scene.post.documents), len(slack.documents)) == (1, 1)
    assert set(slack.documents[0]) == {"text", "blocks"}


def test_a_channel_sends_its_own_messages_only(both: Scene) -> None:
    """What waits for another receiver is not for this one."""
    slack = Post(replies=[BROKEN])
    both.opened()
    other = both.notifier(form=Form.SLACK, post=slack)
    other.run()
    webhook = both.notifier()
    webhook.run()
    both.store.clock.go_on(5)
    webhook.run()
    assert (len(both.post.ids), len(slack.ids)) == (1, 1)
    other.run()
    assert (len(both.post.ids), len(slack.documents)) == (1, 1)


def test_what_has_changed_while_no_worker_ran_is_told(both: Scene) -> None:
    """However long ago: a worker that starts compares everything."""
    both.opened()
    both.notifier().run()
    both.cleared()
    both.opened(key=OTHER)
    both.store.clock.go_on(100 * OVERLAP_S)
    both.notifier("w2").run()
    assert sorted(event for event, _ in both.post.events()) == ["cleared", "opened", "opened"]


def test_what_is_less_grave_is_not_told(sqlite: Database, tmp_path: Path) -> None:
    """Until it is grave enough; then that it is there is news."""
    scene = make_scene(sqlite, tmp_path, notify_severity="critical")
    notifier = scene.notifier()
    scene.opened("warning")
    notifier.run()
    assert not scene.post.documents
    scene.graver("critical")
    notifier.run()
    scene.graver("warning")
    notifier.run()
    scene.cleared()
    notifier.run()
    assert [event for event, _ in scene.post.events()] == ["opened", "cleared"]


def test_what_has_cleared_before_anybody_looked_is_not_told(scene: Scene) -> None:
    """It would only be noise."""
    scene.opened()
    scene.cleared()
    scene.notifier().run()
    assert not scene.post.documents


def test_two_findings_are_two_things(scene: Scene) -> None:
    """Cause and place tell them apart."""
    scene.opened()
    scene.opened(key=OTHER)
    notifier = scene.notifier()
    notifier.run()
    scene.cleared(OTHER)
    notifier.run()
    assert [event for event, _ in scene.post.events()] == ["opened", "opened", "cleared"]
    assert {one.key: one.told_severity for one in scene.notices()} == {
        PLACE: "warning",
        OTHER: None,
    }


# --- restarts of the job ----------------------------------------------------------------------


def test_the_end_of_the_attempt_clears(scene: Scene) -> None:
    """Whatever the data looks like: nothing more comes."""
    scene.opened()
    notifier = scene.notifier()
    notifier.run()
    scene.quality(0.1)
    scene.over()
    notifier.run()
    assert [event for event, _ in scene.post.events()] == ["opened", "cleared"]
    assert "over with the attempt" in scene.post.documents[1]["text"]


def test_a_restart_does_not_make_it_a_new_thing(scene: Scene) -> None:
    """The same cause in the same place of the same job waits for the cool-down."""
    notifier = scene.notifier()
    scene.opened()
    notifier.run()
    scene.over()
    scene.start(attempt=1)
    scene.opened()
    notifier.run()
    assert [event for event, _ in scene.post.events()] == ["opened"]
    scene.graver("critical")
    notifier.run()
    assert [event for event, _ in scene.post.events()] == ["opened", "severity"]
    assert scene.post.documents[1]["job"]["attempt"] == 1


def test_what_is_there_counts_and_not_what_was_there_before_a_restart(both: Scene) -> None:
    """Two attempts have the same finding: one is over, the other is not."""
    notifier = both.notifier()
    both.opened()
    notifier.run()
    both.over()
    notifier.run()
    both.store.clock.go_on(1_000)
    both.start(attempt=1)
    both.opened()
    notifier.run()
    assert [event for event, _ in both.post.events()] == ["opened", "cleared", "opened"]
    assert both.post.documents[2]["job"]["attempt"] == 1


# --- flapping ---------------------------------------------------------------------------------


def test_a_finding_that_flaps_is_told_once_in_a_cool_down(both: Scene) -> None:
    """That it is there, and that it is not; then again once the time is over, if it is still so."""
    notifier = both.notifier()
    for _ in range(5):
        both.opened()
        notifier.run()
        both.cleared()
        notifier.run()
        both.store.clock.go_on(60)
    both.opened()
    notifier.run()
    assert [event for event, _ in both.post.events()] == ["opened", "cleared"]
    both.store.clock.go_on(600)
    notifier.run()
    notifier.run()
    assert [event for event, _ in both.post.events()] == ["opened", "cleared", "opened"]
    assert both.post.documents[2]["came_back"] == 5
    assert "come back 5 times" in both.post.documents[2]["text"]


def test_a_finding_that_is_gone_when_the_cool_down_ends_is_not_told(scene: Scene) -> None:
    """What waited is compared with what is."""
    notifier = scene.notifier()
    scene.opened()
    notifier.run()
    scene.cleared()
    notifier.run()
    scene.opened()
    notifier.run()
    scene.cleared()
    scene.store.clock.go_on(1_000)
    notifier.run()
    assert [event for event, _ in scene.post.events()] == ["opened", "cleared"]
    assert [one.state for one in scene.notices()] == ["done"]


def test_a_longer_cool_down_holds_for_what_waits_already(scene: Scene) -> None:
    """The settings of the worker that sends are those that count."""
    notifier = scene.notifier()
    for change in (scene.opened, scene.cleared, scene.opened):
        change()
        notifier.run()
    scene.store.settings = replace(scene.store.settings, notify_cooldown_s=3_600)
    scene.store.clock.go_on(1_000)
    patient = scene.notifier("w2")
    patient.run()
    assert [event for event, _ in scene.post.events()] == ["opened", "cleared"]
    scene.store.clock.go_on(3_000)
    patient.run()
    assert [event for event, _ in scene.post.events()] == ["opened", "cleared", "opened"]


# --- data that cannot be trusted --------------------------------------------------------------


@pytest.mark.parametrize("coverage, aligned", [(0.9, True), (1.0, False), (0.0, None)])
def test_nothing_is_said_while_the_data_is_incomplete(
    scene: Scene,
    coverage: float,
    aligned: bool | None,  # noqa: FBT001  # a parameter of the test
) -> None:
    """What is missing could be what was slow; it is said later, if it is still true."""
    notifier = scene.notifier()
    scene.quality(coverage, aligned=aligned)
    scene.opened()
    notifier.run()
    assert not scene.post.documents
    assert scene.count("smon_notify_withheld_total", channel="webhook") == 1
    scene.quality()
    notifier.run()
    assert not scene.post.documents
    scene.store.clock.go_on(WITHHELD_S)
    notifier.run()
    assert scene.post.events() == [("opened", "warning")]


def test_what_was_withheld_and_is_gone_is_not_said(scene: Scene) -> None:
    """Neither that it was there nor that it is not."""
    notifier = scene.notifier()
    scene.quality(0.5)
    scene.opened()
    notifier.run()
    scene.cleared()
    scene.quality()
    scene.store.clock.go_on(WITHHELD_S)
    notifier.run()
    assert not scene.post.documents


def test_missing_data_is_no_proof_that_it_is_gone(scene: Scene) -> None:
    """A suspect that stops sending has not become fast."""
    notifier = scene.notifier()
    scene.opened()
    notifier.run()
    scene.quality(0.75)
    scene.cleared()
    notifier.run()
    assert [event for event, _ in scene.post.events()] == ["opened"]
    scene.quality()
    scene.store.clock.go_on(WITHHELD_S)
    notifier.run()
    assert [event for event, _ in scene.post.events()] == ["opened", "cleared"]


def test_a_hang_is_told_at_once(scene: Scene) -> None:
    """Data that does not come is what a hang looks like."""
    scene.quality(0.3)
    scene.opened("critical", key="hang|rank|rank=17", verdict="hang", cause="hang")
    scene.notifier().run()
    assert scene.post.events() == [("opened", "critical")]


# --- receivers that fail ----------------------------------------------------------------------


def test_a_message_is_tried_again_with_growing_pauses(both: Scene) -> None:
    """Under one id, so that the receiver can tell; counted each time."""
    notifier = both.notifier()
    both.post.replies = [BROKEN] * 3
    both.opened()
    tries = []
    begin = both.store.clock()
    for _ in range(40):
        before = len(both.post.ids)
        notifier.run()
        if len(both.post.ids) > before:
            tries.append(round((both.store.clock() - begin) / 1e9))
        both.store.clock.go_on(0.5)
    assert tries == [0, 1, 3, 7]
    assert len(set(both.post.ids)) == 1
    assert both.post.events() == [("opened", "warning")]
    assert both.count("smon_notify_messages_total", channel="webhook", result="failed") == 3


def test_tries_have_an_end(both: Scene) -> None:
    """Then the message is given up, until the finding changes or a worker starts."""
    notifier = both.notifier()
    both.post.replies = [BROKEN] * 1_000
    both.opened()
    for _ in range(2 * MAX_TRIES):
        notifier.run()
        both.store.clock.go_on(301)
    assert len(both.post.ids) == MAX_TRIES
    assert both.count("smon_notify_messages_total", channel="webhook", result="given_up") == 1
    (row,) = both.notices()
    assert (row.state, row.error, row.told_severity) == ("failed", "status 500", None)
    both.post.replies = []
    both.graver("critical")
    notifier.run()
    assert both.post.events() == [("opened", "critical")]


def test_a_new_worker_tries_again_what_was_given_up(scene: Scene) -> None:
    """It may have been given another address."""
    notifier = scene.notifier()
    scene.post.replies = [BROKEN] * MAX_TRIES
    scene.opened()
    for _ in range(MAX_TRIES):
        notifier.run()
        scene.store.clock.go_on(301)
    scene.notifier("w2").run()
    assert scene.post.events() == [("opened", "warning")]


def test_what_changes_while_it_is_tried_is_said_as_it_is(scene: Scene) -> None:
    """A message that is late has the numbers of now; one that is wrong by now is not sent."""
    notifier = scene.notifier()
    scene.post.replies = [BROKEN, BROKEN]
    scene.opened()
    notifier.run()
    scene.graver("critical")
    scene.store.clock.go_on(5)
    notifier.run()
    scene.store.clock.go_on(5)
    notifier.run()
    assert scene.post.events() == [("opened", "critical")]


def test_what_changes_while_it_is_sent_is_noticed(both: Scene) -> None:
    """The next look begins where the last one did, however long the sending took."""
    notifier = both.notifier()

    def change() -> None:
        both.post.then = None
        both.graver("critical")

    both.post.then = change
    both.opened()
    notifier.run()
    both.store.clock.go_on(2 * OVERLAP_S)
    notifier._full_ns = 2**62
    notifier.run()
    assert [event for event, _ in both.post.events()] == ["opened", "severity"]


def test_a_receiver_that_fails_is_left_alone(scene: Scene) -> None:
    """A hundred messages are no hundred tries at once."""
    for rank in range(10):
        scene.opened(key=f"slow_gpu|rank|rank={rank}")
    scene.post.replies = [BROKEN] * 100
    notifier = scene.notifier()
    for _ in range(5):
        notifier.run()
    assert len(scene.post.ids) == 1


def test_a_receiver_says_how_long_to_wait(scene: Scene) -> None:
    """And is left alone for so long."""
    scene.post.replies = [Reply(delivered=False, reason="status 429", retry_after_s=120)]
    notifier = scene.notifier()
    scene.opened()
    scene.opened(key=OTHER)
    notifier.run()
    scene.store.clock.go_on(119)
    notifier.run()
    assert len(scene.post.ids) == 1
    scene.store.clock.go_on(1)
    notifier.run()
    assert len(scene.post.documents) == 2


def test_a_worker_that_dies_while_it_sends_is_replaced(both: Scene) -> None:
    """Its message goes out again under the same id, and what it still writes is refused."""
    later = both.notifier("w2")

    def other_takes_over() -> None:
        both.post.then = None
        both.store.clock.go_on(LEASE_S + 1)
        later.run()

    both.post.then = other_takes_over
    both.opened()
    both.notifier("w1").run()
    assert both.post.ids == [both.post.ids[0]] * 2
    (row,) = both.notices()
    assert (row.owner, row.messages, row.state) == ("w2", 1, "done")


# --- rows -------------------------------------------------------------------------------------


def test_a_job_that_is_removed_is_forgotten(both: Scene) -> None:
    """With all that was told of it."""
    both.opened()
    both.notifier().run()
    ids = both.ids()
    with both.store.database.write() as session:
        delete_job(session, ids["tenant_id"], ids["job_id"])
    both.notifier().run()
    assert not both.notices()


def test_a_finding_that_retention_has_removed_is_forgotten(scene: Scene) -> None:
    """There is nothing to be said of it any more."""
    scene.opened()
    notifier = scene.notifier()
    notifier.run()
    scene.opened(key=OTHER)
    scene.post.replies = [BROKEN]
    notifier.run()
    with scene.store.database.write() as session:
        session.query(FindingEvent).delete()
        session.query(Finding).delete()
    scene.store.clock.go_on(100)
    notifier.run()
    assert [event for event, _ in scene.post.events()] == ["opened"]
    assert {one.state for one in scene.notices()} == {"done"}


def test_a_change_that_was_written_late_is_found(scene: Scene) -> None:
    """A commit can take longer than the pause between two looks, and clocks of workers differ."""
    notifier = scene.notifier()
    notifier.run()
    scene.store.clock.go_on(20)
    notifier.run()
    scene.opened()
    early = scene.store.clock() - int((OVERLAP_S - 5) * 1e9)
    with scene.store.database.write() as session:
        session.execute(update(FindingEvent).values(at_ns=early))
    notifier.run()
    assert len(scene.post.documents) == 1


def test_the_time_from_the_change_is_measured(scene: Scene) -> None:
    """It is what an on-call person waits for."""
    scene.opened()
    scene.store.clock.go_on(1.5)
    scene.notifier().run()
    seconds = scene.count("smon_notify_delay_seconds_sum", channel="webhook")
    assert seconds == pytest.approx(1.5)


# --- settings ---------------------------------------------------------------------------------


def test_channels_are_those_with_an_address(sqlite: Database, tmp_path: Path) -> None:
    """Without any, nobody looks for anything."""
    scene = make_scene(sqlite, tmp_path)
    assert not channels_of(scene.store.settings)
    assert not scene.store.worker().notifiers
    worker = scene.store.worker(notify_slack_url=f"https://h.example/{SECRET}")
    assert [one.channel.form for one in worker.notifiers] == [Form.SLACK]


def test_the_secret_is_in_no_log(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Neither when it starts nor when it fails."""
    caplog.set_level(logging.DEBUG)
    worker = scene.store.worker(
        notify_webhook_url=f"https://h.invalid/{SECRET}", notify_private=1, notify_timeout_s=0.2
    )
    scene.opened()
    worker.notifiers[0].run()
    assert "was not taken" in caplog.text
    assert "h.invalid/***" in caplog.text
    assert SECRET not in caplog.text
    assert [one.error for one in scene.store.all(Notice)] == [None]
