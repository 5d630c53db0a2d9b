"""Time the sends and receives of a schedule of ``torch.distributed.pipelining``.

Flow: schedule → `ingest_agents.recorder.pipelining` → **here** → `ingest_agents.recorder.recorder`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from types import FunctionType
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar

from ingest_agents.recorder.pending import Open, Stamp
from ingest_agents.recorder.recorder import Recorder
from smon.ops import OpType

#: A wait that returns sooner has not waited: the transfer had ended before.
_WAITED_NS: Final = 200_000

#: What a schedule sends and receives with: functions of its module, by the names they have there.
_POST: Final = "_batch_p2p"
_WAIT: Final = "_wait_batch_p2p"
_SENDS: Final = frozenset({OpType.FORWARD_SEND, OpType.BACKWARD_SEND})

Function = Callable[..., Any]


class _Records(Protocol):
    """Something that records."""

    _recorder: Recorder


_S = TypeVar("_S", bound=_Records)
_P = ParamSpec("_P")
_R = TypeVar("_R")


def guarded(
    method: Callable[Concatenate[_S, _P], _R],
) -> Callable[Concatenate[_S, _P], _R | None]:
    """The method, but it never raises into the trainer."""

    @wraps(method)
    def safe(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # a recorder that fails leaves training alone
            self._recorder.failed(error)
            return None

    return safe


class _Key(NamedTuple):
    """Which transfer: several tensors of one microbatch are one."""

    op: OpType
    microbatch: int
    chunk: int


class _Flight(NamedTuple):
    """A transfer that is under way.

    Attributes
    ----------
    posted
        When it was.
    computes
        Computes of the schedule that had begun then.
    """

    op: OpType
    open: Open
    posted: Stamp | None
    computes: int


class Transfers:
    """Times the sends and receives of one schedule, from when they are posted.

    A wait tells when a transfer has ended only if it had to wait. If not, the transfer ended at
    some time before, and counts as one that took no longer than posting it: an op must not seem to
    have waited for what it has not waited for. On a GPU a wait never shows on the host: there, a
    transfer ends when the computes that follow its wait can begin, but a send for which nobody
    waits until other computes have begun counts as posted only.
    """

    def __init__(self, recorder: Recorder, monotonic: Callable[[], int]) -> None:
        self.computes = 0
        self._recorder, self._monotonic = recorder, monotonic
        self._listed: dict[int, tuple[Any, _Key]] = {}
        self._flying: dict[int, tuple[Any, list[_Flight]]] = {}

    def forget(self) -> None:
        """What an earlier step has left, e.g. one that failed."""
        self._listed.clear()
        self._flying.clear()

    def listed(self, method: Function, op: OpType, chunk: int) -> Function:
        """The method of a stage; remembers which transfer its result stands for."""

        @wraps(method)
        def ops(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the method
            result = method(*args, **kwargs)
            self._note(result, op, chunk, args, kwargs)
            return result

        return ops

    @guarded
    def _note(
        self,
        ops: Iterable[Any],
        op: OpType,
        chunk: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        key = _Key(op, microbatch_of(args, kwargs), chunk)
        for each in ops:
            self._listed[id(each)] = (each, key)

    def posted(self, method: Function) -> Function:
        """The function that posts transfers, recorded."""

        @wraps(method)
        def post(ops: Iterable[Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            opened = self._open(ops)
            works = method(ops, *args, **kwargs)
            if opened:
                self._fly(works, opened)
            return works

        return post

    @guarded
    def _open(self, ops: Iterable[Any]) -> list[tuple[OpType, Open]]:
        opened = []
        for key in self._keys(ops):
            begun = self._recorder.begin(key.op, microbatch=key.microbatch, chunk=key.chunk)
            if begun is not None:
                opened.append((key.op, begun))
        return opened

    @guarded
    def _fly(self, works: Any, opened: list[tuple[OpType, Open]]) -> None:  # noqa: ANN401
        now = self._monotonic()
        flights = [self._posted(op, begun, now) for op, begun in opened]
        self._flying[id(works)] = (works, flights)

    def awaited(self, method: Function) -> Function:
        """The function that waits for posted transfers, recorded."""

        @wraps(method)
        def wait(works: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the function
            batch = self._flying.pop(id(works), None)
            if batch is None:
                return method(works, *args, **kwargs)
            began = self._monotonic()
            result = method(works, *args, **kwargs)
            waited = self._monotonic() - began > _WAITED_NS
            self._land(batch[1], waited=waited)
            return result

        return wait

    @guarded
    def _land(self, flights: list[_Flight], *, waited: bool) -> None:
        for flight in flights:
            self._end(flight, waited=waited)

    def _keys(self, ops: Iterable[Any]) -> list[_Key]:
        keys: list[_Key] = []
        for each in ops:
            known = self._listed.pop(id(each), None)
            if known is not None and known[1] not in keys:
                keys.append(known[1])
        return keys

    def _posted(self, op: OpType, begun: Open, now: int) -> _Flight:
        posted: Stamp | None = now
        if not isinstance(begun.begin, int):
            posted = self._recorder.stamp() if op in _SENDS else None
        return _Flight(op, begun, posted, self.computes)

    def _end(self, flight: _Flight, *, waited: bool) -> None:
        if isinstance(flight.open.begin, int):
            if waited:
                self._queue(flight)
            # One that was queued has begun later than it was posted.
            posted = max(flight.open.begin, _host_ns(flight.posted))
            self._recorder.end(flight.open, None if waited else posted)
        else:
            late = flight.op in _SENDS and self.computes > flight.computes
            self._recorder.end(flight.open, flight.posted if late else None)

    def _queue(self, ending: _Flight) -> None:
        """Transfers of this kind that were posted later had to wait for the one that ends now."""
        now = self._monotonic()
        for _, flights in self._flying.values():
            for each in flights:
                later = each.op is ending.op and each.open.seq > ending.open.seq
                if later and isinstance(each.open.begin, int):
                    each.open.begin = max(each.open.begin, now)


def _host_ns(stamp: Stamp | None) -> int:
    return stamp if isinstance(stamp, int) else 0


def microbatch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """First argument of the methods of a stage, whatever its name."""
    return int(args[0] if args else next(iter(kwargs.values())))


def with_recorded(step: FunctionType, transfers: Transfers) -> Function:
    """The function, with recorded transfers in place of those of its module, for itself only."""
    own = dict(step.__globals__)
    for name, value in step.__globals__.items():
        # Functions of the module that transfer through these two.
        if isinstance(value, FunctionType) and {_POST, _WAIT} & set(value.__code__.co_names):
            own[name] = _rebound(value, own)
    own[_POST], own[_WAIT] = transfers.posted(own[_POST]), transfers.awaited(own[_WAIT])
    copy = _rebound(step, own)

    @wraps(step)
    def recorded(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the function
        transfers.forget()
        return copy(*args, **kwargs)

    return recorded


def _rebound(function: FunctionType, own: dict[str, Any]) -> FunctionType:
    """A copy of a function that looks its names up there."""
    copy = FunctionType(
        function.__code__, own, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
