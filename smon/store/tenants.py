"""Tenants: whoever shares one server with others; made when they are first named.

Flow: `smon.store.tokens`, `smon.api` → **here**.
"""

from __future__ import annotations

import re
from typing import Final

from sqlalchemy import select
from sqlalchemy.orm import Session

from smon.errors import ConfigError
from smon.store.database import now_ns
from smon.store.models import Tenant, new_id
from smon.store.streams import insert_new

#: Tenant of a server without tokens.
DEFAULT: Final = "default"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def tenant_id(session: Session, name: str) -> str | None:
    """Id of a tenant; None if there is none of this name."""
    return session.scalar(select(Tenant.id).where(Tenant.name == name))


def tenant_of(session: Session, name: str, now: int) -> str:
    """Id of a tenant, which is made if need be: needs a transaction that writes.

    Raises
    ------
    ConfigError
        The name is not one that a tenant can have.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            "expected a tenant of 1 to 64 letters, digits, dots, dashes and underscores, found "
            f"{name[:80]!a}"
        )
    found = tenant_id(session, name)
    if found is None:
        values = {"id": new_id(), "name": name, "created_ns": now}
        session.execute(insert_new(session, Tenant).values(**values))
        found = session.scalars(select(Tenant.id).where(Tenant.name == name)).one()
    return found


def default_tenant(session: Session, now: int | None = None) -> str:
    """Id of the tenant of a server without tokens: needs a transaction that writes."""
    return tenant_of(session, DEFAULT, now_ns() if now is None else now)


def tenant_names(session: Session) -> dict[str, str]:
    """Names of all tenants by id."""
    return {row.id: row.name for row in session.execute(select(Tenant.id, Tenant.name))}
