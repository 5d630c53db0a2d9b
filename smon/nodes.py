"""Names of machines in commands that people copy: only what can be one node is put into one.

Flow: the host of a suspect → **here** → commands of a report, of pages. Anything else than a plain
name could mean several nodes (``n[1-9]``, ``a,b``), an option, or another command.
"""

from __future__ import annotations

import re
from typing import Final

_NODE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_KUBERNETES_NODE: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


def is_node(name: str | None) -> bool:
    """Whether this is the plain name of one node."""
    return name is not None and _NODE.fullmatch(name) is not None


def node_or(name: str | None, rank: int) -> str:
    """A node's name for a command, or what the reader has to put in its place."""
    return name if name is not None and is_node(name) else f"<node of rank {rank}>"


_DRAIN: Final = "scontrol update NodeName="


def drain(node: str, reason: str) -> str:
    """The command of Slurm that lets a node end its jobs and gives it no new ones."""
    return f"{_DRAIN}{node} State=DRAIN Reason={reason}"


def is_drain(command: str) -> bool:
    """Whether `drain` made it."""
    return command.startswith(_DRAIN)


def cordon(name: str | None) -> str | None:
    """The same of Kubernetes; None where it could not be called so."""
    if name is None or _KUBERNETES_NODE.fullmatch(name) is None:
        return None
    return f"kubectl cordon {name}"
