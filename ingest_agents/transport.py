"""One request, one answer: HTTP/1.1 with a connection that is kept, over the standard library.

Flow: `ingest_agents.link` → **here** → network. The seam of the tests: anything with `request`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import urlsplit

from smon.errors import ConfigError, SMonError

#: An answer to an agent is short; more is no answer of SMon.
_MAX_ANSWER_BYTES: Final = 16 << 20


class TransportError(SMonError):
    """The server could not be reached, or the connection broke: nobody knows what it did."""


@dataclass(frozen=True, slots=True)
class Response:
    """An answer; names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def document(self) -> dict[str, Any]:
        """The JSON object in it; empty if there is none."""
        try:
            document = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return document if isinstance(document, dict) else {}


class Transport(Protocol):
    """Carries requests to one server; used by one thread at a time."""

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Response:
        """The answer.

        Raises
        ------
        TransportError
            There is none.
        """

    def close(self) -> None:
        """Give the connection up."""


#: Makes a transport, for one thread.
Transports = Callable[[], Transport]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is.

    Attributes
    ----------
    prefix
        Path before that of every route, e.g. behind a proxy; empty, or without a slash at its end.
    """

    secure: bool
    host: str
    port: int
    prefix: str


def address_of(url: str) -> Address:
    """Read a server's address.

    Raises
    ------
    ConfigError
        It is no http or https URL.
    """
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"server: expected a URL, found {url!r}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username:
        raise ConfigError(f"server: expected http://HOST:PORT or https://HOST, found {url!r}")
    secure = parts.scheme == "https"
    return Address(secure, parts.hostname, port or (443 if secure else 80), parts.path.rstrip("/"))


class HttpTransport:
    """A kept connection; see `Transport`.

    Raises
    ------
    ConfigError
        The certificates cannot be read.
    """

    def __init__(self, address: Address, *, timeout_s: float, ca_file: str = "") -> None:
        self._address, self._timeout_s = address, timeout_s
        self._context: ssl.SSLContext | None = None
        if address.secure:
            try:
                self._context = ssl.create_default_context(cafile=ca_file or None)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"ca_file: cannot read certificates: {error}") from error
        self._connection: http.client.HTTPConnection | None = None

    def request(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Response:
        """The answer; a kept connection that the server had closed is opened anew, once.

        Raises
        ------
        TransportError
            There is none.
        """
        kept = self._connection is not None
        try:
            return self._exchange(method, path, headers, body)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            if not (kept and isinstance(error, ConnectionError | http.client.BadStatusLine)):
                raise TransportError(_reason(error)) from error
        # Every request of an agent may be repeated.
        try:
            return self._exchange(method, path, headers, body)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            raise TransportError(_reason(error)) from error

    def _exchange(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None
    ) -> Response:
        connection = self._connection or self._connect()
        self._connection = connection
        # A server that refuses a large body may answer, and close, before it has read all of it.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.request(method, self._address.prefix + path, body, dict(headers))
        answer = connection.getresponse()
        content = answer.read(_MAX_ANSWER_BYTES)
        if not answer.isclosed() or answer.will_close:
            self.close()
        names = {name.lower(): value for name, value in answer.getheaders()}
        return Response(answer.status, names, content)

    def _connect(self) -> http.client.HTTPConnection:
        where = self._address
        connection: http.client.HTTPConnection
        if self._context is not None:
            connection = http.client.HTTPSConnection(
                where.host, where.port, timeout=self._timeout_s, context=self._context
            )
        else:
            connection = http.client.HTTPConnection(where.host, where.port, timeout=self._timeout_s)
        connection.connect()
        # Head and body are two writes: without this, the second waits for an acknowledgement.
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def close(self) -> None:
        """Give the connection up."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
