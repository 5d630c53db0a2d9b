"""Damaged copies of a file: the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Final

Mutate = Callable[[random.Random, bytearray], None]

#: A mutant has one to so many mutations.
MAX_MUTATIONS: Final = 4

#: A run of bytes that is repeated or missing is shorter than this.
_MAX_RUN: Final = 400

#: What stands in place of a digit.
_NO_DIGITS: Final = (
    b"9" * 30, b"-", b"1e308", b"NaN", b"null", b'""', b"[]", b"{}", b"true", b"0",
)  # fmt: skip

_SEEDS: Final = 100_003


def flip(chance: random.Random, data: bytearray) -> None:
    """One byte becomes another."""
    data[chance.randrange(len(data))] = chance.randrange(256)


def cut(chance: random.Random, data: bytearray) -> None:
    """The end is lost."""
    del data[chance.randrange(len(data)) :]


def repeat(chance: random.Random, data: bytearray) -> None:
    """A part comes twice, or elsewhere."""
    begin = chance.randrange(len(data))
    part = data[begin : begin + chance.randrange(1, _MAX_RUN)]
    at = chance.randrange(len(data))
    data[at:at] = part


def drop(chance: random.Random, data: bytearray) -> None:
    """A part is missing."""
    begin = chance.randrange(len(data))
    del data[begin : begin + chance.randrange(1, _MAX_RUN)]


def number(chance: random.Random, data: bytearray) -> None:
    """A digit becomes many, a sign, an exponent, or none."""
    begin = chance.randrange(len(data))
    for at in (*range(begin, len(data)), *range(begin)):
        if ord("0") <= data[at] <= ord("9"):
            data[at : at + 1] = chance.choice(_NO_DIGITS)
            return


MUTATIONS: Final[tuple[Mutate, ...]] = (flip, cut, repeat, drop, number)


def mutant(seed: int, index: int, whole: bytes) -> bytes:
    """One mutant of a file."""
    chance = random.Random(seed * _SEEDS + index)  # noqa: S311  # no secret
    data = bytearray(whole)
    for _ in range(chance.randrange(1, MAX_MUTATIONS + 1)):
        if data:
            chance.choice(MUTATIONS)(chance, data)
    return bytes(data)


def mutants(seed: int, whole: bytes, count: int) -> Iterator[bytes]:
    """The first `count` mutants of a file."""
    return (mutant(seed, index, whole) for index in range(count))
