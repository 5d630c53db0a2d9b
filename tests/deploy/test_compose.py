"""docker-compose.yml: what it starts exists, and its parts fit each other and the image."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from smon.config import PREFIX, Settings
from tests.deploy.files import (
    AGENT_VARIABLES,
    COMPOSE,
    ROOT,
    SERVER,
    SERVER_VARIABLES,
    parses,
    smon_commands,
)

CONDITIONS = {"service_started", "service_healthy", "service_completed_successfully"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    """The file, with its anchors resolved."""
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """All services by name."""
    found: dict[str, dict[str, Any]] = compose["services"]
    return found


@pytest.fixture(scope="module")
def dockerfile() -> str:
    """The Dockerfile, with its continued lines joined."""
    return (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")


def ours(services: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The services that run SMon."""
    return {name: one for name, one in services.items() if one["image"].startswith("smon:")}


def targets(service: dict[str, Any]) -> list[tuple[str, str]]:
    """(volume or file, folder in the container) of a service."""
    return [(text.split(":")[0], text.split(":")[1]) for text in service.get("volumes", [])]


def mounted(service: dict[str, Any], folder: str) -> str:
    """What is mounted at a folder of a service."""
    (found,) = [source for source, target in targets(service) if target == folder]
    return found


def running(services: dict[str, dict[str, Any]], command: str) -> dict[str, dict[str, Any]]:
    """The services that run one command of `smon`."""
    wanted = ["smon", command]
    return {name: one for name, one in ours(services).items() if one["command"][:2] == wanted}


def test_every_command_of_a_service_is_one_of_the_programs(
    services: dict[str, dict[str, Any]],
) -> None:
    """Options that the programs do not know would only be noticed where docker runs."""
    commands = [
        line for one in ours(services).values() for line in smon_commands(list(one["command"]))
    ]
    found = {" ".join(line[:3]) for line in commands}
    assert {"smon db upgrade", "smon token create", "smon synth slow-worker"} <= found
    assert {line[1] for line in commands} >= {"serve", "worker", "send"}
    assert not [line for line in commands if not parses(line)]


def test_a_wrong_command_of_a_service_is_noticed() -> None:
    """The check above sees through a shell."""
    script = "umask 077\ntest -s t && exit 0\nsmon token creat --scope x > t\nsmon-agent send f"
    assert [parses(line) for line in smon_commands(["sh", "-ec", script])] == [False, True]


def test_every_variable_is_a_setting(services: dict[str, dict[str, Any]]) -> None:
    """A variable that nothing reads is a typing error."""
    for name, one in ours(services).items():
        known = AGENT_VARIABLES if name == "demo" else SERVER_VARIABLES
        given = {key for key in one["environment"] if key.startswith(PREFIX)}
        assert given <= known, name


def test_the_variables_of_the_image_are_settings(dockerfile: str) -> None:
    """As above, for what the image sets."""
    given = set(re.findall(r"\b(SMON_\w+)=", dockerfile))
    assert given
    assert given <= SERVER_VARIABLES


def test_no_secret_stands_in_the_files(services: dict[str, dict[str, Any]]) -> None:
    """Passwords come from outside, and compose refuses to start without them."""
    secret = re.compile(r"(?i)password|secret|token$|key$")
    values = {
        str(value)
        for one in services.values()
        for key, value in one.get("environment", {}).items()
        if secret.search(key)
    }
    assert values
    assert all(re.fullmatch(r"\$\{[A-Z_]+:\?.+\}", value) for value in values)
    urls = [one["environment"].get("SMON_DATABASE_URL", "") for one in ours(services).values()]
    assert not [url for url in urls if re.search(r"//[^@/]*:[^@/]*@", url)]


def test_services_wait_for_services_that_exist(services: dict[str, dict[str, Any]]) -> None:
    """Each condition can come true.

    Who is waited for to be healthy has a check; who is waited for to end does end.
    """
    for one in services.values():
        for name, wanted in one.get("depends_on", {}).items():
            other = services[name]
            assert wanted["condition"] in CONDITIONS
            if wanted["condition"] == "service_healthy":
                # `smon serve` has the one of the image.
                assert not other.get("healthcheck", {}).get("disable")
                assert "healthcheck" in other or other["image"].startswith("smon:")
            if wanted["condition"] == "service_completed_successfully":
                assert other["restart"].startswith("on-failure")


def test_only_servers_are_asked_for_their_health(services: dict[str, dict[str, Any]]) -> None:
    """The image's check asks the ops port, which workers and agents do not have."""
    for one in ours(services).values():
        disabled = one.get("healthcheck", {}).get("disable", False)
        assert disabled == (list(one["command"])[:2] != ["smon", "serve"])


