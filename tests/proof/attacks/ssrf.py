"""Addresses that would make the server talk to where it must not: a listener counts who comes."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Final

from smon.config import Settings
from smon.errors import ConfigError
from smon.notify.address import target_of
from smon.notify.post import Terms, post
from tests.notify.receiver import receiving
from tests.proof.attacks.target import Target, lines_of, sample
from tests.proof.child import ROOT
from tests.system.server import free_port, quiet_environ

_TERMS: Final = Terms(timeout_s=0.5, private=False)

#: What a name server may say of a name that looks harmless: this machine, in all its forms.
_LIES: Final[tuple[list[str], ...]] = (
    ["127.0.0.1"], ["::1"], ["::ffff:127.0.0.1"], ["64:ff9b::7f00:1"], ["2002:7f00:1::"], ["0.0.0.0"],  # noqa: S104, E501
    ["93.184.216.34", "127.0.0.1"], ["127.0.0.1", "93.184.216.34"], ["::"], [],
)  # fmt: skip

#: Headers by which a server may be told where it is, or whom to ask.
_HEADERS: Final = (
    "Host", "X-Forwarded-Host", "X-Forwarded-For", "X-Forwarded-Server", "X-Original-URL",
    "X-Rewrite-URL", "X-Host", "Forwarded", "Referer", "Origin", "Via", "X-Real-IP",
    "True-Client-IP", "Client-IP", "X-Wap-Profile", "Proxy", "Destination",
    "Location", "From", "Link",
)  # fmt: skip


@dataclass(slots=True)
class Listener:
    """Somebody who must not be called, on both loopback addresses; counts who does."""

    port: int = 0
    called: int = 0
    _sockets: list[socket.socket] = field(default_factory=list)

    def open(self) -> None:
        """Listen."""
        # Not any port: somebody may still look for a server that had it a moment ago.
        self.port = free_port()
        first = socket.create_server(("127.0.0.1", self.port))
        self._sockets.append(first)
        with suppress(OSError):
            second = socket.create_server(("::1", self.port), family=socket.AF_INET6)
            self._sockets.append(second)
        for each in self._sockets:
            threading.Thread(target=self._take, args=(each,), daemon=True).start()

    def _take(self, listener: socket.socket) -> None:
        while True:
            try:
                caller, _ = listener.accept()
            except OSError:
                return
            self.called += 1
            caller.close()

    def close(self) -> None:
        """Stop."""
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def listening() -> Iterator[Listener]:
    """A listener, while the context lasts."""
    listener = Listener()
    listener.open()
    try:
        yield listener
    finally:
        listener.close()


def attack(target: Target, most: int, commands: int) -> tuple[int, int]:
    """(addresses tried, calls at places that must not be called).

    Parameters
    ----------
    commands
        How many of them are also given to ``smon notify test``, in a process of its own.
    """
    with listening() as listener:
        addresses = [line.replace("PORT", str(listener.port)) for line in lines_of("ssrf.txt")]
        for address in sample(addresses, most):
            _notify(address)
        for lie in _LIES:
            _misled(lie, listener.port)
        for address in sample(addresses, commands):
            _command(address)
        _redirected(listener)
        _asked(target, listener, sample(addresses, max(most // 10, 3)))
        return min(most, len(addresses)) + len(_LIES), listener.called


def _notify(address: str) -> None:
    """As the notifier sends: settings, then resolution, then the check."""
    with suppress(ConfigError):
        given = Settings.from_env({"SMON_NOTIFY_WEBHOOK_URL": address})
        reply = post(target_of(given.notify_webhook_url), b"{}", "1", _TERMS)
        if reply.delivered:
            raise AssertionError(f"a message was delivered to {address}")


def _misled(found: Sequence[str], port: int) -> None:
    terms = Terms(0.5, private=False, look_up=lambda _host, _port: found)
    for scheme in ("https", "http"):
        post(target_of(f"{scheme}://good.example:{port}/x"), b"{}", "1", terms)


def _command(address: str) -> None:
    if "\0" in address:
        return
    environ = {**quiet_environ(), "SMON_NOTIFY_SLACK_URL": address, "SMON_NOTIFY_TIMEOUT_S": "0.5"}
    command = [sys.executable, "-m", "smon.cli", "notify", "test"]
    done = subprocess.run(command, env=environ, capture_output=True, check=False, cwd=ROOT)
    if done.returncode == 0 or b"Traceback" in done.stderr:
        raise AssertionError(f"smon notify test took {address}: {done.stderr[-500:]!r}")


def _redirected(listener: Listener) -> None:
    """A receiver that may be called sends us on to one that may not."""
    for status in (301, 302, 303, 307, 308):
        with receiving() as receiver:
            receiver.status = status
            receiver.headers = {"Location": f"http://127.0.0.1:{listener.port}/x"}
            post(target_of(receiver.url), b"{}", "1", Terms(2.0, private=True))


def _asked(target: Target, listener: Listener, addresses: Sequence[str]) -> None:
    """Whether a request can make the server call somebody: by its headers, or its address."""
    place = f"127.0.0.1:{listener.port}"
    token = target.tokens["all"]
    for name in _HEADERS:
        for text in (place, f"http://{place}/x", f"for={place};host={place}"):
            target.ask("GET", "/api/v1/version", token=token, headers={name: text})
    for address in addresses:
        shown = address.replace(" ", "%20").replace("\r", "").replace("\n", "").replace("\0", "")
        target.ask("GET", shown, token=token)
        target.ask("GET", f"/login?next={shown}")
        target.ask("GET", f"/hosts/{shown}", token=token)
        target.ask("GET", f"/static/plotly.min.js?v={shown}", headers={"Host": place})
