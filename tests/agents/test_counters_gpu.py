"""GPUs through NVML: what is read, what is not, whose they are, and every way to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingest_agents.sources.counters.catalogue import ALL, GPU
from ingest_agents.sources.counters.gpu import (
    REASONS,
    GpusUnavailableError,
    NvidiaGpus,
    throttle_words,
)
from ingest_agents.sources.counters.owners import JobHere, owned_by
from ingest_agents.sources.counters.preview import preview
from ingest_agents.sources.counters.trainers import trainer_of
from ingest_agents.spool.folder import StreamSpec
from smon.topology import Layout
from tests.agents.counting import (
    LOST,
    NO_PERMISSION,
    NOT_LOADED,
    NOT_SUPPORTED,
    UNINITIALIZED,
    VERSION,
    Gpu,
    Nvml,
    port,
    process,
    put,
)

GIB = 1 << 30

CALLS = {
    "clock": "gpu_clock_mhz",
    "max_clock": "gpu_clock_max_mhz",
    "temperature": "gpu_temperature_c",
    "power": "gpu_power_w",
    "limit": "gpu_power_limit_w",
    "busy": "gpu_busy_ratio",
    "reasons": "gpu_throttle_thermal",
    "generation": "pcie_gen",
    "width": "pcie_width",
    "replays": "pcie_replays",
    "ecc": "gpu_ecc_corrected",
    "fields": "nvlink_crc",
    "link": "nvlink_down",
}


def host(count: int = 8) -> list[Gpu]:
    """GPUs, each with a process that has most memory there."""
    return [Gpu(f"GPU-{number}", processes={100 + number: 40 * GIB}) for number in range(count)]


def job(ranks: tuple[int, ...], world: int = 16, source: str = "recorder") -> JobHere:
    """The part of a job that is here."""
    spec = StreamSpec("key", "train", 2, Layout(dp=world, pp=1), "live", "unix", "h", source, ranks)
    return JobHere(spec, ranks)


def test_every_counter_of_a_gpu_is_read() -> None:
    """All names of the catalogue but those of what a healthy GPU of one kind cannot have."""
    gpus = NvidiaGpus(Nvml(host(1)))
    gpus.read()
    (reading,) = gpus.read()
    missing = {counter.name for counter in GPU} - set(reading.values)
    assert missing == {"gpu_lost", "nvlink_replays"}
    assert set(reading.values) <= set(ALL)
    assert reading.values["gpu_power_w"] == 500.0
    assert reading.values["gpu_busy_ratio"] == pytest.approx(0.97)


def test_counts_are_differences() -> None:
    """What a GPU has counted since it was made is nobody's fault today."""
    (gpu,) = machine = host(1)
    gpu.ecc, gpu.replays, gpu.crc = [7, 1], 1000, 50
    gpus = NvidiaGpus(Nvml(machine))
    first = gpus.read()[0].values
    assert not {"gpu_ecc_corrected", "pcie_replays", "nvlink_crc"} & set(first)
    gpu.ecc, gpu.replays, gpu.crc = [9, 1], 1000, 53
    second = gpus.read()[0].values
    assert second["gpu_ecc_corrected"] == 2
    assert second["gpu_ecc_uncorrected"] == 0
    assert second["pcie_replays"] == 0
    assert second["nvlink_crc"] == 3


@pytest.mark.parametrize("bit", REASONS)
def test_each_reason_for_low_clocks_is_a_flag(bit: int) -> None:
    """Heat, power, hardware and settings are told from each other."""
    flags = NvidiaGpus(Nvml([Gpu("GPU-0", reasons=bit)])).read()[0].values
    name, words = REASONS[bit]
    raised = {key for key, value in flags.items() if key.startswith("gpu_throttle") and value}
    assert raised == {name}
    assert throttle_words(bit | 1) == (words,)


def test_an_idle_gpu_is_not_throttled() -> None:
    """Idle, sync boost and display clocks are no reason to worry."""
    values = NvidiaGpus(Nvml([Gpu("GPU-0", reasons=0x1 | 0x10 | 0x100)])).read()[0].values
    assert not any(value for name, value in values.items() if name.startswith("gpu_throttle"))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION, 999])
def test_a_call_that_fails_costs_its_counter_only(call: str, code: int) -> None:
    """The others are there; what is simply not supported is no error."""
    (gpu,) = machine = host(1)
    nvml = Nvml(machine)
    gpus = NvidiaGpus(nvml)
    gpus.read()
    gpu.fails = {call: code}
    (reading,) = gpus.read()
    assert CALLS[call] not in reading.values
    others = [name for other, name in CALLS.items() if other != call]
    assert set(others) <= set(reading.values)
    assert bool(gpus.errors) == (code != NOT_SUPPORTED)


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION])
def test_what_is_not_supported_is_not_asked_again(code: int) -> None:
    """A call into a driver for nothing, every few seconds for weeks."""
    (gpu,) = machine = host(1)
    gpu.fails = {"power": code}
    nvml = Nvml(machine)
    gpus = NvidiaGpus(nvml)
    for _ in range(5):
        gpus.read()
    assert nvml.calls["power"] == 1
    assert nvml.calls["clock"] == 5


