"""Pickles that hold plain data only, decoded without Python's own unpickler.

A pickle is a program for a small machine. This one knows the instructions that build numbers,
text, lists, tuples and dicts; what looks up a name, calls it or makes an object is not in it, so
nothing can run. Keys of dicts are text or small numbers: hashing anything else can take for ever.

Flow: bytes → **here** → `smon.trace.formats.flight_recorder`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from smon.errors import TraceError

#: Instructions that would import, call or make something, or ask the caller for an object.
_CODE: Final = frozenset(b"cio\x81\x82\x83\x84\x92\x93RbPQ")

_STOP: Final = ord(".")
_LONGEST_INT_BYTES: Final = 16


def plain_data(data: bytes) -> Any:  # noqa: ANN401  # whatever the file holds
    """What a pickle of plain data holds.

    Raises
    ------
    TraceError
        It is cut off or damaged, or holds anything but numbers, text, lists, tuples and dicts.
    """
    return _Machine(data).run()


class _Machine:
    """Stack, memo and place of one decoding."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:  # noqa: ANN401
        """Decode until the end mark.

        Raises
        ------
        TraceError
            As `plain_data`.
        """
        try:
            while (code := self._byte()) != _STOP:
                step = _STEPS.get(code)
                if step is None:
                    raise TraceError(_refusal(code, self._at - 1))
                step(self)
            return self._stack.pop()
        except (IndexError, KeyError, struct.error, UnicodeDecodeError, TypeError) as error:
            raise TraceError(f"the pickle is damaged or cut off near byte {self._at}") from error

    # --- reading --------------------------------------------------------------------------------

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) < count:
            raise IndexError(count)
        self._at += count
        return part

    def number(self, form: str) -> int:
        """An unsigned or signed number in this `struct` form."""
        value: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    # --- single values --------------------------------------------------------------------------

    def push(self, value: object) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def yes(self) -> None:
        """True."""
        self._stack.append(True)

    def no(self) -> None:
        """False."""
        self._stack.append(False)

    def whole(self, form: str) -> None:
        """A number of fixed size."""
        self.push(self.number(form))

    def long(self) -> None:
        """A number of given size."""
        size = self._byte()
        if size > _LONGEST_INT_BYTES:
            raise TraceError(f"a number of {size} bytes near byte {self._at}: it is no dump")
        self.push(int.from_bytes(self._take(size), "little", signed=True))

    def real(self) -> None:
        """A float."""
        self.push(struct.unpack(">d", self._take(8))[0])

    def text(self, form: str) -> None:
        """Text after its length."""
        self.push(self._take(self.number(form)).decode("utf-8", "replace"))

    def skip(self, count: int) -> None:
        """Leave out what is only there for readers of streams."""
        self._take(count)

    # --- containers -----------------------------------------------------------------------------

    def mark(self) -> None:
        """Begin a run of values."""
        self._below.append(self._stack)
        self._stack = []

    def run_of_values(self) -> list[Any]:
        """The values since the last mark."""
        values, self._stack = self._stack, self._below.pop()
        return values

    def last(self, count: int) -> None:
        """A tuple of the last values."""
        taken = [self._stack.pop() for _ in range(count)]
        self.push(tuple(reversed(taken)))

    def extend(self, values: list[Any]) -> None:
        """Add to the list on top."""
        into = self._stack[-1]
        if not isinstance(into, list):
            raise TypeError
        into.extend(values)

    def store(self, values: list[Any]) -> None:
        """Add to the dict on top: keys and values in turn."""
        into = self._stack[-1]
        if not isinstance(into, dict) or len(values) % 2:
            raise TypeError
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str | int):
                raise TraceError("a key that is neither text nor a number: it is no dump")
            into[key] = value

    def append(self) -> None:
        """Add one value to the list below it."""
        value = self._stack.pop()
        self.extend([value])

    def store_one(self) -> None:
        """Add one key and value to the dict below them."""
        value, key = self._stack.pop(), self._stack.pop()
        self.store([key, value])

    # --- memo -----------------------------------------------------------------------------------

    def remember(self, index: int | None = None) -> None:
        """Note the value on top under a number, by default the next one."""
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def recall(self, index: int) -> None:
        """Push what was noted."""
        self.push(self._memo[index])

    def drop(self) -> None:
        """Leave out the value on top."""
        self._stack.pop()


def _refusal(code: int, at: int) -> str:
    if code in _CODE:
        return (
            f"the pickle refers to code (instruction {code:#04x} at byte {at}): refused, because "
            "opening it could run anything; a dump holds plain data only"
        )
    return f"unknown instruction {code:#04x} at byte {at}: damaged, or a pickle of another kind"


_STEPS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: lambda m: m.skip(1),  # protocol
    0x95: lambda m: m.skip(8),  # frame
    ord("N"): lambda m: m.push(None),
    0x88: _Machine.yes,
    0x89: _Machine.no,
    ord("J"): lambda m: m.whole("<i"),
    ord("K"): lambda m: m.whole("<B"),
    ord("M"): lambda m: m.whole("<H"),
    0x8A: lambda m: m.long(),
    ord("G"): lambda m: m.real(),
    ord("X"): lambda m: m.text("<I"),
    0x8C: lambda m: m.text("<B"),
    0x8D: lambda m: m.text("<Q"),
    ord("("): lambda m: m.mark(),
    ord("]"): lambda m: m.push([]),
    ord("}"): lambda m: m.push({}),
    ord(")"): lambda m: m.push(()),
    ord("l"): lambda m: m.push(m.run_of_values()),
    ord("t"): lambda m: m.push(tuple(m.run_of_values())),
    0x85: lambda m: m.last(1),
    0x86: lambda m: m.last(2),
    0x87: lambda m: m.last(3),
    ord("a"): lambda m: m.append(),
    ord("e"): lambda m: m.extend(m.run_of_values()),
    ord("s"): lambda m: m.store_one(),
    ord("u"): lambda m: m.store(m.run_of_values()),
    ord("q"): lambda m: m.remember(m.number("<B")),
    ord("r"): lambda m: m.remember(m.number("<I")),
    0x94: lambda m: m.remember(),
    ord("h"): lambda m: m.recall(m.number("<B")),
    ord("j"): lambda m: m.recall(m.number("<I")),
    ord("0"): lambda m: m.drop(),
}
