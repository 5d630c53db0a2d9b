"""SQL where text is expected: every parameter of every route, and names that are kept."""

from __future__ import annotations

import itertools
import re
import time
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from tests.proof.attacks.target import Target, lines_of, sample

#: Parameters of pages stand in their forms and links.
_FIELD: Final = re.compile(r"""<(?:input|select|button)[^>]*\bname="([\w-]+)\"""")
_LINK: Final = re.compile(r"""[?;&]([\w-]+)=""")


@dataclass(frozen=True, slots=True)
class Found:
    """What SQL in parameters did.

    Attributes
    ----------
    changed
        Tables that are not as they were.
    widened
        Filters that let through what their text does not say.
    slowest_s
        The longest that one answer took.
    """

    requests: int
    parameters: int
    changed: tuple[str, ...]
    widened: tuple[str, ...]
    slowest_s: float


def attack(target: Target, most: int) -> Found:
    """Put each text into each parameter, at most so many requests; what came of it."""
    before = target.rows()
    places = _places(target)
    asked = sample(list(itertools.product(places, lines_of("sql.txt"))), most)
    slowest = 0.0
    for place, text in asked:
        began = time.monotonic()
        target.ask("GET", place.format(quoted(text)), token=target.tokens["all"])
        slowest = max(slowest, time.monotonic() - began)
    widened = tuple(_widened(target, max(most // 10, 10)))
    after = target.rows()
    changed = tuple(name for name in before if before[name] != after[name])
    return Found(len(asked), len(places), changed, widened, slowest)


def quoted(text: str) -> str:
    """As a parameter, bytes as they are."""
    return quote(text.encode("utf-8", "surrogateescape"), safe="")


def _places(target: Target) -> list[str]:
    """Addresses with one parameter left open: of a query, or of the path."""
    found = [
        f"{target.filled(path)}?{each['name']}={{}}"
        for (method, path), operation in target.operations().items()
        if method == "GET"
        for each in operation.get("parameters", ())
        if each["in"] == "query"
    ]
    fields = _fields(target)
    found += [f"{target.filled(path)}?{name}={{}}" for path in target.pages() for name in fields]
    for path in target.paths():
        for name in re.findall(r"\{(\w+)(?::\w+)?\}", path):
            found.append(target.filled(path, **{name: "{}"}))
    return list(dict.fromkeys(found))


def _fields(target: Target) -> list[str]:
    """Names of all that the pages ask with."""
    found: set[str] = {"next", "cursor", "windows"}
    for path in target.pages():
        if not path.startswith("/static"):
            page = target.ask("GET", target.filled(path), token=target.tokens["all"])
            text = page.body.decode("latin-1")
            found |= {*_FIELD.findall(text), *_LINK.findall(text)}
    return sorted(found)


def _widened(target: Target, most: int) -> list[str]:
    """Names asked for that bring jobs which are not called so."""
    wrong = []
    for text in sample(lines_of("sql.txt"), most):
        answer = target.ask("GET", f"/api/v1/jobs?name={quoted(text)}", token=target.tokens["all"])
        if answer.status == 200:
            names = [each["name"] for each in answer.json()["items"]]
            wrong += [text for name in names if text.lower() not in name.lower()]
    return wrong
