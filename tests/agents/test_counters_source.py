"""The source as the agent turns it: whose counters, of which step, and for how long."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ingest_agents.payload import OpRow, ops_batch
from ingest_agents.sources.counters.catalogue import ALL
from ingest_agents.sources.counters.gpu import GpuReading, GpusUnavailableError, NvidiaGpus
from ingest_agents.sources.counters.patient import Patient, Seams, in_thread
from ingest_agents.sources.counters.source import CounterSource, Readers, readers_of
from ingest_agents.spool.folder import read_spec, streams_in
from ingest_agents.spool.writer import SpoolLimits, SpoolWriter
from smon.topology import Layout
from smon.wire import BatchKind
from tests.agents.builders import SMALL, Hand, spec
from tests.agents.counting import LOST, Gpu, Nvml, at_once, process
from tests.agents.fake import Fake, Stored, serve
from tests.agents.test_processes import TRAINER, agent, environment
from tests.waiting import wait_until

S = 10**9


class Site:
    """A host on which time passes when a test says so.

    Attributes
    ----------
    now
        Seconds; also unix time.
    """

    def __init__(self, root: Path, gpus: list[Gpu] | None = None, interval_s: float = 10.0) -> None:
        self.now = 1000.0
        self.root, self.machine = root / "spool", root / "machine"
        self.root.mkdir()
        self.said: list[tuple[str, str]] = []
        self.writers: dict[tuple[str, int], SpoolWriter] = {}
        self.network_value, self.host_value = {"nic_errors": 0.0}, {"host_cpu_ratio": 0.5}
        self.looks = 0
        read = None if gpus is None else NvidiaGpus(Nvml(gpus)).read
        seams = Seams(lambda: self.now, lambda: int(self.now * S), at_once)
        self.readers = Readers(read, self._network, self._host, self.machine, seams)
        self.source = self.make(interval_s)

    def make(self, interval_s: float = 10.0) -> CounterSource:
        """Another life of the source."""
        return CounterSource(self.root, interval_s, self.readers, SMALL, self._say)

    def _say(self, name: str, text: str) -> None:
        if text:
            self.said.append((name, text))

    def _network(self) -> dict[str, float]:
        return dict(self.network_value)

    def _host(self) -> dict[str, float]:
        self.looks += 1
        return dict(self.host_value)

    def trainer(self, rank: int, *, job: str = "train", world: int = 2, attempt: int = 0) -> None:
        """A process with a recorder."""
        process(self.machine, 100 + rank, RANK=rank, SMON_JOB_ID=job, SMON_ATTEMPT=attempt)
        made = replace(
            spec(f"{job}/{attempt}/{rank}", source="recorder"),
            job=job,
            attempt=attempt,
            layout=Layout(dp=world, pp=1),
            ranks=(rank,),
        )
        self.writers[job, rank] = SpoolWriter(self.root, made, SMALL)

    def step(self, number: int, length_s: float = 8.0, *, job: str = "train") -> None:
        """A step of every rank: counters are read in the middle, ops written at its end."""
        begin = self.now
        self.now = begin + length_s / 2
        self.source.poll()
        self.now = begin + length_s
        for (of, rank), writer in self.writers.items():
            if of == job:
                op = OpRow(
                    number, rank, 0, rank, "forward-compute", int(begin * S), int(length_s * S), 0
                )
                writer.append(ops_batch([op], steps_done=number))
        self.source.poll()
        self.now += 2.0

    def stop(self, job: str = "train") -> None:
        """All trainers of a job end."""
        for key in [key for key in self.writers if key[0] == job]:
            writer = self.writers.pop(key)
            writer.end("closed")
            writer.close()

    def counters(self) -> list[Path]:
        """Folders of streams of counters in the spool."""
        return [each for each in streams_in(self.root) if read_spec(each).source == "counters"]


@contextmanager
def shipped(site: Site) -> Iterator[Fake]:
    """A server that has got all that is in the spool."""
    fake = Fake()
    hand = Hand(fake, site.root)
    hand.until(lambda: all(not shipper.waiting for shipper in hand.agent.shippers.values()))
    hand.rounds(3)
    yield fake
    hand.kill()


def side(fake: Fake) -> list[Stored]:
    """Batches of the streams of counters."""
    found = [each for each in fake.streams.values() if each.request["source"] == "counters"]
    return [batch for stream in found for _, batch in sorted(stream.stored.items())]


def table(fake: Fake) -> dict[tuple[int, int, str], float]:
    """Values by step, rank and name; each is there once."""
    found: dict[tuple[int, int, str], float] = {}
    for batch in side(fake):
        columns = batch.document.get("counters", {})
        names = ("step", "rank", "name", "value")
        for *row, value in zip(*(columns.get(name, ()) for name in names), strict=True):
            key = row[0], row[1], row[2]
            assert key not in found
            found[key] = value
    return found


def test_counters_are_of_the_step_in_which_they_were_read(tmp_path: Path) -> None:
    """And of the rank whose process is on the GPU; those of the host are of each of its ranks."""
    gpus = [Gpu("GPU-a", processes={101: 1}), Gpu("GPU-b", processes={100: 1})]
    site = Site(tmp_path, gpus)
    site.trainer(0)
    site.trainer(1)
    site.step(0)
    gpus[0].clock = 1410
    site.step(1)
    site.step(2)
    site.stop()
    with shipped(site) as fake:
        values = table(fake)
    assert values[1, 1, "gpu_clock_mhz"] == 1410
    assert values[1, 0, "gpu_clock_mhz"] == 1980
    assert values[2, 0, "host_cpu_ratio"] == values[2, 1, "host_cpu_ratio"] == 0.5
    # The first reading only says from where differences count.
    assert {step for step, _, _ in values} == {1, 2}
    gpus_said = [batch.document["gpus"] for batch in side(fake) if "gpus" in batch.document]
    assert gpus_said == [{"0": "GPU-b", "1": "GPU-a"}]


def test_each_batch_is_of_one_step(tmp_path: Path) -> None:
    """A server files side evidence with the window of its first step."""
    site = Site(tmp_path, interval_s=1.0)
    site.trainer(0)
    for number in range(6):
        site.step(number)
    site.stop()
    with shipped(site) as fake:
        for batch in side(fake):
            assert len(set(batch.document.get("counters", {}).get("step", [0]))) == 1


def test_the_stream_has_the_ops_of_no_rank_and_ends_with_its_job(tmp_path: Path) -> None:
    """So nobody waits for it; and it does not hold up the end of the attempt."""
    site = Site(tmp_path)
    site.trainer(0)
    site.step(0)
    site.step(1)
    (folder,) = site.counters()
    made = read_spec(folder)
    assert (made.job, made.attempt, made.ranks) == ("train", 0, ())
    assert made.layout == Layout(dp=2, pp=1)
    site.stop()
    site.now += 2.0
    site.source.poll()
    with shipped(site) as fake:
        assert side(fake)[-1].kind is BatchKind.END
        assert side(fake)[-1].document == {"reason": "job-ended"}
    looks = site.looks
    for _ in range(30):
        site.now += 10.0
        site.source.poll()
    assert site.looks == looks, "nothing is read while no job runs"


def test_without_a_job_nothing_is_read_or_written(tmp_path: Path) -> None:
    """An agent on an idle host is idle."""
    site = Site(tmp_path, [Gpu("GPU-a")])
    SpoolWriter(site.root, spec(source="recorded"), SMALL).close()
    for _ in range(10):
        site.now += 10.0
        site.source.poll()
    site.source.close()
    assert site.looks == 0
    assert len(streams_in(site.root)) == 1


def test_two_jobs_on_one_host_have_their_own_counters(tmp_path: Path) -> None:
    """Each the GPU of its own process, and both the host."""
    gpus = [Gpu("GPU-a", processes={100: 1}), Gpu("GPU-b", processes={101: 1}, clock=900)]
    site = Site(tmp_path, gpus, interval_s=1.0)
    site.trainer(0, job="one")
    site.trainer(1, job="two")
    for number in range(3):
        site.step(number, job="one")
        site.step(number, job="two")
    with shipped(site) as fake:
        by_job: dict[str, dict[str, Any]] = {}
        for stream in fake.streams.values():
            if stream.request["source"] == "counters":
                for batch in stream.stored.values():
                    by_job.setdefault(stream.request["job"], {}).update(
                        batch.document.get("gpus", {})
                    )
    assert by_job == {"one": {"0": "GPU-a"}, "two": {"1": "GPU-b"}}


def test_a_lost_gpu_is_still_that_of_its_rank(tmp_path: Path) -> None:
    """It has no processes any more; who had it is remembered."""
    gpus = [Gpu("GPU-a", processes={100: 1})]
    site = Site(tmp_path, gpus)
    site.trainer(0)
    site.step(0)
    site.step(1)
    gpus[0].fails = {"all": LOST}
    site.step(2)
    site.stop()
    with shipped(site) as fake:
        assert table(fake)[2, 0, "gpu_lost"] == 1.0
        assert (2, 0, "gpu_clock_mhz") not in table(fake)


def test_an_agent_that_starts_again_ends_the_stream_of_the_one_before(tmp_path: Path) -> None:
    """A new stream goes on; no step waits for either."""
    site = Site(tmp_path)
    site.trainer(0)
    site.step(0)
    site.step(1)
    ((key, job),) = site.source._jobs.items()
    assert job.writer is not None
    job.writer.abandon()
    site.source = site.make()
    site.step(2)
    site.step(3)
    site.stop()
    site.source.close()
    with shipped(site) as fake:
        ends = [batch.document["reason"] for batch in side(fake) if batch.kind is BatchKind.END]
        assert sorted(ends) == ["agent-stopped", "producer-gone"]
        assert {step for step, _, _ in table(fake)} == {1, 3}
    assert key == ("train", 0)


def test_of_a_large_job_each_host_reads_less_often(tmp_path: Path) -> None:
    """So that 16,384 ranks send no more in all than 1,024."""
    site = Site(tmp_path)
    site.trainer(0, world=4096)
    for _ in range(100):
        site.now += 1.0
        site.source.poll()
    assert site.looks == 3


def test_a_step_in_progress_is_not_told_yet(tmp_path: Path) -> None:
    """Its mean is not known before it is over."""
    site = Site(tmp_path, interval_s=1.0)
    site.trainer(0)
    site.step(0)
    before = len(table_of(site))
    for _ in range(5):
        site.now += 1.0
        site.source.poll()
    assert len(table_of(site)) == before


def table_of(site: Site) -> dict[tuple[int, int, str], float]:
    """What would be shipped now."""
    with shipped(site) as fake:
        return table(fake)


# --- trouble --------------------------------------------------------------------------------------


def test_a_driver_that_hangs_stops_neither_the_agent_nor_the_other_counters(tmp_path: Path) -> None:
    """It is said once; when the driver comes back, so do its counters."""
    gpus = [Gpu("GPU-a", processes={100: 1}, hang=threading.Event())]
    gpus[0].hang.set()  # type: ignore[union-attr]  # it has one
    site = Site(tmp_path, gpus)
    running: list[threading.Thread] = []

    def start(run: Callable[[], None]) -> None:
        running.append(threading.Thread(target=run, daemon=True))
        running[-1].start()
        if gpus[0].hang is None or gpus[0].hang.is_set() or len(running) % 3:
            running[-1].join(5.0)

    site.readers = replace(site.readers, seams=replace(site.readers.seams, start=start))
    site.source = site.make()
    site.trainer(0)
    site.step(0)
    gpus[0].hang.clear()  # type: ignore[union-attr]  # it has one
    for number in range(1, 5):
        site.step(number)
    said = {text for name, text in site.said if name == "counters GPUs"}
    assert said == {"counters of the GPUs: the driver does not answer; going on without them"}
    gpus[0].hang.set()  # type: ignore[union-attr]  # it has one
    for thread in running:
        thread.join(5.0)
    for number in range(5, 8):
        site.step(number)
    site.stop()
    with shipped(site) as fake:
        values = table(fake)
    assert {(number, 0, "host_cpu_ratio") for number in range(1, 8)} <= set(values)
    assert (3, 0, "gpu_clock_mhz") not in values
    assert (7, 0, "gpu_clock_mhz") in values


def test_what_cannot_be_read_is_said_and_tried_again(tmp_path: Path) -> None:
    """One reader that fails leaves the others alone."""
    site = Site(tmp_path)
    fails = [True]

    def gpus() -> list[GpuReading]:
        if fails[0]:
            raise GpusUnavailableError("NVML cannot be started: driver not loaded")
        return [GpuReading("GPU-a", {"gpu_power_w": 1.0})]

    site.readers = replace(site.readers, gpus=gpus)
    site.source = site.make()
    site.trainer(0)
    site.step(0)
    site.step(1)
    assert any("driver not loaded" in text for _, text in site.said)
    assert len(table_of(site)) > 0
    fails[0] = False
    site.step(2)
    said = len(site.said)
    site.step(3)
    assert len(site.said) == said


def test_gpus_of_processes_that_cannot_be_looked_at_are_nobodys(tmp_path: Path) -> None:
    """The agent of another user says what it needs, and ships what is of the host."""
    site = Site(tmp_path, [Gpu("GPU-a", processes={999: 1})])
    site.trainer(0)
    for number in range(3):
        site.step(number)
    assert {text for name, text in site.said if name == "counters owners"}
    with shipped(site) as fake:
        assert {name for _, _, name in table(fake)} == {"host_cpu_ratio", "nic_errors"}


def test_a_job_whose_steps_are_never_known_is_said(tmp_path: Path) -> None:
    """Its counters are of no use; no empty stream is made for them."""
    site = Site(tmp_path)
    site.trainer(0)
    for _ in range(5):
        site.now += 10.0
        site.source.poll()
    site.stop()
    site.source.close()
    assert ("counters steps", "job train: 10 readings of counters were of no step") in site.said
    assert not site.counters()


def test_a_spool_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """Counters are lost then; the agent goes on."""
    site = Site(tmp_path)
    site.trainer(0)
    site.step(0)
    (site.root / "blocked").write_text("")
    site.source._root = site.root / "blocked"
    site.source._look_due = 1e9
    site.step(1)
    assert any("cannot be written" in text for _, text in site.said)


def test_a_reading_that_raises_is_counted() -> None:
    """Whatever a library of a driver raises stays in its thread."""

    def read() -> int:
        raise MemoryError("no")

    patient = Patient(read, Seams(start=at_once))
    assert patient.begin()
    assert patient.take() is None
    assert (patient.failures, patient.failure) == (1, "MemoryError: no")


def test_without_room_for_a_thread_the_next_reading_is_tried() -> None:
    """A host at its limit of processes."""

    def refuse(_run: object) -> None:
        raise RuntimeError("can't start new thread")

    patient = Patient(lambda: 1, Seams(start=refuse))
    assert patient.begin()
    assert patient.begin()
    assert patient.failures == 2


def test_a_thread_reads_behind_the_callers_back() -> None:
    """The caller asks again until there is something."""
    patient = Patient(lambda: 7, Seams(start=in_thread))
    patient.begin()
    found: list[int] = []

    def there() -> bool:
        taken = patient.take()
        found.extend([] if taken is None else [taken.value])
        return bool(found)

    wait_until(there, "counters")
    assert found == [7]


# --- real processes -------------------------------------------------------------------------------


UNTIL_STOPPED = """
import itertools, os, time
from ingest_agents.recorder import Recorder
from smon.ops import OpType

