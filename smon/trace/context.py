"""Side evidence that may stand beside a trace: hosts, sequence lengths, counters, events.

Flow: agents or `smon.synth` → ``context.json`` → **here** → the diagnosis. All of it is optional: a
trace alone is enough to say what a job loses; this says more surely why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import DTypeLike, NDArray

from smon.errors import MetaError
from smon.trace.formats.reading import printable, quoted

CONTEXT_NAME: Final = "context.json"

#: Value of the key ``schema``.
SCHEMA: Final = "smon.context/1"

#: Larger files are something else: 1,024 ranks with 8 counters over 100 steps take 30 MB.
MAX_CONTEXT_BYTES: Final = 64 << 20

#: Rows of one table.
MAX_ROWS: Final = 2_000_000

#: Hosts, switches, GPUs and counters have short names.
MAX_NAME: Final = 255

_MAX_INT: Final = 2**63 - 1
_MAX_RANK: Final = 2**31 - 1

#: Far beyond any counter, and safe to add up.
_MAX_FLOAT: Final = 1e300

_RANK: Final = re.compile(r"[0-9]{1,9}")

_Range = tuple[float, float]
_INT: Final = (0, _MAX_INT)
_INDEX: Final = (0, _MAX_RANK)
_FLOAT: Final = (-_MAX_FLOAT, _MAX_FLOAT)


class EventKind(StrEnum):
    """What a host or the job did besides computing."""

    GC = "gc"
    CHECKPOINT = "checkpoint"
    LOGGING = "logging"
    EVALUATION = "evaluation"
    RESTART = "restart"
    COMPILE = "compile"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that took time.

    Attributes
    ----------
    step
        Step in which it began.
    rank
        Global rank; None: the whole job.
    start_ns
        Unix time, or since the start of the step, as in the trace; None if it is not known.
    duration_s
        How long it took.
    """

    kind: EventKind
    step: int
    rank: int | None
    start_ns: int | None
    duration_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Microbatches:
    """What was in each microbatch; arrays of equal length.

    Attributes
    ----------
    tokens
        Number of tokens.
    sum_len2
        Sum of the squared lengths of its sequences.
    """

    step: NDArray[np.int64]
    dp: NDArray[np.int32]
    microbatch: NDArray[np.int32]
    tokens: NDArray[np.int64]
    sum_len2: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertTokens:
    """Tokens that the experts of each rank got in each step; arrays of equal length."""

    step: NDArray[np.int64]
    rank: NDArray[np.int32]
    tokens: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True, slots=True, eq=False)
class Counters:
    """Readings of counters; arrays of equal length.

    Attributes
    ----------
    name
        Such as ``gpu_clock_mhz``, ``gpu_temperature_c``, ``gpu_throttle_thermal`` (0 or 1),
        ``gpu_power_w``, ``pcie_width``, ``nvlink_crc``, ``nic_errors``, ``alloc_retries``,
        ``host_cpu_ratio``.
    value
        Mean over the step, or for counts, how many more there were in it.
    """

    step: NDArray[np.int64]
    rank: NDArray[np.int32]
    name: NDArray[np.str_]
    value: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.step)


def _none(dtype: DTypeLike) -> NDArray[Any]:
    return np.empty(0, dtype)


def _no_microbatches() -> Microbatches:
    index = _none(np.int32)
    return Microbatches(_none(np.int64), index, index, _none(np.int64), _none(np.float64))


def _no_expert_tokens() -> ExpertTokens:
    return ExpertTokens(_none(np.int64), _none(np.int32), _none(np.int64))


