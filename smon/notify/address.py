"""Where a message may go: the parts of an address, and what its host may resolve to.

Flow: `smon.config` → **here** → `smon.notify.post`. A setting names the receiver, and a name server
says where that is: a name that leads into the network of the server could make it talk to whatever
listens there. So addresses are checked after resolution, and the connection is made to an address
that was checked, never to the name.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from smon.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

#: Names and ports to addresses: ``socket.getaddrinfo``, or what a test gives.
Lookup = Callable[[str, int], Sequence[str]]

_PORTS: Final = {"https": 443, "http": 80}

#: Addresses that hold an address of the old kind in their last 32 bits: NAT64.
_NAT64: Final = ipaddress.IPv6Network("64:ff9b::/96")

#: Where clouds answer questions about their machines although the address looks public.
_OF_CLOUDS: Final = (
    ipaddress.IPv4Network("168.63.129.16/32"),
    ipaddress.IPv4Network("192.0.0.0/24"),
    ipaddress.IPv4Network("100.100.100.200/32"),
    ipaddress.IPv6Network("fd00:ec2::/32"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """A receiver.

    Attributes
    ----------
    path
        What is asked for there: the secret part. Never logged.
    secure
        Whether it is spoken to by TLS.
    """

    host: str
    port: int
    path: str
    secure: bool

    def __repr__(self) -> str:
        return f"Target({self.host}:{self.port})"

    @property
    def name(self) -> str:
        """What the Host header says."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        usual = _PORTS["https" if self.secure else "http"]
        return host if self.port == usual else f"{host}:{self.port}"


def target_of(url: str) -> Target:
    """The parts of an address that the settings have let through.

    Raises
    ------
    ConfigError
        It is none; the address is not repeated.
    """
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError) as error:
        raise ConfigError("expected https://HOST/PATH, found another scheme or port") from error
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.hostname or "", port, path, parts.scheme == "https")


def look_up(host: str, port: int) -> Sequence[str]:
    """All addresses of a name, in the order in which they are to be tried.

    Raises
    ------
    OSError
        It has none.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def refusal(target: Target, found: Sequence[str], *, private: bool) -> str | None:
    """Why no message goes to what a host resolves to; None if it may.

    All of the addresses must be allowed: a name with one good address and one bad one is not
    trusted.

    Parameters
    ----------
    private
        Whether private networks and this machine are allowed.
    """
    addresses = [_inner(ipaddress.ip_address(text.partition("%")[0])) for text in found]
    if not addresses:
        return "its name has no address"
    reason = next((why for one in addresses if (why := _refused(one, private=private))), None)
    if reason is not None:
        return reason
    if not target.secure and not (private and all(one.is_loopback for one in addresses)):
        return "http is for this machine only, and only with SMON_NOTIFY_PRIVATE=1: use https"
    return None


def _refused(address: Address, *, private: bool) -> str | None:
    if any(address in network for network in _OF_CLOUDS) or address.is_link_local:
        return "its address is one where a cloud keeps secrets of its machines"
    if address.is_multicast or address.is_unspecified:
        return "its address is not that of one machine"
    if address.is_reserved and not address.is_loopback:
        return "its address is reserved"
    if address.is_global or private:
        return None
    return "its address is private: SMON_NOTIFY_PRIVATE=1 allows that"


def _inner(address: Address) -> Address:
    """The address that is meant: one of the old kind may be wrapped in one of the new kind."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    teredo = address.teredo
    wrapped = address.ipv4_mapped or address.sixtofour or (teredo[1] if teredo else None)
    if wrapped is None and address in _NAT64:
        wrapped = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return wrapped or address
