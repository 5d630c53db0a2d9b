"""Network cards and the host: trees of ``/sys`` and ``/proc`` as kernels write them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ingest_agents.sources.counters.catalogue import ALL, HOST, NETWORK, Kind
from ingest_agents.sources.counters.host import Host
from ingest_agents.sources.counters.network import Network
from ingest_agents.sources.counters.reading import Growth, gained, number_of, text_of
from ingest_agents.sources.counters.trainers import throttled_s, trainer_of
from tests.agents.counting import interface, port, process, put

MEMORY = (
    "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB\nSwapTotal: 100 kB\nSwapFree: 40 kB"
)


class Clock:
    """Seconds that pass when a test says so."""

    now = 100.0

    def __call__(self) -> float:
        """The present second."""
        return self.now


def machine(root: Path, busy: int = 0, idle: int = 0, stalled_us: int = 0, faults: int = 0) -> None:
    """Files of ``/proc`` after so many ticks of work and rest."""
    stall = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={stalled_us}\nfull avg10=0.00 total=0"
    put(
        root / "proc",
        {
            "stat": f"cpu  {busy} 0 0 {idle} 0 0 0 {busy // 10} 0 0\ncpu0 1 2 3",
            "pressure/cpu": stall,
            "pressure/memory": stall,
            "pressure/io": stall,
            "meminfo": MEMORY,
            "vmstat": f"nr_free_pages 1\npgmajfault {faults}\npgfault 9",
            "loadavg": "8.00 4.0 2.0 3/1000 4711",
            "sys/kernel/numa_balancing": 1,
            "sys/kernel/osrelease": "6.8.0-1014-oracle",
        },
    )


# --- growth ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "before, now, grown",
    [
        (5, 9, 4),
        (5, 5, 0),
        (2**32 - 10, 6, 16),
        (2**64 - 1, 0, 1),
        (1000, 3, 3),
        (2**40, 7, 7),
    ],
)
def test_a_counter_that_shrinks_has_wrapped_or_begun_anew(
    before: int, now: int, grown: int
) -> None:
    """Near the end of 32 or 64 bits it wrapped; elsewhere its driver was loaded again."""
    assert gained(before, now) == grown


def test_what_was_away_begins_anew() -> None:
    """An interface that is unplugged and put back has not sent all that in between."""
    growth = Growth()
    growth.of("eth0", 100)
    growth.turn()
    growth.turn()
    assert growth.of("eth0", 500) is None


def test_a_file_without_a_number_has_none(tmp_path: Path) -> None:
    """Missing, empty, words, bytes that are no text, a folder."""
    put(tmp_path, {"words": "N/A", "empty": "", "number": "12 packets"})
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "folder").mkdir()
    assert number_of(tmp_path / "number") == 12
    for name in ("missing", "words", "empty", "bytes", "folder"):
        assert number_of(tmp_path / name) is None
    assert text_of(tmp_path / "folder") is None


# --- network --------------------------------------------------------------------------------------


def test_all_ports_count_together(tmp_path: Path) -> None:
    """Data of InfiniBand is in words of four bytes; errors of all kinds add up."""
    known = {"port_xmit_data": 100, "port_rcv_data": 10, "symbol_error": 5, "port_xmit_wait": 0}
    port(tmp_path, "mlx5_0", **known, hw_out_of_sequence=1, hw_np_cnp_sent=0, link_downed=2)
    port(tmp_path, "mlx5_1", **known, hw_out_of_sequence=1)
    network = Network(tmp_path)
    assert network.read() == {"nic_down": 0.0, "nic_rate_gbps": 400.0}
    port(tmp_path, "mlx5_0", port_xmit_data=350, port_rcv_data=12, symbol_error=6, link_downed=3)
    port(tmp_path, "mlx5_1", port_xmit_data=150, hw_out_of_sequence=4, port_rcv_errors=9)
    assert network.read() == {
        "nic_sent_bytes": 300.0 * 4,
        "nic_received_bytes": 2.0 * 4,
        "nic_errors": 1.0,
        "nic_retransmits": 3.0,
        "nic_congestion": 0.0,
        "nic_wait_ticks": 0.0,
        "nic_link_downs": 1.0,
        "nic_down": 0.0,
        "nic_rate_gbps": 400.0,
    }


def test_interfaces_that_are_no_hardware_do_not_count(tmp_path: Path) -> None:
    """Loopback, bridges and pairs of containers carry each byte once more."""
    interface(tmp_path, "eth0", tx_bytes=0)
    interface(tmp_path, "lo", hardware=False)
    interface(tmp_path, "ib0", type=32)
    network = Network(tmp_path)
    network.read()
    interface(tmp_path, "eth0", tx_bytes=1000, rx_errors=2, carrier_down_count=1)
    interface(tmp_path, "lo", hardware=False, tx_bytes=5000)
    interface(tmp_path, "ib0", type=32, tx_bytes=5000)
    values = network.read()
    assert values["nic_sent_bytes"] == 1000
    assert values["nic_errors"] == 2
    assert values["nic_link_downs"] == 1
    assert values["nic_rate_gbps"] == 100


def test_ports_of_a_fabric_have_the_rate_that_counts(tmp_path: Path) -> None:
    """An interface for administration is slow on every host."""
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1")
    interface(tmp_path, "eth0", speed=1000)
    assert Network(tmp_path).read()["nic_rate_gbps"] == 400
    put(tmp_path / "sys/class/infiniband/mlx5_1/ports/1", {"rate": "100 Gb/sec (1X HDR)"})
    assert Network(tmp_path).read()["nic_rate_gbps"] == 100


@pytest.mark.parametrize("how", ["down", "gone"])
def test_a_port_that_was_up_and_is_not_is_down(tmp_path: Path, how: str) -> None:
    """Its link, or the whole card; one that never was up is simply not cabled."""
    port(tmp_path, "mlx5_0")
    port(tmp_path, "mlx5_1")
    port(tmp_path, "mlx5_2")
    put(tmp_path / "sys/class/infiniband/mlx5_2/ports/1", {"state": "1: DOWN"})
    network = Network(tmp_path)
    assert network.read()["nic_down"] == 0
    if how == "down":
        put(tmp_path / "sys/class/infiniband/mlx5_1/ports/1", {"state": "1: DOWN"})
    else:
        shutil.rmtree(tmp_path / "sys/class/infiniband/mlx5_1")
    assert network.read()["nic_down"] == 1
    port(tmp_path, "mlx5_1")
    assert network.read()["nic_down"] == 0


def test_a_host_without_cards_has_nothing_to_say(tmp_path: Path) -> None:
    """No folder, or an empty one."""
    network = Network(tmp_path)
    assert network.read() == {}
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    assert network.read() == {}


def test_a_link_that_is_down_has_no_speed(tmp_path: Path) -> None:
    """The kernel says −1, or refuses to say."""
    interface(tmp_path, "eth0", speed=-1)
    assert "nic_rate_gbps" not in Network(tmp_path).read()
    interface(tmp_path, "eth0", operstate="down")
    assert "nic_rate_gbps" not in Network(tmp_path).read()


# --- host -----------------------------------------------------------------------------------------


def test_every_counter_of_a_host_is_read(tmp_path: Path) -> None:
    """All names of the catalogue but that of the limit, which is of processes."""
    clock = Clock()
    host = Host(tmp_path, clock=clock, cpus=16)
    cpu = "sys/devices/system"
    put(
        tmp_path,
        {
            f"{cpu}/cpu/cpu0/cpufreq/scaling_governor": "powersave",
            f"{cpu}/clocksource/clocksource0/current_clocksource": "tsc",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        },
    )
    machine(tmp_path, busy=1000, idle=1000)
    host.read()
    machine(tmp_path, busy=1300, idle=1670, stalled_us=2_500_000, faults=12)
    clock.now += 10.0
    values = host.read()
    assert set(values) == {counter.name for counter in HOST} - {"host_throttled_ratio"}
    assert values["host_cpu_ratio"] == pytest.approx(0.33)
    assert values["host_steal_ratio"] == pytest.approx(0.03)
    assert values["host_load_ratio"] == 0.5
    assert values["host_pressure_cpu_ratio"] == pytest.approx(0.25)
    assert values["host_memory_ratio"] == 0.75
    assert values["host_swap_bytes"] == 60 * 1024
    assert values["host_major_faults"] == 12
    assert values["host_governor_performance"] == 0
    assert values["host_clocksource_tsc"] == 1
    assert values["host_numa_balancing"] == 1
    assert values["host_hugepages_always"] == 0


def test_the_first_look_has_no_differences(tmp_path: Path) -> None:
    """Since the host was booted is not since the job began."""
    machine(tmp_path, busy=10**9, idle=1, stalled_us=10**9, faults=10**9)
    values = Host(tmp_path, clock=Clock(), cpus=1).read()
    assert set(values) == {
        "host_memory_ratio",
        "host_swap_bytes",
        "host_load_ratio",
        "host_numa_balancing",
    }


@pytest.mark.parametrize(
    "file", ["stat", "meminfo", "vmstat", "loadavg", "pressure/cpu", "sys/kernel/numa_balancing"]
)
@pytest.mark.parametrize("text", [None, "", "nonsense", "cpu  one two", "some total=many"])
def test_a_file_that_is_missing_or_odd_costs_its_counters_only(
    tmp_path: Path, file: str, text: str | None
) -> None:
    """Kernels without pressure, containers with half a ``/proc``."""
    clock = Clock()
    host = Host(tmp_path, clock=clock, cpus=4)
    for busy in (100, 200):
        machine(tmp_path, busy=busy, idle=busy, stalled_us=busy, faults=busy)
        path = tmp_path / "proc" / file
        path.unlink()
        if text is not None:
            path.write_text(text)
        clock.now += 10.0
        values = host.read()
    assert set(values) <= set(ALL)
    assert len(values) >= 6


def test_facts_are_said_in_words(tmp_path: Path) -> None:
    """For ``smon-agent check``; what is not there is left out."""
    machine(tmp_path)
    facts = Host(tmp_path, cpus=8).facts()
    assert facts == {"kernel": "6.8.0-1014-oracle", "CPUs": "8", "NUMA balancing": "on"}


# --- limits of processes --------------------------------------------------------------------------


def test_the_limit_of_a_pod_holds_its_containers_back(tmp_path: Path) -> None:
    """Of a cgroup and those above it, the one that was held back longest counts."""
    process(tmp_path, 7)
    group = "kubepods.slice/pod1/container1"
    put(tmp_path, {"proc/7/cgroup": f"0::/{group}"})
    assert throttled_s(tmp_path, 7) is None
    put(tmp_path / "sys/fs/cgroup", {f"{group}/cpu.stat": "usage_usec 5\nthrottled_usec 0"})
    put(tmp_path / "sys/fs/cgroup", {"kubepods.slice/pod1/cpu.stat": "throttled_usec 2500000"})
    assert throttled_s(tmp_path, 7) == 2.5


def test_older_cgroups_count_in_nanoseconds(tmp_path: Path) -> None:
    """Version 1 has a folder for each controller."""
    process(tmp_path, 7)
    put(tmp_path, {"proc/7/cgroup": "9:memory:/m\n4:cpu,cpuacct:/slurm/job_1"})
    put(
        tmp_path / "sys/fs/cgroup/cpu,cpuacct",
        {"slurm/job_1/cpu.stat": "nr_throttled 3\nthrottled_time 1500000000"},
    )
    assert throttled_s(tmp_path, 7) == 1.5


@pytest.mark.parametrize("text", ["", "0::/../../outside", "nonsense", "1:name=systemd:/x"])
def test_a_cgroup_that_cannot_be_seen_is_no_limit(tmp_path: Path, text: str) -> None:
    """From inside of a container, paths may lead out of what it sees."""
    process(tmp_path, 7)
    put(tmp_path, {"proc/7/cgroup": text})
    assert throttled_s(tmp_path, 7) is None
    assert throttled_s(tmp_path, 8) is None


def test_the_environment_of_another_user_is_not_read(tmp_path: Path) -> None:
    """An agent that may not look does not know whose GPU it is, and goes on."""
    assert trainer_of(tmp_path, 1) is None
    (tmp_path / "proc/2/environ").mkdir(parents=True)
    assert trainer_of(tmp_path, 2) is None


def test_the_catalogue_has_each_name_once() -> None:
    """And units for what is no number of things."""
    assert len(ALL) == len({*ALL})
    assert {counter.kind for counter in ALL.values()} == set(Kind)
    assert len(NETWORK) + len(HOST) < len(ALL)
