"""A whole file as batches: what every server takes, and the same file at the other end."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from ingest_agents.files import Span, WholeFile, digest_of, file_batches, parts_of
from ingest_agents.payload import decode
from smon.wire import Batch, BatchKind, parse_headers
from smon.wire.parts import MAX_PART_BYTES, FileFormat, decode_part
from tests.agents.builders import chance_of

FULL = MAX_PART_BYTES


def file(folder: Path, content: bytes) -> WholeFile:
    """A file with all that can be known of one."""
    path = folder / "content"
    path.write_bytes(content)
    size, sha256 = digest_of(path)
    span = (1_790_000_000 * 10**9, 1_790_000_001 * 10**9)
    return WholeFile("name", FileFormat.RANK_EVENTS, path, size, sha256, 3, 8, (5, 9), span)


def lower(batch: Batch) -> dict[str, str]:
    """Headers of its request, as a server sees them."""
    return {name.lower(): value for name, value in batch.headers().items()}


@pytest.mark.parametrize("size", [1, FULL - 1, FULL, FULL + 1, 3 * FULL])
def test_parts_are_the_file_again(tmp_path: Path, size: int) -> None:
    """At, below and above what one part may hold."""
    content = chance_of(size).randbytes(size)
    batches = list(file_batches(file(tmp_path, content)))
    parts = [decode_part(decode(batch)) for batch in batches]
    assert b"".join(part.content for part in parts) == content
    assert [part.part for part in parts] == list(range(-(-size // FULL)))
    assert {part.parts for part in parts} == {len(parts)}
    assert {part.sha256 for part in parts} == {hashlib.sha256(content).hexdigest()}
    for batch in batches:
        head = parse_headers(lower(batch))
        assert (head.kind, head.events) == (BatchKind.FILE, 1)
        assert (batch.first_step, batch.last_step) == (5, 9)


def test_a_file_goes_on_with_any_part(tmp_path: Path) -> None:
    """Byte for byte as if all were made at once."""
    whole = file(tmp_path, chance_of(1).randbytes(3 * FULL))
    assert list(file_batches(whole, 2)) == list(file_batches(whole))[2:]
    assert not list(file_batches(whole, parts_of(whole)))


def test_what_shrinks_too_well_goes_as_it_is(tmp_path: Path) -> None:
    """Servers take more than 20 to 1 for a bomb."""
    (batch,) = file_batches(file(tmp_path, bytes(FULL)))
    assert batch.encoding == "identity"


@pytest.mark.parametrize(
    "name, value, shown",
    [
        ("name", "", "file"),
        ("name", "a\nb/é", "a-b/-"),
        ("rank", -1, None),
        ("rank", 1 << 20, None),
        ("world_size", 3, None),
        ("world_size", (1 << 20) + 1, None),
        ("steps", (4, 3), None),
        ("steps", (-1, 3), None),
        ("times", (0, 5), None),
    ],
)
def test_what_a_server_would_refuse_is_left_out(
    tmp_path: Path, name: str, value: str | int | Span, shown: str | None
) -> None:
    """A number that cannot be true is unknown; text is made harmless."""
    whole = replace(file(tmp_path, b"x"), **{name: value})  # type: ignore[arg-type]  # any field
    (batch,) = file_batches(whole)
    part = decode_part(decode(batch))
    found = {"steps": part.first_step, "times": part.start_ns}.get(name, getattr(part, name, None))
    assert found == shown
