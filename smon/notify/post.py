"""One POST to a receiver, with everything bounded: time, answer, and where the connection goes.

Flow: `smon.notify.notifier` → **here** → the receiver. No redirect is followed, no proxy is used,
nothing of the answer but its status counts: its text may repeat the secret address.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Final

import smon
from smon.notify.address import Lookup, Target, look_up, refusal

#: Of a receiver that wants to be left alone for a while, no longer than so.
MAX_RETRY_AFTER_S: Final = 300.0

#: Addresses of one name that are tried.
_MAX_ADDRESSES: Final = 3

_HEADERS: Final = {
    "Content-Type": "application/json",
    "User-Agent": f"smon/{smon.__version__}",
    "Connection": "close",
}

_OK: Final = range(200, 300)
_REDIRECT: Final = range(300, 400)
_TOO_MANY: Final = 429
_BUSY: Final = 503


@dataclass(frozen=True, slots=True)
class Reply:
    """What became of a message.

    Attributes
    ----------
    reason
        Why it was not taken, in words that may be logged.
    retry_after_s
        How long the receiver wants to be left alone; 0: it does not say.
    """

    delivered: bool
    reason: str = ""
    retry_after_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Terms:
    """How a message is sent.

    Attributes
    ----------
    timeout_s
        From the first connection to the status of the answer.
    private
        Whether private addresses are allowed.
    look_up
        Names to addresses.
    context
        Of TLS; by default the certificates that the system trusts.
    """

    timeout_s: float
    private: bool
    look_up: Lookup = look_up
    context: Callable[[], ssl.SSLContext] = ssl.create_default_context


def post(target: Target, body: bytes, message_id: str, terms: Terms) -> Reply:
    """Send one message; never raises for what the network or the receiver does."""
    try:
        found = terms.look_up(target.host, target.port)
    except (OSError, UnicodeError):
        return Reply(delivered=False, reason=f"the name {target.host} cannot be resolved")
    reason = refusal(target, found, private=terms.private)
    if reason is not None:
        return Reply(delivered=False, reason=f"nothing is sent to {target.host}: {reason}")
    deadline = time.monotonic() + terms.timeout_s
    headers = {**_HEADERS, "Host": target.name, "X-SMon-Message": message_id}
    try:
        with _connected(found, target.port, deadline) as plain, _cut_at(deadline, plain):
            reply = _exchange(_secured(plain, target, terms), target, body, headers)
    except TimeoutError:
        return _late(terms)
    except (OSError, HTTPException, ValueError) as error:
        reply = Reply(delivered=False, reason=_words(error))
    # An answer that was cut off can look like a whole one.
    return _late(terms) if time.monotonic() >= deadline else reply


def _late(terms: Terms) -> Reply:
    return Reply(delivered=False, reason=f"no answer within {terms.timeout_s:g} s")


def _exchange(
    connected: socket.socket, target: Target, body: bytes, headers: Mapping[str, str]
) -> Reply:
    connection = HTTPConnection(target.host, target.port)
    # A connection that is there already is used: the name is not resolved again.
    connection.sock = connected
    with contextlib.closing(connection):
        connection.request("POST", target.path, body, headers)
        return _reply(connection.getresponse())


def _secured(plain: socket.socket, target: Target, terms: Terms) -> socket.socket:
    """A second handle on a connection, with TLS where it is wanted: the first one is to end it."""
    copy = plain.dup()
    if not target.secure:
        return copy
    try:
        return terms.context().wrap_socket(copy, server_hostname=target.host)
    except BaseException:
        copy.close()
        raise


@contextlib.contextmanager
def _connected(found: Sequence[str], port: int, deadline: float) -> Iterator[socket.socket]:
    """A connection to the first of these addresses that takes one."""
    error: OSError = OSError("no address")
    for address in found[:_MAX_ADDRESSES]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        try:
            made = socket.create_connection((address, port), timeout=left_s)
        except OSError as why:
            error = why
            continue
        with made:
            yield made
        return
    raise error


@contextlib.contextmanager
def _cut_at(deadline: float, connected: socket.socket) -> Iterator[None]:
    """Cut a connection when the time is over: a timeout of a socket begins anew with each byte."""

    def cut() -> None:
        with contextlib.suppress(OSError):
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(max(deadline - time.monotonic(), 0.0), cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _reply(answer: HTTPResponse) -> Reply:
    status = answer.status
    if status in _OK:
        return Reply(delivered=True)
    if status in _REDIRECT:
        return Reply(delivered=False, reason=f"status {status}: redirects are not followed")
    wait_s = _retry_after(answer) if status in (_TOO_MANY, _BUSY) else 0.0
    return Reply(delivered=False, reason=f"status {status}", retry_after_s=wait_s)


def _retry_after(answer: HTTPResponse) -> float:
    text = (answer.getheader("Retry-After") or "").strip()
    # Digits only: a date would have to be compared with the clock of another machine.
    return min(float(text), MAX_RETRY_AFTER_S) if text.isascii() and text.isdigit() else 0.0


def _words(error: Exception) -> str:
    """What went wrong, without anything that the receiver has said."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or 'no more is known'}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
