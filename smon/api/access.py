"""Who may do what: the tenant and the scopes of a request, from its token.

Flow: headers → **here** → every route. The tenant comes from here and from nowhere else.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from ipaddress import ip_address
from threading import Lock
from typing import Final, Protocol
from urllib.parse import urlsplit

from smon.config import Settings
from smon.errors import StoreError, WireError
from smon.store import tokens
from smon.store.database import Database
from smon.store.tenants import default_tenant
from smon.wire.problems import Problem

_log = logging.getLogger(__name__)

#: A good token is looked up again after so long: the longest that a revoked one still works.
_REMEMBER_NS: Final = 10 * 10**9
_REMEMBERED: Final = 4096


class Scope(StrEnum):
    """What a token allows. ``admin`` allows everything."""

    INGEST = "ingest"
    READ = "read"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Access:
    """What a request may do.

    Attributes
    ----------
    kid
        Key id of the token; None on a loopback server without tokens.
    """

    tenant_id: str
    scopes: frozenset[Scope]
    kid: str | None = None

    def need(self, scope: Scope) -> None:
        """Let it pass if it has the scope.

        Raises
        ------
        WireError
            It has not.
        """
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            raise WireError(Problem.FORBIDDEN, f"expected a token with the scope {scope}")


class Gate(Protocol):
    """Tells who asks."""

    def access(self, headers: Mapping[str, str]) -> Access:
        """What the request with these headers (lower-case names) may do.

        Raises
        ------
        WireError
            There is no token, or it is wrong, expired or revoked.
        """


class LoopbackGate:
    """Everybody on this machine may do everything: for a server that nobody else can reach.

    Browsers on this machine run other people's pages, so the request must name this machine as its
    host (else a foreign name was pointed at it: DNS rebinding) and must not come from another site.
    """

    __slots__ = ("_access",)

    def __init__(self, tenant_id: str) -> None:
        self._access = Access(tenant_id, frozenset(Scope))

    def access(self, headers: Mapping[str, str]) -> Access:
        """All scopes of the tenant.

        Raises
        ------
        WireError
            The host is no name of this machine, or another site asks.
        """
        if not is_loopback(_host_name(headers.get("host", ""))):
            raise WireError(
                Problem.FORBIDDEN,
                "expected the header Host to be localhost or a loopback address: without tokens "
                "the server answers to this machine alone (smon token create)",
            )
        refuse_other_sites(headers)
        return self._access


class TokenGate:
    """Asks for ``Authorization: Bearer smon_<kid>_<secret>``.

    A good token is remembered for ten seconds, so that a flood of batches is no flood of queries;
    one that is revoked works no longer than that. Bad ones are never remembered.

    Parameters
    ----------
    clock
        Unix time, ns.
    """

    __slots__ = ("_clock", "_database", "_known", "_lock")

    def __init__(self, database: Database, clock: Callable[[], int] = time.time_ns) -> None:
        self._database = database
        self._clock = clock
        self._lock = Lock()
        self._known: OrderedDict[bytes, tuple[int, Access]] = OrderedDict()

    def access(self, headers: Mapping[str, str]) -> Access:
        """What the token of the request allows.

        Raises
        ------
        WireError
            There is no token, or it is wrong, expired or revoked.
        StoreError
            The database cannot be reached.
        """
        scheme, _, text = headers.get("authorization", "").partition(" ")
        text = text.strip()
        if scheme.lower() != "bearer" or not text:
            raise WireError(
                Problem.UNAUTHORIZED, "expected the header Authorization: Bearer smon_…"
            )
        now, digest = self._clock(), hashlib.sha256(text.encode()).digest()
        with self._lock:
            known = self._known.get(digest)
        if known is not None and 0 <= now - known[0] < _REMEMBER_NS:
            return known[1]
        access = self._verified(text, now)
        with self._lock:
            self._known[digest] = (now, access)
            self._known.move_to_end(digest)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return access

    def _verified(self, text: str, now: int) -> Access:

        with self._database.read() as session:
            token = tokens.verify(session, text, now)
        if token is None:
            raise WireError(
                Problem.UNAUTHORIZED, "expected a token that is known, not expired, not revoked"
            )
        if token.last_used_ns is None or now - token.last_used_ns >= tokens.USED_PAUSE_NS:
            self._note_use(token.kid, now)
        scopes = frozenset(Scope(name) for name in token.scopes)
        return Access(token.tenant_id, scopes, token.kid)

    def _note_use(self, kid: str, now: int) -> None:
        try:
            with self._database.write() as session:
                tokens.touch(session, kid, now)
        except StoreError as error:
            # Whoever may come in does so, even if that cannot be written down.
            _log.warning("the use of token %s cannot be noted: %s", kid, error)


class FirstTokenGate:
    """Open on this machine until the first token is made; from then on tokens are asked for."""

    __slots__ = ("_asked_ns", "_clock", "_closed", "_database", "_open", "_tokens")

    def __init__(self, database: Database, clock: Callable[[], int] = time.time_ns) -> None:
        self._database = database
        self._clock = clock
        self._tokens = TokenGate(database, clock)
        self._open: Gate | None = None
        self._closed = False
        self._asked_ns = -_REMEMBER_NS

    def access(self, headers: Mapping[str, str]) -> Access:
        """As `LoopbackGate` for the default tenant without tokens, as `TokenGate` with.

        Raises
        ------
        WireError
            As theirs.
        StoreError
            The database cannot be reached.
        """
        return self._gate().access(headers)

    def _gate(self) -> Gate:
        now = self._clock()
        if not self._closed and not 0 <= now - self._asked_ns < _REMEMBER_NS:
            with self._database.read() as session:
                self._closed = tokens.any_token(session)
            self._asked_ns = now
        if self._closed:
            return self._tokens
        if self._open is None:
            with self._database.write() as session:
                self._open = LoopbackGate(default_tenant(session, now))
        return self._open


def gate_for(
    settings: Settings, database: Database, clock: Callable[[], int] = time.time_ns
) -> Gate:
    """The gate of a server: open on loopback as long as there is no token, else for tokens."""
    if is_loopback(settings.host):
        return FirstTokenGate(database, clock)
    return TokenGate(database, clock)


def is_loopback(host: str) -> bool:
    """Whether a name or an address means this machine, whatever a name server says."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refuse_other_sites(headers: Mapping[str, str], *, must_say: bool = False) -> None:
    """Let no page of another site act with what a browser adds by itself.

    Parameters
    ----------
    must_say
        Whether a request without ``Origin`` and ``Sec-Fetch-Site`` is refused too.

    Raises
    ------
    WireError
        Another site asks.
    """
    origin, fetched = headers.get("origin"), headers.get("sec-fetch-site")
    foreign = origin is not None and _place_of(origin) != headers.get("host", "")
    elsewhere = fetched in {"cross-site", "same-site"} and (
        must_say or headers.get("sec-fetch-mode") != "navigate"
    )
    if foreign or elsewhere or (must_say and origin is None and fetched != "same-origin"):
        raise WireError(Problem.FORBIDDEN, "expected a request from a page of this server")


def _place_of(origin: str) -> str | None:
    """Host and port of an origin; None if it is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _host_name(host: str) -> str:
    """Without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if host.count(":") == 1 else host
