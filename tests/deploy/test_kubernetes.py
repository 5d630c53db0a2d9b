"""Manifests for Kubernetes: structure, security, and what they run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smon
from smon.config import PREFIX, Settings
from tests.deploy.files import (
    AGENT,
    AGENT_VARIABLES,
    SERVER,
    SERVER_VARIABLES,
    documents,
    parses,
    smon_commands,
)

MANIFESTS = (
    SERVER / "kubernetes" / "server.yaml",
    AGENT / "kubernetes" / "daemonset.yaml",
    AGENT / "kubernetes" / "sidecar.yaml",
)
POD_KINDS = {"StatefulSet", "Deployment", "DaemonSet", "Job"}

manifest = pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)


def pods(path: Path) -> Iterator[dict[str, Any]]:
    """Specifications of all pods in a file."""
    for each in documents(path):
        if each["kind"] in POD_KINDS:
            yield each["spec"]["template"]["spec"]


def containers(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(pod, container) of all containers of SMon in a file."""
    for pod in pods(path):
        for one in (*pod.get("initContainers", ()), *pod["containers"]):
            if one["image"].startswith("smon:"):
                yield pod, one


def volumes(path: Path) -> Iterator[tuple[set[str], dict[str, Any]]]:
    """(volumes of the pod, container) of all containers in a file."""
    for each in documents(path):
        if each["kind"] in POD_KINDS:
            pod = each["spec"]["template"]["spec"]
            claims = each["spec"].get("volumeClaimTemplates", ())
            known = {volume["name"] for volume in pod["volumes"]}
            known |= {claim["metadata"]["name"] for claim in claims}
            for one in (*pod.get("initContainers", ()), *pod["containers"]):
                yield known, one


@manifest
def test_every_document_has_a_kind_and_a_name(path: Path) -> None:
    """What every object of Kubernetes has."""
    found = documents(path)
    assert found
    assert all({"apiVersion", "kind", "metadata"} <= set(each) for each in found)
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(set(names)) == len(names)


@manifest
def test_selectors_select_the_pods_beside_them(path: Path) -> None:
    """A Deployment that does not select its own pods is refused; a Service without is silent."""
    found = documents(path)
    labels = [
        each["spec"]["template"]["metadata"].get("labels", {})
        for each in found
        if each["kind"] in POD_KINDS - {"Job"}
    ]
    for each in found:
        spec = each.get("spec", {})
        if each["kind"] == "Service":
            assert any(spec["selector"].items() <= some.items() for some in labels)
        elif "selector" in spec:
            assert any(spec["selector"]["matchLabels"].items() <= some.items() for some in labels)


@manifest
def test_every_command_of_a_container_is_one_of_the_programs(path: Path) -> None:
    """Options that the programs do not know would only be noticed on a cluster."""
    lines = [line for _, one in containers(path) for line in smon_commands(one["command"])]
    assert lines
    assert not [line for line in lines if not parses(line)]


@manifest
def test_every_variable_is_a_setting(path: Path) -> None:
    """Of the server in the ConfigMap, of agent and recorder in their containers."""
    for each in documents(path):
        if each["kind"] == "ConfigMap":
            assert set(each["data"]) <= SERVER_VARIABLES
            Settings.from_env(each["data"])
    for pod in pods(path):
        for one in (*pod.get("initContainers", ()), *pod["containers"]):
            given = {each["name"] for each in one.get("env", ()) if each["name"].startswith(PREFIX)}
            assert given <= AGENT_VARIABLES


@manifest
def test_containers_have_limits_and_little_power(path: Path) -> None:
    """Bounded memory, a read-only root, no capabilities; of agents, bounded CPU too."""
    for pod, one in containers(path):
        assert "memory" in one["resources"]["limits"]
        security = one["securityContext"]
        assert security["readOnlyRootFilesystem"]
        assert not security["allowPrivilegeEscalation"]
        assert security["capabilities"]["drop"] == ["ALL"]
        assert not pod["automountServiceAccountToken"]
        if one["command"][0] == "smon-agent":
            assert one["resources"]["limits"] == {"cpu": "100m", "memory": "256Mi"}


@manifest
def test_only_the_agent_of_a_node_is_root(path: Path) -> None:
    """Because segments belong to the users of trainers; and it has no other power of root."""
    for pod, one in containers(path):
        security = {**pod.get("securityContext", {}), **one["securityContext"]}
        if path.name == "daemonset.yaml":
            assert security["capabilities"]["add"] == ["DAC_OVERRIDE", "FOWNER"]
        else:
            assert security["runAsNonRoot"]
            assert security["runAsUser"] > 0
            assert "add" not in security["capabilities"]


@manifest
def test_mounted_volumes_exist(path: Path) -> None:
    """Every mount names a volume of its pod, or a claim."""
    mounts = 0
    for known, one in volumes(path):
        for mount in one.get("volumeMounts", ()):
            mounts += 1
            assert mount["name"] in known
    assert mounts


@manifest
def test_images_have_the_version_of_the_package(path: Path) -> None:
    """So that an upgrade changes them."""
    assert {one["image"] for _, one in containers(path)} == {f"smon:{smon.__version__}"}


@manifest
def test_tokens_and_passwords_come_from_secrets(path: Path) -> None:
    """No value of one stands in a file."""
    for pod in pods(path):
        for one in (*pod.get("initContainers", ()), *pod["containers"]):
            assert "SMON_TOKEN" not in {each["name"] for each in one.get("env", ())}
    assert "Secret" not in {each["kind"] for each in documents(path)}


def test_servers_are_asked_on_the_ops_port_and_keep_their_log() -> None:
    """Alive and ready are two questions; a log that goes with its pod would lose batches."""
    found = {(each["kind"], each["metadata"]["name"]): each for each in documents(MANIFESTS[0])}
    spec = found["StatefulSet", "smon-api"]["spec"]
    (server,) = spec["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    words = server["command"]
    assert ports == {"http": 8080, "ops": 8081}
    assert words[words.index("--port") + 1] == "8080"
    assert words[words.index("--ops-port") + 1] == "8081"
    assert server["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "ops"}
    assert server["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "ops"}
    assert spec["persistentVolumeClaimRetentionPolicy"] == {
        "whenDeleted": "Retain",
        "whenScaled": "Retain",
    }
    grace_s = spec["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > 3 * Settings().stop_timeout_s
