from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smon.errors import TraceError
from smon.trace.pickled import plain_data

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text()
    | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.integers(-9, 9), inner, max_size=4)
    ),
    max_leaves=30,
)


@given(PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_comes_back_as_it_was(value: object, protocol: int) -> None:
    """Numbers, text, lists, tuples and dicts, in every binary protocol."""
    assert plain_data(pickle.dumps(value, protocol)) == value


class Runs:
    """Pickled as a call of `os.mkdir`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_calls_something_is_refused_and_nothing_runs(
    protocol: int, tmp_path: Path
) -> None:
    """Python's own unpickler would make the folder."""
    hostile = pickle.dumps({"entries": [Runs(tmp_path / "made")]}, protocol)
    with pytest.raises(TraceError, match="refers to code"):
        plain_data(hostile)
    assert not (tmp_path / "made").exists()
    pickle.loads(hostile)  # noqa: S301  # shows that the attack is a real one
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "body",
    [
        b"cos\nsystem\n",
        b"(ios\nsystem\n",
        b"X\x02\x00\x00\x00osX\x06\x00\x00\x00system\x93",
        b"Pname\n.",
        b"K\x01Q",
        b"\x82\x01",
        b"\x83\x01\x00",
        b"\x84\x01\x00\x00\x00",
        b"NN\x81",
        b"NNN\x92",
        b"(No",
        b"NNb",
        b"NNR",
    ],
)
def test_every_instruction_that_makes_or_looks_up_something_is_refused(body: bytes) -> None:
    """Import, call, new object, state, extension, persistent id."""
    with pytest.raises(TraceError, match="refers to code"):
        plain_data(b"\x80\x04" + body + b".")


def test_a_key_that_is_no_text_and_no_number_is_refused() -> None:
    """Hashing a tuple of tuples of tuples takes twice as long at each level."""
    nested = b")q\x00" + b"0h\x00h\x00\x86q\x00" * 64
    with pytest.raises(TraceError, match="neither text nor a number"):
        plain_data(b"\x80\x02}" + nested + b"Ns.")


@pytest.mark.parametrize(
    "body",
    [
        b"X" + struct.pack("<I", 2**32 - 1) + b"short",
        b"\x8d" + struct.pack("<Q", 2**63) + b"short",
        b"\x8a\xff" + b"\x01" * 255,
        b"h\x07",
        b"e",
        b"Na",
        b"NNs",
        b"}(Nu",
        b"",
    ],
)
def test_damage_is_one_error(body: bytes) -> None:
    """Lengths beyond the end, absent notes and marks, wrong containers, an empty stack."""
    with pytest.raises(TraceError):
        plain_data(b"\x80\x02" + body + b".")


def test_a_note_with_a_huge_number_takes_no_memory() -> None:
    """Python's own unpickler makes room for all notes below it: 32 GiB."""
    assert plain_data(b"\x80\x02N" + b"r" + struct.pack("<I", 2**32 - 2) + b".") is None


@given(st.binary(max_size=200))
def test_random_bytes_give_data_or_one_error(body: bytes) -> None:
    """Nothing foreign comes out."""
    with suppress(TraceError):
        plain_data(b"\x80\x02" + body)