def test_every_server_has_a_log_of_its_own_and_all_share_the_event_files(
    services: dict[str, dict[str, Any]],
) -> None:
    """Two servers in one log would lose batches; two roots would lose jobs."""
    servers = list(running(services, "serve").values())
    assert len(servers) >= 2
    logs = [mounted(one, "/var/lib/smon/wal") for one in servers]
    assert len(set(logs)) == len(servers)
    workers = list(running(services, "worker").values())
    roots = {mounted(one, "/var/lib/smon/objects") for one in servers + workers}
    assert roots == {"objects"}


def test_the_folders_of_volumes_belong_to_the_images_user(
    services: dict[str, dict[str, Any]], dockerfile: str
) -> None:
    """An empty volume takes the owner of the folder in the image.

    A folder that docker makes belongs to root, and nothing could be written.
    """
    made = re.search(r"install -d -o 10001 -g 10001 -m 0750 ([^&\n]+)", dockerfile)
    assert made
    folders = {folder for one in ours(services).values() for _, folder in targets(one)}
    assert folders <= set(made[1].split())


def test_volumes_are_declared_and_mounted_files_exist(
    compose: dict[str, Any], services: dict[str, dict[str, Any]]
) -> None:
    """A file that does not exist would become an empty folder."""
    sources = [source for one in services.values() for source, _ in targets(one)]
    files = {source for source in sources if source.startswith(".")}
    assert set(sources) - files == set(compose["volumes"])
    assert not [name for name in files if not (ROOT / name).exists()]


def test_ports_are_published_on_loopback_only(services: dict[str, dict[str, Any]]) -> None:
    """Who wants more says so."""
    ports = [port for one in services.values() for port in one.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_images_are_pinned(services: dict[str, dict[str, Any]]) -> None:
    """A tag that moves is another program tomorrow."""
    images = [one["image"] for one in services.values()]
    assert not [name for name in images if not re.search(r":(local|v?\d+\.?\d*)", name)]


def test_servers_get_the_time_they_need_to_stop(services: dict[str, dict[str, Any]]) -> None:
    """Docker kills after the grace period: requests, log and worker have `stop_timeout_s` each."""
    for one in {**running(services, "serve"), **running(services, "worker")}.values():
        assert int(one["stop_grace_period"].rstrip("s")) > 3 * Settings().stop_timeout_s


def test_the_containers_of_smon_can_do_little(services: dict[str, dict[str, Any]]) -> None:
    """Read-only, without capabilities, with an init for what workers leave behind."""
    for one in ours(services).values():
        assert one["read_only"]
        assert one["init"]
        assert one["cap_drop"] == ["ALL"]
        assert one["security_opt"] == ["no-new-privileges:true"]


def test_load_balancer_and_prometheus_ask_the_servers_that_there_are(
    services: dict[str, dict[str, Any]],
) -> None:
    """Names and ports in their files are those of the services."""
    servers = set(running(services, "serve"))
    text = (SERVER / "haproxy.cfg").read_text(encoding="utf-8")
    named = set(re.findall(r"server (\S+) \1:8080", text))
    assert named == servers
    assert "check port 8081" in text
    prometheus = yaml.safe_load(
        (ROOT / "dashboards" / "prometheus" / "prometheus.yml").read_text(encoding="utf-8")
    )
    scraped = {
        target
        for job in prometheus["scrape_configs"]
        if job["job_name"] == "smon"
        for config in job["static_configs"]
        for target in config["targets"]
    }
    assert scraped == {f"{name}:8081" for name in servers}
    for name in servers:
        words = list(services[name]["command"])
        assert words[words.index("--port") + 1 :][0] == "8080"
        assert words[words.index("--ops-port") + 1 :][0] == "8081"


def test_the_image_is_built_of_what_the_package_needs(dockerfile: str) -> None:
    """Every package of the wheel, its readme and its licence are copied and let in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = {
        name.removesuffix(".*")
        for name in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    needed = packages | {"pyproject.toml", "requirements.txt", "README.md", "LICENSE"}
    copied = {
        word
        for line in re.findall(r"^COPY (?!--)(.+)$", dockerfile, re.MULTILINE)
        for word in line.split()
    }
    let_in = set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text("utf-8"), re.MULTILINE))
    assert needed <= copied
    assert let_in == needed


def test_the_image_does_not_run_as_root(dockerfile: str) -> None:
    """By number, so that Kubernetes can check it."""
    assert re.findall(r"^USER (.+)$", dockerfile, re.MULTILINE) == ["10001:10001"]
    assert "ADD " not in dockerfile
    assert ":latest" not in dockerfile
