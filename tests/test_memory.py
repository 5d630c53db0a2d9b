"""What a worker asks of the allocator: large arrays are made without new pages."""

from __future__ import annotations

import subprocess
import sys

import pytest

from smon import memory

#: In a thread, as a worker does: arrays of 40 MB are made and dropped; prints pages that were new.
_CHILD = """
import resource, sys, threading
import numpy as np
from smon import memory

if sys.argv[1] == "keep":
    assert memory.keep()

def analyse():
    for _ in range(3):
        arrays = [np.ones(5_000_000) for _ in range(5)]
        del arrays

def in_a_thread():
    thread = threading.Thread(target=analyse)
    thread.start()
    thread.join()

in_a_thread()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
in_a_thread()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def new_pages(how: str) -> int:
    """Page faults of a second round."""
    made = subprocess.run(
        [sys.executable, "-c", _CHILD, how], check=True, capture_output=True, text=True
    )
    return int(made.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is asked")
def test_what_is_dropped_is_used_again() -> None:
    """After the first round nothing is asked of the system any more, in any thread."""
    assert 10 * new_pages("keep") < new_pages("as it is")


def test_another_system_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to ask for, and nothing fails."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.keep() is False
