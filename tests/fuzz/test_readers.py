"""The fuzzer finds what it is for."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz import planted
from tests.fuzz.mutants import mutant
from tests.fuzz.readers import Seed, fuzz, read_and_analyse, seeds

COUNT = 24


def some() -> list[Seed]:
    """One file of chance."""
    return [Seed("a/file.bin", random.Random(1).randbytes(planted.WHOLE))]  # noqa: S311


def bad_turns() -> list[int]:
    """Which of the first mutants meet the bug."""
    content = some()[0].content
    return [turn for turn in range(COUNT) if planted.is_bad(mutant(5, turn, content))]


def test_a_sound_reader_reads_or_refuses_every_mutant(tmp_path: Path) -> None:
    """Nothing fails, nothing is kept."""
    outcome = fuzz(some(), COUNT, 5, tmp_path, read=planted.sound, processes=1)
    assert not outcome.failures
    assert outcome.mutants == COUNT == outcome.read + outcome.refused
    assert outcome.read
    assert outcome.refused
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "read, kind",
    [
        (planted.raising, "exception"),
        (planted.dying, "crash"),
        (planted.obeying, "forbidden"),
    ],
)
def test_a_planted_bug_is_found_at_each_mutant_that_meets_it(
    tmp_path: Path, read: Callable[[Path], str], kind: str
) -> None:
    """Counted once per mutant; all others are still read; the mutant is kept."""
    outcome = fuzz(some(), COUNT, 5, tmp_path, read=read, processes=1)
    assert bad_turns()
    assert outcome.failures == {kind: len(bad_turns())}
    assert outcome.mutants == COUNT
    kept = list(tmp_path.iterdir())
    assert len(kept) == len(bad_turns())
    assert all(planted.is_bad(path.read_bytes()) for path in kept)


@pytest.mark.parametrize(
    "read, kind", [(planted.looping, "too long"), (planted.hoarding, "memory")]
)
def test_a_reader_without_bounds_is_found(
    tmp_path: Path, read: Callable[[Path], str], kind: str
) -> None:
    """One mutant is enough."""
    first = bad_turns()[0]
    outcome = fuzz(some(), first + 1, 5, tmp_path, read=read, processes=1)
    assert outcome.failures == {kind: 1}


def test_mutants_of_every_public_file_are_survived(traces: Path, tmp_path: Path) -> None:
    """Two of each; ``make fuzz`` reads 100,000."""
    files = seeds(traces)
    outcome = fuzz(files, 2 * len(files), 1, tmp_path, read=read_and_analyse, processes=1)
    assert not outcome.failures, outcome.examples
    assert outcome.read > outcome.mutants / 10
