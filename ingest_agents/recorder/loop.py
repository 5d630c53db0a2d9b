"""The ops of a plain training loop: forward and backward of each microbatch, the optimizer.

Flow: hooks (`ingest_agents.recorder.plain`, `ingest_agents.recorder.sharded`) → **here** →
`ingest_agents.recorder.recorder`.

A step begins with its first forward and ends with the optimizer. What passes before a forward, like
the wait for the loader, is the gap before it.

**Where ranks wait for each other.** Ranks wait in collectives in the midst of forward and backward
(shards of parameters are gathered, gradients are reduced), and at the end of a backward, when the
last reductions end. None of that is compute, and none has a place of its own in the graph of a
step. So all of it is put into one op at the end of the step, ``grads-reduce-scatter``: computes
last as long as they compute, and stand as far apart as they do without the waits between them; the
reduction begins where the last compute ends that way, and ends when it ends. A rank that computes
longer then comes later to it, and the others wait for it there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ingest_agents.recorder.batches import Counts
from ingest_agents.recorder.pending import Open, Stamp
from ingest_agents.recorder.recorder import Recorder
from smon.ops import OpType

_F: Final = OpType.FORWARD_COMPUTE
_B: Final = OpType.BACKWARD_COMPUTE


class Loop:
    """Records one training loop; its methods are called by hooks, in the order of the loop.

    Parameters
    ----------
    recorder
        If one of its steps is open already, that is used, and left open.
    first_step
        Number of the first step that is begun here.
    optimizers
        A step ends when so many optimizers have stepped.
    reduces
        Whether gradients are reduced over ranks at the end of the backward that runs.
    at_end
        Has a function called when the backward that runs has computed all gradients, after those
        that were given before.

    Attributes
    ----------
    microbatch
        Of the last forward.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        first_step: int,
        optimizers: int,
        reduces: Callable[[], bool],
        at_end: Callable[[Callable[[], None]], None],
    ) -> None:
        self._recorder, self._next_step = recorder, first_step
        self._optimizers, self._reduces, self._at_end = optimizers, reduces, at_end
        self._step: int | None = None
        self._mine = False
        self.microbatch = -1
        self._compute: Open | None = None
        self._in_backward = False
        self._waiting: Stamp | None = None
        self._reducing: Stamp | None = None
        self._reduced: tuple[Stamp, Stamp] | None = None
        self._optimizer: Open | None = None
        self._stepped = 0

    # --- forward ----------------------------------------------------------------------------------

    def forward_begins(self, counts: Counts | None) -> None:
        """The forward of the next microbatch, with these tokens."""
        self._ensure_step()
        # A backward that was broken off has no end.
        self._in_backward, self._waiting = False, None
        # There is another microbatch: the reduction before it was none at the end of the step.
        if self._reduced is not None:
            self._recorder.waited(*self._reduced)
            self._reduced = None
        self.microbatch += 1
        self._compute = self._recorder.begin(_F, microbatch=self.microbatch)
        if counts is not None:
            self._recorder.tokens(self.microbatch, *counts)

    def forward_ends(self) -> None:
        """The forward of this microbatch ends."""
        self._end_compute()

    def _ensure_step(self) -> None:
        if self._recorder.open_step is None:
            self._recorder.begin_step(self._next_step)
            self._mine = True
        if self._step != self._recorder.open_step:
            self._step, self.microbatch = self._recorder.open_step, -1
            self._reduced, self._stepped = None, 0

    # --- backward ---------------------------------------------------------------------------------

    def backward_begins(self, microbatch: int) -> None:
        """The first gradient of the outputs of a microbatch is there; may be repeated."""
        if self._in_backward or self._recorder.open_step is None:
            return
        self._in_backward = True
        self._at_end(self._computed)
        self._compute = self._recorder.begin(_B, microbatch=microbatch)

    def backward_waits(self, microbatch: int) -> None:
        """The backward of a part of the model begins with a wait; maybe that of the whole does."""
        self.backward_begins(microbatch)
        self.wait_begins()

    @property
    def computing(self) -> bool:
        """Whether a forward or backward is recorded."""
        return self._compute is not None

    def _computed(self) -> None:
        """All gradients of this rank are there. Those who wait for reductions come after this."""
        self._end_compute()
        self._in_backward = False
        if self._reduces():
            self._reducing = self._recorder.stamp()
            self._at_end(self._all_reduced)

    def _all_reduced(self) -> None:
        begin, end = self._reducing, self._recorder.stamp()
        if begin is not None and end is not None:
            self._reduced = begin, end

    def _end_compute(self) -> None:
        self.wait_ends()
        self._recorder.end(self._compute)
        self._compute = None

    # --- collectives inside of them ---------------------------------------------------------------

    def wait_begins(self) -> None:
        """Until `wait_ends` nothing is computed, other ranks are waited for; may be repeated."""
        if self._compute is not None and self._waiting is None:
            self._waiting = self._recorder.stamp()

    def wait_ends(self) -> None:
        """Computing goes on, if it had paused."""
        begin, self._waiting = self._waiting, None
        if begin is None or self._compute is None:
            return
        end = self._recorder.stamp()
        if end is not None:
            waits = self._compute.waits
            self._compute.waits = waits = [] if waits is None else waits
            waits.append((begin, end))

    # --- optimizer --------------------------------------------------------------------------------

    def optimizer_begins(self) -> None:
        """An optimizer steps: all microbatches of the step were computed."""
        if self._reduced is not None:
            begin, end = self._reduced
            self._reduced = None
            reduction = self._recorder.begin(OpType.GRADS_REDUCE_SCATTER, at=begin)
            if reduction is not None:
                reduction.settles = True
                self._recorder.end(reduction, at=end)
        if self._optimizer is None:
            self._optimizer = self._recorder.begin(OpType.OPTIMIZER)

    def optimizer_ends(self) -> None:
        """An optimizer has stepped; after the last one, the step ends."""
        self._stepped += 1
        if self._stepped < self._optimizers:
            return
        self._recorder.end(self._optimizer)
        self._optimizer, self._stepped = None, 0
        self.leave()

    def leave(self) -> None:
        """End the step that was begun here, if one is open."""
        if self._mine:
            if self._recorder.open_step is not None:
                self._next_step = self._recorder.open_step + 1
            self._recorder.end_step()
        self._mine, self._step = False, None
