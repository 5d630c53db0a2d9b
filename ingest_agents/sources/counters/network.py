"""Network cards: InfiniBand and RoCE ports, and Ethernet interfaces that are hardware.

Flow: ``/sys/class/infiniband``, ``/sys/class/net`` → **here** →
`ingest_agents.sources.counters.source`. All cards of the host count together: which of them a rank
uses is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ingest_agents.sources.counters.reading import (
    Growth,
    Values,
    names_in,
    number_of,
    text_of,
    total,
)

#: ``port_xmit_data`` and ``port_rcv_data`` count words of four bytes.
_WORD: Final = 4

#: Files of ``counters`` and ``hw_counters`` of a port, by what they count.
_PORT_FILES: Final = {
    "nic_errors": (
        "symbol_error",
        "link_error_recovery",
        "port_rcv_errors",
        "port_xmit_discards",
        "local_link_integrity_errors",
        "excessive_buffer_overrun_errors",
        "rx_drops",
    ),
    "nic_retransmits": (
        "out_of_sequence",
        "packet_seq_err",
        "implied_nak_seq_err",
        "local_ack_timeout_err",
        "rnr_nak_retry_err",
        "retrans_pkts",
    ),
    "nic_congestion": ("np_cnp_sent", "rp_cnp_handled", "roce_slow_restart"),
    "nic_wait_ticks": ("port_xmit_wait",),
    "nic_link_downs": ("link_downed",),
}
_SENT: Final = ("port_xmit_data", "tx_bytes")
_RECEIVED: Final = ("port_rcv_data", "rx_bytes")

#: Files of an Ethernet interface.
_INTERFACE_FILES: Final = {
    "nic_sent_bytes": ("statistics/tx_bytes",),
    "nic_received_bytes": ("statistics/rx_bytes",),
    "nic_errors": (
        "statistics/rx_errors",
        "statistics/tx_errors",
        "statistics/rx_missed_errors",
    ),
    "nic_link_downs": ("carrier_down_count",),
}

#: Of ``/sys/class/net/*/type``: InfiniBand, whose traffic its port counts already.
_ARPHRD_INFINIBAND: Final = 32

_MBIT: Final = 1e-3


@dataclass(frozen=True, slots=True)
class _Port:
    """A port or interface now; `grown` by counter, None where it is new."""

    name: str
    up: bool
    rate_gbps: float | None
    grown: dict[str, list[int | None]]
    infiniband: bool


class Network:
    """All network cards of a host.

    Parameters
    ----------
    root
        Above ``sys``.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._infiniband = root / "sys/class/infiniband"
        self._net = root / "sys/class/net"
        self._growth = Growth()
        self._been_up: set[str] = set()

    def read(self) -> Values:
        """Look at every card once; differences only from the second look on."""
        ports = [*self._ports(), *self._interfaces()]
        self._growth.turn()
        if not ports and not self._been_up:
            return {}
        values: Values = {}
        for name in dict.fromkeys(name for port in ports for name in port.grown):
            grown = total(part for port in ports for part in port.grown.get(name, ()))
            if grown is not None:
                values[name] = grown
        up = {port.name for port in ports if port.up}
        self._been_up |= up
        values["nic_down"] = float(len(self._been_up - up))
        rate = _slowest(ports)
        if rate is not None:
            values["nic_rate_gbps"] = rate
        return values

    def _ports(self) -> Iterable[_Port]:
        for device in names_in(self._infiniband):
            folder = self._infiniband / device / "ports"
            for port in names_in(folder):
                yield self._port(f"{device}/{port}", folder / port)

    def _port(self, name: str, folder: Path) -> _Port:
        counted: dict[str, list[int | None]] = {}
        for place in (folder / "counters", folder / "hw_counters"):
            there = set(names_in(place))
            for counter, files in _PORT_FILES.items():
                for file in files:
                    if file in there:
                        grown = self._grown(name, place / file, 1)
                        counted.setdefault(counter, []).append(grown)
            for counter, files in (("nic_sent_bytes", _SENT), ("nic_received_bytes", _RECEIVED)):
                for file in files:
                    if file in there and counter not in counted:
                        words = _WORD if file.startswith("port_") else 1
                        counted[counter] = [self._grown(name, place / file, words)]
        state, rate = text_of(folder / "state"), text_of(folder / "rate")
        up = state is not None and "ACTIVE" in state
        return _Port(name, up, _rate(rate) if up else None, counted, infiniband=True)

    def _interfaces(self) -> Iterable[_Port]:
        for name in names_in(self._net):
            folder = self._net / name
            # What has no device behind it (lo, veth, bridges) is no card.
            if (folder / "device").exists() and number_of(folder / "type") != _ARPHRD_INFINIBAND:
                yield self._interface(name, folder)

    def _interface(self, name: str, folder: Path) -> _Port:
        counted = {
            counter: [self._grown(name, folder / file, 1) for file in files]
            for counter, files in _INTERFACE_FILES.items()
        }
        up = text_of(folder / "operstate") == "up"
        speed = number_of(folder / "speed") if up else None
        rate = speed * _MBIT if speed is not None and speed > 0 else None
        return _Port(name, up, rate, counted, infiniband=False)

    def _grown(self, name: str, path: Path, unit: int) -> int | None:
        now = number_of(path)
        grown = None if now is None else self._growth.of((name, str(path)), now)
        return None if grown is None else grown * unit


def _rate(text: str | None) -> float | None:
    """Gbit/s out of e.g. ``400 Gb/sec (4X NDR)``."""
    try:
        return float((text or "").split()[0])
    except (IndexError, ValueError):
        return None


def _slowest(ports: Iterable[_Port]) -> float | None:
    """Of the ports that jobs use: those of InfiniBand and RoCE, if there are any."""
    known = [(port.infiniband, port.rate_gbps) for port in ports if port.rate_gbps is not None]
    fabric = [rate for infiniband, rate in known if infiniband]
    return min(fabric or [rate for _, rate in known], default=None)
