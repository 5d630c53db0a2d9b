from __future__ import annotations

import re

import pytest
from sqlalchemy import select

from smon.errors import ConfigError, MissingError
from smon.store.database import Database
from smon.store.models import Tenant, Token
from smon.store.tenants import default_tenant, tenant_id, tenant_names, tenant_of
from smon.store.tokens import any_token, create, revoke, tokens, touch, verify
from tests.store.rows import DAY_NS, NOW, all_rows, only

MINUTE_NS = 60 * 10**9


def make(database: Database, tenant: str = "acme", **changes: object) -> str:
    """A token with the scopes ingest and read."""
    given = {"name": "agents", "scopes": ["read", "ingest"], "expires_ns": None, "now": NOW}
    with database.write() as session:
        return create(session, tenant, **(given | changes))  # type: ignore[arg-type]  # of many types


def test_a_token_opens_what_it_was_made_for(database: Database) -> None:
    """Tenant and scopes come from the token."""
    text = make(database)
    assert re.fullmatch(r"smon_[a-z0-9]{8}_[A-Za-z0-9]{40,}", text)
    with database.read() as session:
        verified = verify(session, text, NOW)
        assert verified is not None
        assert verified.tenant_id == tenant_id(session, "acme")
    assert verified.scopes == {"ingest", "read"}
    assert verified.kid == text.split("_")[1]


def test_the_secret_is_not_kept(database: Database) -> None:
    """Who reads the database cannot ask in somebody's name."""
    text = make(database)
    secret = text.split("_")[2]
    assert secret not in str(only(database, Token))
    with database.read() as session:
        (shown,) = tokens(session)
    assert secret not in repr(shown)
    assert shown.masked == f"smon_{shown.kid}_…"


def test_nothing_else_opens_anything(database: Database) -> None:
    """Another secret, another key id, parts of a token, text of any kind."""
    text, other = make(database), make(database)
    _, kid, secret = text.split("_")
    wrong = [
        f"smon_{kid}_{other.split('_')[2]}",
        f"smon_aaaaaaaa_{secret}",
        f"smon_{kid}_{secret[:-1]}",
        f"smon_{kid}_{secret}A",
        f"smon_{kid}_",
        f"smon__{secret}",
        f" {text}",
        f"{text}\n",
        text.upper(),
        "smon_" + "a" * 100_000,
        "smon_aaaaaaaa_" + "ä" * 43,
        "\x00",
        "",
    ]
    with database.read() as session:
        assert [each for each in wrong if verify(session, each, NOW) is not None] == []
        assert verify(session, text, NOW) is not None


def test_two_tokens_live_at_once_for_a_rotation(database: Database) -> None:
    """The second is made before the first is revoked; both work meanwhile."""
    first, second = make(database), make(database)
    with database.write() as session:
        assert verify(session, first, NOW)
        assert verify(session, second, NOW)
        revoke(session, first.split("_")[1], NOW)
        revoke(session, first.split("_")[1], NOW + 1)
        assert verify(session, first, NOW) is None
        assert verify(session, second, NOW)
    assert {row["revoked_ns"] for row in all_rows(database, Token)} == {None, NOW}


def test_a_token_expires(database: Database) -> None:
    """At its time and not before."""
    text = make(database, expires_ns=NOW + DAY_NS)
    with database.read() as session:
        assert verify(session, text, NOW + DAY_NS - 1)
        assert verify(session, text, NOW + DAY_NS) is None
        (shown,) = tokens(session)
    assert [shown.state(NOW + n * DAY_NS) for n in (0, 1)] == ["live", "expired"]


def test_the_last_use_is_noted_once_a_minute(database: Database) -> None:
    """A token that is used all the time does not cost a write each time."""
    kid = make(database).split("_")[1]
    noted = []
    for at in (NOW, NOW + 10, NOW + MINUTE_NS - 1, NOW + MINUTE_NS):
        with database.write() as session:
            touch(session, kid, at)
        noted.append(only(database, Token)["last_used_ns"])
    assert noted == [NOW, NOW, NOW, NOW + MINUTE_NS]


def test_revoking_what_is_not_there_is_said(database: Database) -> None:
    """A typing error must not look like success."""
    with pytest.raises(MissingError, match="smon token list"), database.write() as session:
        revoke(session, "aaaaaaaa", NOW)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"scopes": ["root"]}, "ingest, read, admin"),
        ({"scopes": []}, "found 'none'"),
        ({"name": ""}, "name"),
        ({"name": "a\x1b[31m"}, "printable"),
        ({"expires_ns": NOW}, "future"),
        ({"tenant": "../x"}, "tenant"),
        ({"tenant": "a b"}, "tenant"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "x" * 65}, "tenant"),
    ],
)
def test_a_token_that_makes_no_sense_is_not_made(
    sqlite: Database, changes: dict[str, object], message: str
) -> None:
    """Nothing is written, not even the tenant."""
    with pytest.raises(ConfigError, match=message):
        make(sqlite, **changes)  # type: ignore[arg-type]  # of many types
    assert all_rows(sqlite, Token) == []
    assert all_rows(sqlite, Tenant) == []


def test_tenants_are_made_once(database: Database) -> None:
    """By name, on demand; the one of a server without tokens is called default."""
    with database.write() as session:
        assert not any_token(session)
        first = tenant_of(session, "acme", NOW)
        assert tenant_of(session, "acme", NOW + 1) == first
        default = default_tenant(session, NOW)
        assert default_tenant(session) == default
        assert tenant_names(session) == {first: "acme", default: "default"}
        assert tenant_id(session, "nobody") is None


def test_any_token_counts_even_a_dead_one(database: Database) -> None:
    """A server that had tokens once does not open to everybody when the last one is revoked."""
    kid = make(database).split("_")[1]
    with database.write() as session:
        revoke(session, kid, NOW)
    with database.read() as session:
        assert any_token(session)
        assert session.scalar(select(Token.kid)) == kid


def test_tokens_are_listed_by_tenant(database: Database) -> None:
    """All, or those of one tenant."""
    make(database, "a")
    make(database, "b", now=NOW + 1)
    with database.read() as session:
        assert [token.tenant for token in tokens(session)] == ["a", "b"]
        assert [token.tenant for token in tokens(session, "b")] == ["b"]
        assert tokens(session, "c") == []
