"""Decoding in processes of their own: the same contents, and deaths that cost one body each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from smon.config import Settings
from smon.errors import WireError
from smon.ingest.decode import Content
from smon.ingest.decoding import Here
from smon.ingest.fence import DEATHS, KILLS, Fence, cause_of
from smon.ingest.limits import Limits
from smon.ingest.metrics import DecoderMetrics
from smon.ingest.parcels import Parcel
from smon.ingest.values import Producer
from smon.wire import TYPE_FILE, TYPE_JSON, Batch, BatchKind
from smon.wire.arrow import SCHEMA
from smon.wire.parts import FileFormat, FilePart, encode_part
from smon.wire.problems import Problem
from tests.faults.planted_decoder import COMMAND, PLANTS
from tests.ingest.batches import (
    LAYOUT,
    NOW,
    document,
    end,
    gap,
    head_of,
    json_ops,
    metrics,
    ops,
)
from tests.service import run_aside
from tests.waiting import wait_in_loop

PATIENCE_S = 120.0

#: Where a question was taken before that was noted, every third such kill left a body alone.
_RANDOM_KILLS = 20

_PART = FilePart(
    name="rank-0.json", format=FileFormat.RANK_EVENTS, rank=0, world_size=8, sha256="0" * 64,
    bytes=9, part=0, parts=1, first_step=None, last_step=None, start_ns=None, end_ns=None,
    content=b"{} \n\0 abc",
)  # fmt: skip
_CONTEXT = {
    "schema": "smon.context/1",
    "counters": {"step": [3, 5], "rank": [0, 0], "name": ["a", "a"], "value": [1.0, 2.0]},
}
SOUND = {
    "arrow": ops(0),
    "arrow of many": ops(0, rows=5000),
    "arrow of none": ops(0, rows=0),
    "json": json_ops(0),
    "context": document(BatchKind.CONTEXT, _CONTEXT, seq=0, events=2),
    "gap": gap(0, 3, events=1 << 40),
    "end": end(0),
    "file": Batch(0, BatchKind.FILE, TYPE_FILE, "identity", 1, encode_part(_PART)),
}


def parcel(batch: Batch, *, logged: bool = False) -> Parcel:
    """A batch as it is handed over; `logged`: from the log."""
    producer = None if logged else Producer(LAYOUT, live_unix=True, window_steps=10)
    return Parcel(head_of(batch), batch.body, batch.seq, producer, NOW)


def deadly(how: str, number: int = 0) -> Batch:
    """A sound batch that ends a planted decoder."""
    return ops(number, rows=12, optype=[how] * 12)


Test = Callable[[Fence, DecoderMetrics], Awaitable[None]]


def run(test: Test, command: Sequence[str] = COMMAND, arena_bytes: int = 0, **changed: Any) -> None:  # noqa: ANN401  # settings
    """Run a test with decoders, which are planted ones if nothing else is said."""

    async def main() -> None:
        figures = metrics().decoder
        fence = Fence(Settings(**changed), figures, command, arena_bytes)
        fence.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await test(fence, figures)
        finally:
            await fence.stop()

    run_aside(main)


async def refusal(fence: Fence, batch: Batch, *, logged: bool = False) -> str:
    """The problem that a body is refused with."""
    with pytest.raises(WireError) as caught:
        await fence.decode(parcel(batch, logged=logged))
    return caught.value.problem


def died(figures: DecoderMetrics, cause: str) -> int:
    """How many decoders died of it."""
    return int(figures.deaths.labels(cause)._value.get())


def died_so_often(figures: DecoderMetrics, count: int) -> bool:
    """Whether the process that forks has ended so often."""
    return died(figures, "all") == count


def fork_server(fence: Fence) -> psutil.Process:
    """The process that forks decoders."""
    assert fence._process is not None
    return psutil.Process(fence._process.pid)


# --- what is in a body ----------------------------------------------------------------------------


def test_every_kind_of_body_holds_the_same_there_as_here() -> None:
    """Ops to the last value, side evidence to the last byte; also of bodies from the log."""

    async def test(fence: Fence, _: DecoderMetrics) -> None:
        here = Here(Limits.of(Settings()), 1)
        for name, batch in SOUND.items():
            for logged in (False, True):
                asked = parcel(batch, logged=logged)
                there = await fence.decode(asked)
                assert _plain(there) == _plain(await here.decode(asked)), name
        await here.stop()

    run(test)


def _plain(content: Content) -> object:
    if content.ops is None:
        return content
    assert content.ops.schema.equals(SCHEMA, check_metadata=True)
    content.ops.validate(full=True)
    return content.ops.to_pydict()


@pytest.mark.parametrize(
    "batch, problem",
    [
        (ops(0, dp=[9] * 12), Problem.WRONG_VALUES),
        (Batch(0, BatchKind.OPS, TYPE_JSON, "zstd", 1, b"no frame"), Problem.MALFORMED_BODY),
        (document(BatchKind.END, {"reason": ""}), Problem.WRONG_VALUES),
    ],
)  # fmt: skip
def test_a_body_is_refused_there_with_the_same_words(batch: Batch, problem: Problem) -> None:
    """Problem and sentence are those of this process."""

    async def test(fence: Fence, figures: DecoderMetrics) -> None:
        here = Here(Limits.of(Settings()), 1)
        said = []
        for decoder in (fence, here):
            with pytest.raises(WireError) as caught:
                await decoder.decode(parcel(batch))
            said.append((caught.value.problem, str(caught.value)))
        assert said[0] == said[1]
        assert said[0][0] == problem
        assert died(figures, "crash") == 0
        await here.stop()

    run(test)


def test_many_bodies_at_once_each_get_their_own_content() -> None:
    """Rounds are full, lanes are mixed, and what does not fit into the memory comes later."""

    async def test(fence: Fence, _: DecoderMetrics) -> None:
        batches = [make(n, rows=100 + n) for n in range(80) for make in (ops, json_ops)]
        found = await asyncio.gather(*(fence.decode(parcel(each)) for each in batches))
        assert [each.ops.num_rows for each in found if each.ops] == [b.events for b in batches]
        large = [ops(n, rows=90_000) for n in range(4)]
        found = await asyncio.gather(*(fence.decode(parcel(each, logged=True)) for each in large))
        assert [each.ops.num_rows for each in found if each.ops] == [90_000] * 4

    # Room for one of the large ones, and no more.
    run(test, arena_bytes=16 << 20)


def test_a_content_that_never_fits_is_refused() -> None:
    """It is too large, and the next one is not."""

    async def test(fence: Fence, _: DecoderMetrics) -> None:
        assert await refusal(fence, ops(0, rows=90_000), logged=True) == Problem.TOO_LARGE
        assert (await fence.decode(parcel(ops(1)))).ops is not None

    run(test, arena_bytes=6 << 20)


# --- deaths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plant, cause",
    [
        ("planted-segv", "crash"),
        ("planted-abort", "crash"),
        ("planted-loop", "time"),
        ("planted-memory", "memory"),
        ("planted-kill", "killed"),
    ],
)
def test_a_body_that_ends_its_decoder_costs_itself(plant: str, cause: str) -> None:
    """Bodies of the same round are decoded by the next one; the death is counted by its cause."""

    async def test(fence: Fence, figures: DecoderMetrics) -> None:
        batches = [ops(0), deadly(plant, 1), ops(2), end(3)]
        found = await asyncio.gather(
            *(fence.decode(parcel(each)) for each in batches), return_exceptions=True
        )
        assert isinstance(found[1], WireError)
        assert found[1].problem == Problem.DECODER_DIED
        assert found[1].retry_after_s
        assert [isinstance(each, Content) for each in found] == [True, False, True, True]
        assert died(figures, cause) == 1

    assert plant in PLANTS
    run(test, decode_timeout_s=0.5, decode_memory_bytes=256 << 20)


def test_a_body_that_several_decoders_died_of_is_refused_for_good() -> None:
    """Else its sender would send it for ever; nobody dies of it any more. Another one may."""

    async def test(fence: Fence, figures: DecoderMetrics) -> None:
        problems = [await refusal(fence, deadly("planted-abort")) for _ in range(DEATHS + 2)]
        final = [Problem.UNDECODABLE] * 3
        assert problems == [Problem.DECODER_DIED] * (DEATHS - 1) + final
        assert died(figures, "crash") == DEATHS
        assert await refusal(fence, deadly("planted-segv")) == Problem.DECODER_DIED

    run(test)


def test_a_body_whose_decoders_are_killed_may_come_again_more_often() -> None:
    """A host is short of memory for a while: a sound body must outlive that."""

    async def test(fence: Fence, figures: DecoderMetrics) -> None:
        problems = [await refusal(fence, deadly("planted-kill")) for _ in range(KILLS + 1)]
        assert problems == [Problem.DECODER_DIED] * (KILLS - 1) + [Problem.UNDECODABLE] * 2
        assert died(figures, "killed") == KILLS

    assert KILLS >= 4 * DEATHS
    run(test)


def test_decoders_that_are_killed_at_any_moment_leave_no_body_without_an_answer() -> None:
    """Also between taking a question and beginning it, where nobody would ask it again."""

    async def test(fence: Fence, figures: DecoderMetrics) -> None:
        number = 0
        for kills in range(1, _RANDOM_KILLS + 1):
            await wait_in_loop(lambda: len(fork_server(fence).children()) == 1, "it to be noticed")
            (decoder,) = fork_server(fence).children()
            killer = threading.Timer(random.uniform(0.0, 0.02), decoder.kill)  # noqa: S311
            killer.start()
            while died(figures, "killed") < kills:
                number += 1
                with contextlib.suppress(WireError):
                    await fence.decode(parcel(end(number)))
            killer.join()
            assert (await fence.decode(parcel(ops(number)))).ops is not None
        assert fence.problem() == ""

    run(test, decode_processes=1)


def test_a_decoder_that_is_killed_while_idle_blames_nobody() -> None:
    """The next body is decoded by the next decoder."""

    async def test(fence: Fence, figures: DecoderMetrics) -> None:
        await fence.decode(parcel(ops(0)))
        for decoder in fork_server(fence).children():
            decoder.kill()
        assert (await fence.decode(parcel(ops(1)))).ops is not None
        await wait_in_loop(lambda: died(figures, "killed") == 1, "it to be noticed")
        assert fence.problem() == ""

    run(test, decode_processes=1)


def test_the_process_that_forks_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """Bodies wait meanwhile, and their memory and sockets are given back."""

    async def test(fence: Fence, figures: DecoderMetrics) -> None:
        await fence.decode(parcel(ops(0)))
        before = psutil.Process().num_fds()
        for number in range(2):
            fork_server(fence).kill()
            # Perhaps by a decoder that is killed a moment later.
            assert (await fence.decode(parcel(ops(number)))).ops is not None
            await wait_in_loop(partial(died_so_often, figures, number + 1), "it to be noticed")
            assert (await fence.decode(parcel(ops(number)))).ops is not None
        # Others of this process open and close some of theirs meanwhile.
        await wait_in_loop(lambda: psutil.Process().num_fds() <= before, "descriptors to be closed")

    run(test)
    assert "starting it again" in caplog.text


def test_without_decoders_bodies_are_refused_and_the_server_says_what_to_do() -> None:
    """It is tried again; the problem names the setting that does without."""

    async def test(fence: Fence, figures: DecoderMetrics) -> None:
        await wait_in_loop(lambda: fence.problem() != "", "it to be noticed")
        assert "SMON_DECODE_PROCESSES=0" in fence.problem()
        assert figures.up._value.get() == 0
        assert await refusal(fence, ops(0)) == Problem.OVERLOADED
        fence._command = COMMAND
        await wait_in_loop(lambda: fence.problem() == "", "it to be noticed")
        assert figures.up._value.get() == 1
        assert (await fence.decode(parcel(ops(1)))).ops is not None

    run(test, ("-c", "raise SystemExit(1)"))


def test_decoders_that_die_again_and_again_of_no_body_are_a_problem() -> None:
    """Then the server says so, and refuses bodies instead of keeping them waiting."""

    async def test(fence: Fence, figures: DecoderMetrics) -> None:
        await fence.decode(parcel(ops(0)))
        while not fence.problem():
            for decoder in fork_server(fence).children() if fence._process else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    decoder.kill()
            await asyncio.sleep(0.01)
        assert "end by themselves" in fence.problem()
        assert figures.up._value.get() == 0
        assert await refusal(fence, ops(0)) == Problem.OVERLOADED
        await wait_in_loop(lambda: fence.problem() == "", "it to be noticed")
        assert (await fence.decode(parcel(ops(1)))).ops is not None

    run(test, decode_processes=1)


_PARENT = """
import asyncio, sys
from smon.config import Settings
from smon.ingest.fence import Fence
from tests.ingest.batches import end, metrics
from tests.ingest.test_fence import COMMAND, parcel, deadly

