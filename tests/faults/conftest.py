"""Fixtures of the fault tests: small disks that can be filled."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.disk import SmallDisk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], SmallDisk]]:
    """Makes file systems of so many bytes; where that is not permitted the test is skipped."""
    made: list[SmallDisk] = []

    def make(size: int) -> SmallDisk:
        folder = tmp_path / f"disk-{len(made)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip("NO MOUNT: expected the right to mount a tmpfs (root)")
        made.append(SmallDisk(folder))
        return made[-1]

    yield make
    for disk in made:
        # Lazily: a process that is just ending may still have a file open.
        subprocess.run(["umount", "-l", str(disk.folder)], check=False, capture_output=True)
