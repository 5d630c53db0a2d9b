"""The service with decoders of its own: what they die of, and what the log holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

from smon.config import Settings
from smon.ingest.fence import DEATHS, Fence
from smon.ingest.metrics import DecoderMetrics
from smon.ingest.service import Ack, Parts
from smon.wire import BatchKind
from smon.wire.problems import Problem
from tests.faults.planted_decoder import COMMAND
from tests.ingest.batches import FakeStore, gap, info, ops
from tests.ingest.test_service import Stand, run
from tests.waiting import wait_in_loop


def planted(chosen: Settings, figures: DecoderMetrics) -> Fence:
    """Decoders that a sound body can end."""
    return Fence(chosen, figures, COMMAND)


def test_a_batch_that_ends_its_decoder_is_not_stored_and_others_are(tmp_path: Path) -> None:
    """It may come again a few times; then it is refused for good, and a gap is taken for it."""

    async def test(stand: Stand) -> None:
        deadly = ops(0, optype=["planted-abort"] * 12)
        for problem in (*[Problem.DECODER_DIED] * (DEATHS - 1), Problem.UNDECODABLE):
            beside = asyncio.ensure_future(stand.put(ops(1)))
            assert await stand.refused(deadly) == problem
            assert (await beside).next_seq == 0
        assert await stand.refused(deadly) == Problem.UNDECODABLE
        assert await stand.put(gap(0, 0, reason="refused-422-undecodable")) == Ack("stored", 2)
        assert stand.logged() == [1, 0]

    run(tmp_path, test, parts=Parts(decoder=planted), decode_processes=1)


def test_a_server_whose_decoders_cannot_start_says_so(tmp_path: Path) -> None:
    """It takes nothing, is not ready, and names the setting."""

    def none(chosen: Settings, figures: DecoderMetrics) -> Fence:
        return Fence(chosen, figures, ("-c", "raise SystemExit(1)"))

    async def test(stand: Stand) -> None:
        await wait_in_loop(stand.service.ready, "a reason not to be ready")
        (reason,) = stand.service.ready()
        assert "SMON_DECODE_PROCESSES=0" in reason
        assert await stand.refused(ops(0)) == Problem.OVERLOADED

    run(tmp_path, test, store=FakeStore(info()), parts=Parts(decoder=none), decode_processes=1)


def test_what_is_in_the_log_is_decoded_there_too(tmp_path: Path) -> None:
    """After a restart: the batch that ends decoders becomes a gap, the others are stored."""

    async def fill(stand: Stand) -> None:
        for batch in (ops(0), ops(1, optype=["planted-segv"] * 12), ops(2)):
            await stand.put(batch)

    async def restarted(stand: Stand) -> None:
        await wait_in_loop(lambda: not stand.service._wal.pending_records, "an empty log")
        kinds = {note.seq: note.kind for note in stand.store.notes}
        assert kinds == {0: BatchKind.OPS, 1: BatchKind.GAP, 2: BatchKind.OPS}
        deaths = stand.service.metrics.decoder.deaths
        assert deaths.labels("crash")._value.get() == DEATHS

    run(tmp_path, fill)
    store = FakeStore(info())
    run(tmp_path, restarted, store=store, parts=Parts(decoder=planted), decode_processes=2)
