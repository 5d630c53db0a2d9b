"""What the commands that talk to a server share: its address, the token, requests, errors.

Flow: `smon.commands.import_`, `smon.commands.fleet` → **here** → REST API.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import http.client
import json
import os
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlsplit

from smon.errors import ConfigError, StoreError
from smon.wire import API, DIGEST_HEADER

_TIMEOUT_S: Final = 120.0
_BLOCK_BYTES: Final = 1 << 20
_TRIES: Final = 5
_MAX_ANSWER: Final = 64 << 20
_BUSY: Final = frozenset({429, 503, 507})
_ERRORS_FROM: Final = 400

#: Sleeps for so many seconds; tests count.
Sleep = Callable[[float], None]


def add_server(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say which server, and with which token."""
    parser.add_argument("--server", required=True, metavar="URL", help="address of the server")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file that holds the token; by default SMON_TOKEN of the environment",
    )


def server_of(parsed: argparse.Namespace, sleep: Sleep) -> Server:
    """The server that the options name.

    Raises
    ------
    ConfigError
        The address is none, or the token cannot be read.
    """
    return Server(parsed.server, _token(parsed.token_file), sleep)


def text_of(path: Path) -> str:
    """A text file.

    Raises
    ------
    ConfigError
        It cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _token(path: Path | None) -> str | None:
    text = os.environ.get("SMON_TOKEN", "") if path is None else text_of(path)
    token = text.strip()
    if not token.isascii() or not token.isprintable():
        raise ConfigError("expected a token of printable characters, as smon token create shows it")
    return token or None


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    body: bytes
    retry_after_s: float


class Server:
    """Asks a server; what it is too busy for is asked again.

    Parameters
    ----------
    address
        ``http://host:port``, with or without a path before the API's.
    token
        None: the server needs none.

    Raises
    ------
    ConfigError
        The address is none.
    """

    def __init__(self, address: str, token: str | None, sleep: Sleep = time.sleep) -> None:
        self.address = address.rstrip("/")
        parts = urlsplit(self.address)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in {"http", "https"} or not parts.hostname or port == -1:
            raise ConfigError(f"expected a server such as http://localhost:8080, found {address!r}")
        self._https = parts.scheme == "https"
        self._place = (parts.hostname, port)
        self._prefix = parts.path + API
        self._token = token
        self._sleep = sleep

    def ask(self, method: str, path: str, document: object = None) -> dict[str, Any]:
        """One request with a JSON document, or without; the answer as JSON.

        Raises
        ------
        ConfigError
            The server refuses.
        StoreError
            It cannot be reached, or fails.
        """
        body = b"" if document is None else json.dumps(document).encode()
        headers = {"Content-Length": str(len(body)), "Accept": "application/json"}
        if document is not None:
            headers["Content-Type"] = "application/json"
        return self._checked(lambda: self._request(method, path, headers, body))

    def send(self, path: str, file: Path) -> dict[str, Any]:
        """Send a file; it is read twice, block by block.

        Raises
        ------
        ConfigError
            The file cannot be read, or the server refuses.
        StoreError
            The server cannot be reached, or fails.
        """
        digest, size = _digest(file)
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(size),
            DIGEST_HEADER: f"sha-256=:{base64.b64encode(digest).decode()}:",
            "SMon-File-Name": quote(file.name, safe=""),
        }

        def once() -> _Answer:
            try:
                with file.open("rb") as content:
                    return self._request("PUT", path, headers, content)
            except FileNotFoundError as error:
                raise ConfigError(f"there is no file {file} any more") from error

        return self._checked(once)

    def _checked(self, once: Callable[[], _Answer]) -> dict[str, Any]:
        answer = once()
        for tried in range(1, _TRIES):
            if answer.status not in _BUSY:
                break
            self._sleep(max(answer.retry_after_s, float(tried)))
            answer = once()
        document = _parsed(answer.body)
        if answer.status < _ERRORS_FROM:
            return document
        detail = document.get("detail") or document.get("title") or f"status {answer.status}"
        if answer.status in _BUSY or answer.status >= http.client.INTERNAL_SERVER_ERROR:
            raise StoreError(f"{self.address} fails: {detail}")
        raise ConfigError(f"{self.address} refuses: {detail}")

    def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: Any,  # noqa: ANN401  # bytes or a file
    ) -> _Answer:
        sent = dict(headers)
        if self._token is not None:
            sent["Authorization"] = f"Bearer {self._token}"
        connection = self._connection()
        try:
            connection.request(method, self._prefix + path, body=body, headers=sent)
            answer = connection.getresponse()
            text = answer.read(_MAX_ANSWER)
            wait = answer.headers.get("Retry-After", "")
            return _Answer(answer.status, text, float(wait) if wait.isdigit() else 0.0)
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            reason = str(error) or type(error).__name__
            raise StoreError(f"cannot reach {self.address}: {reason}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._place
        kind = http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        return kind(host, port, timeout=_TIMEOUT_S)


def _digest(file: Path) -> tuple[bytes, int]:
    digest, size = hashlib.sha256(), 0
    try:
        with file.open("rb") as content:
            while block := content.read(_BLOCK_BYTES):
                digest.update(block)
                size += len(block)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    return digest.digest(), size


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body or b"{}")
    except ValueError as error:
        raise StoreError("the server's answer is no JSON: is this the address of SMon?") from error
    return document if isinstance(document, dict) else {}
