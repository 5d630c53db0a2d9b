"""Clients that take their time: they hold connections and send next to nothing.

``python -m tests.faults.slow_clients PORT CLIENTS SECONDS`` holds so many connections, from several
addresses of this machine, and opens a new one for each that the server closes, until the seconds
are over; then it waits for the server to close the rest, and prints a line of JSON for each kind.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from itertools import cycle
from typing import Final


class Kind(StrEnum):
    """What a client does with its connection."""

    SILENT = "silent"
    HEAD = "head"
    BODY = "body"
    LINES = "lines"
    IDLE = "idle"


#: Connections of one address: fewer than a server allows by default.
_PER_ADDRESS: Final = 50

_PAUSE_S: Final = 0.5

#: How long a server may take to close what it has to close at all.
_PATIENCE_S: Final = 200.0

_WHOLE: Final = b"GET /api/v1/time HTTP/1.1\r\nHost: slow\r\n\r\n"
_HEAD: Final = b"PUT /api/v1/ingest/none/0/0 HTTP/1.1\r\nHost: slow\r\nX-Slow: " + b"a" * 60_000
_BODY: Final = (
    b"PUT /api/v1/ingest/none/0/0 HTTP/1.1\r\nHost: slow\r\nContent-Type: application/json\r\n"
    b"Content-Length: 60000\r\n\r\n"
) + b"1" * 60_000

#: What is sent at once, and what byte by byte.
_SENT: Final = {
    Kind.SILENT: (b"", b""),
    Kind.HEAD: (_HEAD[:20], _HEAD[20:]),
    Kind.BODY: (_BODY[:-60_000], _BODY[-60_000:]),
    Kind.LINES: (b"", b"\r\n" * 10_000),
    Kind.IDLE: (_WHOLE, b""),
}


@dataclass(slots=True)
class Held:
    """Connections of one kind.

    Attributes
    ----------
    refused
        Connections that the server did not take.
    closed, open
        Those that the server closed, and those that it never did.
    answered
        Those that it answered before.
    longest_s
        From the first byte, or the connection, until the server closed it.
    """

    kind: str
    opened: int = 0
    refused: int = 0
    closed: int = 0
    open: int = 0
    answered: int = 0
    longest_s: float = 0.0


async def hold(kind: Kind, address: str, port: int, held: Held) -> None:
    """One connection, until the server closes it."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
    except OSError:
        held.refused += 1
        return
    held.opened += 1
    begin = time.monotonic()
    trickle = asyncio.create_task(_trickle(writer, *_SENT[kind]))
    try:
        answer = await asyncio.wait_for(_until_closed(reader), _PATIENCE_S)
    except TimeoutError:
        held.open += 1
        return
    finally:
        trickle.cancel()
        writer.close()
    held.closed += 1
    held.answered += bool(answer)
    held.longest_s = max(held.longest_s, time.monotonic() - begin)


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    """All that comes. A connection that is reset is closed as well."""
    found = b""
    with suppress(OSError):
        while data := await reader.read(4096):
            found += data
    return found


async def _trickle(writer: asyncio.StreamWriter, at_once: bytes, slowly: bytes) -> None:
    with suppress(OSError):
        writer.write(at_once)
        for at in range(len(slowly)):
            await asyncio.sleep(_PAUSE_S)
            writer.write(slowly[at : at + 1])


async def _repeat(kind: Kind, address: str, port: int, end: float, held: Held) -> None:
    while True:
        await hold(kind, address, port, held)
        if time.monotonic() >= end:
            return
        # A server that refuses everything is not asked more often.
        await asyncio.sleep(_PAUSE_S)


def _addresses(clients: int) -> Iterator[str]:
    """For each client: 127.0.0.2 and on."""
    return (f"127.0.0.{2 + number // _PER_ADDRESS}" for number in range(clients))


async def hold_all(port: int, clients: int, seconds: float) -> list[Held]:
    """Hold so many connections for so long, and until the last is closed."""
    held = {kind: Held(kind) for kind in Kind}
    end = time.monotonic() + seconds
    kinds = cycle(Kind)
    async with asyncio.TaskGroup() as group:
        for kind, address in zip(kinds, _addresses(clients), strict=False):
            group.create_task(_repeat(kind, address, port, end, held[kind]))
    return list(held.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold connections, and say what became of them."""
    port, clients, seconds = arguments or sys.argv[1:]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    held = asyncio.run(hold_all(int(port), int(clients), float(seconds)))
    print(json.dumps([asdict(one) for one in held]))  # noqa: T201  # read by who starts it
    return 0


if __name__ == "__main__":
    sys.exit(main())
