from __future__ import annotations

import os
import threading
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


def test_folders_that_become_empty_go(tmp_path: Path) -> None:
    """Each job and day has its own: with retention they would become many. The outermost stay."""
    objects = Objects(str(tmp_path))
    for name in ("a/job=1/day=1/x", "a/job=1/day=2/x", "a/job=2/day=1/x"):
        objects.put(name, b"1")
    objects.delete("a/job=1/day=1/x")
    assert sorted(path.name for path in (tmp_path / "a").glob("*/*")) == ["day=1", "day=2"]
    objects.move("a/job=1/day=2/x", "b/x")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["job=2"]
    objects.delete("a/job=2/day=1/x")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    objects.put("a/job=2/day=1/x", b"2")
    assert objects.get("a/job=2/day=1/x") == b"2"


def test_a_folder_that_goes_while_a_file_is_written_is_made_anew(tmp_path: Path) -> None:
    """One process removes what is empty, another writes there: thousands of times, no failure."""
    writer, remover = Objects(str(tmp_path)), Objects(str(tmp_path))
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            remover.put("a/b/c/other", b"1")
            remover.delete("a/b/c/other")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for number in range(300):
            writer.put("a/b/c/mine", bytes([number % 256]))
            writer.delete("a/b/c/mine")
    finally:
        done.set()
        thread.join()


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
