"""Whether an answer pauses one stream, or all of them."""

from __future__ import annotations

from pathlib import Path

from smon.wire import BatchKind
from tests.agents.builders import Hand, write
from tests.agents.fake import Fail, Fake, Stored


def test_a_batch_that_ends_its_decoder_holds_up_its_own_stream_alone(tmp_path: Path) -> None:
    """Others go on at once; when the server has had enough of it, it is set aside."""
    fake = Fake()
    write(tmp_path, 4, key="job/0/host/0", each=3)
    write(tmp_path, 4, key="job/0/host/1", each=5)
    answers = [Fail(503, "decoder-died", retry_after=2)] * 2

    def poison(stored: Stored) -> Fail | None:
        if stored.kind is not BatchKind.OPS or stored.events != 3 or stored.seq != 1:
            return None
        return answers.pop() if answers else Fail(422, "undecodable")

    fake.poison = poison
    hand = Hand(fake, tmp_path)
    hand.rounds(3, seconds=0.1)
    assert len(fake.ops()) == 3 + 4 * 5
    assert len(answers) == 1
    hand.until(fake.ended)
    (gap,) = fake.gaps()
    assert (gap["events"], gap["reason"]) == (3, "refused-422-undecodable")
    assert len(fake.ops()) == 3 * 3 + 4 * 5
