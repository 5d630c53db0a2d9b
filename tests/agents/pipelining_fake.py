"""What `torch.distributed.pipelining` looks like to the recorder, on a clock that tests look at."""

from __future__ import annotations

from dataclasses import dataclass, field

MS = 1_000_000
FORWARD_MS, BACKWARD_MS, WEIGHT_MS, LOSS_MS, POST_MS = 20, 30, 10, 5, 0.1


@dataclass(slots=True)
class Clock:
    """Both clocks of the host."""

    now: int = 0
    ahead: int = 1_700_000_000_000_000_000

    def monotonic(self) -> int:
        """A clock that never goes back."""
        return self.now

    def wall(self) -> int:
        """Unix time."""
        return self.now + self.ahead

    def work(self, ms: float) -> None:
        """Let time pass."""
        self.now += round(ms * MS)


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """One tensor to send or to receive: it is there so long after it was posted."""

    clock: Clock
    ms: float


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """A message on its way."""

    clock: Clock
    end: int

    def wait(self) -> None:
        """Until it is there."""
        self.clock.now = max(self.clock.now, self.end)


def _batch_p2p(messages: list[Message], desc: str | None = None) -> list[Work]:
    works = [Work(each.clock, each.clock.now + round(each.ms * MS)) for each in messages]
    if messages:
        messages[0].clock.work(POST_MS)
    return works


def _sorted_batch_p2p(messages: list[Message], *, desc: str | None = None) -> dict[int, list[Work]]:
    return {0: _batch_p2p(messages, desc=desc)} if messages else {}


def _wait_batch_p2p(works: list[Work]) -> None:
    for each in works:
        each.wait()


@dataclass
class Stage:
    """One stage; the first receives nothing, the last sends nothing.

    Attributes
    ----------
    tensors, message_ms
        Messages per microbatch and direction, and how long each takes.
    """

    clock: Clock
    stage_index: int = 1
    num_stages: int = 3
    has_backward: bool = True
    tensors: int = 1
    message_ms: float = 8.0

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.stage_index == self.num_stages - 1

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Message]:
        """From the stage before."""
        return self._messages(there=self.stage_index > 0)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Message]:
        """To the next stage."""
        return self._messages(there=not self.is_last)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Message]:
        """From the next stage."""
        return self._messages(there=not self.is_last)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Message]:
        """To the stage before."""
        return self._messages(there=self.stage_index > 0)

    def _messages(self, *, there: bool) -> list[Message]:
        return [Message(self.clock, self.message_ms) for _ in range(self.tensors * there)]

    def forward_one_chunk(self, fwd_chunk_id: int, args: object = None) -> str:
        """Compute."""
        self.clock.work(FORWARD_MS)
        return f"output {fwd_chunk_id}"

    def backward_one_chunk(self, bwd_chunk_id: int, *, full_backward: bool = True) -> None:
        """Compute gradients, of the inputs only if not `full_backward`."""
        if self.has_backward:
            self.clock.work(BACKWARD_MS)

    def backward_weight_one_chunk(self, bwd_chunk_id: int) -> None:
        """Compute the gradients that were left out."""
        if self.has_backward:
            self.clock.work(WEIGHT_MS)


class Losing:
    """What all schedules do with an output."""

    def _maybe_compute_loss(self, stage: Stage, output: str, target: object, number: int) -> None:
        if stage.is_last:
            stage.clock.work(LOSS_MS)


@dataclass
class InOrder(Losing):
    """A schedule of one stage: forwards, then backwards."""

    _stage: Stage
    microbatches: int = 2
    outputs: list[str] = field(default_factory=list)

    def step(self) -> None:
        """As the trainer calls it."""
        self._step_microbatches()

    def _step_microbatches(self, target: object = None) -> None:
        stage, sent = self._stage, []
        for number in range(self.microbatches):
            for works in _sorted_batch_p2p(stage.get_fwd_recv_ops(number)).values():
                _wait_batch_p2p(works)
            self.outputs.append(stage.forward_one_chunk(number, ()))
            sent.append(_batch_p2p(stage.get_fwd_send_ops(number)))
            self._maybe_compute_loss(stage, self.outputs[-1], target, number)
        for works in sent:
            _wait_batch_p2p(works)
        for number in range(self.microbatches if stage.has_backward else 0):
            _wait_batch_p2p(_batch_p2p(stage.get_bwd_recv_ops(number)))
            stage.backward_one_chunk(number)
            # As 1F1B does: sent and waited for at once.
            _wait_batch_p2p(_batch_p2p(stage.get_bwd_send_ops(bwd_chunk_id=number)))


@dataclass
class Looped(Losing):
    """A schedule of several stages.

    Backwards are split, receives posted early, and sends waited for at the end, the last one first.
    """

    _stages: list[Stage]

    def step(self) -> None:
        """As the trainer calls it."""
        self._step_microbatches()

    def _step_microbatches(self) -> None:
        sent: list[list[Work]] = []
        received = [_batch_p2p(stage.get_fwd_recv_ops(0)) for stage in self._stages]
        for stage, works in zip(self._stages, received, strict=True):
            _wait_batch_p2p(works)
            self._maybe_compute_loss(stage, stage.forward_one_chunk(0), None, 0)
            sent.append(_batch_p2p(stage.get_fwd_send_ops(0)))
        for stage in self._stages:
            stage.backward_one_chunk(0, full_backward=False)
            stage.backward_weight_one_chunk(0)
        while sent:
            _wait_batch_p2p(sent.pop())
