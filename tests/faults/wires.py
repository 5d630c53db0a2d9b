"""Two hosts with a wire between them that can be made bad: network namespaces, a veth pair, nft.

Packets are lost, connections reset, or everything is cut, in both directions and by chance of the
kernel. Needs root, `ip` and `nft`; `lacks` says what is missing.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

_T = TypeVar("_T")

_CLONE_NEWNET: Final = 0x40000000
_DEVICE: Final = "eth0"

#: Of the two ends; nobody else is in these namespaces.
SERVER_ADDRESS: Final = "10.77.0.1"
_AGENT_ADDRESS: Final = "10.77.0.2"

_TABLE: Final = """
table inet faults {
  counter hit {}
  chain inbound { type filter hook input priority 0; policy accept; }
}
"""


def lacks() -> str:
    """What is missing for a wire; empty: nothing."""
    missing = [tool for tool in ("ip", "nft") if _tool(tool) is None]
    if missing:
        return f"NO NETWORK NAMESPACES: expected {' and '.join(missing)} (iproute2, nftables)"
    return "NO NETWORK NAMESPACES: expected root" if os.geteuid() else ""


def _tool(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@dataclass(frozen=True, slots=True)
class Trouble:
    """What happens to packets that arrive, at both ends.

    Attributes
    ----------
    per_mille
        Share of them that it happens to.
    verdict
        What nft does to these.
    """

    per_mille: int
    verdict: str


def loss(percent: int) -> Trouble:
    """Packets are lost."""
    return Trouble(percent * 10, "drop")


def resets(per_mille: int) -> Trouble:
    """Packets are answered with a reset of their connection, as by a firewall that forgot it."""
    return Trouble(per_mille, "reject with tcp reset")


#: Nothing comes through.
CUT: Final = Trouble(1000, "drop")


class Namespace:
    """One host of the network."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, act: Callable[[], _T]) -> _T:
        """Do something in a thread that is on this host; so are processes that it starts."""

        def enter_and_act() -> _T:
            with Path(f"/run/netns/{self.name}").open("rb") as place:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(place.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
            return act()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(enter_and_act).result()

    def ip(self, *arguments: str) -> None:
        """Run `ip` on this host."""
        _run("ip", "-n", self.name, *arguments)

    def nft(self, rules: str) -> None:
        """Load rules."""
        _run("ip", "netns", "exec", self.name, "nft", "-f", "-", given=rules)

    @property
    def hits(self) -> int:
        """Packets that something has happened to."""
        listed = _run("ip", "netns", "exec", self.name, "nft", "-j", "list", "counters")
        each = (item.get("counter") for item in json.loads(listed)["nftables"])
        return sum(int(counter["packets"]) for counter in each if counter)


class Wire:
    """A server's host and a host of agents, joined by a wire.

    Attributes
    ----------
    server, agents
        Its ends.
    """

    def __init__(self) -> None:
        mark = f"smon-{os.getpid()}-{secrets.token_hex(3)}"
        self.server, self.agents = Namespace(f"{mark}-s"), Namespace(f"{mark}-a")

    @property
    def _ends(self) -> Mapping[str, Namespace]:
        return {SERVER_ADDRESS: self.server, _AGENT_ADDRESS: self.agents}

    def __enter__(self) -> Self:
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        for end in self._ends.values():
            _run("ip", "netns", "add", end.name)
        peer = ("peer", "name", _DEVICE, "netns", self.server.name)
        link = ("link", "add", _DEVICE, "netns", self.agents.name, "type", "veth")
        _run("ip", *link, *peer)
        for address, end in self._ends.items():
            end.ip("addr", "add", f"{address}/30", "dev", _DEVICE)
            end.ip("link", "set", "lo", "up")
            # Else the kernel hands whole batches over as one packet.
            end.ip("link", "set", _DEVICE, "gso_max_segs", "1", "up")
            end.nft(_TABLE)

    def __exit__(self, *_error: object) -> None:
        for end in self._ends.values():
            with suppress(RuntimeError):
                _run("ip", "netns", "del", end.name)

    def suffer(self, trouble: Trouble | None) -> None:
        """Let this happen from now on, and nothing else."""
        rules = "flush chain inet faults inbound\n"
        if trouble is not None:
            chance = f"numgen random mod 1000 <= {trouble.per_mille - 1}"
            what = f"counter name hit {trouble.verdict}"
            match = f'iifname "{_DEVICE}" meta l4proto tcp {chance}'
            rules += f"add rule inet faults inbound {match} {what}\n"
        for end in self._ends.values():
            end.nft(rules)

    @property
    def hits(self) -> int:
        """Packets that something has happened to, at both ends."""
        return sum(end.hits for end in self._ends.values())


def _run(tool: str, *arguments: str, given: str = "") -> str:
    command = [_tool(tool) or tool, *arguments]
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
