"""Unit files of systemd, and settings files that they read."""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest

from ingest_agents.config import configure
from smon.config import PREFIX, Settings
from tests.deploy.files import (
    AGENT,
    SERVER,
    SERVER_VARIABLES,
    parses,
    smon_commands,
    tool,
    variables_for,
)
from tests.deploy.units import options

UNITS = (
    SERVER / "smon.service",
    SERVER / "smon-worker@.service",
    AGENT / "systemd" / "smon-agent.service",
)

unit = pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)


def command(path: Path) -> list[str]:
    """The command line of SMon that a unit runs."""
    (found,) = smon_commands(shlex.split(options(path)["ExecStart"][0]))
    return found


@unit
def test_a_unit_runs_a_program_with_settings_that_exist(path: Path) -> None:
    """Command lines parse, and variables are read by the program that gets them."""
    assert parses(command(path))
    given = re.findall(r"\b(SMON_\w+)=", " ".join(options(path)["Environment"]))
    assert given
    assert set(given) <= variables_for(command(path))


@unit
def test_a_unit_comes_back_for_ever(path: Path) -> None:
    """Agents keep data for hours; a service that has given up would make it days."""
    found = options(path)
    assert found["Restart"] == ["always"]
    assert found["StartLimitIntervalSec"] == ["0"]


@unit
def test_a_unit_gets_the_time_that_it_needs_to_stop(path: Path) -> None:
    """What is left after TimeoutStopSec is killed."""
    if command(path)[0] == "smon":
        needed = 3 * Settings().stop_timeout_s
    else:
        needed = configure({}).settings.stop_s + 1
    assert float(options(path)["TimeoutStopSec"][0]) > needed


@unit
def test_a_unit_may_do_little(path: Path) -> None:
    """What a server of bytes from elsewhere need not do, it cannot."""
    found = options(path)
    for name in ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices"):
        assert found[name] == ["yes"]
    assert found["ProtectSystem"] == ["strict"]
    assert found["User"] != ["root"]


@unit
def test_systemd_understands_the_units(path: Path, tmp_path: Path) -> None:
    """`systemd-analyze verify` has nothing to say once the programs are there."""
    analyze = tool("systemd-analyze", "systemd")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    copy = tmp_path / path.name
    text = path.read_text(encoding="utf-8")
    copy.write_text(re.sub(r"/opt/smon/bin/\S+", str(program), text), encoding="utf-8")
    done = subprocess.run(
        [analyze, "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if line.startswith(path.name.split("@")[0])]
    assert (done.returncode, ours) == (0, [])


def test_the_worker_reads_what_the_server_reads() -> None:
    """One settings file for both, or they work on two databases."""
    first, second = options(UNITS[0]), options(UNITS[1])
    for name in ("EnvironmentFile", "Environment", "User", "StateDirectory"):
        assert first[name] == second[name]


def test_the_agent_goes_before_the_trainer() -> None:
    """The caps that the agent promises to hosts."""
    found = options(UNITS[2])
    assert found["CPUQuota"] == ["10%"]
    assert found["MemoryMax"] == ["256M"]
    assert found["Nice"] == ["19"]
    assert found["IOSchedulingClass"] == ["idle"]
    assert found["OOMScoreAdjust"] == ["1000"]
    assert found["ReadWritePaths"] == ["-/var/spool/smon"]


def test_the_example_of_server_settings_is_read() -> None:
    """Every line, also those that are commented out, is a setting with a value that it takes."""
    text = (SERVER / "smon.env").read_text(encoding="utf-8")
    lines = dict(re.findall(r"^#?([A-Z_]+)=(.*)$", text, re.MULTILINE))
    ours = {name: shlex.split(value)[0] for name, value in lines.items() if name.startswith(PREFIX)}
    assert len(ours) > 5
    assert set(ours) <= SERVER_VARIABLES
    Settings.from_env(ours)


def test_the_example_of_agent_settings_is_read(tmp_path: Path) -> None:
    """As it is, and with everything that is commented out."""
    path = AGENT / "agent.yaml"
    found = configure({}, file=path)
    assert (found.origins["server"], found.settings.token_file) == ("file", "/etc/smon/token")
    text = re.sub(r"^#(\w+: )", r"\1", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    every = tmp_path / "agent.yaml"
    every.write_text(text, encoding="utf-8")
    assert configure({}, file=every).settings.ca_file == "/etc/smon/ca.pem"
