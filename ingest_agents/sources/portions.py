"""Stretches of a growing log of NCCL Inspector that end at the same time on all hosts.

A log has no steps. So it is cut by the clock: each portion has the records of one period of unix
time, as their own stamps say, and all hosts cut alike. Version 4.3 writes header and metadata
once; each portion begins with the last ones before it.

Flow: log, how far it was read → **here** → `ingest_agents.sources.reduce`. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

#: Read at a time; a portion is not longer, and the rest of its period is the next one.
MAX_BYTES: Final = 32 << 20

#: A log is known by so many bytes and the rest of the line they end in; of so many at most.
_KEY_BYTES: Final = 200
HEAD_BYTES: Final = 1 << 16

#: A record without an end is none.
_MAX_RECORD: Final = 1 << 20

#: Records begin at the start of a line, whether they are on one line or on many.
_NEXT: Final = re.compile(rb"\n(?=\{)")

_WRITTEN: Final = re.compile(rb'"dump_timestamp_us"\s*:\s*(\d{1,18})')
_STARTED: Final = re.compile(rb'"(?:kernel|coll)_start_ts"\s*:\s*(\d{1,18})')

#: Times before the year 2000, and a day and more ahead of the clock, are damage.
_FIRST_US: Final = 946_684_800 * 10**6
_AHEAD_US: Final = 86_400 * 10**6

#: Characters of a header, as JSON.
_MAX_HEAD: Final = 4096

_HEADS: Final = ("header", "metadata")

Carry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Portion:
    """Records of one period.

    Attributes
    ----------
    text
        With the header that holds for it.
    begin_us
        Begin of the period, unix µs.
    end
        Byte of the log behind it.
    carry
        Header and metadata that hold behind it.
    """

    text: bytes
    begin_us: int
    end: int
    carry: Carry


def key_of_log(head: bytes) -> str | None:
    """Which log begins like this; None while it has no whole record.

    Parameters
    ----------
    head
        The first `HEAD_BYTES` of it, or all.
    """
    end = head.find(b"\n", _KEY_BYTES)
    if end < 0 and len(head) < HEAD_BYTES:
        return None
    return hashlib.sha256(head[: end if end >= 0 else None]).hexdigest()[:24]


def portions_of(
    file: BinaryIO, offset: int, carry: Carry, period_us: int, until_us: int
) -> Iterator[Portion]:
    """Portions whose period is over.

    Parameters
    ----------
    file
        The log.
    offset
        Byte to begin at: the start of a record.
    carry
        Header and metadata that hold there.
    until_us
        Periods that end later are left for the next time.

    Raises
    ------
    OSError
        The log cannot be read.
    """
    file.seek(offset)
    data = file.read(MAX_BYTES)
    begin, at, period, last = 0, 0, -1, until_us - 1
    for end in _records(data):
        last = _stamp(data[at:end], until_us) or last
        own = max(last // period_us, period)
        if own > period >= 0:
            portion = _portion(data[begin:at], carry, period * period_us, offset + at)
            yield portion
            begin, carry = at, portion.carry
        if (own + 1) * period_us > until_us:
            return
        period, at = own, end
    if at > begin:
        yield _portion(data[begin:at], carry, period * period_us, offset + at)


def _records(data: bytes) -> list[int]:
    """Where each whole record ends."""
    ends = [match.end() for match in _NEXT.finditer(data)]
    last = ends[-1] if ends else 0
    rest = data[last:]
    whole = rest.endswith(b"\n") and rest.rstrip().endswith(b"}")
    if whole or len(rest) > _MAX_RECORD:
        ends.append(len(data))
    return ends


def _stamp(record: bytes, until_us: int) -> int | None:
    """When a record was written, else when its collective began; None if it has no such time."""
    match = _WRITTEN.search(record) or _STARTED.search(record)
    stamp = int(match[1]) if match else 0
    return stamp if _FIRST_US < stamp < until_us + _AHEAD_US else None


def _portion(text: bytes, carry: Carry, begin_us: int, end: int) -> Portion:
    """Records behind the header that holds for them, and the header that holds after them."""
    head = json.dumps(carry).encode() + b"\n" if carry else b""
    return Portion(head + text, begin_us, end, {**carry, **_heads(text)})


def _heads(text: bytes) -> Carry:
    """The last header and the last metadata among some records."""
    found: dict[str, Any] = {}
    for record in reversed(_NEXT.split(text)):
        if len(found) == len(_HEADS):
            break
        missing = [name for name in _HEADS if name not in found]
        if not any(b'"%b"' % name.encode() in record for name in missing):
            continue
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            value = json.loads(record)
            found |= {name: value[name] for name in missing if _is_head(value.get(name))}
    return found


def _is_head(value: object) -> bool:
    """Whether it can be a header: it is kept with every position, so it is short."""
    return isinstance(value, dict) and len(json.dumps(value)) <= _MAX_HEAD