recorder = Recorder.from_env()
for step in itertools.count():
    with recorder.step(step), recorder.op(OpType.FORWARD_COMPUTE):
        time.sleep(0.05)
    if os.path.exists(os.environ["STOP"]):
        break
"""


def test_a_real_agent_ships_counters_of_this_host(tmp_path: Path) -> None:
    """A recorder, an agent, the kernel's own files: side evidence of the steps, and the END."""
    fake, stop = Fake(), tmp_path / "stop"
    more = {"SMON_COUNTERS_S": "0.1", "SMON_FLUSH_S": "0.1", "SMON_JOB_ID": "job"}
    root = tmp_path / "spool"
    with serve(fake) as url, agent(root, url, **more):
        environ = environment(root, url, STOP=str(stop), **more)
        with subprocess.Popen([sys.executable, "-c", UNTIL_STOPPED], env=environ) as trainer:
            try:
                wait_until(
                    lambda: any(name == "host_cpu_ratio" for _, _, name in table(fake)),
                    "a counter of the host",
                )
            finally:
                stop.touch()
            assert trainer.wait() == 0
        wait_until(lambda: side(fake)[-1].kind is BatchKind.END, "the end")
    values = table(fake)
    names = {name for _, _, name in values}
    assert {"host_cpu_ratio", "host_memory_ratio"} <= names <= set(ALL)
    assert {rank for _, rank, _ in values} == {0}
    assert {step for step, _, _ in values} <= set(range(steps_of(fake)))


