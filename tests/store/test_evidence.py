"""Side evidence of one rank: what it says, beside what others say, and how much is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest
import zstandard

from smon.store.database import Database
from smon.store.objects import Objects
from smon.store.queries.evidence import (
    EvidenceFile,
    EvidenceLimits,
    Happening,
    evidence_files,
    evidence_of,
)
from tests.service import add_tenant
from tests.store.rows import file_of, note, open_stream, store
from tests.web.places import readings


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    """An empty root of files."""
    return Objects(str(tmp_path / "objects"))


def put(
    objects: Objects, name: str, documents: Iterable[Mapping[str, Any] | bytes], first: int = -1
) -> EvidenceFile:
    """A file of documents; `first` -1: of the whole attempt."""
    lines = [one if isinstance(one, bytes) else orjson.dumps(one) for one in documents]
    packed = zstandard.ZstdCompressor().compress(b"\n".join(lines))
    objects.put(name, packed)
    return EvidenceFile(name, len(packed), first, first if first < 0 else first + 9)


def test_a_counter_stands_beside_the_median_of_all_others(objects: Objects) -> None:
    """Step by step; a step in which nobody else reports has none."""
    rows = [(1, 5, "clock", 1200.0), (1, 0, "clock", 1980.0), (1, 1, "clock", 1970.0),
            (1, 2, "clock", 1990.0), (2, 5, "clock", 1100.0), (1, 0, "other", 3.0)]  # fmt: skip
    file = put(objects, "a", [{"counters": readings(*rows)}], first=0)
    (clock,) = evidence_of(objects, [file], 5).counters
    assert (clock.name, clock.steps, clock.values) == ("clock", (1, 2), (1200.0, 1100.0))
    assert (clock.median, clock.others) == ((1980.0, None), 3)


def test_documents_of_many_agents_are_one(objects: Objects) -> None:
    """Each sends its own ranks; of two readings of one thing the later one holds."""
    documents = [
        {"counters": readings((1, 0, "clock", 1.0))},
        {"counters": readings((1, 1, "clock", 2.0), (1, 0, "clock", 3.0))},
    ]
    (clock,) = evidence_of(objects, [put(objects, "a", documents, first=0)], 0).counters
    assert (clock.values, clock.median) == ((3.0,), (2.0,))


def test_only_steps_that_are_asked_for_count(objects: Objects) -> None:
    """Both ends included; of happenings as of counters."""
    rows = [(step, 0, "clock", float(step)) for step in range(6)]
    events = {"kind": ["gc"] * 6, "step": [*range(6)], "rank": [0] * 6, "duration_s": [0.1] * 6}
    file = put(objects, "a", [{"counters": readings(*rows), "events": events}], first=0)
    found = evidence_of(objects, [file], 0, (2, 4))
    assert found.counters[0].steps == (2, 3, 4)
    assert [one.step for one in found.happenings] == [4, 3, 2]


def test_hosts_give_the_neighbours(objects: Objects) -> None:
    """Ranks of the same host, itself left out; the later name of a host holds."""
    files = [
        put(objects, "a", [{"hosts": {"0": "x", "1": "x", "2": "y", "3": "x"}}]),
        put(objects, "b", [{"hosts": {"3": "y"}, "gpus": {"0": "GPU-0", "1": "GPU-1"}}]),
    ]
    found = evidence_of(objects, files, 0)
    assert (found.host, found.gpu_uuid, found.neighbours) == ("x", "GPU-0", (1,))
    nobody = evidence_of(objects, files, 9)
    assert (nobody.host, nobody.neighbours, nobody.neighbours_count) == (None, (), 0)


def test_happenings_are_those_of_the_rank_and_of_the_job(objects: Objects) -> None:
    """Those of other ranks are not; what is there twice counts once."""
    events = {"kind": ["gc", "gc", "checkpoint"], "step": [1, 1, 2], "rank": [0, 1, None],
              "duration_s": [0.5, 0.6, 6.0]}  # fmt: skip
    file = put(objects, "a", [{"events": events}, {"events": events}], first=0)
    assert evidence_of(objects, [file], 0).happenings == (
        Happening("checkpoint", 2, None, 6.0),
        Happening("gc", 1, 0, 0.5),
    )


@pytest.mark.parametrize(
    "bad",
    [
        b"{not json",
        b"[1, 2]",
        b'{"counters": 5}',
        b'{"counters": {"step": [1], "rank": [0], "name": ["a"]}}',
        b'{"counters": {"step": [1, 2], "rank": [0], "name": ["a"], "value": [1.0]}}',
        b'{"counters": {"step": ["x"], "rank": [0], "name": ["a"], "value": [1.0]}}',
        b'{"counters": {"step": [99999999999999999999], "rank": [0], "name": ["a"], "value": [1]}}',
        b'{"hosts": {"zero": "a"}}',
        b'{"hosts": ["a"]}',
        b'{"events": {"kind": ["gc"], "step": [1], "rank": [0]}}',
    ],
)
def test_what_cannot_be_read_is_left_out_and_said(objects: Objects, bad: bytes) -> None:
    """The rest of the file counts."""
    good = {"counters": readings((1, 0, "clock", 5.0))}
    found = evidence_of(objects, [put(objects, "a", [bad, good], first=0)], 0)
    assert [one.values for one in found.counters] == [(5.0,)]
    assert not found.complete


def test_a_missing_or_damaged_file_does_not_hide_the_others(objects: Objects) -> None:
    """It is said that something is missing."""
    objects.put("bad", b"no zstd")
    files = [
        EvidenceFile("gone", 10, 0, 9),
        EvidenceFile("bad", 10, 0, 9),
        put(objects, "a", [{"counters": readings((1, 0, "clock", 5.0))}], first=0),
    ]
    found = evidence_of(objects, files, 0)
    assert len(found.counters) == 1
    assert not found.complete


def test_too_much_is_read_in_part_newest_first(objects: Objects) -> None:
    """What is said of the whole attempt always counts."""
    files = [put(objects, "names", [{"hosts": {"0": "x"}}])]
    for first in (0, 10, 20):
        rows = readings((first, 0, "clock", float(first)))
        files.append(put(objects, f"w{first}", [{"counters": rows}], first=first))
    limit = sum(file.bytes for file in files) - files[1].bytes
    found = evidence_of(objects, files, 0, limits=EvidenceLimits(packed=limit))
    assert found.host == "x"
    assert found.counters[0].steps == (10, 20)
    assert not found.complete


def test_a_bomb_is_not_unpacked(objects: Objects) -> None:
    """However small it is when packed."""
    bomb = b'{"hosts": {"0": "' + b"x" * (1 << 22) + b'"}}'
    file = put(objects, "bomb", [bomb])
    assert file.bytes < 1 << 12
    found = evidence_of(objects, [file], 0, limits=EvidenceLimits(unpacked=1 << 16))
    assert (found.host, found.complete) == (None, False)


def test_files_are_those_of_the_attempt_and_the_steps(database: Database) -> None:
    """Replaced ones, ops, and other windows are left out; those of the whole attempt stay."""
    tenant = add_tenant(database)
    stream = open_stream(database, tenant)
    files = [
        file_of(stream, 0, kind="context", first_step=0, last_step=9),
        file_of(stream, 1, kind="context", first_step=40, last_step=49),
        file_of(stream, None, kind="context", first_step=-1, last_step=-1),
        file_of(stream, 0, kind="ops", first_step=0, last_step=9),
    ]
    store(database, [note(stream, 0)], files)
    with database.read() as session:
        every = evidence_files(session, tenant, stream.job_id, 1, None)
        late = evidence_files(session, tenant, stream.job_id, 1, (45, 60))
        foreign = evidence_files(session, "other", stream.job_id, 1, None)
    assert [each.first_step for each in every] == [-1, 0, 40]
    assert [each.first_step for each in late] == [-1, 40]
    assert foreign == ()


def test_of_many_ranks_the_one_asked_for_is_always_read(objects: Objects) -> None:
    """Wherever its document stands; of the others so many as the limit allows.

    That a step, a reading, or a part of another number is the same says nothing.
    """
    documents = [
        {"counters": readings(*((99, 9900 + 8 * host + rank, "clock", 99.0) for rank in range(8)))}
        for host in range(50)
    ]
    own = {"counters": readings((99, 99, "clock", 1.0))}
    for last in (own, orjson.dumps(own).replace(b":[", b": [ ").replace(b"]", b" ]")):
        file = put(objects, "a", [*documents, last], first=90)
        (clock,) = evidence_of(objects, [file], 99, limits=EvidenceLimits(parsed=2000)).counters
        assert clock.values == (1.0,)
        assert 8 <= clock.others < 200
        assert clock.median == (99.0,)
