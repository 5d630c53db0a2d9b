"""HTML and scripts in whatever an agent may send, on every page: shown as text, never run.

What a browser makes of the same pages is tested in ``tests/browser/test_hostile.py``; this reads
what is served, so that every page and every name can be tried.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Final
from urllib.parse import quote

from tests.proof.attacks.target import Answer, Target, sample

#: Elements that load or run something, and that no page has.
_FORBIDDEN: Final = frozenset(
    {"iframe", "object", "embed", "img", "base", "style", "frame", "applet", "audio", "video"}
)
_ADDRESSES: Final = frozenset({"href", "src", "action", "formaction", "srcdoc", "xlink:href"})
_SCHEMES: Final = ("javascript:", "data:", "vbscript:")

_POLICY: Final = "default-src 'self'"


@dataclass(frozen=True, slots=True)
class Found:
    """What names did on pages; each entry says where.

    Attributes
    ----------
    running
        Elements and attributes that could run or load something.
    unprotected
        Pages without a policy, and data that a browser might take for a page.
    absent
        Pages of a job that do not show its name: then nothing was proved.
    """

    pages: int
    running: tuple[str, ...]
    unprotected: tuple[str, ...]
    absent: tuple[str, ...]


class _Reader(HTMLParser):
    """Collects what could run, and the text that people see."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.running: list[str] = []
        self.text: list[str] = []
        self._script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Judge an element."""
        given = {name: value or "" for name, value in attrs}
        self._script = tag == "script"
        if tag in _FORBIDDEN or any(name.startswith("on") for name in given):
            self.running.append(self.get_starttag_text() or tag)
        if tag == "script" and not (
            given.get("src", "").startswith("/static/") or given.get("type") == "application/json"
        ):
            self.running.append(self.get_starttag_text() or tag)
        for name in _ADDRESSES & given.keys():
            plain = "".join(given[name].split()).lower()
            if plain.startswith(_SCHEMES) or (tag == "link" and not plain.startswith("/static/")):
                self.running.append(self.get_starttag_text() or tag)

    def handle_endtag(self, tag: str) -> None:
        """Scripts end."""
        self._script = False

    def handle_data(self, data: str) -> None:
        """What is no element."""
        if not self._script:
            self.text.append(data)


def attack(target: Target, most: int) -> Found:
    """Open pages of jobs with hostile names, at most so many, and what lists them."""
    token, running, bare, absent = target.tokens["all"], [], [], []
    asked = sample(list(itertools.product(target.hostile, _pages(target))), most)
    asked += [(name, path) for name in target.hostile for path in _asking(name)]
    asked += [("", path) for path in ("/", "/fleet", "/hosts", "/jobs.csv", "/fleet.csv")]
    for name, place in asked:
        path = target.filled(place, **_values(target, name)) if name in target.hostile else place
        answer = target.ask("GET", path, token=token, headers={"Accept": "text/html"})
        what = f"{path[:80]} of {name[:60]!r}"
        bare += [what] if not _is_protected(answer) else []
        if "text/html" in answer.headers.get("content-type", ""):
            reader = _Reader()
            reader.feed(answer.body.decode())
            running += [f"{what}: {each[:200]}" for each in reader.running]
            seen = " ".join("".join(reader.text).split())
            if "{job_id}" in place and answer.status == 200 and " ".join(name.split()) not in seen:
                absent.append(what)
    return Found(len(asked), tuple(running), tuple(bare), tuple(absent))


def _values(target: Target, name: str) -> dict[str, str]:
    host = quote(f"{name}-host", safe="")
    return target.values(target.hostile[name]) | {"host": host, "name": host}


def _pages(target: Target) -> list[str]:
    """Pages and routes that are about one job or host; a drawing would wait for a worker."""
    about = [path for path in target.paths() if "{job_id}" in path or path.startswith("/hosts/")]
    return [path for path in about if not path.endswith(("/timeline", "/timeline/marks"))]


def _asking(name: str) -> list[str]:
    """Pages that repeat what they were asked."""
    text = quote(name, safe="")
    return [f"/?q={text}", f"/hosts?name={text}", f"/login?next={text}", f"/{text}"]


def _is_protected(answer: Answer) -> bool:
    """Whether a browser is told what this is, and what may run in it."""
    headers, body = answer.headers, answer.body
    kind = headers.get("content-type", "")
    if headers.get("x-content-type-options") != "nosniff":
        return False
    if "text/html" in kind:
        return headers.get("content-security-policy", "").startswith(_POLICY)
    if "json" in kind and answer.status == 200:
        json.loads(body)
    return answer.status in {303, 304} or not body or "html" not in kind