def test_a_call_that_fails_now_and_then_comes_back() -> None:
    """An unknown error is not for ever."""
    (gpu,) = machine = host(1)
    gpus = NvidiaGpus(Nvml(machine))
    gpu.fails = {"power": 999}
    gpus.read()
    gpu.fails = {}
    assert gpus.read()[0].values["gpu_power_w"] == 500.0


@pytest.mark.parametrize("call", ["handle", "uuid", "clock", "link"])
def test_a_lost_gpu_is_said_to_be_lost(call: str) -> None:
    """Wherever it shows; the other seven are read as ever."""
    machine = host()
    gpus = NvidiaGpus(Nvml(machine))
    gpus.read()
    machine[3].fails = {call: LOST}
    found = {reading.uuid: reading.values for reading in gpus.read()}
    assert found["GPU-3"] == {"gpu_lost": 1.0}
    assert len(found) == 8
    assert all(found[f"GPU-{number}"]["gpu_clock_mhz"] for number in (0, 1, 2, 4, 5, 6, 7))


def test_a_gpu_that_was_lost_before_it_was_known_has_no_name() -> None:
    """It is counted, and nothing is said of it."""
    machine = host(2)
    machine[0].fails = {"handle": LOST}
    gpus = NvidiaGpus(Nvml(machine))
    assert [reading.uuid for reading in gpus.read()] == ["GPU-1"]
    assert gpus.errors["handle"] == 1


def test_a_driver_that_comes_later_is_found() -> None:
    """The agent starts with the host, the driver when it likes."""
    nvml = Nvml(host(1))
    nvml.fails = {"init": NOT_LOADED}
    gpus = NvidiaGpus(nvml)
    with pytest.raises(GpusUnavailableError, match="cannot be started"):
        gpus.read()
    nvml.fails = {}
    assert len(gpus.read()) == 1


@pytest.mark.parametrize("code", [UNINITIALIZED, VERSION, NOT_LOADED])
def test_nvml_is_started_anew_after_the_driver_was_replaced(code: int) -> None:
    """A driver that is upgraded under the agent makes all handles useless."""
    machine = host(1)
    nvml = Nvml(machine)
    gpus = NvidiaGpus(nvml)
    gpus.read()
    machine[0].fails = {"all": code}
    gpus.read()
    machine[0].fails = {}
    assert gpus.read()[0].values["gpu_clock_mhz"] == 1980
    assert nvml.calls["init"] == 2


def test_the_version_of_the_driver_is_none_where_it_does_not_answer() -> None:
    """Facts are nice to have."""
    nvml = Nvml([])
    assert NvidiaGpus(nvml).driver() == "595.58.03"
    nvml.fails = {"driver": 999}
    assert NvidiaGpus(nvml).driver() is None


def test_an_older_module_lacks_calls() -> None:
    """Calls are known by the name that they had before; what it lacks is left out."""
    gpus = NvidiaGpus(Nvml([Gpu("GPU-0", reasons=0x40)], old=True))
    gpus.read()
    values = gpus.read()[0].values
    assert values["gpu_throttle_thermal"] == 1.0
    assert "pcie_replays" not in values


# --- whose it is ----------------------------------------------------------------------------------


def test_a_rank_is_found_by_its_process_whatever_its_local_rank_says(tmp_path: Path) -> None:
    """Every process thinks that it has GPU 0, and processes are numbered the other way round."""
    machine = host()
    for number in range(8):
        env = {"TORCHELASTIC_RUN_ID": "train", "TORCHELASTIC_RESTART_COUNT": 2, "LOCAL_RANK": 0}
        process(tmp_path, 100 + number, RANK=15 - number, WORLD_SIZE=16, **env)
    here = job(tuple(range(8, 16)))
    owned = owned_by(here, NvidiaGpus(Nvml(machine)).read(), lambda pid: trainer_of(tmp_path, pid))
    assert {rank: each.uuid for rank, each in owned.items()} == {
        15 - number: f"GPU-{number}" for number in range(8)
    }


def test_a_little_memory_on_gpu_0_does_not_make_it_everybodys(tmp_path: Path) -> None:
    """Every rank may have opened it; its own is where most of its memory is."""
    machine = host(4)
    machine[0].processes |= dict.fromkeys((101, 102, 103), GIB // 2)
    for number in range(4):
        env = {"SMON_JOB_ID": "train", "SMON_ATTEMPT": 2}
        process(tmp_path, 100 + number, RANK=number, **env)
    readings = NvidiaGpus(Nvml(machine)).read()
    owned = owned_by(job((0, 1, 2, 3)), readings, lambda pid: trainer_of(tmp_path, pid))
    assert [owned[rank].uuid for rank in range(4)] == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]


