"""Tokens that are none, or too weak, or of somebody else, at every route and every page."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

from smon.api.routes.common import SCOPE_KEY
from smon.store import tokens
from smon.store.database import Database
from tests.proof.attacks.target import MINE, Answer, Target, lines_of, sample

#: Answers to who is not known: refused, sent to sign in, no such route or method.
_REFUSED: Final = frozenset({303, 400, 401, 403, 404, 405})

#: What is open to all, since it holds nothing of any job.
_OPEN: Final = ("/login", "/logout", "/static/", "/runbooks", "/api/v1/openapi.json")

#: Routes of agents stand in the document without a scope: theirs is to send.
_OF_AGENTS: Final = ("/api/v1/agents/hello", "/api/v1/agents/heartbeat", "/api/v1/time")
_INGEST: Final = "/api/v1/ingest/"

_WORD: Final = re.compile("GOOD|KID|SECRET|THEIRS|THEIR|HALF|SHORT|EXPIRED|REVOKED")


@dataclass(frozen=True, slots=True)
class Found:
    """What tokens opened that should not have; each entry says which request."""

    requests: int
    routes: int
    open: tuple[str, ...]
    shown: tuple[str, ...]
    weak: tuple[str, ...]
    foreign: tuple[str, ...]


def attack(target: Target, most: int) -> Found:
    """Every forged token at every route, at most so many; every scope and tenant at all of them."""
    operations, before = target.operations(), target.judged.requests
    routes = [*operations, *(("GET", path) for path in target.pages())]
    tried: list[tuple[str, Answer]] = []
    for (method, path), headers in sample(list(product(routes, _forged(target))), most):
        answer = target.ask(method, target.filled(path), headers=headers)
        tried.append((f"{method} {target.filled(path)} with {headers}", answer))
    return Found(
        requests=target.judged.requests - before,
        routes=len(routes),
        open=tuple(what for what, answer in tried if _is_open(what, answer)),
        shown=tuple(what for what, answer in tried if _shows(answer)),
        weak=tuple(_weak(target, operations)),
        foreign=tuple(_foreign(target, routes)),
    )


def _is_open(what: str, answer: Answer) -> bool:
    public = any(what.split(" ")[1].startswith(path) for path in _OPEN)
    return not public and answer.status not in _REFUSED


def _shows(answer: Answer) -> bool:
    """Whether there is anything of the job, besides what the address itself said."""
    return MINE in answer.body.decode("latin-1").replace(f"{MINE}-host", "")


def _forged(target: Target) -> list[dict[str, str]]:
    """Headers that say who asks, none of which is good."""
    good, (_, kid, secret) = target.tokens["all"], target.tokens["all"].split("_")
    _, theirs, their = target.tokens["other"].split("_")
    words = {
        "GOOD": good, "KID": kid, "SECRET": secret, "THEIRS": theirs, "THEIR": their,
        "HALF": good[: len(good) // 2], "SHORT": good[:-1], "EXPIRED": target.tokens["expired"],
        "REVOKED": target.tokens["revoked"],
    }  # fmt: skip
    lines = [_WORD.sub(lambda match: words[match[0]], line) for line in lines_of("tokens.txt")]
    flipped = [_flipped(good, place) for place in range(len(good))]
    lines += [f"Authorization: Bearer {text}" for text in flipped]
    pairs = (line.partition(":") for line in lines)
    return [{name: text.strip(" ")} for name, _, text in pairs]


def _flipped(text: str, place: int) -> str:
    """With one bit changed, which leaves a character that a header may hold."""
    return text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]


def _weak(target: Target, operations: dict[tuple[str, str], dict[str, Any]]) -> Iterator[str]:
    """Operations that a token of another scope opens, and those that say no scope."""
    for (method, path), operation in operations.items():
        agents = path in _OF_AGENTS or path.startswith(_INGEST)
        wanted = operation.get(SCOPE_KEY, "ingest" if agents else None)
        if wanted is None:
            yield f"{method} {path} says no scope"
        for scope in set(tokens.SCOPES) - {wanted, "admin"}:
            answer = target.ask(method, target.filled(path), token=target.tokens[scope])
            if answer.status != 403:
                yield f"{method} {path} with {scope}: {answer.status}"


def _foreign(target: Target, routes: list[tuple[str, str]]) -> Iterator[str]:
    """What a token of this tenant opens of the other's job."""
    values = target.values(target.foreign)
    for method, path in routes:
        if "{job_id}" in path or "{stream}" in path:
            answer = target.ask(method, target.filled(path, **values), token=target.tokens["all"])
            if answer.status < 400:
                yield f"{method} {path}: {answer.status}"


def timing(target: Target, tries: int) -> tuple[float, float]:
    """Median µs to refuse a token whose secret is wrong from the start, and at its end only."""
    good = target.tokens["all"]
    early, late = _flipped(good, good.rindex("_") + 1), _flipped(good, len(good) - 1)
    times: dict[str, list[float]] = {early: [], late: []}
    with closing(Database(target.url)) as database, database.read() as session:
        for _ in range(tries):
            for text, found in times.items():
                began = time.perf_counter()
                tokens.verify(session, text, time.time_ns())
                found.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times[early]), statistics.median(times[late])
