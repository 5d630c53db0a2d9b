"""GPUs of AMD: files as the kernel's driver writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingest_agents.sources.counters.amd import AmdGpus
from ingest_agents.sources.counters.catalogue import ALL
from ingest_agents.sources.counters.gpu import Holder
from ingest_agents.sources.counters.preview import preview
from ingest_agents.sources.counters.source import readers_of
from tests.agents.counting import put

UUID = "GPU-00000000deadbeef"


def machine(root: Path, **changed: object) -> Path:
    """A CPU and one GPU, with a process that uses it, and one that does not."""
    put(
        root / "sys/class/kfd/kfd",
        {
            "topology/nodes/0/gpu_id": 0,
            "topology/nodes/0/properties": "cpu_cores_count 96\nunique_id 0",
            "topology/nodes/1/gpu_id": 51110,
            "topology/nodes/1/properties": f"drm_render_minor 128\nunique_id {0xDEADBEEF}",
            "proc/4711/vram_51110": 40 << 30,
            "proc/4712/vram_51110": 0,
        },
    )
    files = {
        "hwmon/hwmon3/freq1_input": 2_100_000_000,
        "hwmon/hwmon3/temp1_input": 51_000,
        "hwmon/hwmon3/temp2_input": 64_000,
        "hwmon/hwmon3/power1_average": 550_000_000,
        "hwmon/hwmon3/power1_cap": 750_000_000,
        "gpu_busy_percent": 98,
        "current_link_width": 16,
        "current_link_speed": "32.0 GT/s PCIe",
        "ras/umc_err_count": "ue: 0\nce: 5",
    }
    return put(root / "sys/class/drm/renderD128/device", {**files, **changed})


def test_what_the_driver_says_is_read(tmp_path: Path) -> None:
    """In the units of the catalogue; whose it is, by memory."""
    machine(tmp_path)
    gpus = AmdGpus(tmp_path)
    gpus.read()
    machine(tmp_path, **{"ras/umc_err_count": "ue: 0\nce: 8"})
    (reading,) = gpus.read()
    assert reading.uuid == UUID
    assert reading.holders == (Holder(4711, UUID, 40 << 30),)
    assert reading.values == pytest.approx(
        {
            "gpu_clock_mhz": 2100,
            "gpu_temperature_c": 64,
            "gpu_power_w": 550,
            "gpu_power_limit_w": 750,
            "gpu_busy_ratio": 0.98,
            "pcie_width": 16,
            "pcie_gen": 5,
            "gpu_ecc_corrected": 3,
            "gpu_ecc_uncorrected": 0,
        }
    )
    assert set(reading.values) <= set(ALL)


@pytest.mark.parametrize(
    "file",
    ["hwmon/hwmon3/freq1_input", "gpu_busy_percent", "current_link_speed", "ras/umc_err_count"],
)
def test_a_file_that_is_missing_or_odd_costs_its_counter_only(tmp_path: Path, file: str) -> None:
    """Drivers and cards differ in what they have."""
    folder = machine(tmp_path)
    whole = len(AmdGpus(tmp_path).read()[0].values)
    (folder / file).write_text("N/A\n")
    odd = AmdGpus(tmp_path).read()[0].values
    (folder / file).unlink()
    assert AmdGpus(tmp_path).read()[0].values == odd
    assert len(odd) >= whole - 1


def test_a_host_without_them_has_none(tmp_path: Path) -> None:
    """Neither is anything read of them there."""
    assert AmdGpus(tmp_path).read() == []
    assert readers_of(tmp_path, find=lambda: None).gpus is None


def test_a_host_with_them_needs_no_library(tmp_path: Path) -> None:
    """Files are enough."""
    machine(tmp_path)
    gpus = readers_of(tmp_path, find=lambda: None).gpus
    assert gpus is not None
    assert [reading.uuid for reading in gpus()] == [UUID]


def test_check_shows_them(tmp_path: Path) -> None:
    """A process of another user is all that can be said of whose it is."""
    machine(tmp_path)
    shown = [*preview(tmp_path, find=lambda: None)][-2:]
    assert shown == [
        "  GPUs: 1, driver amdgpu",
        f"    {UUID}: 2100 MHz, process 4711, which may not be looked at",
    ]
