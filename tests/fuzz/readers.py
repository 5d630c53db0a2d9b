"""Reads and analyses mutants of the public trace files, many of them, in guarded processes.

``python -m tests.fuzz.readers --mutants 100000`` prints one line of JSON, and exits with 1 if a
mutant was not survived: an exception that is none of ours, more than five seconds, more than 1 GB,
a crash, or code that a file made run. Such mutants are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final

from smon.errors import SMonError
from tests.conftest import TRACES
from tests.fuzz.guard import ForbiddenError, Guard, TooLongError, peak_bytes
from tests.fuzz.mutants import mutant

#: Of one mutant, CPU seconds. What blocks without CPU is met by `_HANG_S`.
MAX_SECONDS: Final = 5.0

#: Of a whole process, so of every mutant in it.
MAX_BYTES: Final = 1 << 30

#: Without a word, a process hangs.
_HANG_S: Final = 60.0

#: Larger files (packed, unpacked) would take the time of thousands of small ones.
_MAX_FILE: Final = 400_000
_MAX_UNPACKED: Final = 4_000_000

#: A process is replaced after so many mutants: what one has left behind cannot hide for long.
_PER_PROCESS: Final = 2_000

#: Each process starts from nothing: no thread or lock of this one is copied into it.
_CONTEXT: Final = multiprocessing.get_context("spawn")

#: Beside traces: texts about them, results, and what no reader takes.
_NO_TRACES: Final = frozenset({".md", ".py", ".txt", ".yaml", ".yml"})
_NO_TRACE_NAMES: Final = ("events_", "fault_", "ideal-", "ms-", "mw-", "result-", "timeline-")

#: Folders whose files make sense together only: ranks of one job.
_SETS: Final = ("nvrx-flight-recorder/", "torch-gloo-2pp2dp/")

#: Reads a path; `SMonError` is a fair answer.
Read = Callable[[Path], str]


@dataclass(frozen=True, slots=True)
class Seed:
    """A file that mutants are made of.

    Attributes
    ----------
    name
        Path below the folder of traces, without ``.gz`` if the content is unpacked.
    beside
        Files that a reader looks for beside it: meta files, and other ranks of the job.
    """

    name: str
    content: bytes
    beside: tuple[Path, ...] = ()


@dataclass(slots=True)
class Outcome:
    """What became of mutants.

    Attributes
    ----------
    read, refused
        Mutants with a report, and those with one clear line.
    failures
        What was not survived, by kind.
    examples
        (kind, file, seed, index, what was raised).
    """

    mutants: int = 0
    read: int = 0
    refused: int = 0
    peak_bytes: int = 0
    slowest_s: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str, int, int, str]] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Take in what another process has found."""
        self.mutants += other.mutants
        self.read += other.read
        self.refused += other.refused
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.failures += other.failures
        self.examples += other.examples

    def document(self) -> dict[str, object]:
        """For a line of JSON."""
        return {
            "mutants": self.mutants,
            "read": self.read,
            "refused": self.refused,
            "peak_mib": self.peak_bytes >> 20,
            "slowest_s": round(self.slowest_s, 2),
            "failures": dict(self.failures),
            "examples": self.examples[:20],
        }

    def fail(self, kind: str, seed: Seed, place: tuple[int, int], what: str) -> None:
        """Count a mutant that was not survived."""
        self.failures[kind] += 1
        self.examples.append((kind, seed.name, *place, what[:300]))


def read_and_analyse(path: Path) -> str:
    """The way of ``smon analyze``: what the file is, and its report.

    Raises
    ------
    SMonError
        It cannot be used.
    """
    from smon.analysis import analyze
    from smon.collectives.report import analyze_collectives
    from smon.hangs.report import analyze_hang
    from smon.series.report import analyze_series
    from smon.trace.load import load

    trace = load([path])
    if trace.events:
        return str(len(analyze_collectives(trace.events, trace.job).to_json()))
    if trace.dumps:
        return str(len(analyze_hang(trace.dumps, trace.job).to_json()))
    if trace.series is not None:
        return str(len(analyze_series(trace.series, trace.job).to_json()))
    return str(len(analyze(trace.table, trace.job).to_json()))


