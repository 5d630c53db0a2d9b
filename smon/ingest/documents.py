"""Batches that are documents: side evidence, gaps, the end of a stream.

Flow: `smon.ingest.encodings` → **here** → `smon.ingest.wal`, and again in `smon.ingest.drain`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from smon.errors import MetaError, WireError
from smon.ingest.limits import MAX_GAP, MAX_LOST, MAX_VALUES
from smon.ingest.values import is_text
from smon.trace.context import SCHEMA, Context, parse_context
from smon.wire.columns import MAX_TEXT, TEXT_EXTRA
from smon.wire.problems import Problem

_MAX_INT: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Gap:
    """Sequence numbers that will never come, and what was lost with them.

    Attributes
    ----------
    first_seq, last_seq
        Both included.
    events
        Ops that are lost.
    first_step, last_step
        Steps that they were of; None if not known.
    """

    first_seq: int
    last_seq: int
    events: int
    reason: str
    first_step: int | None
    last_step: int | None


@dataclass(frozen=True, slots=True)
class Evidence:
    """Side evidence as it came, and the steps that it is of; None: of no step."""

    document: bytes
    first_step: int | None
    last_step: int | None


def read_gap(raw: bytes, seq: int, events: int) -> Gap:
    """The gap of a body; `seq` and `events` are what path and headers say.

    Raises
    ------
    WireError
        It is malformed, or says something else.
    """
    parsed = _object(raw)
    first, last = _whole(parsed, "first_seq"), _whole(parsed, "last_seq")
    if first != seq or _whole(parsed, "events") != events:
        raise _wrong("expected first_seq and events to be those of path and header")
    if events > MAX_LOST:
        raise _wrong(f"expected at most {MAX_LOST} lost events")
    if not first <= last < first + MAX_GAP:
        raise _wrong(f"expected last_seq from first_seq on, at most {MAX_GAP} numbers in all")
    steps = [
        None if parsed.get(name) is None else _whole(parsed, name)
        for name in ("first_step", "last_step")
    ]
    return Gap(first, last, events, _reason(parsed), steps[0], steps[1])


def read_end(raw: bytes) -> str:
    """Why a stream ended.

    Raises
    ------
    WireError
        The body is malformed.
    """
    return _reason(_object(raw))


def read_evidence(raw: bytes) -> Evidence:
    """Side evidence (``smon.context/1``), checked.

    Raises
    ------
    WireError
        It is malformed.
    """
    if raw.count(b",") > MAX_VALUES:
        raise _wrong(f"expected at most {MAX_VALUES} values of side evidence: send smaller batches")
    parsed = _object(raw)
    if parsed.get("schema") != SCHEMA:
        raise WireError(Problem.WRONG_SCHEMA, f"expected a document of the schema {SCHEMA}")
    try:
        context = parse_context(parsed, "body")
    except MetaError as error:
        # The reader quotes what it finds; the answer must not.
        raise _wrong(f"expected side evidence as {SCHEMA} describes it, found another") from error
    first, last = _steps_of(context)
    return Evidence(raw, first, last)


def _steps_of(context: Context) -> tuple[int | None, int | None]:
    tables = (context.microbatches, context.expert_tokens, context.counters)
    filled = [table.step for table in tables if len(table)]
    firsts = [int(steps.min()) for steps in filled] + [event.step for event in context.events]
    lasts = [int(steps.max()) for steps in filled] + [event.step for event in context.events]
    return (min(firsts), max(lasts)) if firsts else (None, None)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        parsed = orjson.loads(raw)
    except ValueError as error:
        raise WireError(Problem.MALFORMED_BODY, "expected a body of JSON") from error
    if not isinstance(parsed, dict):
        raise _wrong("expected a JSON object")
    return parsed


def _whole(parsed: dict[str, Any], name: str) -> int:
    value = parsed.get(name)
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise _wrong(f"expected {name} to be a whole number from 0")
    return value


def _reason(parsed: dict[str, Any]) -> str:
    reason = parsed.get("reason")
    if not isinstance(reason, str) or not is_text(reason):
        raise _wrong(f"expected a reason of 1 to {MAX_TEXT} letters, digits and {TEXT_EXTRA}")
    return reason


def _wrong(message: str) -> WireError:
    return WireError(Problem.WRONG_VALUES, message)
