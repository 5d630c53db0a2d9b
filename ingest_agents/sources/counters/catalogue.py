"""Every counter that the agent reads: its name, unit, kind, and where it comes from.

Flow: `ingest_agents.sources.counters.gpu`, `network`, `host` name them → **here** → the table in
``docs/reference/agent.md``, which a test holds to this one. The diagnosis knows the same names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Kind(StrEnum):
    """What a reading is."""

    GAUGE = "gauge"
    """How it is now: of several readings in one step, the mean."""

    COUNT = "count"
    """How many more since the reading before: said per step."""

    FACT = "fact"
    """How something is set: said once, and when it changes."""


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter.

    Attributes
    ----------
    unit
        Empty for a number of things, and for a share of 1.
    source
        Call or file that it is read from.
    """

    name: str
    kind: Kind
    unit: str
    source: str


_G, _C, _F = Kind.GAUGE, Kind.COUNT, Kind.FACT

#: Of the GPU of a rank.
GPU: Final = (
    Counter("gpu_clock_mhz", _G, "MHz", "NVML ClockInfo(SM)"),
    Counter("gpu_clock_max_mhz", _F, "MHz", "NVML MaxClockInfo(SM)"),
    Counter("gpu_temperature_c", _G, "°C", "NVML Temperature(GPU)"),
    Counter("gpu_power_w", _G, "W", "NVML PowerUsage"),
    Counter("gpu_power_limit_w", _F, "W", "NVML EnforcedPowerLimit"),
    Counter("gpu_busy_ratio", _G, "", "NVML UtilizationRates.gpu"),
    Counter("gpu_throttle_thermal", _G, "", "NVML clock reasons SwThermal, HwThermal"),
    Counter("gpu_throttle_power", _G, "", "NVML clock reasons SwPowerCap, HwPowerBrake"),
    Counter("gpu_throttle_hw", _G, "", "NVML clock reason HwSlowdown"),
    Counter("gpu_throttle_setting", _G, "", "NVML clock reasons ApplicationsClocks, BoardLimit"),
    Counter("gpu_ecc_corrected", _C, "", "NVML TotalEccErrors(corrected, volatile)"),
    Counter("gpu_ecc_uncorrected", _C, "", "NVML TotalEccErrors(uncorrected, volatile)"),
    Counter("gpu_lost", _G, "", "1: NVML says that the GPU is lost; else not said"),
    Counter("pcie_gen", _G, "", "NVML CurrPcieLinkGeneration"),
    Counter("pcie_width", _G, "lanes", "NVML CurrPcieLinkWidth"),
    Counter("pcie_replays", _C, "", "NVML PcieReplayCounter"),
    Counter("nvlink_crc", _C, "", "NVML field NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),
    Counter("nvlink_replays", _C, "", "NVML field NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
    Counter("nvlink_down", _G, "links", "NVML NvLinkState of every link"),
)

#: Of all network cards of the host together.
NETWORK: Final = (
    Counter("nic_sent_bytes", _C, "bytes", "port_xmit_data × 4; statistics/tx_bytes"),
    Counter("nic_received_bytes", _C, "bytes", "port_rcv_data × 4; statistics/rx_bytes"),
    Counter("nic_errors", _C, "", "symbol_error, port_rcv_errors, …; rx_errors, tx_errors, …"),
    Counter("nic_retransmits", _C, "", "out_of_sequence, local_ack_timeout_err, …"),
    Counter("nic_congestion", _C, "", "np_cnp_sent, rp_cnp_handled, roce_slow_restart"),
    Counter("nic_wait_ticks", _C, "ticks", "port_xmit_wait"),
    Counter("nic_link_downs", _C, "", "link_downed; carrier_down_count"),
    Counter("nic_down", _G, "ports", "ports that were up since the agent began, and are not now"),
    Counter("nic_rate_gbps", _G, "Gbit/s", "slowest port that is up: rate; speed"),
)

#: Of the host.
HOST: Final = (
    Counter("host_cpu_ratio", _G, "", "/proc/stat: share of all CPUs that is busy"),
    Counter("host_steal_ratio", _G, "", "/proc/stat: share that the hypervisor took"),
    Counter("host_load_ratio", _G, "", "/proc/loadavg: mean of one minute, per CPU"),
    Counter("host_pressure_cpu_ratio", _G, "", "/proc/pressure/cpu, some"),
    Counter("host_pressure_memory_ratio", _G, "", "/proc/pressure/memory, some"),
    Counter("host_pressure_io_ratio", _G, "", "/proc/pressure/io, some"),
    Counter("host_throttled_ratio", _G, "", "cgroup cpu.stat: throttled time over time"),
    Counter("host_memory_ratio", _G, "", "/proc/meminfo: share that is not available"),
    Counter("host_swap_bytes", _G, "bytes", "/proc/meminfo: swap in use"),
    Counter("host_major_faults", _C, "", "/proc/vmstat pgmajfault"),
    Counter("host_governor_performance", _F, "", "cpufreq/scaling_governor of cpu0"),
    Counter("host_clocksource_tsc", _F, "", "clocksource0/current_clocksource"),
    Counter("host_numa_balancing", _F, "", "/proc/sys/kernel/numa_balancing"),
    Counter("host_hugepages_always", _F, "", "transparent_hugepage/enabled"),
)

ALL: Final = {counter.name: counter for counter in (*GPU, *NETWORK, *HOST)}