def seeds(folder: Path) -> list[Seed]:
    """The traces below a folder, each as it is, and unpacked if it is packed."""
    found = []
    for path in sorted(folder.rglob("*")):
        usable = path.is_file() and path.suffix not in _NO_TRACES
        usable = usable and not path.name.startswith(_NO_TRACE_NAMES)
        if not usable or not 0 < path.stat().st_size <= _MAX_FILE:
            continue
        name, content = str(path.relative_to(folder)), path.read_bytes()
        beside = tuple(_beside(path, in_set=name.startswith(_SETS)))
        found.append(Seed(name, content, beside))
        if content[:2] == b"\x1f\x8b" and len(plain := gzip.decompress(content)) <= _MAX_UNPACKED:
            found.append(Seed(name.removesuffix(".gz"), plain, beside))
    return found


def _beside(path: Path, *, in_set: bool) -> Iterator[Path]:
    suffix = path.name.partition(".")[2]
    for other in sorted(path.parent.iterdir()):
        meta = (
            path.suffix == ".parquet"
            and other.name.startswith("meta")
            and (other.stem in {"meta", path.stem.replace("trace", "meta")})
        )
        rank = in_set and path.suffix != ".parquet" and other.name.partition(".")[2] == suffix
        if other != path and (meta or (rank and not other.name.startswith(_NO_TRACE_NAMES))):
            yield other


def run_some(
    some: Sequence[Seed], turns: range, seed: int, read: Read, keep: Path, say: Connection
) -> None:
    """Read the mutants of these turns, one file after the other, and send what became of them."""
    guard, outcome = Guard(), Outcome()
    _warm_up(some, read)
    for turn in turns:
        file, index = some[turn % len(some)], turn // len(some)
        # Before and not after: a crash leaves no time to say anything.
        say.send((turn, None))
        failed = outcome.failures.total()
        with placed(file, mutant(seed, index, file.content)) as path:
            _one(guard, outcome, read, path, file, (seed, index))
        if outcome.failures.total() > failed:
            _keep(keep, file, seed, index)
    say.send((turns.stop, outcome))


def _warm_up(some: Sequence[Seed], read: Read) -> None:
    """Read one sound file of each kind: what is imported then is not imported under guard."""
    for file in {(Path(file.name).parent, Path(file.name).suffix): file for file in some}.values():
        with placed(file, file.content) as path, contextlib.suppress(SMonError):
            read(path)


