"""Heads of requests that mean two things, or nothing: smuggled requests, added headers, failures.

Each goes over a connection of its own as raw bytes. A request that is hidden in another one carries
an id that the server would repeat; an answer with it means that the server took it for a request.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from tests.proof.attacks.target import INJECTED, SMUGGLED, Target, lines_of, sample

#: How long to wait for more of an answer, s; and connections at a time.
_WAIT_S: Final = 1.5
_TOGETHER: Final = 12

_HOST: Final = "Host: localhost\r\nConnection: close\r\n"
_HTML: Final = "Accept: text/html\r\nConnection: close\r\n"

#: What fields are put before; where names of hosts may become part of an answer.
_WAYS: Final = ("GET /api/v1/jobs", "GET /", "POST /login", "PUT /api/v1/ingest/x/0/0")
_NAMED: Final = ("/", "/login", "/jobs/x", "/api/v1/jobs", "/nothing", "/hosts?name=a")


def attack(target: Target, most: int) -> int:
    """Send them all, at most so many of each sort; how many."""
    token = target.tokens["all"]
    sorts = (_doubtful(token), _lines(token), _fields(token), _hosts(token), _added())
    asked = [head for sort in sorts for head in sample(list(sort), most)]
    heads = [head.encode("utf-8", "surrogateescape") for head in asked]
    with ThreadPoolExecutor(_TOGETHER) as pool:
        answers = list(pool.map(partial(target.send, seconds=_WAIT_S), heads))
    for head, answer in zip(asked, answers, strict=True):
        target.judge(answer, repr(head.replace(SMUGGLED, "…")), token=token)
    return len(asked)


def _doubtful(token: str) -> Iterator[str]:
    """Bodies whose end two programs may see in different places, with a request behind it."""
    hidden = (
        f"GET /api/v1/version HTTP/1.1\r\nX-Request-Id: {SMUGGLED}\r\n"
        f"Authorization: Bearer {token}\r\n{_HOST}\r\n"
    )
    size, chunks = str(len(hidden)), f"0\r\n\r\n{hidden}"
    for coding in lines_of("codings.txt"):
        length = f"Content-Length: {len(chunks)}"
        yield _post(f"{length}\r\n{coding}", chunks)
        yield _post(f"{coding}\r\n{length}", chunks)
    for length in lines_of("lengths.txt"):
        yield _post(f"Content-Length: {length.replace('SIZE', size)}", hidden)
    for chunk in lines_of("chunks.txt"):
        body = chunk.replace("SIZE", f"{len(hidden):x}") + hidden
        yield _post("Transfer-Encoding: chunked", body)


def _post(fields: str, body: str) -> str:
    return f"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Type: a/b\r\n{fields}\r\n\r\n{body}"


def _lines(token: str) -> Iterator[str]:
    for line in lines_of("lines.txt"):
        yield f"{line}\r\n{_HOST}Authorization: Bearer {token}\r\n\r\n"


def _fields(token: str) -> Iterator[str]:
    for way, text in itertools.product(_WAYS, lines_of("fields.txt")):
        field = text.replace("TOKEN", token)
        yield f"{way} HTTP/1.1\r\n{_HOST}Authorization: Bearer {token}\r\n{field}\r\n\r\n"


def _hosts(token: str) -> Iterator[str]:
    """With a token and without: who is not known is sent to a page that has an address in it."""
    bearer = ("", f"Authorization: Bearer {token}\r\n")
    for path, known, host in itertools.product(_NAMED, bearer, lines_of("hosts.txt")):
        yield f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{known}{_HTML}\r\n"
    for path, known in itertools.product(_NAMED, bearer):
        yield f"GET {path} HTTP/1.1\r\n{known}{_HTML}\r\n"


def _added() -> Iterator[str]:
    """A line end in what may come back in a header, and behind it a header of the client's."""
    for place, end in itertools.product(lines_of("places.txt"), lines_of("ends.txt")):
        text = place.replace("{}", f"{end}{INJECTED}:%201{end}{end}")
        yield f"GET {text} HTTP/1.1\r\nHost: localhost\r\n{_HTML}\r\n"
    for end in lines_of("ends.txt"):
        yield f"GET /login HTTP/1.1\r\n{_HOST}X-Request-Id: a{end}{INJECTED}: 1\r\n\r\n"
