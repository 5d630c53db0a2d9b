"""What a worker asks of the allocator: large arrays are made without new pages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


#: Threads that stay, each of which has made something and dropped most; prints the arenas.
_ARENAS = """
import ctypes, re, sys, threading
from smon import memory

if sys.argv[1] == "one":
    assert memory.one_arena()

made, done = threading.Barrier(9), threading.Event()

def work():
    kept = [bytearray(100_000) for _ in range(20)]
    made.wait()
    done.wait()

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
made.wait()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
done.set()
print(len(re.findall("<heap nr=", open(sys.argv[2]).read())))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is asked")
def test_threads_share_one_arena(tmp_path: Path) -> None:
    """Without being asked, each thread gets its own."""

    def arenas(how: str) -> int:
        command = [sys.executable, "-c", _ARENAS, how, str(tmp_path / how)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return int(done.stdout)

    assert arenas("one") == 1 < arenas("many")


def test_another_system_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to ask for, and nothing fails."""
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.keep() is False
    assert memory.one_arena() is False
