"""Runbooks: one for each alert and each cause, kept as Markdown, shown as pages.

Flow: ``dashboards/runbooks/*.md`` → **here** → ``runbook.html``. They come with the package, so
they can be read where there is no internet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

from markdown_it import MarkdownIt
from markupsafe import Markup

#: Where they lie; ``docs/runbooks.md`` lists them.
FOLDER: Final = Path(__file__).resolve().parents[2] / "runbooks"

_SUFFIX: Final = ".md"

#: Names of alerts begin so, those of causes do not.
_ALERT: Final = "SMon"


@dataclass(frozen=True, slots=True)
class RunbookView:
    """A runbook as its page shows it."""

    title: str
    body: Markup


@dataclass(frozen=True, slots=True)
class RunbookList:
    """All runbooks: (name, what it is about) of each, by name."""

    alerts: tuple[tuple[str, str], ...]
    causes: tuple[tuple[str, str], ...]


@lru_cache(maxsize=1)
def names() -> frozenset[str]:
    """Names of all runbooks: alerts and causes."""
    return frozenset(path.stem for path in FOLDER.glob(f"*{_SUFFIX}"))


@lru_cache(maxsize=128)
def runbook(name: str) -> RunbookView | None:
    """A runbook by its name, with or without the suffix; None if there is none."""
    stem = name.removesuffix(_SUFFIX)
    if stem not in names():
        return None
    text = (FOLDER / f"{stem}{_SUFFIX}").read_text(encoding="utf-8")
    return RunbookView(text.partition("\n")[0].removeprefix("# "), rendered(text))


@lru_cache(maxsize=1)
def listed() -> RunbookList:
    """What there is to read, for who does not come from a link."""
    lines: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    for name in sorted(names()):
        found = runbook(name)
        if found is not None:
            about = found.title.removeprefix(f"{name}: ")
            lines[name.startswith(_ALERT)].append((name, about))
    return RunbookList(tuple(lines[True]), tuple(lines[False]))


def rendered(text: str) -> Markup:
    """Markdown as HTML, in which markup is text."""
    made = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    # Commands are wider than a phone: who has no pointer scrolls them by keys.
    made = made.replace("<pre>", '<pre tabindex="0">')
    return Markup(made)  # noqa: S704  # escaped by the first line
