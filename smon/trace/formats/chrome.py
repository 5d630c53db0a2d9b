"""Chrome trace files, event by event: large ones in pieces, damaged ones as far as they go.

``{"some": "facts", …, "traceEvents": [{…}, {…}, …], …}``, plain or gzipped. Events are parsed a
few megabytes at a time, so that memory does not grow with the file. A piece that is not JSON is
repaired if that can be done without guessing, else taken apart; only the events that are broken
are lost, and they are counted.

Flow: file → **here** → `smon.trace.formats.kineto`.
"""

from __future__ import annotations

import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from smon.errors import TraceError
from smon.trace.formats.reading import GZIP_MAGIC, printable, reading_from

#: Called with the events of one piece; what they are is for the caller to check.
Take = Callable[[list[Any]], None]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much is taken at once, and at all, in bytes.

    Attributes
    ----------
    read
        Read from the file, or unpacked, at once.
    piece
        Text that is parsed at once: objects take five to ten times as much.
    event
        A single event, or the facts before the first one; larger ones are damage.
    file
        Text of the whole file. No profile of one rank is larger; a gzip of zeros would be.
    """

    read: int = 1 << 20
    piece: int = 1 << 22
    event: int = 1 << 26
    file: int = 1 << 34


_DEFAULT: Final = Limits()

#: The last boundary of a piece is looked for in so many bytes first.
_TAIL_BYTES: Final = 1 << 16
#: No single event is larger: what is, is many of them whose boundaries are damaged.
_MAX_MENDED_BYTES: Final = 1 << 16
#: The list may end at so many places of a piece; each costs a parse.
_MAX_ENDS: Final = 8

_BEGIN: Final = re.compile(rb'"traceEvents"\s*:\s*\[')
#: Between two events. A quote inside a string is escaped, so this occurs nowhere else.
_BOUNDARY: Final = re.compile(rb'\}(\s*,\s*)(?=\{\s*"(?:ph|name|cat|pid|tid|ts|dur|args)"\s*:)')
_END: Final = re.compile(rb'\}\s*(\])\s*(?=,\s*"[^"]*"\s*:|\}|$)')

#: Control characters, which JSON wants escaped.
_CONTROL: Final = {code: " " for code in range(32) if code not in (9, 10, 13)}
_COMMA: Final = re.compile(r'("(?:ts|dur)"\s*:\s*-?\d+),(\d+)(?=\s*[,}])')
_NAME: Final = re.compile(r'("name"\s*:\s*")(.*?)("\s*,\s*"(?:ph|cat|pid|tid|ts|dur|args|id)"\s*:)')
_KEY: Final = re.compile(r'"\s*:')
_QUOTE: Final = re.compile(r'(?<!\\)"')

_NOT_JSON: Final = "event that is not JSON, or is cut off"


def read_chrome(
    path: Path, take: Take, dropped: Counter[str], limits: Limits = _DEFAULT
) -> dict[str, Any]:
    """Give the events of a file to `take`, and return the facts beside them.

    Parameters
    ----------
    dropped
        Gets, by reason, the number of events that were left out.

    Raises
    ------
    TraceError
        The file cannot be read, has no list of events, or is absurdly large.
    """
    with reading_from(path), path.open("rb") as file:
        parts = iter(lambda: file.read(limits.read), b"")
        pieces = _unpacked(parts, dropped, limits)
        try:
            before, first = _opening(pieces, limits)
            after = _Events(take, dropped, limits).read(first, pieces)
        except _UnusableError as error:
            raise TraceError(f"{printable(path)}: {error}") from error
    return _facts(before, after)


class _UnusableError(Exception):
    """Why a file cannot be read."""


def _unpacked(parts: Iterator[bytes], dropped: Counter[str], limits: Limits) -> Iterator[bytes]:
    """The bytes of a file that may be gzipped; ends where a gzip is cut off or damaged."""
    first = next(parts, b"")
    if not first.startswith(GZIP_MAGIC):
        yield first
        yield from parts
        return
    total = 0
    unpack = zlib.decompressobj(wbits=31)
    packed = first
    try:
        while packed:
            text = unpack.decompress(packed, limits.read)
            total += len(text)
            if total > limits.file:
                raise _UnusableError(f"more than {limits.file >> 20} MiB of text")
            yield text
            packed = unpack.unconsumed_tail
            if unpack.eof:
                packed = unpack.unused_data
                unpack = zlib.decompressobj(wbits=31)
                packed = packed if packed.startswith(GZIP_MAGIC) else b""
            packed = packed or next(parts, b"")
        yield unpack.flush()
    except zlib.error:
        dropped["end of a damaged gzip"] += 1


def _opening(pieces: Iterator[bytes], limits: Limits) -> tuple[bytes, bytes]:
    """The text before the list of events, and its beginning as far as it was read."""
    text = bytearray()
    for piece in pieces:
        searched = max(len(text) - 64, 0)
        text += piece
        found = _BEGIN.search(text, searched)
        if found:
            return bytes(text[: found.start()]), bytes(text[found.end() :])
        if len(text) > limits.event:
            break
    whole = bytes(text)
    bare = whole.lstrip(b"\xef\xbb\xbf \t\r\n")
    if bare.startswith(b"["):
        return b"{", bare[1:]
    raise _UnusableError('no list "traceEvents" in it: cut off, or no trace')


class _Events:
    """Parses the list of events piece by piece."""

    def __init__(self, take: Take, dropped: Counter[str], limits: Limits) -> None:
        self._limits = limits
        self._take = take
        self._dropped = dropped

    def read(self, text: bytes, pieces: Iterator[bytes]) -> bytes:
        """Parse all; what stands behind the list is returned."""
        rest = bytearray(text)
        for piece in pieces:
            rest += piece
            if len(rest) < self._limits.piece:
                continue
            cut = _last_boundary(rest)
            if cut is not None:
                after = self._parse(bytes(rest[: cut.start() + 1]))
                if after is not None:
                    return after + bytes(rest[cut.start() + 1 :]) + b"".join(pieces)
                del rest[: cut.end()]
            elif len(rest) > self._limits.event:
                raise _UnusableError(f"an event of more than {self._limits.event >> 20} MiB")
        bare = bytes(rest.lstrip(b" \t\r\n"))
        if not bare or bare.startswith(b"]"):
            return bare[1:]
        after = self._parse(bytes(rest))
        return b"" if after is None else after

    def _parse(self, text: bytes) -> bytes | None:
        """Parse events; if the list ends in `text`, what stands behind it."""
        events = _loads(b"[" + text + b"]")
        if isinstance(events, list):
            self._take(events)
            return None
        ends = [*_END.finditer(text)]
        # Mostly the last one; facts behind the list may hold lists of their own.
        for end in (*reversed(ends[-_MAX_ENDS:]), *ends[:-_MAX_ENDS][:_MAX_ENDS]):
            events = _loads(b"[" + text[: end.start(1)] + b"]")
            if isinstance(events, list):
                self._take(events)
                return text[end.end(1) :]
        self._take_apart(text)
        return None

    def _take_apart(self, text: bytes) -> None:
        """Parse events one by one."""
        begin, good = 0, []
        for boundary in [*_BOUNDARY.finditer(text), None]:
            end = len(text) if boundary is None else boundary.start() + 1
            event = _mended(text[begin:end])
            if event is None:
                self._dropped[_NOT_JSON] += 1
            else:
                good.append(event)
            begin = end if boundary is None else boundary.end()
        self._take(good)


def _last_boundary(text: bytearray) -> re.Match[bytes] | None:
    for start in (max(len(text) - _TAIL_BYTES, 0), 0):
        found = [*_BOUNDARY.finditer(text, start)]
        if found:
            return found[-1]
    return None


def _loads(text: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """A JSON value, after plain repairs if need be; None if it is none."""
    import orjson

    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    clean = text.decode("utf-8", "replace").translate(_CONTROL)
    try:
        return orjson.loads(clean)
    except orjson.JSONDecodeError:
        return None


def _mended(text: bytes) -> Any:  # noqa: ANN401 - any JSON value
    """One event: with decimal commas, unescaped quotes in its name, or text behind it; or None."""
    event = _loads(text)
    if event is not None or len(text) > _MAX_MENDED_BYTES:
        return event
    line = text.decode("utf-8", "replace").translate(_CONTROL)
    line = _COMMA.sub(r"\1.\2", line)
    line = _NAME.sub(_requoted, line, count=1)
    try:
        event, _ = json.JSONDecoder(strict=False).raw_decode(line.lstrip())
    except (ValueError, RecursionError):
        return None
    return event


def _requoted(match: re.Match[str]) -> str:
    if _KEY.search(match[2]):
        return match[0]  # not a quote too many, but one too few: which fields follow is a guess
    inner = _QUOTE.sub(lambda _: '\\"', match[2])
    return f"{match[1]}{inner}{match[3]}"


def _facts(before: bytes, after: bytes) -> dict[str, Any]:
    """The keys beside the list, as many as can be read."""
    for text in (before + b'"traceEvents":[]' + after, before.rstrip(b" \t\r\n,") + b"}"):
        facts = _loads(text)
        if isinstance(facts, dict):
            return facts
    return dict(_single_facts(before + b" " + after))


def _single_facts(text: bytes) -> Iterator[tuple[str, Any]]:
    """Keys that matter, out of text that is no JSON as a whole."""
    line = text.decode("utf-8", "replace").translate(_CONTROL)
    for key in ("distributedInfo", "baseTimeNanoseconds", "host_name", "hostname"):
        at = line.find(f'"{key}"')
        colon = line.find(":", at) if at >= 0 else -1
        if colon < 0:
            continue
        try:
            value, _ = json.JSONDecoder(strict=False).raw_decode(line[colon + 1 :].lstrip())
        except (ValueError, RecursionError):
            continue
        yield key, value
