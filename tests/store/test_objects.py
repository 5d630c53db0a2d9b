from __future__ import annotations

import os
from pathlib import Path

import pytest

from smon.errors import ConfigError, StoreError
from smon.store.objects import PARTIAL, Objects


def test_a_file_is_written_read_listed_moved_and_removed(any_root: str) -> None:
    """The same on a local folder and on S3."""
    objects = Objects(any_root)
    assert objects.put("a/b/c.bin", b"12345") == 5
    assert objects.get("a/b/c.bin") == b"12345"
    assert objects.size("a/b/c.bin") == 5
    assert [(file.path, file.bytes) for file in objects.list("a")] == [("a/b/c.bin", 5)]
    assert objects.move("a/b/c.bin", "other/c.bin")
    assert not objects.move("a/b/c.bin", "other/d.bin")
    assert objects.size("a/b/c.bin") is None
    assert objects.get("other/c.bin") == b"12345"
    assert objects.delete("other/c.bin")
    assert not objects.delete("other/c.bin")
    assert list(objects.list("no-such-folder")) == []


def test_a_file_is_written_piece_by_piece(any_root: str) -> None:
    """It is there when all of it is, and not at all if that failed."""
    objects = Objects(any_root)
    with objects.create("a/long.bin") as file:
        for n in range(100):
            file.write(bytes([n]) * 1000)
        assert objects.size("a/long.bin") is None
    assert objects.size("a/long.bin") == 100_000
    with pytest.raises(ZeroDivisionError), objects.create("a/half.bin") as file:
        file.write(b"half" + bytes([1 // 0]))
    assert [each.path for each in objects.list("a")] == ["a/long.bin"]


def test_a_disk_that_takes_no_more_leaves_nothing_behind(tmp_path: Path) -> None:
    """An error of the file system is a StoreError, and no half file stays."""
    objects = Objects(str(tmp_path))
    (tmp_path / "a").write_bytes(b"a file where a folder should be")
    with pytest.raises(StoreError, match="cannot write"):
        objects.put("a/b.bin", b"1")
    limited = tmp_path / "limited"
    limited.mkdir()
    (limited / "b.bin").mkdir()
    with pytest.raises(StoreError, match="cannot write"):
        objects.put("limited/b.bin", b"1")
    assert not [name for name in os.listdir(limited) if name.endswith(PARTIAL)]  # noqa: PTH208  # names


@pytest.mark.parametrize("root", ["nonsense://x", "s3://", "file://relative/x"])
def test_a_root_that_makes_no_sense_is_refused(root: str) -> None:
    """At the start, with a message about the root."""
    with pytest.raises(ConfigError, match="root of the event files"):
        Objects(root)


def test_a_read_error_in_the_middle_is_no_write_error(tmp_path: Path) -> None:
    """What the caller raises while it writes goes through as it is."""
    objects = Objects(str(tmp_path))
    with pytest.raises(StoreError, match="cannot read no"), objects.create("a/x.bin") as file:
        file.write(objects.get("no"))
    assert list(objects.list("a")) == []
