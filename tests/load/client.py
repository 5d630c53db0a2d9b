"""What players of a site say and hear: connections that open again, a tally of all answers."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException
from typing import Any, Final

from smon.wire import API, TYPE_JSON

_TRIES: Final = 5
_KEPT_ERRORS: Final = 20
_SERVER_ERROR: Final = 500


class Tally:
    """What was said by both sides; any thread may add to it."""

    def __init__(self) -> None:
        self.answers: Counter[tuple[str, int]] = Counter()
        self.events: Counter[str] = Counter()
        self.errors: list[str] = []
        self.reconnects = 0
        self._lock = threading.Lock()

    def answered(self, what: str, status: int) -> None:
        """One answer."""
        with self._lock:
            self.answers[what, status] += 1

    def taken(self, job: str, events: int) -> None:
        """So many more events of a job were acknowledged."""
        with self._lock:
            self.events[job] += events

    def lost_connection(self) -> None:
        """A connection broke, and the request was sent again."""
        with self._lock:
            self.reconnects += 1

    def failed(self, who: str, error: BaseException) -> None:
        """A player met what it does not expect."""
        with self._lock:
            if len(self.errors) < _KEPT_ERRORS:
                self.errors.append(f"{who}: {type(error).__name__}: {error}"[:300])

    @property
    def requests(self) -> int:
        """Answers in all."""
        return self.answers.total()

    @property
    def server_errors(self) -> int:
        """Answers that are the server's fault."""
        items = list(self.answers.items())
        return sum(count for (_, status), count in items if status >= _SERVER_ERROR)


class Client:
    """One connection that is opened again when it breaks."""

    def __init__(self, port: int, tally: Tally) -> None:
        self._port, self._tally = port, tally
        self._connection: HTTPConnection | None = None

    def ask(
        self,
        what: str,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Status and body of the answer; `what` is the name under which it is counted.

        Raises
        ------
        ConnectionError
            There was none, several times in a row.
        """
        for _ in range(_TRIES):
            try:
                status, answer = self._once(method, path, body, headers or {})
            except (OSError, HTTPException):
                self.close()
                self._tally.lost_connection()
                time.sleep(0.2)
                continue
            self._tally.answered(what, status)
            return status, answer
        raise ConnectionError(f"{method} {path}: no answer")

    def _once(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        if self._connection is None:
            self._connection = HTTPConnection("127.0.0.1", self._port, timeout=60)
        self._connection.request(method, path, body, dict(headers))
        answer = self._connection.getresponse()
        return answer.status, answer.read()

    def document(self, what: str, path: str, document: object | None = None) -> Any:  # noqa: ANN401  # JSON
        """The JSON answer of a route below /api/v1; None if it is not there (any more).

        Raises
        ------
        ValueError
            The server refuses.
        """
        body = None if document is None else json.dumps(document).encode()
        headers = {} if body is None else {"Content-Type": TYPE_JSON}
        method = "GET" if body is None else "POST"
        status, answer = self.ask(what, method, f"{API}/{path}", body, headers)
        if status == 404:
            return None
        if status >= 400:
            raise ValueError(f"{method} {path} was answered with {status}: {answer[:200]!r}")
        return json.loads(answer)

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
