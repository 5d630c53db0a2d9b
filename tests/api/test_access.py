"""The gates: tokens, this machine without tokens, cookies of pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from smon.api.access import (
    FirstTokenGate,
    LoopbackGate,
    Scope,
    TokenGate,
    gate_for,
    is_loopback,
)
from smon.config import Settings
from smon.errors import WireError
from smon.store import tokens
from smon.store.tenants import tenant_id
from tests.api.filled import NOW, SECOND, World, make_world

LOCAL = {"host": "localhost:8080"}


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> int:
        """The present."""
        return self.now


def bearer(text: str) -> dict[str, str]:
    """Headers with a token."""
    return {"authorization": f"Bearer {text}"}


def test_a_revoked_token_counts_for_ten_seconds_more(world: World) -> None:
    """A good token is remembered for ten seconds, and not longer."""
    clock = Clock()
    gate = TokenGate(world.database, clock)
    text = world.tokens["read"]
    assert gate.access(bearer(text)).scopes == {Scope.READ}
    with world.database.write() as session:
        tokens.revoke(session, text.split("_")[1], NOW)
    clock.now += 9 * SECOND
    assert gate.access(bearer(text)).tenant_id == world.tenant_id
    clock.now += 2 * SECOND
    with pytest.raises(WireError, match="expected a token that is known"):
        gate.access(bearer(text))


def test_the_use_of_a_token_is_noted_once_a_minute(world: World) -> None:
    """Lists of tokens say when each was last used."""
    clock = Clock()
    gate = TokenGate(world.database, clock)
    for later in (0, 30, 61):
        clock.now = NOW + later * SECOND
        gate.access(bearer(world.tokens["read"]))
    with world.database.read() as session:
        used = {token.name: token.last_used_ns for token in tokens.tokens(session)}
    assert used["read"] == NOW + 61 * SECOND
    assert used["admin"] is None


def test_a_wrong_token_is_not_remembered(world: World) -> None:
    """A token that is made later works at once, whatever was tried before."""
    gate = TokenGate(world.database, Clock())
    for wrong in ("", "x", "smon_aaaaaaaa_" + "a" * 43, world.tokens["read"] + "a", "é"):
        with pytest.raises(WireError) as caught:
            gate.access(bearer(wrong))
        assert caught.value.problem == "unauthorized"
        assert world.tokens["read"] not in str(caught.value)
    with pytest.raises(WireError):
        gate.access({"authorization": "Basic " + world.tokens["read"]})


def test_a_clock_that_is_set_back_forgets(world: World) -> None:
    """What was remembered in the future is looked up again."""
    clock = Clock()
    gate = TokenGate(world.database, clock)
    gate.access(bearer(world.tokens["read"]))
    with world.database.write() as session:
        tokens.revoke(session, world.tokens["read"].split("_")[1], NOW)
    clock.now -= SECOND
    with pytest.raises(WireError):
        gate.access(bearer(world.tokens["read"]))


def test_without_tokens_this_machine_may_do_everything(tmp_path: Path) -> None:
    """Until the first token is made; from then on, within ten seconds, one is needed."""
    clock = Clock()
    world = make_world(tmp_path)
    with world.database.write() as session:
        session.connection().exec_driver_sql("DELETE FROM tokens")
    gate = gate_for(Settings(host="127.0.0.1"), world.database, clock)
    assert isinstance(gate, FirstTokenGate)
    access = gate.access(LOCAL)
    assert access.scopes == frozenset(Scope)
    with world.database.write() as session:
        assert tenant_id(session, "default") == access.tenant_id
        text = tokens.create(session, "default", "first", ["read"], None, NOW)
    clock.now += 11 * SECOND
    with pytest.raises(WireError, match="Authorization"):
        gate.access(LOCAL)
    assert gate.access({**LOCAL, **bearer(text)}).tenant_id == access.tenant_id
    world.database.close()


def test_a_server_that_others_reach_always_wants_a_token(world: World) -> None:
    """Bound to anything but loopback, no request goes without."""
    gate = gate_for(Settings(host="0.0.0.0"), world.database, Clock())  # noqa: S104  # not bound
    assert isinstance(gate, TokenGate)


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "127.0.0.1:1", "127.8.8.8", "[::1]:8080", "[::1]"]
)
def test_names_of_this_machine_open_the_loopback_gate(host: str) -> None:
    """Loopback names and addresses, with or without port."""
    assert LoopbackGate("t").access({"host": host}).tenant_id == "t"


@pytest.mark.parametrize(
    "host", ["", "evil.example", "localhost.evil.example", "127.0.0.1.nip.io", "10.0.0.1", "[::2]"]
)
def test_foreign_names_do_not(host: str) -> None:
    """A name that somebody points at this machine is refused (DNS rebinding)."""
    with pytest.raises(WireError, match="Host"):
        LoopbackGate("t").access({"host": host})
    assert not is_loopback(host)


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://localhost:9999"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
    ],
)
def test_pages_of_other_sites_do_not_act_through_the_loopback_gate(
    headers: dict[str, str],
) -> None:
    """What a browser sends for another site is refused; a link that is followed is not."""
    gate = LoopbackGate("t")
    with pytest.raises(WireError, match="page of this server"):
        gate.access({**LOCAL, **headers})
    gate.access({**LOCAL, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"})
    gate.access({**LOCAL, "origin": "http://localhost:8080", "sec-fetch-site": "same-origin"})


def sign_in(world: World, token: str, **more: str) -> tuple[int, dict[str, str]]:
    """Sign in with a form; the status, and the headers."""
    answer = world.client(None).post(
        "/login", data={"token": token, "next": "/jobs/x"}, headers={"accept": "text/html", **more}
    )
    return answer.status_code, dict(answer.headers)


def test_a_browser_signs_in_with_a_token(world: World) -> None:
    """The cookie is out of reach of scripts and other sites; with it, pages open."""
    status, headers = sign_in(world, world.tokens["read"])
    assert (status, headers["location"]) == (303, "/jobs/x")
    cookie = headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert "secure" not in cookie.lower()
    value = {"cookie": cookie.split(";")[0], "accept": "text/html"}
    page = world.client(None).get("/", headers=value)
    assert page.status_code == 200
    assert "Sign out" in page.text
    assert world.client(None).get("/api/v1/jobs", headers=value).status_code == 200
    out = world.client(None).post("/logout", headers=value)
    assert 'smon_token=""' in out.headers["set-cookie"]


def test_behind_https_the_cookie_is_secure(tmp_path: Path) -> None:
    """The public address says whether browsers come by https."""
    world = make_world(tmp_path, None, {"public_url": "https://smon.example"})
    assert "Secure" in sign_in(world, world.tokens["read"])[1]["set-cookie"]
    world.database.close()


def test_a_wrong_token_does_not_sign_in(world: World) -> None:
    """401, no cookie, and the token is not shown again."""
    answer = world.client(None).post("/login", data={"token": "smon_secret"})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert "smon_secret" not in answer.text
    assert sign_in(world, world.tokens["read"], origin="https://evil.example")[0] == 403


@pytest.mark.parametrize(
    "target", ["//evil.example", "https://evil.example", "/\\evil.example", "x", "/a\nb", ""]
)
def test_signing_in_leads_nowhere_else(world: World, target: str) -> None:
    """`next` is a path of this server, or the start page."""
    answer = world.client(None).post("/login", data={"token": world.tokens["read"], "next": target})
    assert answer.headers["location"] == "/"


def test_a_page_without_a_token_leads_to_the_sign_in(world: World) -> None:
    """And back again afterwards; a script gets 401."""
    html = {"accept": "text/html"}
    answer = world.client(None).get("/jobs/0123456789abcdef?x=1", headers=html)
    assert answer.headers["location"] == "/login?next=%2Fjobs%2F0123456789abcdef%3Fx%3D1"
    assert world.client(None).get("/").status_code == 401
    assert world.client("ingest").get("/", headers=html).status_code == 403


@pytest.mark.parametrize(
    "headers, status",
    [
        ({}, 403),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"origin": "http://localhost"}, 201),
        ({"sec-fetch-site": "same-origin"}, 201),
    ],
)
def test_with_a_cookie_only_this_servers_pages_change_something(
    world: World, headers: dict[str, str], status: int
) -> None:
    """A form of another site that a browser sends with the cookie is refused; a token is not."""
    cookie = {"cookie": f"smon_token={world.tokens['ingest']}"}
    path = "/api/v1/imports"
    assert world.client(None).post(path, headers={**cookie, **headers}).status_code == status
    assert world.client("ingest").post(path, headers=headers).status_code == 201
