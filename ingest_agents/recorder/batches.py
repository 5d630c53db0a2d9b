"""What is in a microbatch: tokens, and the sum of squared sequence lengths.

Flow: loader or arguments of the model → **here** → `Recorder.tokens`. Nothing is read from a GPU:
that would wait for it. Of tensors there, only the shape counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

#: Tokens, and the sum of the squared sequence lengths.
Counts = tuple[int, float]

_BOUNDS: Final = ("cu_seqlens", "cu_seqlens_q", "cu_seq_lens_q", "cu_seq_lens")
_TOKENS: Final = ("input_ids", "tokens", "inputs", "input", "x", "inputs_embeds")
_MATRIX: Final = 2


def count_tokens(batch: object) -> Counts | None:
    """Count what is in a batch; None if it does not say.

    Parameters
    ----------
    batch
        A mapping as most trainers have it; or a tensor of token numbers, ``(batch, length)``; or a
        sequence that begins with one of these. In a mapping, ``cu_seqlens`` says most, then
        ``position_ids`` that begin again within a row, then ``attention_mask``, then the shape of
        ``input_ids``.
    """
    if isinstance(batch, Mapping):
        return _of_mapping(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return count_tokens(batch[0]) if batch else None
    return _of_shape(batch)


def _of_mapping(batch: Mapping[Any, Any]) -> Counts | None:
    lengths = _packed(batch) or _masked(batch)
    if lengths:
        return sum(lengths), float(sum(length * length for length in lengths))
    found = (counts for name in _TOKENS if (counts := _of_shape(batch.get(name))) is not None)
    return next(found, None)


def _packed(batch: Mapping[Any, Any]) -> list[int]:
    """Lengths of sequences that share rows; none if there are no such."""
    for name in _BOUNDS:
        bounds: Any = batch.get(name)
        if _here(bounds):
            return [after - before for before, after in pairwise(bounds.reshape(-1).tolist())]
    positions: Any = batch.get("position_ids")
    if not _here(positions) or len(positions.shape) != _MATRIX:
        return []
    rows, length = positions.shape
    starts = [row * length + column for row, column in (positions == 0).nonzero().tolist()]
    if len(starts) <= rows:
        return []
    # A row that goes on with the sequence of the one before begins a piece of its own.
    edges = sorted({*starts, *range(0, rows * length + 1, length)})
    return [after - before for before, after in pairwise(edges)]


def _masked(batch: Mapping[Any, Any]) -> list[int]:
    """Lengths of sequences that are padded; none if there is no mask."""
    mask: Any = batch.get("attention_mask")
    if not _here(mask) or len(mask.shape) != _MATRIX:
        return []
    return [int(length) for length in mask.sum(-1).tolist()]


def _of_shape(tokens: Any) -> Counts | None:  # noqa: ANN401  # tensors of any kind
    shape = getattr(tokens, "shape", None)
    if shape is None or len(shape) < _MATRIX:
        return None
    rows, length = int(shape[0]), int(shape[1])
    return rows * length, float(rows * length * length)


def _here(tensor: Any) -> bool:  # noqa: ANN401  # tensors of any kind
    """Whether it is a tensor in the host's memory."""
    return getattr(getattr(tensor, "device", None), "type", None) == "cpu"


def watch(loader: Any, seen: Callable[[object], None]) -> Callable[[], None]:  # noqa: ANN401  # any
    """See every batch that a loader gives, on its way.

    The loader stays the object that it is, and an instance of its class.

    Returns
    -------
    Callable[[], None]
        Undoes it.

    Raises
    ------
    TypeError
        Objects of this kind cannot be changed.
    """
    kind: type[Any] = type(loader)

    def watched(self: object) -> Iterator[object]:
        for batch in kind.__iter__(self):
            seen(batch)
            yield batch

    names = {"__iter__": watched, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    loader.__class__ = type(kind.__name__, (kind,), names)

    def undo() -> None:
        loader.__class__ = kind

    return undo
