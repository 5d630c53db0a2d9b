"""Hostile text in every place that takes text: paths, SQL, addresses, heads, tokens, markup.

What is sent stands in ``tests/proof/corpus/``, how it is sent in ``tests/proof/attacks/``. Routes
are those that the server itself lists, so that a new one is attacked without a word here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from tests.browser.names import HOSTILE
from tests.faults.postgres import postgres
from tests.proof.attacks import access, heads, markup, paths, sql, ssrf
from tests.proof.attacks.target import Target, sample, target
from tests.proof.line import Form, Goal, Line, at_most, exactly

_ALL: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Sizes:
    """At most so many of each sort.

    Attributes
    ----------
    names, sent
        Jobs with hostile names; names that lead out of a folder and are sent as those of jobs.
    commands
        Addresses that are given to ``smon notify test``.
    """

    names: int
    paths: int
    sql: int
    sent: int
    addresses: int
    commands: int
    heads: int
    tokens: int
    pages: int
    tries: int


_SIZES: Final = {
    Form.SHORT: Sizes(3, 120, 120, 8, 40, 0, 25, 120, 20, 50),
    Form.LONG: Sizes(len(HOSTILE), _ALL, 20_000, _ALL, _ALL, 20, _ALL, _ALL, _ALL, 5_000),
}


def prove(form: Form, folder: Path) -> Line:
    """Attack a real server, and judge everything that it answers."""
    begin, sizes = time.monotonic(), _SIZES[form]
    with target(folder / "sqlite", sample(HOSTILE, sizes.names)) as attacked:
        goals, figures = _attacked(attacked, sizes)
    goals += _judged(attacked)
    judged = attacked.judged
    if form is Form.LONG:
        goals += _on_postgres(folder / "postgresql", sizes)
    figures["requests"] = judged.requests
    figures["answers"] = {
        str(status): judged.statuses[status] for status in sorted(judged.statuses)
    }
    return Line("corpora", form, tuple(goals), figures, round(time.monotonic() - begin, 1))


def _attacked(attacked: Target, sizes: Sizes) -> tuple[list[Goal], dict[str, Any]]:
    by_access = access.attack(attacked, sizes.tokens)
    asked = paths.read(attacked, sizes.paths)
    by_sql = sql.attack(attacked, sizes.sql)
    by_markup = markup.attack(attacked, sizes.pages)
    addresses, calls = ssrf.attack(attacked, sizes.addresses, sizes.commands)
    doubtful = heads.attack(attacked, sizes.heads)
    # Last: it writes, and so would change what others compare.
    written = paths.written(attacked, sizes.sent)
    early, late = access.timing(attacked, sizes.tries)
    counts = {
        "routes without a scope, or open to the wrong one": by_access.weak,
        "answers to forged tokens that are no refusal": by_access.open,
        "answers to forged tokens with content": by_access.shown,
        "things of another tenant that were opened": by_access.foreign,
        "tables that reading has changed": by_sql.changed,
        "filters that SQL has widened": by_sql.widened,
        "files written outside the data folder": written,
        "elements of pages that a name has made": by_markup.running,
        "answers without what protects a browser": by_markup.unprotected,
        "pages of a job that do not show its name as it is": by_markup.absent,
    }
    goals = [exactly(_with(what, found), len(found), 0) for what, found in counts.items()]
    goals.append(exactly("calls to an address that must not be called", calls, 0))
    differ = abs(early - late) / max(early, late)
    what = "secret wrong from the start or at its end: difference in time, ratio"
    goals.append(at_most(what, differ, 0.05, timed=True))
    figures = {
        "routes": by_access.routes, "requests_with_tokens": by_access.requests,
        "requests_for_files": asked, "requests_with_sql": by_sql.requests,
        "parameters": by_sql.parameters, "slowest_answer_to_sql_s": round(by_sql.slowest_s, 3),
        "pages_with_markup": by_markup.pages, "addresses": addresses, "heads": doubtful,
        "refusing_a_token_us": round(late, 1),
    }  # fmt: skip
    return goals, figures


def _on_postgres(folder: Path, sizes: Sizes) -> list[Goal]:
    """What depends on the database, once more."""
    with postgres() as server, target(folder, [], server.new("attacked")) as attacked:
        found = sql.attack(attacked, sizes.sql)
    goals = [
        exactly(_with("tables that reading has changed", found.changed), len(found.changed), 0),
        exactly(_with("filters that SQL has widened", found.widened), len(found.widened), 0),
        *_judged(attacked),
    ]
    return [replace(goal, what=f"{goal.what}, PostgreSQL") for goal in goals]


def _judged(attacked: Target) -> list[Goal]:
    judged = attacked.judged
    log = attacked.server.log.read_text(encoding="utf-8", errors="replace")
    counts = {
        "answers 5xx": judged.failed,
        "answers with a file that is none of the server's": judged.leaked,
        "answers with anything of another tenant": judged.foreign,
        "answers with a header that the client made up": judged.injected,
        "requests that were hidden in others and answered": judged.smuggled,
    }
    goals = [exactly(_with(what, found), len(found), 0) for what, found in counts.items()]
    return [*goals, exactly("tracebacks in the server's log", log.count("Traceback"), 0)]


def _with(what: str, found: Any) -> str:  # noqa: ANN401  # strings in some order
    """The goal, with the first few that miss it."""
    return f"{what}: {'; '.join(list(found)[:3])}" if found else what