def _no_counters() -> Counters:
    return Counters(_none(np.int64), _none(np.int32), _none(np.str_), _none(np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """Side evidence of one window. Everything is empty unless somebody recorded it.

    Attributes
    ----------
    hosts
        Host of each global rank.
    switches
        Leaf switch of each host.
    gpus
        UUID of the GPU of each global rank.
    ignored
        Number of keys in the file that SMon does not know.
    """

    hosts: Mapping[int, str] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    gpus: Mapping[int, str] = field(default_factory=dict)
    microbatches: Microbatches = field(default_factory=_no_microbatches)
    expert_tokens: ExpertTokens = field(default_factory=_no_expert_tokens)
    counters: Counters = field(default_factory=_no_counters)
    events: tuple[Event, ...] = ()
    ignored: int = 0

    def __bool__(self) -> bool:
        parts = (self.hosts, self.switches, self.gpus, self.events)
        tables = (self.microbatches, self.expert_tokens, self.counters)
        return any(len(part) > 0 for part in parts) or any(len(table) > 0 for table in tables)


# --- several as one -------------------------------------------------------------------------


def merge(contexts: Iterable[Context]) -> Context:
    """The side evidence of several documents as one.

    Of two names for the same thing the later one holds; what is there twice, exactly alike, counts
    once.
    """
    parts = list(contexts)
    if len(parts) == 1:
        return parts[0]
    return Context(
        hosts={rank: name for part in parts for rank, name in part.hosts.items()},
        switches={host: name for part in parts for host, name in part.switches.items()},
        gpus={rank: name for part in parts for rank, name in part.gpus.items()},
        microbatches=Microbatches(**_united([part.microbatches for part in parts], "microbatches")),
        expert_tokens=ExpertTokens(
            **_united([part.expert_tokens for part in parts], "expert_tokens")
        ),
        counters=Counters(**_united([part.counters for part in parts], "counters")),
        events=tuple(dict.fromkeys(event for part in parts for event in part.events)),
        ignored=sum(part.ignored for part in parts),
    )


def _united(tables: Sequence[object], name: str) -> dict[str, NDArray[Any]]:
    """Rows of all tables in order, each of them once."""
    columns = {
        column: np.concatenate(
            [np.empty(0, dtype), *(getattr(table, column) for table in tables)], dtype=dtype
        )
        if bounds is not None
        else np.concatenate([_none(np.str_), *(getattr(table, column) for table in tables)])
        for column, (dtype, bounds) in _TABLES[name].items()
    }
    # Stable, so of rows that are alike the first one leads.
    order = np.lexsort(tuple(columns.values()))
    alike = np.ones(max(len(order) - 1, 0), bool)
    for values in columns.values():
        alike &= values[order][1:] == values[order][:-1]
    keep = np.ones(len(order), bool)
    keep[order[1:][alike]] = False
    return {column: values[keep] for column, values in columns.items()}


# --- writing --------------------------------------------------------------------------------


def write_context(context: Context, path: Path) -> None:
    """Write a context file.

    Raises
    ------
    MetaError
        It cannot be written.
    """
    try:
        path.write_text(json.dumps(_document(context), separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise MetaError(
            f"{printable(path)}: cannot write the context file: {quoted(error)}"
        ) from error


def _document(context: Context) -> dict[str, Any]:
    """What is written: parts that are empty are left out."""
    parts: dict[str, Any] = {
        "hosts": {str(rank): host for rank, host in context.hosts.items()},
        "switches": dict(context.switches),
        "gpus": {str(rank): gpu for rank, gpu in context.gpus.items()},
    }
    for name, columns in _TABLES.items():
        table = getattr(context, name)
        if len(table):
            parts[name] = {column: getattr(table, column).tolist() for column in columns}
    if context.events:
        parts["events"] = {
            column: [getattr(event, column) for event in context.events] for column in _EVENT
        }
    return {"schema": SCHEMA, **{name: part for name, part in parts.items() if part}}


# --- reading --------------------------------------------------------------------------------


def context_beside(paths: Sequence[Path]) -> Context | None:
    """The context file in the folders of these traces, or in these folders; None if there is none.

    Raises
    ------
    MetaError
        It is malformed, or the folders have several.
    """
    folders = dict.fromkeys(path if _is(path, Path.is_dir) else path.parent for path in paths)
    places = [folder / CONTEXT_NAME for folder in folders]
    found = [place for place in places if _is(place, Path.is_file)]
    distinct = {place.resolve(): place for place in found}
    if len(distinct) > 1:
        raise MetaError(
            f"expected one {CONTEXT_NAME}, found {len(distinct)}: "
            f"{', '.join(printable(place) for place in list(distinct)[:3])}: keep one"
        )
    return read_context(found[0]) if found else None


def _is(path: Path, kind: Callable[[Path], bool]) -> bool:
    """Whether a path is of this kind; False where that cannot be found out."""
    try:
        return kind(path)
    except (OSError, ValueError):
        return False


def read_context(path: Path) -> Context:
    """Read a context file.

    Raises
    ------
    MetaError
        It cannot be read, or is malformed.
    """
    return parse_context(_parsed(path), printable(path))


def parse_context(document: Mapping[str, object], name: str) -> Context:
    """The side evidence of a document that has been parsed as JSON; `name` is for messages.

    Raises
    ------
    MetaError
        It is malformed.
    """
    return _Reader(name).context(document)


def _parsed(path: Path) -> Mapping[str, object]:
    name = printable(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONTEXT_BYTES + 1)
    # ValueError: a zero byte in the name.
    except (OSError, ValueError) as error:
        raise MetaError(f"{name}: cannot read the context file: {quoted(error)}") from error
    if len(raw) > MAX_CONTEXT_BYTES:
        limit = MAX_CONTEXT_BYTES >> 20
        raise MetaError(f"{name}: expected at most {limit} MiB of context, found more: cut it")
    try:
        parsed = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise MetaError(f"{name}: not valid JSON: {quoted(error)}") from error
    if not isinstance(parsed, dict):
        raise MetaError(f"{name}: expected keys such as hosts and counters, found no mapping")
    return parsed


#: Columns of each table: type and range; None for a name.
_TABLES: Final[dict[str, dict[str, tuple[DTypeLike, _Range | None]]]] = {
    "microbatches": {
        "step": (np.int64, _INT),
        "dp": (np.int32, _INDEX),
        "microbatch": (np.int32, _INDEX),
        "tokens": (np.int64, _INT),
        "sum_len2": (np.float64, (0.0, _MAX_FLOAT)),
    },
    "expert_tokens": {
        "step": (np.int64, _INT),
        "rank": (np.int32, _INDEX),
        "tokens": (np.int64, _INT),
    },
    "counters": {
        "step": (np.int64, _INT),
        "rank": (np.int32, _INDEX),
        "name": (np.str_, None),
        "value": (np.float64, _FLOAT),
    },
}

_EVENT: Final = ("kind", "step", "rank", "start_ns", "duration_s")

_KNOWN: Final = {"schema", "hosts", "switches", "gpus", "events", *_TABLES}


class _Reader:
    """Checks everything: the file may come from anywhere."""

    __slots__ = ("_ignored", "_name")

    def __init__(self, name: str) -> None:
        self._name = name
        self._ignored = 0

    def context(self, parsed: Mapping[str, object]) -> Context:
        if parsed.get("schema") != SCHEMA:
            found = printable(repr(parsed.get("schema")))[:MAX_NAME]
            self._fail("schema", f"expected {SCHEMA!r}, found {found}: write it anew")
        self._ignored += len(set(parsed) - _KNOWN)
        return Context(
            hosts=self._by_rank(parsed, "hosts"),
            switches=self._names(parsed, "switches"),
            gpus=self._by_rank(parsed, "gpus"),
            microbatches=Microbatches(**self._table(parsed, "microbatches")),
            expert_tokens=ExpertTokens(**self._table(parsed, "expert_tokens")),
            counters=Counters(**self._table(parsed, "counters")),
            events=self._events(parsed),
            ignored=self._ignored,
        )

    def _fail(self, part: str, message: str) -> NoReturn:
        raise MetaError(f"{printable(self._name)}: {part}: {message}")

    def _mapping(self, parsed: Mapping[str, object], part: str) -> Mapping[str, object]:
        mapping = parsed.get(part, {})
        if not isinstance(mapping, dict):
            self._fail(part, f"expected a mapping, found {type(mapping).__name__}: correct it")
        if len(mapping) > MAX_ROWS:
            self._fail(part, f"expected at most {MAX_ROWS:,} keys, found {len(mapping):,}: cut it")
        return mapping

    def _names(self, parsed: Mapping[str, object], part: str) -> dict[str, str]:
        mapping = self._mapping(parsed, part)
        self._check_names(part, list(mapping))
        self._check_names(part, list(mapping.values()))
        return {str(key): str(value) for key, value in mapping.items()}

    def _by_rank(self, parsed: Mapping[str, object], part: str) -> dict[int, str]:
        names = self._names(parsed, part)
        for key in names:
            if not _RANK.fullmatch(key):
                self._fail(part, f"expected global ranks as keys, found {key!r}: correct it")
        return {int(rank): name for rank, name in names.items()}

    def _check_names(self, part: str, values: Sequence[object]) -> None:
        for value in values:
            if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME:
                found = "a long name" if isinstance(value, str) and value else _shown(value)
                self._fail(part, f"expected names of 1 to {MAX_NAME} characters, found {found}")
            if not value.isprintable():
                self._fail(part, f"expected printable names, found {value!a}: correct it")

    def _columns(
        self, parsed: Mapping[str, object], part: str, wanted: Sequence[str]
    ) -> dict[str, list[object]]:
        """The wanted columns of a table, of one length; without rows if the table is missing."""
        mapping = self._mapping(parsed, part)
        if not mapping:
            return {name: [] for name in wanted}
        self._ignored += len(set(mapping) - set(wanted))
        columns: dict[str, list[object]] = {}
        for name in wanted:
            values = mapping.get(name)
            if not isinstance(values, list):
                self._fail(part, f"expected {name} to be a list, found {_shown(values)}")
            columns[name] = values
        lengths = {len(values) for values in columns.values()}
        if len(lengths) > 1:
            counts = ", ".join(f"{name} {len(values)}" for name, values in columns.items())
            self._fail(part, f"expected columns of one length, found {counts}: correct it")
        if max(lengths) > MAX_ROWS:
            self._fail(part, f"expected at most {MAX_ROWS:,} rows, found {max(lengths):,}: cut it")
        return columns

    def _table(self, parsed: Mapping[str, object], part: str) -> dict[str, NDArray[Any]]:
        wanted = _TABLES[part]
        columns = self._columns(parsed, part, list(wanted))
        for name, (dtype, bounds) in wanted.items():
            if bounds is None:
                self._check_names(part, columns[name])
            else:
                self._check_numbers(f"{part}.{name}", columns[name], dtype, bounds)
        return {name: np.array(columns[name], wanted[name][0]) for name in wanted}

    def _check_numbers(
        self, part: str, values: Sequence[object], dtype: DTypeLike, bounds: _Range
    ) -> None:
        """Comparing is exact also for whole numbers beyond any float, and False for NaN."""
        kinds = (int, float) if dtype is np.float64 else (int,)
        low, high = bounds
        for value in values:
            if type(value) not in kinds or not low <= value <= high:  # type: ignore[operator]
                kind = "numbers" if dtype is np.float64 else "whole numbers"
                message = f"expected {kind} from {low:g} to {high:g}, found {_shown(value)}"
                self._fail(part, f"{message}: correct it")

    def _events(self, parsed: Mapping[str, object]) -> tuple[Event, ...]:
        columns = self._columns(parsed, "events", _EVENT)
        kinds = {kind.value: kind for kind in EventKind}
        for value in columns["kind"]:
            if not isinstance(value, str) or value not in kinds:
                known = ", ".join(kinds)
                self._fail("events", f"expected one of {known}, found {_shown(value)}")
        self._check_numbers("events.step", columns["step"], np.int64, _INT)
        self._check_numbers("events.duration_s", columns["duration_s"], np.float64, (0.0, 1e9))
        for name, bounds in (("rank", _INDEX), ("start_ns", _INT)):
            given = [value for value in columns[name] if value is not None]
            self._check_numbers(f"events.{name}", given, np.int64, bounds)
        rows: Any = zip(*columns.values(), strict=True)
        return tuple(Event(kinds[kind], *rest) for kind, *rest in rows)


def _shown(value: object) -> str:
    """A value on one line, short; a number of thousands of digits is not printed."""
    if isinstance(value, int) and abs(value) > _MAX_INT:
        return "a huge number"
    text = printable(repr(value)) if not isinstance(value, dict | list) else type(value).__name__
    return text if len(text) <= 80 else text[:79] + "…"  # noqa: PLR2004  # a line on a terminal
