"""Memory that is free goes back to the system, also what lies between pieces that are in use."""

from __future__ import annotations

import subprocess
import sys

_GLIBC = """
import ctypes, sys, threading, time
import psutil
from smon.commands.memory import give_back_regularly

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
rss = psutil.Process().memory_info

def fill():
    pieces = [libc.malloc(4096) for _ in range(20_000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 4096)
    for number, piece in enumerate(pieces):
        if number % 100:
            libc.free(piece)

thread = threading.Thread(target=fill)
thread.start()
thread.join()
full = rss().rss
if not give_back_regularly(0.05):
    sys.exit("this C library cannot")
end = time.monotonic() + 20
while rss().rss > full - (40 << 20) and time.monotonic() < end:
    time.sleep(0.05)
print((full - rss().rss) >> 20)
"""


def test_free_memory_between_what_is_used_is_given_back() -> None:
    """Of 80 MB that a thread has freed all but a hundredth of, in its own heap."""
    run = subprocess.run(
        [sys.executable, "-c", _GLIBC], check=False, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 40