async def main():
    fence = Fence(Settings(decode_processes=1), metrics().decoder, COMMAND)
    fence.start()
    await fence.decode(parcel(end(0)))
    task = asyncio.ensure_future(fence.decode(parcel(deadly("planted-loop"))))
    await asyncio.sleep(0.2)
    print("ready", flush=True)
    await task

asyncio.run(main())
"""


def test_decoders_die_with_their_server() -> None:
    """However it ends, and although one of them is in a loop."""
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 2
        os.kill(process.pid, signal.SIGKILL)
    gone, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert len(gone) == len(family), alive


def test_decoders_know_no_secret_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body that takes one over finds neither address nor key in its environment."""
    for name in ("SMON_DATABASE_URL", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"):
        monkeypatch.setenv(name, "a secret")

    async def test(fence: Fence, _: DecoderMetrics) -> None:
        await fence.decode(parcel(end(0)))
        family = [fork_server(fence), *fork_server(fence).children()]
        assert len(family) == 2
        for process in family:
            assert "a secret" not in process.environ().values()

    run(test, decode_processes=1)


def test_stopping_leaves_nothing_behind(tmp_path: Path) -> None:
    """No process, no descriptor; bodies that wait are refused."""

    async def main() -> None:
        before = psutil.Process().num_fds()
        fence = Fence(Settings(data_dir=tmp_path), metrics().decoder, COMMAND)
        fence.start()
        await fence.decode(parcel(end(0)))
        family = [fork_server(fence), *fork_server(fence).children()]
        waits = asyncio.ensure_future(fence.decode(parcel(deadly("planted-loop"))))
        await asyncio.sleep(0)
        begin = time.monotonic()
        await fence.stop()
        assert time.monotonic() - begin < PATIENCE_S
        with pytest.raises(WireError):
            await waits
        _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not alive
        # Others of this process open and close some of theirs meanwhile.
        await wait_in_loop(lambda: psutil.Process().num_fds() <= before, "descriptors to be closed")

    run_aside(main)


@pytest.mark.parametrize(
    "status, cause",
    [(signal.SIGSEGV, "crash"), (signal.SIGKILL, "killed"), (signal.SIGALRM, "time"),
     (77 << 8, "memory"), (1 << 8, "crash")],
)  # fmt: skip
def test_a_cause_is_what_the_system_says(status: int, cause: str) -> None:
    """By signal, or by exit code."""
    assert cause_of(int(status)) == cause
