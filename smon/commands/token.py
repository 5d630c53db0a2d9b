"""``smon token``: make, list and revoke the tokens that agents, people and programs ask with."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smon.errors import ConfigError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from smon.store.database import Database
    from smon.store.tokens import TokenInfo

_DAY_NS = 86_400 * 10**9
_MAX_DAYS = 36_500


def add(commands: _SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "token",
        help="make, list or revoke tokens",
        description="Make, list or revoke tokens. Once there is one, every request needs one.",
    )
    inner = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = inner.add_parser(
        "create",
        help="make a token and print it, once",
        description="Make a token. Its secret is printed now and cannot be shown again.",
    )
    create.add_argument("--tenant", default="default", metavar="T", help="whose data (default)")
    create.add_argument(
        "--scope",
        action="append",
        required=True,
        choices=("ingest", "read", "admin"),
        help="what it allows; may be given several times",
    )
    create.add_argument("--name", default="", metavar="N", help="what it is for, for the list")
    create.add_argument("--days", type=float, metavar="N", help="days that it is valid (for ever)")
    create.set_defaults(run=_create)
    listing = inner.add_parser("list", help="list the tokens, without their secrets")
    listing.add_argument("--tenant", metavar="T", help="only those of this tenant")
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=_list)
    revoke = inner.add_parser("revoke", help="close a token for ever")
    revoke.add_argument("kid", metavar="KID", help="the 8 characters after smon_")
    revoke.set_defaults(run=_revoke)
    for each in (create, listing, revoke):
        each.add_argument(
            "--data-dir", type=Path, metavar="DIR", help="folder of the database (smon-data)"
        )


@contextmanager
def _database(parsed: argparse.Namespace) -> Iterator[Database]:
    from smon.commands.serve import settings_of
    from smon.store import schema
    from smon.store.database import Database

    database = Database(settings_of(parsed).database)
    try:
        schema.upgrade(database)
        yield database
    finally:
        database.close()


def _create(parsed: argparse.Namespace) -> int:
    from smon.store.database import now_ns
    from smon.store.tokens import create

    now = now_ns()
    if parsed.days is not None and not 0 < parsed.days <= _MAX_DAYS:
        raise ConfigError(f"--days: expected a number up to {_MAX_DAYS}, found {parsed.days}")
    expires = None if parsed.days is None else now + int(parsed.days * _DAY_NS)
    name = parsed.name or "-".join(sorted(set(parsed.scope)))
    with _database(parsed) as database, database.write() as session:
        text = create(session, parsed.tenant, name, parsed.scope, expires, now)
    # Committed: only now is it worth something.
    print(text)
    return 0


def _list(parsed: argparse.Namespace) -> int:
    from smon.store.database import now_ns
    from smon.store.tokens import tokens

    with _database(parsed) as database, database.read() as session:
        found = tokens(session, parsed.tenant)
    now = now_ns()
    rows = [_row(token, now) for token in found]
    if parsed.json:
        print(json.dumps(rows, indent=2))
    elif not rows:
        print("no tokens: on loopback, the server needs none")
    else:
        _print_table(rows)
    return 0


def _row(token: TokenInfo, now: int) -> dict[str, str]:
    return {
        "token": token.masked,
        "tenant": token.tenant,
        "name": token.name,
        "scopes": " ".join(token.scopes),
        "state": token.state(now),
        "created": _time(token.created_ns),
        "expires": _time(token.expires_ns),
        "last_used": _time(token.last_used_ns),
    }


def _time(at_ns: int | None) -> str:
    if at_ns is None:
        return "-"
    return datetime.fromtimestamp(at_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def _print_table(rows: list[dict[str, str]]) -> None:
    names = list(rows[0])
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in names}
    for row in ({name: name for name in names}, *rows):
        print("  ".join(row[name].ljust(widths[name]) for name in names).rstrip())


def _revoke(parsed: argparse.Namespace) -> int:
    from smon.store.database import now_ns
    from smon.store.tokens import revoke

    with _database(parsed) as database, database.write() as session:
        revoke(session, parsed.kid, now_ns())
    print(f"token smon_{parsed.kid}_… is revoked")
    return 0
