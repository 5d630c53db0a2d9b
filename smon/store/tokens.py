"""Tokens: made, listed, revoked, verified. The secret is shown once; its SHA-256 is kept.

Flow: ``smon token`` and the gate of `smon.api` → **here**. A token reads ``smon_<kid>_<secret>``.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from sqlalchemy import exists, or_, select, update
from sqlalchemy.orm import Session

from smon.errors import ConfigError, MissingError
from smon.store.models import Tenant, Token
from smon.store.tenants import tenant_of

SCOPES: Final = ("ingest", "read", "admin")

#: The time of last use is written at most so often.
USED_PAUSE_NS: Final = 60 * 10**9

_KID_LETTERS: Final = string.ascii_lowercase + string.digits
_KID_LENGTH: Final = 8
_SECRET_LETTERS: Final = string.ascii_letters + string.digits
#: 43 of 62 letters: 256 bits.
_SECRET_LENGTH: Final = 43

_TEXT: Final = re.compile(r"smon_([a-z0-9]{8})_([A-Za-z0-9~.-]{40,128})")

_MAX_NAME: Final = 200

#: Compared with where there is no such token, so that it takes as long.
_NOTHING: Final = "0" * 64


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """What a token opens.

    Attributes
    ----------
    kid
        Its key id, which may be shown.
    last_used_ns
        When its use was last noted; see `touch`.
    """

    tenant_id: str
    scopes: frozenset[str]
    kid: str
    last_used_ns: int | None = None


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """A token as lists show it: without its secret."""

    kid: str
    tenant: str
    name: str
    scopes: tuple[str, ...]
    created_ns: int
    expires_ns: int | None
    revoked_ns: int | None
    last_used_ns: int | None

    @property
    def masked(self) -> str:
        """The token with its secret masked."""
        return f"smon_{self.kid}_…"

    def state(self, now: int) -> str:
        """``live``, ``expired`` or ``revoked``."""
        if self.revoked_ns is not None:
            return "revoked"
        return "expired" if self.expires_ns is not None and self.expires_ns <= now else "live"


def create(
    session: Session,
    tenant_name: str,
    name: str,
    scopes: Collection[str],
    expires_ns: int | None,
    now: int,
) -> str:
    """A new token, which is known nowhere else from now on; its tenant is made if need be.

    Any number may live at once: for a rotation, make the second before revoking the first.

    Raises
    ------
    ConfigError
        A scope is not known, there is none, or the name or expiry cannot be used.
    """
    _check(name, scopes, expires_ns, now)
    kid = "".join(secrets.choice(_KID_LETTERS) for _ in range(_KID_LENGTH))
    secret = "".join(secrets.choice(_SECRET_LETTERS) for _ in range(_SECRET_LENGTH))
    session.add(
        Token(
            kid=kid,
            tenant_id=tenant_of(session, tenant_name, now),
            name=name,
            sha256=_hash(secret),
            scopes=" ".join(scope for scope in SCOPES if scope in scopes),
            created_ns=now,
            expires_ns=expires_ns,
        )
    )
    session.flush()
    return f"smon_{kid}_{secret}"


def tokens(session: Session, tenant_name: str | None = None) -> list[TokenInfo]:
    """All tokens, or those of one tenant, the newest last."""
    wanted = select(Token, Tenant.name).join(Tenant, Tenant.id == Token.tenant_id)
    if tenant_name is not None:
        wanted = wanted.where(Tenant.name == tenant_name)
    return [
        TokenInfo(
            kid=token.kid,
            tenant=tenant,
            name=token.name,
            scopes=tuple(token.scopes.split()),
            created_ns=token.created_ns,
            expires_ns=token.expires_ns,
            revoked_ns=token.revoked_ns,
            last_used_ns=token.last_used_ns,
        )
        for token, tenant in session.execute(wanted.order_by(Token.created_ns, Token.kid))
    ]


def revoke(session: Session, kid: str, now: int) -> None:
    """Close a token, for ever; once more does no harm.

    Raises
    ------
    MissingError
        There is none with this key id.
    """
    if session.scalar(select(Token.kid).where(Token.kid == kid)) is None:
        raise MissingError(
            "expected the key id of a token (the 8 characters after smon_), found none like that: "
            "see smon token list"
        )
    session.execute(
        update(Token)
        .where(Token.kid == kid, Token.revoked_ns.is_(None))
        .values(revoked_ns=now)
        .execution_options(synchronize_session=False)
    )


def verify(session: Session, text: str, now: int) -> VerifiedToken | None:
    """What a token opens; None if it is malformed, unknown, wrong, expired or revoked.

    Takes as long for a wrong secret as for a right one, and only reads: `touch` notes the use.
    """
    match = _TEXT.fullmatch(text)
    kid, secret = match.groups() if match else ("", "")
    token = session.get(Token, kid, populate_existing=True)
    same = hmac.compare_digest(_hash(secret), token.sha256 if token is not None else _NOTHING)
    if token is None or not same or token.revoked_ns is not None:
        return None
    if token.expires_ns is not None and token.expires_ns <= now:
        return None
    return VerifiedToken(
        token.tenant_id, frozenset(token.scopes.split()), token.kid, token.last_used_ns
    )


def touch(session: Session, kid: str, now: int) -> None:
    """Note that a token is being used, at most once a minute: needs a transaction that writes."""
    session.execute(
        update(Token)
        .where(
            Token.kid == kid,
            or_(Token.last_used_ns.is_(None), Token.last_used_ns <= now - USED_PAUSE_NS),
        )
        .values(last_used_ns=now)
        .execution_options(synchronize_session=False)
    )


def any_token(session: Session) -> bool:
    """Whether there is any token, be it expired or revoked: from the first on, all need one."""
    return bool(session.scalar(select(exists(select(Token.kid)))))


def _hash(secret: str) -> str:
    # Not a slow one: the secret has 256 random bits, which nobody tries out.
    return hashlib.sha256(secret.encode()).hexdigest()


def _check(name: str, scopes: Collection[str], expires_ns: int | None, now: int) -> None:
    unknown = sorted(set(scopes) - set(SCOPES))
    if unknown or not scopes:
        found = ", ".join(unknown) or "none"
        raise ConfigError(f"expected scopes out of {', '.join(SCOPES)}, found {found[:200]!a}")
    if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
        raise ConfigError(
            f"expected a name of 1 to {_MAX_NAME} printable characters for the token, found "
            f"{name[:80]!a}"
        )
    if expires_ns is not None and expires_ns <= now:
        raise ConfigError("expected an expiry in the future: give a longer time")