def steps_of(fake: Fake) -> int:
    """Steps that the recorder has done."""
    return 1 + max(each.steps_done or 0 for each in fake.batches())


def test_without_an_interval_there_are_no_counters(tmp_path: Path) -> None:
    """``SMON_COUNTERS_S=0`` switches them off."""
    fake = Fake()
    with serve(fake) as url, agent(tmp_path, url, SMON_COUNTERS_S="0"):
        environ = environment(tmp_path, url, SMON_JOB_ID="job", STEPS="30")
        subprocess.run([sys.executable, "-c", TRAINER], env=environ, check=True)
        wait_until(fake.ended, "the end")
    assert not side(fake)


def test_what_there_is_to_read_is_found_without_nvml(tmp_path: Path) -> None:
    """On a host without ``nvidia-ml-py`` GPUs are simply not read."""
    readers = readers_of(tmp_path, find=lambda: None)
    assert readers.gpus is None
    assert readers.network() == {}
    assert set(readers.host()) <= set(ALL)


@pytest.mark.parametrize("source", ["recorded", "kineto", "counters"])
def test_streams_without_steps_of_now_are_no_job(tmp_path: Path, source: str) -> None:
    """Whatever else writes to the spool."""
    site = Site(tmp_path)
    writer = SpoolWriter(site.root, spec(source=source), SpoolLimits())
    site.source.poll()
    assert site.looks == 0
    writer.close()
