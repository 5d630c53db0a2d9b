"""Names of machines in commands that people copy."""

from __future__ import annotations

import pytest

from smon.nodes import cordon, drain, is_node, node_or


@pytest.mark.parametrize("name", ["node-7", "gpu-a.cluster.local", "10.0.0.7", "N_1", "a" * 253])
def test_plain_names_are_nodes(name: str) -> None:
    """They stand in a command as they are."""
    assert is_node(name)
    assert node_or(name, 3) == name
    assert drain(name, "smon_x") == f"scontrol update NodeName={name} State=DRAIN Reason=smon_x"


@pytest.mark.parametrize(
    "name", [None, "", "n[1-9]", "a,b", "-f", "a b", "a;reboot", "$(x)", "a\n", "é", "a" * 254]
)
def test_anything_else_never_gets_into_a_command(name: str | None) -> None:
    """It could mean several nodes, an option, or another command."""
    assert not is_node(name)
    assert node_or(name, 3) == "<node of rank 3>"
    assert cordon(name) is None


@pytest.mark.parametrize("name", ["Node-7", "n_1", "a-", ".a"])
def test_kubernetes_has_fewer_names(name: str) -> None:
    """Lower case, digits, dots and hyphens, and neither of these at the ends."""
    assert cordon(name) is None
    assert cordon("node-7") == "kubectl cordon node-7"
