"""Tokens of a microbatch: what the batch says, and nothing that would wait for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ingest_agents.recorder.batches import count_tokens, watch

Rows = list[list[int]]


class Device:
    """Where a tensor is."""

    def __init__(self, kind: str) -> None:
        self.type = kind


class Numbers:
    """As much of a tensor of whole numbers as is looked at."""

    def __init__(self, rows: Rows | list[int], device: str = "cpu") -> None:
        self.rows, self.device = rows, Device(device)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows and columns, or elements."""
        first = self.rows[0]
        return (len(self.rows),) if isinstance(first, int) else (len(self.rows), len(first))

    def _read(self) -> Any:  # noqa: ANN401  # of both shapes
        assert self.device.type == "cpu", "reading waits for the GPU"
        return self.rows

    def tolist(self) -> Any:  # noqa: ANN401  # of both shapes
        """All of them."""
        return self._read()

    def reshape(self, size: int) -> Numbers:
        """In one row."""
        assert size == -1
        rows = self._read()
        return Numbers(rows if isinstance(rows[0], int) else [x for row in rows for x in row])

    def sum(self, axis: int) -> Numbers:
        """Of each row."""
        assert axis == -1
        return Numbers([sum(row) for row in self._read()])

    def __eq__(self, other: object) -> Numbers:  # type: ignore[override]  # as a tensor's
        return Numbers([[int(x == other) for x in row] for row in self._read()])

    __hash__ = None  # type: ignore[assignment]  # as a tensor's

    def nonzero(self) -> Numbers:
        """Places of what is not 0."""
        rows = self._read()
        return Numbers([[r, c] for r, row in enumerate(rows) for c, x in enumerate(row) if x])


IDS = Numbers([[5] * 6, [5] * 6])
MASK = Numbers([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
PACKED = Numbers([[0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
GOES_ON = Numbers([[0, 1, 0, 1, 2, 3], [4, 5, 0, 1, 0, 1]])
PLAIN = Numbers([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]])


@pytest.mark.parametrize(
    "batch, tokens, sum_len2",
    [
        ({"input_ids": IDS}, 12, 72.0),
        ({"input_ids": IDS, "labels": None, "attention_mask": MASK}, 10, 16.0 + 36.0),
        ({"input_ids": IDS, "attention_mask": MASK, "position_ids": PLAIN}, 10, 52.0),
        ({"input_ids": IDS, "position_ids": PACKED}, 12, 4.0 + 16.0 + 36.0),
        ({"input_ids": IDS, "position_ids": GOES_ON}, 12, 4.0 + 16.0 + 3 * 4.0),
        ({"input_ids": IDS, "cu_seqlens": Numbers([0, 3, 4, 12])}, 12, 9.0 + 1.0 + 64.0),
        ({"tokens": IDS}, 12, 72.0),
        (IDS, 12, 72.0),
        ((IDS, MASK), 12, 72.0),
        (({"input_ids": IDS, "attention_mask": MASK},), 10, 52.0),
    ],
)
def test_tokens_are_counted_as_the_batch_says(batch: object, tokens: int, sum_len2: float) -> None:
    """Bounds of sequences, positions that begin again, padding; else rows of full length."""
    assert count_tokens(batch) == (tokens, sum_len2)


@pytest.mark.parametrize("batch", [None, (), {}, "text", {"pixels": 3}, Numbers([1, 2]), 7])
def test_a_batch_that_says_nothing_counts_nothing(batch: object) -> None:
    """No count is better than a wrong one."""
    assert count_tokens(batch) is None


def test_what_is_on_a_gpu_is_not_read() -> None:
    """Its shape is known without waiting; how much of it is padding is not."""
    batch = {
        "input_ids": Numbers(IDS.rows, "cuda"),
        "attention_mask": Numbers(MASK.rows, "cuda"),
        "position_ids": Numbers(PACKED.rows, "cuda"),
        "cu_seqlens": Numbers([0, 3, 12], "cuda"),
    }
    assert count_tokens(batch) == (12, 72.0)


class Loader:
    """Gives batches; has a method and a length, as loaders do."""

    def __iter__(self) -> Iterator[int]:
        yield from (1, 2, 3)

    def __len__(self) -> int:
        return 3


def test_a_loader_is_watched_and_stays_what_it_is() -> None:
    """Each batch is seen when it is taken, and undoing leaves no trace."""
    loader, seen = Loader(), list[object]()
    undo = watch(loader, seen.append)
    batches = iter(loader)
    assert next(batches) == 1
    assert seen == [1]
    assert list(batches) == [2, 3]
    assert list(loader) == [1, 2, 3]
    assert len(loader) == 3
    assert isinstance(loader, Loader)
    assert type(loader).__name__ == "Loader"
    undo()
    assert list(loader) == [1, 2, 3]
    assert seen == [1, 2, 3] * 2
    assert type(loader) is Loader


def test_what_cannot_be_watched_is_refused() -> None:
    """A list has no class of its own to change."""
    with pytest.raises(TypeError):
        watch([1, 2], print)