@contextlib.contextmanager
def placed(file: Seed, content: bytes) -> Iterator[Path]:
    """A file of this content, with what belongs beside it; of a set, the whole folder."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for other in file.beside:
            (folder / other.name).symlink_to(other)
        path = folder / Path(file.name).name
        path.write_bytes(content)
        yield folder if file.name.startswith(_SETS) and file.beside else path


def _one(
    guard: Guard, outcome: Outcome, read: Read, path: Path, file: Seed, place: tuple[int, int]
) -> None:
    before, began = peak_bytes(), time.process_time()
    outcome.mutants += 1
    try:
        guard.arm(MAX_SECONDS)
        try:
            _read(outcome, read, path, file, place)
        finally:
            guard.disarm()
    except TooLongError:
        # Also where it comes while another answer is being written down.
        outcome.fail("too long", file, place, f"{MAX_SECONDS} s of CPU")
    outcome.slowest_s = max(outcome.slowest_s, time.process_time() - began)
    outcome.peak_bytes = peak_bytes()
    if guard.seen:
        outcome.fail("forbidden", file, place, guard.seen[0])
    if before <= MAX_BYTES < outcome.peak_bytes:
        outcome.fail("memory", file, place, f"{outcome.peak_bytes >> 20} MiB")


def _read(outcome: Outcome, read: Read, path: Path, file: Seed, place: tuple[int, int]) -> None:
    try:
        read(path)
        outcome.read += 1
    except SMonError as error:
        outcome.refused += 1
        if "\n" in str(error) or not str(error):
            outcome.fail("message", file, place, str(error))
    except ForbiddenError:
        pass  # it stands in `guard.seen`, where a reader cannot hide it
    except TooLongError:
        raise
    except MemoryError:
        outcome.fail("memory", file, place, "MemoryError")
    except BaseException as error:  # noqa: BLE001  # that is what is looked for
        outcome.fail("exception", file, place, f"{type(error).__name__}: {error}")


def fuzz(
    some: Sequence[Seed], mutants: int, seed: int, keep: Path, *, read: Read, processes: int
) -> Outcome:
    """Read so many mutants, spread over files and processes.

    Parameters
    ----------
    keep
        Folder for those that were not survived.
    read
        A function of a module: every process imports it anew.
    """
    whole, lock = Outcome(), threading.Lock()
    work: SimpleQueue[range] = SimpleQueue()
    for begin in range(0, mutants, _PER_PROCESS):
        work.put(range(begin, min(begin + _PER_PROCESS, mutants)))

    def some_turns() -> None:
        while True:
            try:
                turns = work.get_nowait()
            except Empty:
                return
            outcome = _portion(some, turns, seed, keep, read)
            with lock:
                whole.add(outcome)

    threads = [threading.Thread(target=some_turns) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return whole


def _portion(some: Sequence[Seed], turns: range, seed: int, keep: Path, read: Read) -> Outcome:
    """The mutants of these turns, over as many processes as die of them."""
    whole = Outcome()
    while turns:
        here, there = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=run_some, args=(some, turns, seed, read, keep, there))
        process.start()
        there.close()
        at, outcome = _listen(here, turns.start)
        process.kill()
        process.join()
        if outcome is not None:
            whole.add(outcome)
            return whole
        file, index = some[at % len(some)], at // len(some)
        kind = "hang" if process.exitcode == -signal.SIGKILL else "crash"
        whole.mutants += at + 1 - turns.start
        whole.fail(kind, file, (seed, index), f"exit code {process.exitcode}")
        _keep(keep, file, seed, index)
        turns = range(at + 1, turns.stop)
    return whole


def _listen(here: Connection, at: int) -> tuple[int, Outcome | None]:
    """The last turn that a process has spoken of, and its outcome unless it died or hangs."""
    while here.poll(_HANG_S):
        try:
            at, outcome = here.recv()
        except EOFError:
            break
        if outcome is not None:
            return at, outcome
    return at, None


def _keep(folder: Path, file: Seed, seed: int, index: int) -> None:
    path = folder / f"{seed}-{index}-{Path(file.name).name}"
    path.write_bytes(mutant(seed, index, file.content))


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz, and print what was found."""
    parser = argparse.ArgumentParser(description="Read mutants of the public traces.")
    parser.add_argument("--mutants", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "smon-fuzz")
    parsed = parser.parse_args(arguments)
    if not TRACES.is_dir():
        sys.stderr.write("expected the public traces in ../shared/traces beside the project\n")
        return 2
    parsed.keep.mkdir(parents=True, exist_ok=True)
    some, began = seeds(TRACES), time.monotonic()
    outcome = fuzz(
        some, parsed.mutants, parsed.seed, parsed.keep,
        read=read_and_analyse, processes=parsed.processes,
    )  # fmt: skip
    line = {
        "proof": "readers",
        "seed": parsed.seed,
        "files": len(some),
        "seconds": round(time.monotonic() - began, 1),
        **outcome.document(),
    }
    sys.stdout.write(json.dumps(line) + "\n")
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    sys.exit(main())