def test_where_memory_is_not_told_the_gpu_with_fewer_ranks_counts(tmp_path: Path) -> None:
    """Some drivers do not say how much memory a process has."""
    machine = [Gpu("GPU-0", processes={100: 0, 101: 0}), Gpu("GPU-1", processes={101: 0})]
    for number in range(2):
        env = {"SMON_JOB_ID": "train", "SMON_ATTEMPT": 2}
        process(tmp_path, 100 + number, RANK=number, **env)
    readings = NvidiaGpus(Nvml(machine)).read()
    owned = owned_by(job((0, 1)), readings, lambda pid: trainer_of(tmp_path, pid))
    assert {rank: each.uuid for rank, each in owned.items()} == {0: "GPU-0", 1: "GPU-1"}


def test_processes_of_other_jobs_and_attempts_are_not_ours(tmp_path: Path) -> None:
    """Nor those that cannot be looked at, are gone, or say nonsense."""
    machine = [Gpu("GPU-0", processes={1: 1, 2: 1, 3: 1, 4: 1, 5: 1})]
    process(tmp_path, 1, RANK=0, SMON_JOB_ID="other", SMON_ATTEMPT=2)
    process(tmp_path, 2, RANK=0, SMON_JOB_ID="train", SMON_ATTEMPT=1)
    process(tmp_path, 3, RANK="zero", SMON_JOB_ID="train", SMON_ATTEMPT=2)
    process(tmp_path, 4, RANK=9, SMON_JOB_ID="train", SMON_ATTEMPT=2)
    readings = NvidiaGpus(Nvml(machine)).read()
    assert not owned_by(job((0, 1)), readings, lambda pid: trainer_of(tmp_path, pid))


def test_a_process_that_is_alone_is_rank_0(tmp_path: Path) -> None:
    """It was started without a launcher, and its recorder knows as much."""
    process(tmp_path, 100)
    readings = NvidiaGpus(Nvml(host(1))).read()
    here = job((0,), world=1)
    owned = owned_by(here, readings, lambda pid: trainer_of(tmp_path, pid))
    assert owned[0].uuid == "GPU-0"


def test_parts_of_a_gpu_have_their_own_names(tmp_path: Path) -> None:
    """MIG: two ranks on one GPU, told apart by the part; clocks are those of the GPU."""
    parts = {"MIG-a": {100: GIB}, "MIG-b": {101: GIB}}
    machine = [Gpu("GPU-0", parts=parts, fails={"busy": NOT_SUPPORTED})]
    for number in range(2):
        process(tmp_path, 100 + number, RANK=number, SMON_JOB_ID="train", SMON_ATTEMPT=2)
    readings = NvidiaGpus(Nvml(machine)).read()
    owned = owned_by(job((0, 1)), readings, lambda pid: trainer_of(tmp_path, pid))
    assert {rank: each.uuid for rank, each in owned.items()} == {0: "MIG-a", 1: "MIG-b"}
    assert {each.reading.uuid for each in owned.values()} == {"GPU-0"}


def test_in_a_growing_folder_the_job_may_have_another_name(tmp_path: Path) -> None:
    """Whoever starts the agent names the job; ranks are ranks."""
    process(tmp_path, 100, RANK=0, SLURM_JOB_ID=4711)
    readings = NvidiaGpus(Nvml(host(1))).read()
    named = job((0,), source="directory")
    assert owned_by(named, readings, lambda pid: trainer_of(tmp_path, pid))
    assert not owned_by(job((0,)), readings, lambda pid: trainer_of(tmp_path, pid))


# --- for people -----------------------------------------------------------------------------------


def test_check_says_what_there_is_to_read(tmp_path: Path) -> None:
    """The host, its cards, and each GPU with its rank."""
    machine = [
        Gpu("GPU-a", clock=1410, reasons=0x44, processes={100: GIB}),
        Gpu("GPU-b", processes={101: GIB, 102: 1}),
        Gpu("GPU-c"),
    ]
    process(tmp_path, 100, RANK=5, SMON_JOB_ID="train")
    process(tmp_path, 101)
    port(tmp_path)
    put(tmp_path, {"proc/sys/kernel/osrelease": "6.8.0"})
    nvml = Nvml(machine)
    NvidiaGpus(nvml).read()
    machine[2].fails = {"clock": LOST}
    lines = list(preview(tmp_path, find=lambda: nvml))
    assert lines[0] == "counters"
    assert lines[1].startswith("  host: kernel 6.8.0, CPUs ")
    assert lines[2:] == [
        "  network: from 400 Gbit/s on",
        "  GPUs: 3, driver 595.58.03",
        "    GPU-a: 1410 MHz, software power cap, hardware thermal slowdown, rank 5 of train",
        "    GPU-b: 1980 MHz, process 101 of no rank, process 102, which may not be looked at",
        "    GPU-c: lost",
    ]


def test_check_says_why_gpus_are_not_read(tmp_path: Path) -> None:
    """A driver that is not loaded."""
    nvml = Nvml([])
    nvml.fails = {"init": NOT_LOADED}
    assert "NVML cannot be started" in list(preview(tmp_path, find=lambda: nvml))[-1]
