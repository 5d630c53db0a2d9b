"""The routes of the server, as an agent calls them.

Flow: `ingest_agents.agent`, `ingest_agents.sender` → **here** → `ingest_agents.transport`. It
decides nothing: answers and failures go back as they are.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ingest_agents.transport import Response, Transport, TransportError, Transports
from ingest_agents.usage import Usage
from smon import __version__
from smon.errors import ConfigError
from smon.wire import API, PROTOCOL, Batch

TIME_PATH: Final = f"{API}/time"
HELLO_PATH: Final = f"{API}/agents/hello"
HEARTBEAT_PATH: Final = f"{API}/agents/heartbeat"


class Link:
    """Requests to one server; may be used by several threads, each with its own connection.

    Parameters
    ----------
    transports
        Makes the connection of a thread.
    token
        Says what to send as a token, if anything; asked before every request.
    host
        Name of this host.
    """

    def __init__(self, transports: Transports, token: Callable[[], str | None], host: str) -> None:
        self._transports, self._token, self._host = transports, token, host
        self._mine = threading.local()
        self._usage = Usage()

    def _transport(self) -> Transport:
        transport: Transport | None = getattr(self._mine, "transport", None)
        if transport is None:
            transport = self._mine.transport = self._transports()
        return transport

    def _request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> Response:
        try:
            token = self._token()
        except ConfigError as error:
            # A file that is being replaced may be missing for a moment.
            raise TransportError(str(error)) from error
        all_headers = {"Accept": "application/json", **(headers or {})}
        if token:
            all_headers["Authorization"] = f"Bearer {token}"
        return self._transport().request(method, path, all_headers, body)

    def put(
        self,
        stream_id: str,
        epoch: int,
        batch: Batch,
        *,
        attempt: int,
        clock: tuple[int, int] | None,
    ) -> Response:
        """Send a batch.

        Raises
        ------
        TransportError
            There is no answer.
        """
        path = f"{API}/ingest/{stream_id}/{epoch}/{batch.seq}"
        return self._request("PUT", path, batch.headers(attempt=attempt, clock=clock), batch.body)

    def hello(self, streams: Sequence[Mapping[str, Any]]) -> Response:
        """Say which streams there are.

        Raises
        ------
        TransportError
            There is no answer.
        """
        return self._post(
            HELLO_PATH, {"protocol": PROTOCOL, "agent": self._agent(), "streams": streams}
        )

    def heartbeat(
        self, streams: Sequence[Mapping[str, Any]], clock: Mapping[str, Any] | None
    ) -> Response:
        """Say that we are there.

        Raises
        ------
        TransportError
            There is no answer.
        """
        agent = {**self._agent(), **self._usage.since_last()}
        document = {"agent": agent, "streams": streams, "clock": clock}
        return self._post(HEARTBEAT_PATH, document)

    def _agent(self) -> dict[str, Any]:
        return {"version": __version__, "host": self._host, "pid": os.getpid()}

    def _post(self, path: str, document: Mapping[str, Any]) -> Response:
        body = json.dumps(document, separators=(",", ":")).encode()
        return self._request("POST", path, {"Content-Type": "application/json"}, body)

    def time(self) -> tuple[int, int] | None:
        """Server's clock, ns, when it got the request and when it answered; None: it won't say.

        Raises
        ------
        TransportError
            There is no answer.
        """
        document = self._request("GET", TIME_PATH).document()
        try:
            return int(document["received_ns"]), int(document["sent_ns"])
        except (KeyError, TypeError, ValueError):
            return None

    def get(self, path: str) -> Response:
        """Read something else, e.g. a job's windows.

        Raises
        ------
        TransportError
            There is no answer.
        """
        return self._request("GET", path)
