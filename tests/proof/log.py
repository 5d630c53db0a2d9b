"""Single changed bytes in the server's log and in an agent's spool; and reading a large log."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from ingest_agents.payload import gap_of, last_seq
from ingest_agents.spool.folder import segments_of
from ingest_agents.spool.reader import SpoolReader
from ingest_agents.spool.writer import SpoolLimits
from smon.ingest.segments import read_back, recover
from smon.ingest.wal import Wal
from smon.wire import BatchKind
from tests.agents.builders import write
from tests.ingest.batches import metrics, ops, record_head, settings
from tests.proof.line import Form, Line, at_most, exactly

_FLIPS: Final = {Form.SHORT: 60, Form.LONG: 1000}
_LOG_BYTES: Final = {Form.SHORT: 8 << 20, Form.LONG: 1 << 30}

#: Batches of a file that is damaged, and ops of each.
_BATCHES: Final = 40
_ROWS: Final = 200

#: Ops of a batch of the large log: that of a step of 16 workers.
_LARGE_ROWS: Final = 1_584

#: Batches that wait to be written at a time.
_TOGETHER: Final = 64


def prove(form: Form, folder: Path) -> Line:
    """Flip bytes, then read a large log."""
    begin = time.monotonic()
    wal, spool = Flips(), Flips()
    for flip in _log_flips(folder / "wal", _FLIPS[form]):
        wal.add(*flip)
    for flip in _spool_flips(folder / "spool", _FLIPS[form]):
        spool.add(*flip)
    size, records, seconds = _replay(folder / "large", _LOG_BYTES[form])
    goals = (
        at_most("records of the log that one changed byte costs", wal.worst, 1),
        exactly("changed bytes of the log whose loss was not counted", wal.uncounted, 0),
        exactly("records of the log that came back changed", wal.changed, 0),
        at_most("batches of a spool that one changed byte costs", spool.worst, 1),
        exactly("changed bytes of a spool whose loss was not counted", spool.uncounted, 0),
        exactly("batches of a spool that came back changed", spool.changed, 0),
        at_most(f"reading a log of {size / (1 << 30):.2g} GiB, s", seconds, 10, timed=True),
    )
    figures = {
        "flips_of_the_log": wal.flips,
        "flips_of_a_spool": spool.flips,
        "without_any_loss": wal.harmless + spool.harmless,
        "records_of_the_large_log": records,
        "mib_per_s": round(size / (1 << 20) / max(seconds, 1e-9)),
    }
    return Line("log", form, goals, figures, round(time.monotonic() - begin, 1))


class Flips:
    """What changed bytes have cost so far."""

    def __init__(self) -> None:
        self.flips = self.worst = self.uncounted = self.changed = self.harmless = 0

    def add(self, lost: int, counted: int, changed: int) -> None:
        """One more: records that are missing, losses that were said, records that differ."""
        self.flips += 1
        self.worst = max(self.worst, lost)
        self.uncounted += lost > counted
        self.changed += changed
        self.harmless += lost == 0


def _flipped(chance: random.Random, data: bytes) -> bytes:
    spoiled = bytearray(data)
    spoiled[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    return bytes(spoiled)


def _log_flips(folder: Path, flips: int) -> Iterator[tuple[int, int, int]]:
    """(lost, counted, changed) of each flip, by what a restart recovers."""
    wal = _log(folder, _BATCHES, _ROWS)
    (segment,) = sorted(wal.glob("*.wal"))
    data, chance = segment.read_bytes(), random.Random(1)  # noqa: S311  # no secret
    written = _read_log(wal)
    for _ in range(flips):
        segment.write_bytes(_flipped(chance, data))
        # Recovery cuts a torn end off the file itself: counted before, read after.
        found = recover(wal)
        counted = found.damaged + found.torn
        back = _read_log(wal)
        changed = sum(written.get(number) != body for number, body in back.items())
        yield len(written) - len(back), counted, changed


def _read_log(folder: Path) -> dict[int, bytes]:
    found = recover(folder)
    return {
        record.number: body
        for segment in found.segments
        for record, _, body in read_back(
            segment.path, [each for each in found.records if each.segment == segment.number]
        )
    }


def _spool_flips(root: Path, flips: int) -> Iterator[tuple[int, int, int]]:
    """(lost, counted, changed) of each flip, by what an agent would send."""
    limits = SpoolLimits(1 << 30, 1e9, 0)
    stream = write(root, _BATCHES, each=_ROWS, limits=limits)
    ((_, segment),) = segments_of(stream)
    data, chance = segment.read_bytes(), random.Random(2)  # noqa: S311  # no secret
    written = dict(_read_spool(stream))
    for _ in range(flips):
        segment.write_bytes(_flipped(chance, data))
        back = dict(_read_spool(stream))
        sound = {seq: body for seq, body in back.items() if body is not None}
        changed = sum(written.get(seq) != body for seq, body in sound.items())
        # Damage of the last record, which says that the stream ends, shows when more is written.
        counted = sum(body is None for body in back.values()) + (len(written) - 1 not in back)
        yield len(written) - len(sound), counted, changed


def _read_spool(stream: Path) -> Iterator[tuple[int, bytes | None]]:
    """(seq, body) of what is there; None for each number that a GAP stands for."""
    reader, at = SpoolReader(stream), 0
    while (batch := reader.next(at)) is not None:
        if batch.kind is BatchKind.GAP:
            gap = gap_of(batch)
            yield from ((seq, None) for seq in range(gap.first_seq, gap.last_seq + 1))
        else:
            yield batch.seq, batch.body
        at = last_seq(batch) + 1
    reader.forget()


def _replay(folder: Path, size: int) -> tuple[int, int, float]:
    """Bytes and records of a large log, and seconds to find them all."""
    one = len(ops(0, _LARGE_ROWS).body)
    wal = _log(folder, max(size // one, 2), _LARGE_ROWS)
    total = sum(path.stat().st_size for path in wal.glob("*.wal"))
    log = Wal(settings(folder), metrics().wal)
    begin = time.monotonic()
    records = len(log.open())
    seconds = time.monotonic() - begin
    log.close()
    return total, records, seconds


def _log(folder: Path, batches: int, rows: int) -> Path:
    """A log of so many batches, as a server writes it; its folder."""
    log = Wal(settings(folder, max_wal_bytes=8 << 30), metrics().wal)
    log.open()
    log.start()
    batch = ops(0, rows)
    for number in range(batches):
        # The same ops with another number: nothing here looks into them.
        log.append(record_head(replace(batch, seq=number)), batch.body, lambda _: None)
        if number % _TOGETHER == 0:
            log.flush()
            while log.pending_records <= number:
                time.sleep(0.001)
    log.close()
    return log.folder
