from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import pytest

from smon.commands import config, notify
from tests.notify.receiver import SECRET, Receiver, receiving

Run = Callable[..., int]


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver on this machine, which the environment allows; no other setting is."""
    import os

    for name in [name for name in os.environ if name.startswith("SMON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SMON_NOTIFY_PRIVATE", "1")
    with receiving() as made:
        yield made


@pytest.fixture
def run(receiver: Receiver) -> Run:
    """Runs a command line and gives its exit code."""

    def call(*words: str) -> int:
        parser = argparse.ArgumentParser()
        commands = parser.add_subparsers(required=True)
        for module in (notify, config):
            module.add(commands)
        parsed = parser.parse_args(words)
        return int(parsed.run(parsed))

    return call


def test_each_channel_gets_a_message(
    run: Run,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """And the terminal says so, without the secret."""
    monkeypatch.setenv("SMON_NOTIFY_WEBHOOK_URL", receiver.url)
    monkeypatch.setenv("SMON_NOTIFY_SLACK_URL", receiver.url)
    assert run("notify", "test") == 0
    out = capsys.readouterr().out
    shown = f"http://127.0.0.1:{receiver.port}/***"
    assert out == f"webhook ({shown}): taken\nslack ({shown}): taken\n"
    assert [set(one.document) >= {"text"} for one in receiver.received] == [True, True]
    assert "blocks" in receiver.received[1].document


def test_a_message_that_is_not_taken_is_a_failure(
    run: Run,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the reason."""
    receiver.status = 403
    monkeypatch.setenv("SMON_NOTIFY_WEBHOOK_URL", receiver.url)
    assert run("notify", "test") == 1
    out = capsys.readouterr().out
    assert out.endswith("not taken: status 403\n")
    assert SECRET not in out


def test_without_a_channel_there_is_nothing_to_try(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line says what to set."""
    assert run("notify", "test") == 1
    assert "SMON_NOTIFY_SLACK_URL" in capsys.readouterr().out


def test_the_settings_are_shown_without_the_secret(
    run: Run,
    receiver: Receiver,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As text and as JSON."""
    monkeypatch.setenv("SMON_NOTIFY_SLACK_URL", receiver.url)
    for words in (("config", "show"), ("config", "show", "--json")):
        assert run(*words) == 0
        out = capsys.readouterr().out
        assert SECRET not in out
        assert f"http://127.0.0.1:{receiver.port}/***" in out
