"""Megatron-LM's text log: the step time every few steps, and what its timers say.

All of it is about the whole job: a section of ``time (ms)`` is what one rank measured, or the
lowest and highest over all. Lines of several ranks can be glued together. What Megatron's
StragglerDetector says is quoted, not checked.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Final

from smon.errors import TopologyError, TraceError
from smon.topology import Layout
from smon.trace.formats.reading import GZIP_MAGIC, Reading, inflated, printable, reading_from
from smon.trace.series import Section, StepSeries, number_of, usable

NAME: Final = "megatron-log"
LOOKS_FOR: Final = (
    'text with "iteration N/ M | … elapsed time per iteration (ms):", or with lines of '
    "StragglerDetector"
)
SELF_DESCRIBED: Final = True

#: A log begins with settings and warnings of all ranks: the first step may be megabytes later.
_SEARCHED_BYTES: Final = 1 << 24
_MAX_BYTES: Final = 1 << 27
_PART_BYTES: Final = 1 << 20

_MARKS: Final = (b"elapsed time per iteration (", b"MnRtt/Rnk:")

_STEP: Final = re.compile(
    r"iteration\s{1,12}(\d{1,15})/\s{0,12}\d{1,15}\s?\|([^\n]{0,600}?)"
    r"elapsed time per iteration \((ms|s)\):\s{0,4}([^\s|]{1,31})"
)
_WORLD: Final = re.compile(
    r"using world size: (\d{1,7}), data-parallel[- ]size: (\d{1,7}),"
    r"(?: context-parallel[- ]size: (\d{1,7}),)?"
    r"[^\n]{0,80}?tensor-model-parallel[- ]size: (\d{1,7}),"
    r"[^\n]{0,80}?pipeline-model-parallel[- ]size: (\d{1,7})"
)
_ONE_LINE: Final = re.compile(r"time \(ms\) \|([^\n]{0,8000})")
_PAIR: Final = re.compile(r"([a-z][\w/-]{0,60}): ([\d.,]{1,20})(?=[\s|]|$)")
_SEVERAL_LINES: Final = re.compile(
    r"^\s{1,12}([a-z][\w/-]{0,60}) \.{2,80}: "
    r"(?:\(([\d.]{1,20}), ([\d.]{1,20})\)|([\d.]{1,20}))\s*$",
    re.MULTILINE,
)
_DETECTOR: Final = re.compile(
    r"(M[nx])(Rtt|Pwr|Tmp|Utl|Clk|DRtt|Etpt)/Rnk: ([\d.]{1,20})([A-Za-z%]{1,4})/(\d{1,8})"
)
_DETECTED: Final = {
    "Rtt": "time between its marks",
    "DRtt": "time in the loader",
    "Etpt": "throughput",
    "Clk": "clock",
    "Pwr": "power",
    "Tmp": "temperature",
    "Utl": "utilisation",
}
#: No GPU draws that much: the tool writes milliwatts and labels them W.
_MOST_WATTS: Final = 10_000.0
_MS: Final = 1e3


def recognises(head: bytes, path: Path) -> bool:
    """Whether the file, unpacked if need be, is text that has a step of Megatron-LM.

    Looks further into the file than at its head, which may only hold settings.
    """
    text = inflated(head, len(head))
    if not text or b"\0" in text or text.lstrip()[:1] in (b"{", b"["):
        return False
    return any(mark in part for part in (text, _further(path)) for mark in _MARKS)


def read(path: Path) -> Reading:
    """Read the step times of a job, and what else its log says of them.

    Raises
    ------
    TraceError
        The file cannot be read, or has neither a step nor a line of StragglerDetector.
    """
    with reading_from(path):
        text = _text(path)
    dropped: Counter[str] = Counter()
    steps, seconds = usable(_steps(text), dropped)
    statements = _statements(text)
    if not len(steps) and not statements:
        raise TraceError(f"{printable(path)}: no step: looked for {LOOKS_FOR}")
    begin = _STEP.search(text)
    sections = _sections(text[begin.start() :] if begin else "")
    series = StepSeries(
        steps=steps,
        seconds=seconds,
        sections=sections,
        layout=_layout(text),
        statements=statements,
        dropped=tuple(sorted((+dropped).items())),
        notes=(
            "each value of the log is the mean over the steps since the one before",
            *(
                ["parts of the step are what one rank measured, or the highest over all ranks"]
                if sections
                else []
            ),
        ),
    )
    return Reading(series=series)


def _further(path: Path) -> bytes:
    """What follows the head; nothing if that cannot be read."""
    try:
        with path.open("rb") as raw:
            data = raw.read(_SEARCHED_BYTES)
    except OSError:
        return b""
    try:
        packed = data.startswith(GZIP_MAGIC)
        return zlib.decompressobj(wbits=31).decompress(data, _SEARCHED_BYTES) if packed else data
    except zlib.error:
        return b""


def _text(path: Path) -> str:
    parts, size = [], 0
    with path.open("rb") as raw:
        for part in _parts(raw):
            parts.append(part)
            size += len(part)
            if size > _MAX_BYTES:
                raise TraceError(
                    f"{printable(path)}: more than {_MAX_BYTES >> 20} MiB: cut the log"
                )
    return b"".join(parts).decode("utf-8", "replace").replace("\r", "\n")


def _parts(raw: BinaryIO) -> Iterator[bytes]:
    """The file, unpacked; of a packed log that is cut off, what can be had."""
    part = raw.read(_PART_BYTES)
    packed = zlib.decompressobj(wbits=31) if part.startswith(GZIP_MAGIC) else None
    while part:
        if packed is None:
            yield part
        else:
            yield packed.decompress(part, _MAX_BYTES)
            part = packed.unused_data or packed.unconsumed_tail
            packed = zlib.decompressobj(wbits=31) if packed.eof else packed
            if part:
                continue
        part = raw.read(_PART_BYTES)


def _steps(text: str) -> Iterator[tuple[int, object]]:
    for match in _STEP.finditer(text):
        value = number_of(match[4])
        scale = _MS if match[3] == "ms" else 1.0
        yield int(match[1]), None if value is None else value / scale


def _layout(text: str) -> Layout | None:
    """As the log gives it, if its sizes agree with its number of ranks."""
    match = _WORLD.search(text)
    if match is None:
        return None
    world, dp, cp, tp, pp = (int(part or 1) for part in match.groups())
    try:
        layout = Layout(dp=dp, pp=pp, tp=tp, cp=cp)
    except TopologyError:
        return None
    return layout if layout.world_size == world else None


def _sections(text: str) -> tuple[Section, ...]:
    """Parts of the step, in the order in which the log first has them."""
    found: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for line in _ONE_LINE.finditer(text):
        for name, value in _PAIR.findall(line[1]):
            _add(found, name, value, value)
    for name, low, high, one in _SEVERAL_LINES.findall(text):
        _add(found, name, low or one, high or one)
    return tuple(
        Section(name, tuple(low for low, _ in values), tuple(high for _, high in values))
        for name, values in found.items()
    )


def _add(found: dict[str, list[tuple[float, float]]], name: str, low: str, high: str) -> None:
    least, most = number_of(low), number_of(high)
    if least is not None and most is not None:
        found[name].append((least / _MS, most / _MS))


def _statements(text: str) -> tuple[str, ...]:
    """The last report of StragglerDetector, in sentences."""
    last: dict[tuple[str, str], tuple[float, str, str]] = {}
    reports = 0
    for end, what, value, unit, rank in _DETECTOR.findall(text):
        number = number_of(value)
        if number is not None:
            reports += (end, what) == ("Mn", "Rtt")
            last[what, end] = number, unit, rank
    if not last:
        return ()
    parts = [
        f"{words} {_measured(*last[what, 'Mn'])} to {_measured(*last[what, 'Mx'])}"
        for what, words in _DETECTED.items()
        if (what, "Mn") in last and (what, "Mx") in last
    ]
    return (
        f"Megatron-LM's StragglerDetector reports {reports:,} times, last: {'; '.join(parts)}. "
        "SMon quotes that and cannot check it: lowest and highest of any healthy job are somebody",
    )


def _measured(number: float, unit: str, rank: str) -> str:
    if unit == "W" and number > _MOST_WATTS:
        return f"{number / 1e3:,.0f} W, written as {number:.0f} W (rank {rank})"
    return f"{number:,.6g} {unit} (rank {rank})"
