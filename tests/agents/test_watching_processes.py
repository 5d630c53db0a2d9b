"""Real agents on folders that grow: killed at any moment, measured by what they load."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from smon.trace.formats import rank_events
from smon.wire import BatchKind
from smon.wire.parts import MAX_PART_BYTES, FileFormat, FilePart, decode_part
from tests.agents.builders import chance_of
from tests.agents.fake import Fake, serve
from tests.agents.test_processes import agent
from tests.agents.watching import append, inspector_record
from tests.kineto_files import Ddp, write_ddp
from tests.waiting import wait_until

#: Ranks and cycles of the profiler, records of a log, and dumps of three parts.
RANKS, CYCLES, RECORDS = 2, 3, 90


class Host:
    """Folders in which files of three profilers appear, and the environment of their agent."""

    def __init__(self, root: Path) -> None:
        self.root, self.spool = root, root / "spool"
        self.profiles, self.logs, self.dumps = (root / n for n in ("kineto", "logs", "dumps"))
        for folder in (self.profiles, self.logs, self.dumps):
            folder.mkdir()
        self.environ = {
            "SMON_KINETO_DIR": str(self.profiles),
            "SMON_INSPECTOR_DIR": str(self.logs),
            "SMON_FLIGHT_RECORDER_DIR": str(self.dumps),
            "SMON_FILE_STILL_S": "0.2",
            "SMON_INSPECTOR_PORTION_S": "1",
            "SMON_JOB_ID": "job",
        }

    def grow(self, turn: int) -> None:
        """What comes in one turn: records, and now and then a profile of each rank, or a dump."""
        log = self.logs / "host-pid1.log"
        now = time.time()
        records = range(turn * RECORDS // 9, (turn + 1) * RECORDS // 9)
        append(log, *(inspector_record(n, now + n / 1e4) for n in records))
        if turn == 4:
            log.rename(log.with_name("host-pid1.log.1"))
        if turn % 3 == 0:
            write_ddp(self.profiles / f"cycle-{turn}", Ddp(ranks=RANKS, steps=2, first_step=turn))
            noise = chance_of(turn).randbytes(MAX_PART_BYTES).hex()
            part = self.dumps / ".aside"
            part.write_text(f'{{"pg_config": {{}}, "noise": "{noise}{"!" * 99}"}}')
            part.rename(self.dumps / f"_dump_{turn}")


def parts(fake: Fake) -> list[FilePart]:
    """All parts that a server has."""
    return [decode_part(each.raw) for each in fake.batches() if each.kind is BatchKind.FILE]


def whole(fake: Fake) -> list[tuple[FilePart, bytes]]:
    """All files of which every part has come, and their content."""
    found: dict[tuple[str, int | None], list[FilePart]] = defaultdict(list)
    for part in parts(fake):
        found[part.sha256, part.rank].append(part)
    return [
        (same[0], b"".join(part.content for part in sorted(same, key=lambda each: each.part)))
        for same in found.values()
        if len(same) == same[0].parts
    ]


def records(fake: Fake, folder: Path) -> list[int]:
    """Number of every collective in the portions of logs."""
    found: list[int] = []
    for part, content in whole(fake):
        if ".log" in part.name:
            path = folder / "portion"
            path.write_bytes(content)
            found += rank_events.read(path).events[0].seq.tolist()
    return found


def kinds(fake: Fake) -> Counter[FileFormat]:
    """Whole files that are no portions of logs, by format."""
    return Counter(part.format for part, _ in whole(fake) if ".log" not in part.name)


def test_killed_agents_ship_every_file_and_every_record_once(tmp_path: Path) -> None:
    """Killed while files appear, logs move, and profiles are read."""
    fake, chance, host = Fake(), chance_of(5), Host(tmp_path)
    with serve(fake) as url:
        for turn in range(9):
            host.grow(turn)
            with agent(host.spool, url, **host.environ):
                time.sleep(0.4 + 1.2 * chance.random())
        with agent(host.spool, url, **host.environ):
            # Each look decodes all that has come, in the process that takes the rest.
            wait_until(lambda: len(records(fake, tmp_path)) >= RECORDS, "all records", pause_s=0.2)
            wait_until(
                lambda: sum(kinds(fake).values()) >= (RANKS + 1) * CYCLES, "files", pause_s=0.2
            )
    assert sorted(records(fake, tmp_path)) == list(range(RECORDS))
    counts = Counter((part.sha256, part.rank, part.part) for part in parts(fake))
    assert set(counts.values()) == {1}
    assert kinds(fake) == {FileFormat.RANK_EVENTS: RANKS * CYCLES, FileFormat.FLIGHT_RECORDER: 3}
    assert not fake.gaps()


WATCHES = """
import os, sys
from ingest_agents.config import configure
from ingest_agents.sources.watched import watched
sources = watched(configure(os.environ).settings, os.environ, print)
for _ in range(3):
    for source in sources:
        source.poll()
heavy = {"numpy", "pyarrow", "pandas", "smon.trace"} & set(sys.modules)
assert not heavy, heavy
"""


def test_an_agent_that_watches_loads_no_numpy(tmp_path: Path) -> None:
    """Reading is another process's: the agent stays small."""
    host = Host(tmp_path)
    write_ddp(host.profiles, Ddp(ranks=1, steps=2))
    environ = {**os.environ, **host.environ, "SMON_SPOOL_DIR": str(host.spool)}
    subprocess.run([sys.executable, "-c", WATCHES], env=environ, check=True)
