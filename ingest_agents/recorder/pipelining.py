"""Record the ops of a schedule of ``torch.distributed.pipelining``.

Flow: schedule of the trainer → **here** → `ingest_agents.recorder.transfers` →
`ingest_agents.recorder.recorder`. Wraps methods of the one schedule that it is given and of its
stages; classes and modules stay as they are. Imports no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import wraps
from types import MethodType
from typing import Any, Final

from ingest_agents.recorder.pending import Open
from ingest_agents.recorder.recorder import Recorder
from ingest_agents.recorder.transfers import (
    Function,
    Transfers,
    guarded,
    microbatch_of,
    with_recorded,
)
from smon.ops import OpType

_LOG: Final = logging.getLogger("smon.recorder")

#: The method of a schedule that runs a step.
_STEP: Final = "_step_microbatches"
#: Methods of a stage that list what is to be sent or received for a microbatch.
_LISTS: Final = {
    "get_fwd_recv_ops": OpType.FORWARD_RECV,
    "get_fwd_send_ops": OpType.FORWARD_SEND,
    "get_bwd_recv_ops": OpType.BACKWARD_RECV,
    "get_bwd_send_ops": OpType.BACKWARD_SEND,
}
_COMPUTES: Final = {
    "forward_one_chunk": OpType.FORWARD_COMPUTE,
    "backward_one_chunk": OpType.BACKWARD_COMPUTE,
    "backward_weight_one_chunk": OpType.WEIGHT_GRAD_COMPUTE,
}


class AttachedSchedule:
    """What `attach_schedule` has done; `detach` undoes it."""

    def __init__(self) -> None:
        self._changed: list[tuple[Any, str, Any]] = []

    def detach(self) -> None:
        """Leave the schedule and its stages as they were. May be repeated."""
        while self._changed:
            target, name, before = self._changed.pop()
            if before is None:
                delattr(target, name)
            else:
                setattr(target, name, before)

    def replace(self, target: Any, name: str, value: object) -> None:  # noqa: ANN401  # torch's
        """Give one object a method of its own."""
        self._changed.append((target, name, vars(target).get(name)))
        setattr(target, name, value)


def attach_schedule(
    recorder: Recorder,
    schedule: Any,  # noqa: ANN401  # torch's
    *,
    monotonic: Callable[[], int] = time.monotonic_ns,
) -> AttachedSchedule:
    """Record computes, sends and receives of a schedule, inside the recorder's steps.

    Parameters
    ----------
    recorder
        Of this process; if it is off, nothing is done.
    schedule
        ``ScheduleGPipe``, ``Schedule1F1B``, ``ScheduleInterleaved1F1B``, … of
        ``torch.distributed.pipelining``, before or after its first step.
    monotonic
        Tells whether a wait has waited, ns.

    Returns
    -------
    AttachedSchedule
        To detach it. If the schedule is not as expected, one warning says so, and nothing is
        recorded.
    """
    attached = AttachedSchedule()
    if not recorder.on:
        return attached
    try:
        _attach(attached, recorder, schedule, monotonic)
    except Exception as error:  # noqa: BLE001  # a recorder that fails leaves training alone
        attached.detach()
        _LOG.warning("SMon: nothing of the pipeline schedule is recorded: %r", error)
    return attached


def _attach(
    attached: AttachedSchedule,
    recorder: Recorder,
    schedule: Any,  # noqa: ANN401  # torch's
    monotonic: Callable[[], int],
) -> None:
    stages = sorted(_stages_of(schedule), key=lambda stage: stage.stage_index)
    if len(stages) > 1:
        # Some schedules go from the last rank back to the first.
        recorder.model_chunks = {n: stage.stage_index for n, stage in enumerate(stages)}
    transfers = Transfers(recorder, monotonic)
    step = with_recorded(getattr(schedule, _STEP).__func__, transfers)
    attached.replace(schedule, _STEP, MethodType(step, schedule))
    for number, stage in enumerate(stages):
        chunk = number if len(stages) > 1 else -1
        for name, op in _LISTS.items():
            attached.replace(stage, name, transfers.listed(getattr(stage, name), op, chunk))
        computes = _Computes(recorder, transfers, stage, chunk)
        for name, op in _COMPUTES.items():
            attached.replace(stage, name, computes.timed(getattr(stage, name), op))
        if stage.is_last:
            loss = schedule._maybe_compute_loss  # noqa: SLF001  # the only place of the loss
            attached.replace(schedule, "_maybe_compute_loss", computes.with_loss(loss))


def _stages_of(schedule: Any) -> Sequence[Any]:  # noqa: ANN401  # torch's
    one = getattr(schedule, "_stage", None)
    return schedule._stages if one is None else [one]  # noqa: SLF001  # no public name


class _Computes:
    """Times the computes of one stage."""

    def __init__(
        self,
        recorder: Recorder,
        transfers: Transfers,
        stage: Any,  # noqa: ANN401  # torch's
        chunk: int,
    ) -> None:
        self._recorder, self._transfers = recorder, transfers
        self._stage, self._chunk, self._is_last = stage, chunk, bool(stage.is_last)
        self._forward: Open | None = None

    def timed(self, method: Function, op: OpType) -> Function:
        """The method, recorded as one op of the microbatch that is its first argument."""

        @wraps(method)
        def compute(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the method
            begun = self._begin(op, args, kwargs)
            result = method(*args, **kwargs)
            if op is OpType.FORWARD_COMPUTE and self._is_last:
                self._forward = begun
            else:
                self._recorder.end(begun)
            return result

        return compute

    @guarded
    def _begin(self, op: OpType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Open | None:
        # Evaluation runs forwards only, and is no part of a step.
        if not self._stage.has_backward:
            return None
        self._transfers.computes += 1
        return self._recorder.begin(op, microbatch=microbatch_of(args, kwargs), chunk=self._chunk)

    def with_loss(self, method: Function) -> Function:
        """The method; a forward of the last stage ends with its loss."""

        @wraps(method)
        def loss(stage: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # as the method
            result = method(stage, *args, **kwargs)
            if stage is self._stage:
                begun, self._forward = self._forward, None
                self._recorder.end(begun)
            return result

        return loss
