"""``smon notify test``: see whether messages about findings would arrive."""

from __future__ import annotations

import argparse
import os
import secrets
import time
from typing import TYPE_CHECKING, Any

from smon.config import Settings

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add(commands: _SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "notify",
        help="see whether messages about findings arrive",
        description="Messages about findings, to a webhook or to Slack.",
    )
    inner = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    test = inner.add_parser(
        "test",
        help="send a test message to each channel",
        description="Send a test message from here to each channel of the settings "
        "(SMON_NOTIFY_WEBHOOK_URL, SMON_NOTIFY_SLACK_URL); exit code 1 if one was not taken.",
    )
    test.set_defaults(run=_test)


def _test(_parsed: argparse.Namespace) -> int:
    from smon.notify.message import trial_message
    from smon.notify.notifier import channels_of, poster

    settings = Settings.from_env(os.environ)
    channels = channels_of(settings)
    if not channels:
        print("no channel: set SMON_NOTIFY_WEBHOOK_URL or SMON_NOTIFY_SLACK_URL")
        return 1
    send, message = poster(settings), trial_message(f"test-{secrets.token_hex(8)}", time.time_ns())
    taken = True
    for channel in channels:
        reply = send(channel.target, message.body(channel.form), message.id)
        said = "taken" if reply.delivered else f"not taken: {reply.reason}"
        print(f"{channel.name} ({channel.shown}): {said}", flush=True)
        taken = taken and reply.delivered
    return 0 if taken else 1
