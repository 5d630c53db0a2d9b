"""``smon import``: send recorded trace files to a server, and follow what becomes of them."""

from __future__ import annotations

import argparse
import base64
import hashlib
import http.client
import json
import os
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlsplit

from smon.errors import ConfigError, StoreError, TraceError
from smon.wire import API, DIGEST_HEADER

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_EXIT_OK: Final = 0
_EXIT_INSUFFICIENT: Final = 3

_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.5
_BLOCK_BYTES: Final = 1 << 20
_TRIES: Final = 5
_MAX_ANSWER: Final = 64 << 20
_BUSY: Final = frozenset({429, 503, 507})
_ERRORS_FROM: Final = 400

#: Sleeps for so many seconds; tests count.
Sleep = Callable[[float], None]


def add(commands: _SubParsersAction[Any]) -> None:
    """Declare the command."""
    parser = commands.add_parser(
        "import",
        help="send recorded trace files to a server",
        description="Send recorded trace files to a server, which analyses them.",
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="trace file, or directory of the files of all ranks",
    )
    parser.add_argument("--server", required=True, metavar="URL", help="address of the server")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file that holds the token; by default SMON_TOKEN of the environment",
    )
    parser.add_argument("--meta", type=Path, metavar="FILE", help="meta file, YAML or JSON")
    parser.add_argument(
        "--layout", metavar="tp4-dp4-pp4", help="parallel sizes, if there is no meta file"
    )
    parser.add_argument("--job", metavar="NAME", help="name of the job; by default the trace's")
    parser.add_argument("--attempt", type=int, metavar="N", help="restart count of the job")
    parser.add_argument(
        "--format", metavar="NAME", help="read the files as this format instead of recognising it"
    )
    parser.add_argument(
        "--wait", action="store_true", help="wait for the analysis and print its verdict"
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace, sleep: Sleep = time.sleep) -> int:
    """Send, start, follow.

    Returns
    -------
    int
        0, or with ``--wait`` 3 if the data is insufficient.

    Raises
    ------
    ConfigError
        An option or a file cannot be used, or the token does not allow it.
    TraceError
        The server cannot read the files.
    StoreError
        The server cannot be reached, or fails.
    """
    files = list(_files(parsed.files))
    server = Server(parsed.server, _token(parsed.token_file), sleep)
    options = _options(parsed)
    made = server.ask("POST", "/imports", options)
    for number, path in enumerate(files):
        _say(f"sending {path.name} ({number + 1} of {len(files)})")
        server.send(f"/imports/{made['id']}/files/{number}", path)
    server.ask("POST", f"/imports/{made['id']}/start")
    done = _followed(server, made["id"], sleep)
    print(f"{server.address}/jobs/{done['job_id']}", flush=True)
    return _verdict(server, done, sleep) if parsed.wait else _EXIT_OK


def _followed(server: Server, import_id: str, sleep: Sleep) -> dict[str, Any]:
    """Wait until a worker has read the files."""
    said = ""
    while True:
        row = server.ask("GET", f"/imports/{import_id}")
        if row["state"] == "done":
            return row
        if row["state"] == "failed":
            raise TraceError(f"the server cannot read the files: {row['error']}")
        words = f"{row['phase'] or 'waiting for a worker'}, {row['progress']:.0%}"
        if words != said:
            _say(words)
            said = words
        sleep(_POLL_S)


def _verdict(server: Server, done: Mapping[str, Any], sleep: Sleep) -> int:
    """Wait for the analysis, and print what it found."""
    job_id, wanted = done["job_id"], done["window_id"]
    _say("waiting for the analysis")
    while True:
        page = server.ask("GET", f"/jobs/{job_id}/windows?limit=500")
        window = next((each for each in page["items"] if each["id"] == wanted), None)
        if window is None:
            raise StoreError("the window of the import is gone: import it again")
        if window["state"] == "failed":
            raise TraceError(f"the analysis failed: {window['reason']}")
        if window["state"] == "done" and window["verdict"] is not None:
            break
        sleep(_POLL_S)
    for line in server.ask("GET", f"/jobs/{job_id}/plan")["lines"]:
        print(line)
    insufficient = window["verdict"] == "insufficient_data"
    return _EXIT_INSUFFICIENT if insufficient else _EXIT_OK


def _say(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


# --- what is sent -----------------------------------------------------------------------------


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            found = sorted(each for each in path.iterdir() if each.is_file())
            if not found:
                raise ConfigError(f"the folder {path} holds no file")
            yield from found
        elif path.is_file():
            yield path
        else:
            raise ConfigError(f"there is no file {path}")


def _options(parsed: argparse.Namespace) -> dict[str, Any]:
    given = {
        "job": parsed.job,
        "attempt": parsed.attempt,
        "layout": parsed.layout,
        "format": parsed.format,
        "meta": None if parsed.meta is None else _text(parsed.meta),
    }
    return {name: value for name, value in given.items() if value is not None}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _token(path: Path | None) -> str | None:
    text = os.environ.get("SMON_TOKEN", "") if path is None else _text(path)
    token = text.strip()
    if not token.isascii() or not token.isprintable():
        raise ConfigError("expected a token of printable characters, as smon token create shows it")
    return token or None


# --- the server -------------------------------------------------------------------------------


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
