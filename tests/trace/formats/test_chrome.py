from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from smon.errors import TraceError
from smon.trace.formats.chrome import Limits, read_chrome

DEFAULT = Limits()
FACTS = {"schemaVersion": 1, "distributedInfo": {"rank": 3, "pg_config": [{"id": 1}, {"id": 2}]}}


def event(number: int, **more: object) -> dict[str, Any]:
    """An event that is its number."""
    return {"ph": "X", "name": f"kernel {number}", "ts": number, "dur": 1, "args": {}, **more}


def read(path: Path, limits: Limits = DEFAULT) -> tuple[list[Any], dict[str, Any], Counter[str]]:
    """Events, facts, and what was dropped."""
    events: list[Any] = []
    dropped: Counter[str] = Counter()
    facts = read_chrome(path, events.extend, dropped, limits)
    return events, facts, dropped


def write(path: Path, text: bytes | str) -> Path:
    """A file with this text."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def whole(events: list[Any], **after: object) -> str:
    """A document with facts before and behind its events."""
    return json.dumps({**FACTS, "traceEvents": events, **after})


def test_events_and_facts_are_read(tmp_path: Path) -> None:
    """Facts stand before and behind the list."""
    text = whole([event(1), event(2)], traceName="x", deviceProperties=[{"name": "a"}, {"id": 1}])
    events, facts, dropped = read(write(tmp_path / "x", text))
    assert events == [event(1), event(2)]
    assert facts["distributedInfo"]["rank"] == 3
    assert facts["deviceProperties"] == [{"name": "a"}, {"id": 1}]
    assert not dropped


@pytest.mark.parametrize("piece", [1, 64, 300, 5_000])
@pytest.mark.parametrize("indent", [None, 1])
def test_pieces_of_any_size_give_the_same(tmp_path: Path, piece: int, indent: int | None) -> None:
    """A file is parsed in pieces; where they are cut does not matter."""
    events = [
        event(n, args={"deep": [{"name": 1}, {"id": 2}], "text": '}, {"ph"'}) for n in range(50)
    ]
    text = json.dumps({**FACTS, "traceEvents": events, "traceName": "y"}, indent=indent)
    path = write(tmp_path / "x", gzip.compress(text.encode()))
    found, facts, dropped = read(path, Limits(read=37, piece=piece))
    assert found == events
    assert facts["traceName"] == "y"
    assert not dropped


def test_a_list_without_an_object_around_it_is_read(tmp_path: Path) -> None:
    """The other form of Chrome traces."""
    events, facts, _ = read(write(tmp_path / "x", json.dumps([event(1), event(2)])))
    assert len(events) == 2
    assert facts == {}


def test_no_event_is_no_damage(tmp_path: Path) -> None:
    """An empty list, with facts behind it."""
    events, facts, dropped = read(write(tmp_path / "x", whole([], traceName="x")))
    assert (events, facts["traceName"], dropped) == ([], "x", Counter())


@pytest.mark.parametrize("cut", [1, 5, 40, 90, 200])
def test_a_file_that_is_cut_off_loses_its_last_event(tmp_path: Path, cut: int) -> None:
    """The last one is counted, if there is anything of it; facts before the list stay."""
    text = whole([event(n) for n in range(20)])
    events, facts, dropped = read(write(tmp_path / "x", text[:-cut]))
    assert events == [event(n) for n in range(len(events))]
    assert len(events) >= 16
    assert facts["distributedInfo"]["rank"] == 3
    assert sum(dropped.values()) <= 1


def test_a_gzip_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """And the rest is counted."""
    packed = gzip.compress(whole([event(n) for n in range(3_000)]).encode())
    events, _, dropped = read(write(tmp_path / "x", packed[: len(packed) // 2]))
    assert events
    assert events == [event(n) for n in range(len(events))]
    assert dropped


BROKEN = {
    "control characters": ('"name": "a\x01b"', "a b", 0),
    "unescaped quotes": ('"name": "a "b" c"', 'a "b" c', 0),
    "bytes that are not UTF-8": (b'"name": "\xff\xfe"', "��", 0),
    "a name without end": ('"name": "a', None, 1),
    "not a number": ('"name": "a", "id": NaN', "a", 0),
    "an unquoted value": ('"name": ncclFloat32', None, 1),
}


@pytest.mark.parametrize("field, name, lost", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_event_costs_at_most_itself(
    tmp_path: Path, field: str | bytes, name: str | None, lost: int
) -> None:
    """What can be mended without guessing is; the neighbours stay either way."""
    raw = field.encode() if isinstance(field, str) else field
    before, after = json.dumps(event(1)).encode(), json.dumps(event(3)).encode()
    middle = b'{"ph": "X", ' + raw + b', "cat": "kernel", "ts": 2, "dur": 1}'
    text = b'{"traceEvents": [' + b", ".join([before, middle, after]) + b'], "traceName": "x"}'
    events, _, dropped = read(write(tmp_path / "x", text))
    assert events[0] == event(1)
    assert event(3) in events
    assert sum(dropped.values()) == lost
    assert [e["name"] for e in events if e["ts"] == 2] == ([] if name is None else [name])


def test_decimal_commas_are_mended(tmp_path: Path) -> None:
    """``"ts": 12,5`` is what some locales make of 12.5."""
    text = '{"traceEvents": [{"ph": "X", "name": "a", "ts": 12,5, "dur": 3,25}, {"ph": "X"}]}'
    events, _, dropped = read(write(tmp_path / "x", text))
    assert (events[0]["ts"], events[0]["dur"]) == (12.5, 3.25)
    assert not dropped


def test_facts_are_read_singly_where_the_whole_is_no_json(tmp_path: Path) -> None:
    """One broken fact must not hide whose trace it is."""
    text = '{"bad": nope, "distributedInfo": {"rank": 3}, "traceEvents": [{"ph": "X"}]}'
    _, facts, _ = read(write(tmp_path / "x", text))
    assert facts["distributedInfo"] == {"rank": 3}


@pytest.mark.parametrize("text", ["", "{", '{"distributedInfo": {}}', "\x00\x01", "null"])
def test_a_file_without_a_list_of_events_is_an_error(tmp_path: Path, text: str) -> None:
    """It says what was looked for."""
    with pytest.raises(TraceError, match="traceEvents"):
        read(write(tmp_path / "x", text))


def test_a_gzip_of_zeros_is_refused(tmp_path: Path) -> None:
    """It would unpack to a thousand times its size."""
    path = write(tmp_path / "x", gzip.compress(bytes(1 << 23)))
    with pytest.raises(TraceError, match="more than 2 MiB"):
        read(path, Limits(file=1 << 21))
