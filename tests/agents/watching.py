"""What tests of watched folders share: a folder, a fake ``/proc``, a source turned by hand."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ingest_agents.agent import Source
from ingest_agents.config import AgentSettings
from ingest_agents.payload import decode, gap_of
from ingest_agents.sources.listing import FileKind
from ingest_agents.sources.logs import LogSource
from ingest_agents.sources.outbox import Budget, Outbox, Shared
from ingest_agents.sources.processes import Processes
from ingest_agents.sources.profiles import ProfileSource
from ingest_agents.sources.reducing import Reducer
from ingest_agents.spool.folder import StreamSpec, read_spec, streams_in
from smon.wire import Batch, BatchKind
from smon.wire.parts import FilePart, decode_part
from tests.agents.builders import Clock
from tests.agents.test_spool import read_all

PATIENCE_S = 60.0


class Bench:
    """A watched folder and the source that ships it.

    Attributes
    ----------
    said
        All that the source told people.
    wall_ns
        What the source takes for the time.
    """

    def __init__(
        self,
        root: Path,
        kind: FileKind,
        *,
        command: Sequence[str] | None = None,
        needs: Sequence[str] | None = None,
        **changed: object,
    ) -> None:
        self.root, self.kind = root, kind
        self.seams = {"command": command, "needs": needs}
        self.folder, self.spool, self.proc = root / "in", root / "spool", root / "proc"
        for folder in (self.folder, self.spool, self.proc):
            folder.mkdir(parents=True, exist_ok=True)
        base = AgentSettings(spool_dir=str(self.spool), job_id="job", hostname="host")
        self.settings = replace(base, **changed)  # type: ignore[arg-type]  # any field
        self.clock, self.wall_ns = Clock(), time.time_ns()
        self.said: list[str] = []
        self.open()

    def open(self) -> None:
        """A source as an agent makes it at its start."""
        settings = self.settings
        more: dict[str, Any] = {name: each for name, each in self.seams.items() if each}
        self.reducer = Reducer(self.spool, settings.reader_bytes, settings.reader_s, **more)
        shared = Shared(
            settings=settings,
            host="host",
            processes=Processes(self.proc, settings, {}, clock=self.clock),
            reducer=self.reducer,
            budget=Budget(settings.file_hour_bytes, self.clock),
            say=lambda _name, text: self.said.append(text),
            wall=lambda: self.wall_ns,
            clock=self.clock,
        )
        self.outbox = Outbox(self.kind, shared)
        self.source: Source = (
            LogSource(self.folder, self.outbox, shared)
            if self.kind is FileKind.INSPECTOR
            else ProfileSource(self.kind, self.folder, self.outbox, shared)
        )

    def turn(self, seconds: float = 6.0) -> None:
        """One look after so long, and all that follows from it."""
        self.clock.now += seconds
        self.wall_ns += int(seconds * 1e9)
        self.source.poll()
        end = time.monotonic() + PATIENCE_S
        while not self.reducer.is_free:
            assert time.monotonic() < end, "the reader has not come back"
            time.sleep(0.01)
            self.source.poll()

    def settle(self) -> None:
        """Until all that is whole is shipped."""
        for _ in range(4):
            self.turn()

    def kill(self) -> None:
        """End as `kill -9` does, and begin anew."""
        self.reducer.close()
        for stream in self.outbox._streams.values():
            stream.writer.abandon()
        self.open()

    # --- processes ------------------------------------------------------------------------------

    def process(self, pid: int, environ: Mapping[str, str], *, inner: int | None = None) -> None:
        """A process that runs on the host, in a container if it has a number inside."""
        folder = self.proc / str(pid)
        folder.mkdir()
        pairs = [f"{name}={value}".encode() for name, value in environ.items()]
        (folder / "environ").write_bytes(b"\0".join([*pairs, b""]))
        numbers = f"{pid}" if inner is None else f"{pid}\t{inner}"
        (folder / "status").write_text(f"Name:\tpython\nNSpid:\t{numbers}\n")

    def ends(self, pid: int) -> None:
        """The process is gone."""
        for path in (self.proc / str(pid)).iterdir():
            path.unlink()
        (self.proc / str(pid)).rmdir()

    # --- what was shipped -----------------------------------------------------------------------

    def specs(self) -> list[StreamSpec]:
        """All streams."""
        return [read_spec(folder) for folder in streams_in(self.spool)]

    def batches(self) -> list[Batch]:
        """All batches of all streams."""
        return [batch for folder in streams_in(self.spool) for batch in read_all(folder)]

    def parts(self) -> list[FilePart]:
        """All parts of files."""
        return [decode_part(decode(b)) for b in self.batches() if b.kind is BatchKind.FILE]

    def files(self) -> dict[str, bytes]:
        """Content of every whole file, by name; no part may come twice."""
        found: dict[tuple[str, int | None], dict[int, FilePart]] = defaultdict(dict)
        for part in self.parts():
            known = found[part.sha256, part.rank]
            assert part.part not in known, f"{part.name} comes twice"
            known[part.part] = part
        whole: dict[str, bytes] = {}
        for parts in found.values():
            first = next(iter(parts.values()))
            if len(parts) == first.parts:
                content = b"".join(parts[number].content for number in range(first.parts))
                assert len(content) == first.bytes
                # Late records of a period are a portion of their own, under the same name.
                again = f" ({len(whole)})" if first.name in whole else ""
                whole[first.name + again] = content
        return whole

    def gaps(self) -> Counter[str]:
        """Files that were left out, by reason."""
        found: Counter[str] = Counter()
        for batch in self.batches():
            if batch.kind is BatchKind.GAP:
                gap = gap_of(batch)
                found[gap.reason] += gap.events
        return found


def torchrun(rank: int, world: int = 2, **more: str) -> dict[str, str]:
    """What a launcher puts into the environment of a rank."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "SLURM_JOB_ID": "77", **more}


def inspector_record(
    seq: int, written_s: float, *, rank: int = 0, world: int = 2, pid: int = 7, **perf: object
) -> dict[str, Any]:
    """A record of version 4.0: a collective of 1 ms that was dumped at this time."""
    at = int(written_s * 1e6)
    return {
        "header": {"id": "0x1", "rank": rank, "n_ranks": world, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "dump_timestamp_us": at,
            "hostname": "host",
            "pid": pid,
        },
        "coll_perf": {
            "coll": "AllReduce",
            "coll_sn": seq,
            "coll_msg_size_bytes": 1 << 20,
            "coll_exec_time_us": 1000,
            "event_trace_ts": {"coll_start_ts": at - 2000, "kernel_events": []},
            **perf,
        },
    }


def append(path: Path, *records: object, end: str = "\n") -> None:
    """Lines at the end of a log."""
    with path.open("a") as file:
        file.write("\n".join(json.dumps(each) for each in records) + end)
