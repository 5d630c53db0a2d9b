"""How fast batches are taken in, part by part; the whole is measured by `tests.load.ingest`.

Run by ``make bench``. Nothing here is asserted in seconds: machines are shared and noisy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from pytest_benchmark.fixture import BenchmarkFixture

from smon.config import Settings
from smon.errors import SMonError
from smon.ingest.decode import check, check_digest, decode
from smon.ingest.limits import Limits
from smon.ingest.metrics import WalMetrics
from smon.ingest.order import by_window
from smon.ingest.records import Record
from smon.ingest.values import Producer
from smon.ingest.wal import Seams, Wal
from smon.store.events import write_ops
from smon.store.objects import Objects
from smon.topology import Layout
from smon.wire import TYPE_ARROW, Batch, BatchKind
from smon.wire.arrow import encoded, ipc_body
from smon.wire.columns import json_body
from tests.ingest.batches import head_of, record_head
from tests.load.agents import EVENTS, ops

_LIMITS = Limits.of(Settings())
_PRODUCER = Producer(Layout(dp=64, pp=1), live_unix=True, window_steps=40)
_GROUP = 40


def batch(dp: int = 0, step: int = 0) -> Batch:
    """A batch of 1,584 events in Arrow."""
    made = ops(np.random.default_rng(dp), dp, step, time.time_ns())
    return Batch(0, BatchKind.OPS, TYPE_ARROW, "zstd", EVENTS, encoded(ipc_body(made)))


def test_digest_decode_and_check(benchmark: BenchmarkFixture) -> None:
    """One batch of 1,584 events. Goal: below 0.35 ms."""
    made = batch()
    head = head_of(made)

    def taken() -> None:
        check_digest(head, made.body)
        check(decode(head, made.body, 0, _LIMITS), _PRODUCER, _LIMITS, time.time_ns())

    benchmark(taken)


def test_decode_and_check_of_json(benchmark: BenchmarkFixture) -> None:
    """The same as JSON columns, which curl can send."""
    columns = ops(np.random.default_rng(0), 0, 0, time.time_ns()).to_pydict()
    made = Batch(0, BatchKind.OPS, "application/json", "identity", EVENTS, json_body(columns))
    head = head_of(made)
    benchmark(
        lambda: check(decode(head, made.body, 0, _LIMITS), _PRODUCER, _LIMITS, time.time_ns())
    )


@pytest.fixture
def wal(tmp_path: Path) -> Iterator[tuple[Wal, threading.Semaphore]]:
    """A log that writes, and a count of the records that are durable."""
    done = threading.Semaphore(0)

    def settle(records: Sequence[Record], error: SMonError | None) -> None:
        if error is None:
            done.release(len(records))

    settings = Settings(data_dir=tmp_path, min_free_bytes=0)
    log = Wal(settings, WalMetrics(CollectorRegistry()), Seams(settle=settle))
    log.open()
    log.start()
    yield log, done
    log.close()


@pytest.mark.parametrize("group", [1, _GROUP])
def test_append_of_a_group(
    benchmark: BenchmarkFixture, wal: tuple[Wal, threading.Semaphore], group: int
) -> None:
    """From the first record to the sync that makes all of them durable."""
    log, done = wal
    made = batch()
    head = record_head(made)

    def appended() -> None:
        for _ in range(group):
            log.append(head, made.body, lambda _: None)
        log.flush()
        for _ in range(group):
            done.acquire()

    benchmark(appended)


def test_files_of_one_move(benchmark: BenchmarkFixture, tmp_path: Path) -> None:
    """600 batches, 950,400 ops, into one Parquet file: what half a second of full load makes."""
    rng = np.random.default_rng(0)
    batches = [ops(rng, number % 64, 2 * (number // 64), time.time_ns()) for number in range(600)]
    objects, numbers = Objects(str(tmp_path)), count()

    def moved() -> None:
        for part in by_window(batches, 40):
            path = f"events/{next(numbers)}.parquet"
            write_ops(objects, path, part.table, step_relative=False)

    benchmark(moved)
