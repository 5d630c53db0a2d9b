"""Who may do what: the tenant and the scopes of a request, from its token.

Flow: headers → **here** → every route. The tenant comes from here and from nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from smon.errors import WireError
from smon.wire.problems import Problem


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
