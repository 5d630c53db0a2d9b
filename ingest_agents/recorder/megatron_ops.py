"""From starts and stops of Megatron-LM's timers to ops.

Flow: `ingest_agents.recorder.megatron` → **here** → `ingest_agents.recorder.recorder`.

Timers have names, no more. Microbatch and chunk follow from the order, and so does who is at the
other end of a transfer: `ingest_agents.recorder.interleaving`. Timers that have nothing to do run
all the same; what has no peer is not recorded.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from enum import Enum
from typing import Final

from ingest_agents.recorder.interleaving import Plan, Turn, Way
from ingest_agents.recorder.megatron_job import MegatronJob, Overlap
from ingest_agents.recorder.recorder import Open, Recorder
from smon.ops import OpType

_LOG: Final = logging.getLogger("smon.recorder")

#: What happens when a timer is started, and when it is stopped.
Handlers = tuple[Callable[[], None], Callable[[], None]]


class _Half(Enum):
    """One half of a transfer between stages: its way, and whether it is the sending half."""

    FORWARD_SEND = (Way.FORWARD, True)
    FORWARD_RECV = (Way.FORWARD, False)
    BACKWARD_SEND = (Way.BACKWARD, True)
    BACKWARD_RECV = (Way.BACKWARD, False)

    @property
    def op(self) -> OpType:
        """The op that it is."""
        return _OP_OF_HALF[self]


_OP_OF_HALF: Final = {half: OpType[half.name] for half in _Half}
_RECV: Final = {Way.FORWARD: OpType.FORWARD_RECV, Way.BACKWARD: OpType.BACKWARD_RECV}

_COMPUTES: Final = {
    "forward-compute": (Way.FORWARD, OpType.FORWARD_COMPUTE),
    "backward-compute": (Way.BACKWARD, OpType.BACKWARD_COMPUTE),
}

#: A combined transfer is one op for each half, with the same times: both wait for both peers.
_TRANSFERS: Final = {
    "forward-send": (_Half.FORWARD_SEND,),
    "forward-recv": (_Half.FORWARD_RECV,),
    "backward-send": (_Half.BACKWARD_SEND,),
    "backward-recv": (_Half.BACKWARD_RECV,),
    "forward-send-backward-recv": (_Half.FORWARD_SEND, _Half.BACKWARD_RECV),
    "backward-send-forward-recv": (_Half.BACKWARD_SEND, _Half.FORWARD_RECV),
    "forward-send-forward-recv": (_Half.FORWARD_SEND, _Half.FORWARD_RECV),
    "backward-send-backward-recv": (_Half.BACKWARD_SEND, _Half.BACKWARD_RECV),
    "forward-backward-send-forward-backward-recv": tuple(_Half),
}

#: Between the last backward and the optimizer; the last three are names of older versions.
_REDUCTIONS: Final = {
    "all-grads-sync": OpType.GRADS_REDUCE_SCATTER,
    "non-tensor-parallel-grads-all-reduce": OpType.LAYERNORM_GRADS_ALL_REDUCE,
    "embedding-grads-all-reduce": OpType.EMBEDDING_GRADS_ALL_REDUCE,
    "layernorm-grads-all-reduce": OpType.LAYERNORM_GRADS_ALL_REDUCE,
    "grads-all-reduce": OpType.GRADS_REDUCE_SCATTER,
    "grads-reduce-scatter": OpType.GRADS_REDUCE_SCATTER,
}

_EVENTS: Final = {
    "save-checkpoint": "checkpoint",
    "save-checkpoint-non-persistent": "checkpoint",
    "evaluate": "evaluation",
    "eval-time": "evaluation",
}


class _Lane:
    """How far one direction of the step has come.

    Attributes
    ----------
    done
        Computes that have ended.
    receives
        Receives that were begun or posted.
    posted
        Computes that wait for what was posted beside others, in their order.
    calls
        Transfers since the last compute.
    waiting
        The first of the posted receives, from the moment when the stage has nothing else to do.
    computing
        The compute that runs.
    """

    __slots__ = ("calls", "computing", "done", "posted", "receives", "waiting")

    def __init__(self) -> None:
        self.done = self.receives = self.calls = 0
        self.posted: deque[Turn] = deque()
        self.waiting: Open | None = None
        self.computing: Open | None = None


class Watch:
    """Makes ops of what timers tell; one per process.

    An op gets its number when it ends: one that began in vain leaves no gap.

    Parameters
    ----------
    recorder
        Of this process; None: as its environment says, once the job is known.
    job
        Asked when the first step begins.
    monotonic
        A clock that never goes back, ns.
    """

    def __init__(
        self,
        recorder: Recorder | None,
        job: Callable[[], MegatronJob],
        monotonic: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._recorder, self._find = recorder, job
        self._monotonic = monotonic
        self._job: MegatronJob | None = None
        self._off = False
        self._last = -1
        self._opened: int | None = None
        self._live = False
        self._plan = Plan(0, 1)
        self._lanes = {way: _Lane() for way in Way}
        self._numbers: Counter[OpType] = Counter()
        self._transfers: list[tuple[_Half, Open | None]] = []
        self._reduction: Open | None = None
        self._clip: Open | None = None
        self._optimizer: Open | None = None
        self._pauses: list[int] = []

    def handlers(self, name: str) -> Handlers | None:
        """What to do when the timer of this name starts and stops; None if nothing is.

        None of them raises.
        """
        found = self._of_a_compute(name) or self._of_the_end(name)
        return None if found is None else (self._guarded(found[0]), self._guarded(found[1]))

    def tokens(self, tokens: int, sum_len2: float) -> None:
        """What is in the microbatch whose forward runs."""
        self._guarded(lambda: self._count(tokens, sum_len2))()

    def _of_a_compute(self, name: str) -> Handlers | None:
        if name in _COMPUTES:
            way, op = _COMPUTES[name]
            return lambda: self._compute_begins(way, op), lambda: self._compute_ends(way, op)
        if name in _TRANSFERS:
            halves = _TRANSFERS[name]
            return lambda: self._transfer_begins(halves), self._transfer_ends
        if name == "forward-backward":
            return self._pass_begins, _nothing
        if name == "batch-generator":
            return _nothing, self._batch_read
        return None

    def _of_the_end(self, name: str) -> Handlers | None:
        if name in _REDUCTIONS:
            op = _REDUCTIONS[name]
            return lambda: self._reduction_begins(op), lambda: self._reduction_ends(op)
        if name in _EVENTS:
            kind = _EVENTS[name]
            return self._pause_begins, lambda: self._pause_ends(kind)
        return {
            "optimizer": (self._optimizer_begins, self._optimizer_ends),
            # Several optimizers, chained, do not time how they clip.
            "optimizer-clip-main-grad": (_nothing, self._updates),
            "optimizer-inner-step": (self._updates, _nothing),
            "params-all-gather": (self._updated, _nothing),
        }.get(name)

    def _guarded(self, handler: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            if self._off:
                return
            try:
                handler()
            except Exception as error:  # noqa: BLE001  # training goes on without it
                self._off = True
                _LOG.warning("SMon: no more of Megatron-LM's timers is recorded: %s", error)

        return guarded

    # --- steps ------------------------------------------------------------------------------------

    def _pass_begins(self) -> None:
        """A pass of training is a step, or in one that the caller has begun."""
        job, recorder = self._known()
        self._live = False
        if not (recorder.on and job.training()):
            return
        given = recorder.open_step
        if given == self._opened:
            given = None
        step = self._next(job) if given is None else given
        # A pass that is repeated, and steps after a restart within the process, come a second time.
        if step <= self._last:
            return
        self._last, self._live = step, True
        self._plan = job.plan()
        self._lanes = {way: _Lane() for way in Way}
        self._numbers.clear()
        self._transfers = []
        self._reduction = self._clip = self._optimizer = None
        if given is None:
            recorder.begin_step(step)
            self._opened = step

    def _next(self, job: MegatronJob) -> int:
        number = job.iteration()
        return self._last + 1 if number is None else number

    def _known(self) -> tuple[MegatronJob, Recorder]:
        if self._job is None:
            self._job = self._find()
        if self._recorder is None:
            self._recorder = Recorder.from_env(layout=self._job.layout)
        return self._job, self._recorder

    # --- computes ---------------------------------------------------------------------------------

    def _compute_begins(self, way: Way, op: OpType) -> None:
        if not self._live:
            return
        lane = self._lanes[way]
        turn = self._plan.turn(way, lane.done)
        if lane.posted and lane.posted[0] == turn:
            lane.posted.popleft()
            self._end(_RECV[way], lane.waiting)
        lane.computing = self._begin(op, turn)

    def _compute_ends(self, way: Way, op: OpType) -> None:
        if not self._live:
            return
        lane = self._lanes[way]
        self._end(op, lane.computing)
        lane.computing = None
        lane.done += 1
        lane.calls = 0
        self._free()

    def _batch_read(self) -> None:
        """The forward begins when its batch is there: reading it is no compute."""
        lane = self._lanes[Way.FORWARD]
        if self._live and lane.computing is not None:
            turn = self._plan.turn(Way.FORWARD, lane.done)
            lane.computing = self._begin(OpType.FORWARD_COMPUTE, turn)

    def _count(self, tokens: int, sum_len2: float) -> None:
        job, recorder = self._job, self._recorder
        lane = self._lanes[Way.FORWARD]
        if not self._live or lane.computing is None or job is None or recorder is None:
            return
        turn = self._plan.turn(Way.FORWARD, lane.done)
        if job.speaks and turn.chunk <= 0:
            recorder.tokens(turn.microbatch, tokens, sum_len2)

    # --- transfers --------------------------------------------------------------------------------

    def _transfer_begins(self, halves: tuple[_Half, ...]) -> None:
        if not self._live:
            return
        self._transfers = []
        alone = len(halves) == 1
        for half in halves:
            way, sending = half.value
            lane = self._lanes[way]
            if not (alone or self._happens(half)):
                continue
            if sending:
                turn = self._plan.turn(way, lane.done - 1)
            else:
                turn = self._plan.receiver(way, lane.receives)
                lane.receives += 1
            if not sending and not alone and self._overlaps(way):
                lane.posted.append(turn)
            else:
                self._transfers.append((half, self._begin(half.op, turn)))
        for way in {half.value[0] for half in halves}:
            self._lanes[way].calls += 1

    def _transfer_ends(self) -> None:
        if not self._live:
            return
        for half, begun in self._transfers:
            self._end(half.op, begun)
        self._transfers = []
        self._free()

    def _happens(self, half: _Half) -> bool:
        """Whether this half of a combined transfer has a peer."""
        way, sending = half.value
        plan, lane = self._plan, self._lanes[way]
        if not plan.interleaved:
            return True
        last = lane.done - 1
        if last < 0:
            return not sending and not plan.leads(way)
        if not self._prefetches(way):
            return plan.sends(way, last) if sending else plan.receives_after(way, last)
        # First what the last compute made is sent, then what the one after the next needs is
        # received; where the next compute has a partner of the other direction, both at once.
        steady = last < plan.total - plan.warmup and way is Way.BACKWARD
        if lane.calls == 0:
            return plan.sends(way, last) if sending else steady and plan.receives_after(way, last)
        return not sending and plan.receives_after(way, lane.done)

    def _prefetches(self, way: Way) -> bool:
        """Whether receives are posted before the compute, and sends after it."""
        job, plan = self._job, self._plan
        if job is None or job.overlap is not Overlap.EVERYWHERE or plan.leads(way):
            return False
        last = self._lanes[way].done - 1
        return last < plan.warmup if way is Way.FORWARD else True

    def _overlaps(self, way: Way) -> bool:
        """Whether the stage goes on while the transfer that begins is under way."""
        job, plan = self._job, self._plan
        if job is None or not plan.interleaved or job.overlap is Overlap.NOWHERE:
            return False
        last = self._lanes[way].done - 1
        steady = last >= plan.warmup if way is Way.FORWARD else last < plan.total - plan.warmup
        return steady or job.overlap is Overlap.EVERYWHERE

    def _free(self) -> None:
        """The stage has nothing else to do: if its next compute is to wait, it waits from now."""
        for way, lane in self._lanes.items():
            if lane.posted:
                lane.waiting = self._begin(_RECV[way], lane.posted[0])

    # --- the end of the step ----------------------------------------------------------------------

    def _reduction_begins(self, op: OpType) -> None:
        if self._live and self._job is not None and self._job.takes_part(op):
            self._reduction = self._begin(op)

    def _reduction_ends(self, op: OpType) -> None:
        self._end(op, self._reduction)
        self._reduction = None

    def _optimizer_begins(self) -> None:
        """All that comes before gradients are clipped is one op, as all ranks meet there."""
        if self._live and self._job is not None:
            if self._job.clips:
                self._clip = self._begin(OpType.OPTIMIZER_CLIP_MAIN_GRAD)
            else:
                self._updates()

    def _clipped(self) -> None:
        self._end(OpType.OPTIMIZER_CLIP_MAIN_GRAD, self._clip)
        self._clip = None

    def _updates(self) -> None:
        """Gradients are clipped, and the optimizer works; if there are several, one by one."""
        self._clipped()
        if self._live and self._optimizer is None:
            self._optimizer = self._begin(OpType.OPTIMIZER)

    def _updated(self) -> None:
        """It has: what comes next waits for other ranks."""
        self._end(OpType.OPTIMIZER, self._optimizer)
        self._optimizer = None

    def _optimizer_ends(self) -> None:
        if not self._live or self._recorder is None:
            return
        self._clipped()
        self._updated()
        self._live = False
        if self._opened is not None:
            self._recorder.end_step()
            self._opened = None

    def _pause_begins(self) -> None:
        self._pauses.append(self._monotonic())

    def _pause_ends(self, kind: str) -> None:
        """A pause within a pause counts as part of it."""
        if not self._pauses:
            return
        began = self._pauses.pop()
        if not self._pauses and self._recorder is not None and self._last >= 0:
            self._recorder.event(kind, (self._monotonic() - began) / 1e9)

    # --- ops --------------------------------------------------------------------------------------

    def _begin(self, op: OpType, turn: Turn = Turn(-1, -1)) -> Open | None:  # noqa: B008  # frozen
        if self._recorder is None:
            return None
        return self._recorder.begin(op, microbatch=turn.microbatch, chunk=turn.chunk)

    def _end(self, op: OpType, begun: Open | None) -> None:
        """End an op, if it has begun."""
        if begun is not None and self._recorder is not None:
            begun.seq = self._numbers[op]
            self._numbers[op] += 1
            self._recorder.end(begun)


def _nothing() -> None:
    """A timer whose start, or stop, says nothing."""
