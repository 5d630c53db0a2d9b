"""Settings, identity, and that the page names all of them."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from ingest_agents.check import check
from ingest_agents.cli import main, parser
from ingest_agents.config import (
    AgentSettings,
    configure,
    default_of,
    flag_of,
    names,
    token_of,
    variable_of,
)
from ingest_agents.identity import coordinates, identify
from ingest_agents.link import Link
from ingest_agents.payload import clean
from ingest_agents.transport import Address, address_of
from smon.errors import ConfigError
from smon.topology import Layout
from tests.agents.builders import write
from tests.agents.fake import Fake, Wire

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "agent.md"


def test_flag_goes_before_environment_before_file_before_default(tmp_path: Path) -> None:
    """And it is known where each value came from."""
    file = tmp_path / "agent.yaml"
    file.write_text("server: http://file:1\nsenders: 3\npoll_s: 2\n")
    environ = {"SMON_SERVER": "http://env:1", "SMON_SENDERS": "4"}
    found = configure(environ, flags={"server": "http://flag:1"}, file=file)
    assert found.settings.server == "http://flag:1"
    assert (found.settings.senders, found.settings.poll_s) == (4, 2.0)
    assert [found.origins[name] for name in ("server", "senders", "poll_s", "token")] == [
        "flag",
        "environment",
        "file",
        "default",
    ]


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    """JSON needs no PyYAML."""
    file = tmp_path / "agent.json"
    file.write_text('{"senders": 5, "enable": false}')
    settings = configure({"SMON_AGENT_CONFIG": str(file)}).settings
    assert (settings.senders, settings.enable) == (5, False)


@pytest.mark.parametrize(
    "environ, word",
    [
        ({"SMON_SENDERS": "0"}, "from 1"),
        ({"SMON_SENDERS": "2.5"}, "whole number"),
        ({"SMON_POLL_S": "nan"}, "number"),
        ({"SMON_POLL_S": "soon"}, "number"),
        ({"SMON_ENABLE": "maybe"}, "0 or 1"),
        ({"SMON_AGENT_CONFIG": "/nowhere/agent.yaml"}, "cannot be read"),
    ],
)
def test_wrong_values_are_one_sentence(environ: dict[str, str], word: str) -> None:
    """Which setting, what was expected, what was found."""
    with pytest.raises(ConfigError, match=word):
        configure(environ)


@pytest.mark.parametrize("text", ["[1]", "server: [", "colour: red", "senders: {}", "\0"])
def test_wrong_files_are_one_sentence(tmp_path: Path, text: str) -> None:
    """Also keys that are no settings: a typing error must not pass."""
    file = tmp_path / "agent.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        configure({}, file=file)


def test_the_token_is_never_shown(tmp_path: Path) -> None:
    """Neither in the list of settings nor in an error."""
    found = configure({"SMON_TOKEN": "smon_abc_secret"})
    assert "secret" not in "\n".join(found.lines())
    assert "token = ***" in "\n".join(found.lines())
    with pytest.raises(ConfigError) as caught:
        token_of(AgentSettings(token="smon secret"))  # noqa: S106  # no secret
    assert "secret" not in str(caught.value)


def test_the_token_file_is_read_anew(tmp_path: Path) -> None:
    """A rotated token works without a restart; an empty or missing file is an error."""
    file = tmp_path / "token"
    settings = AgentSettings(token_file=str(file))
    file.write_text("smon_a_b\n")
    assert token_of(settings) == "smon_a_b"
    file.write_text("smon_c_d")
    assert token_of(settings) == "smon_c_d"
    file.write_text("")
    with pytest.raises(ConfigError, match="found nothing"):
        token_of(settings)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        token_of(settings)


def test_addresses() -> None:
    """Http and https, with a port and a path before the routes."""
    assert address_of("https://smon.example/base/") == Address(True, "smon.example", 443, "/base")  # noqa: FBT003
    assert address_of("http://[::1]:8080").host == "::1"
    for text in ("smon:8080", "ftp://x", "http://", "http://u:p@host", "http://h:port"):
        with pytest.raises(ConfigError):
            address_of(text)


# --- identity -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "environ, rank",
    [
        ({"SMON_RANK": "1", "RANK": "2", "SLURM_PROCID": "3"}, 1),
        ({"RANK": "2", "SLURM_PROCID": "3", "OMPI_COMM_WORLD_RANK": "4"}, 2),
        ({"SLURM_PROCID": "3", "OMPI_COMM_WORLD_RANK": "4"}, 3),
        ({"OMPI_COMM_WORLD_RANK": "4", "LOCAL_RANK": "0"}, 4),
        ({"LOCAL_RANK": "7"}, None),
    ],
)
def test_the_rank_is_the_launchers(environ: dict[str, str], rank: int | None) -> None:
    """LOCAL_RANK is none: it can be 0 everywhere."""
    assert identify(environ, AgentSettings()).rank == rank


@pytest.mark.parametrize(
    "environ, job, attempt",
    [
        ({"SMON_JOB_ID": "a", "SLURM_JOB_ID": "9"}, "a", 0),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "2"}, "9", 2),
        ({"TORCHELASTIC_RUN_ID": "default"}, None, 0),
        ({"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "1"}, "r", 1),
        ({"SMON_JOB_ID": "a", "SMON_ATTEMPT": "4", "TORCHELASTIC_RESTART_COUNT": "1"}, "a", 4),
        ({"SMON_JOB_ID": "my job\n<x>"}, "my-job--x-", 0),
    ],
)
def test_job_and_attempt(environ: dict[str, str], job: str | None, attempt: int) -> None:
    """Ours before torchrun's before Slurm's; text as the protocol allows it."""
    found = identify(environ, configure(environ).settings)
    assert (found.job, found.attempt) == (job, attempt)


def test_coordinates_are_those_of_the_layout() -> None:
    """For every rank, and for no other."""
    layout = Layout(dp=3, pp=2, tp=2, cp=2)
    found = {
        coordinates(layout, layout.rank(dp, stage, tp, cp)) == (dp, stage)
        for dp in range(3)
        for stage in range(2)
        for tp in range(2)
        for cp in range(2)
    }
    assert found == {True}
    for rank in (-1, layout.world_size):
        with pytest.raises(ConfigError):
            coordinates(layout, rank)


def test_text_is_made_harmless() -> None:
    """Characters that the protocol has not become dashes, and long names end."""
    assert clean(" a b/ü\x00c ") == "a-b/--c"
    assert len(clean("x" * 999)) == 200


# --- check --------------------------------------------------------------------------------------


def checked(fake: Fake, **environ: str) -> tuple[str, list[str]]:
    """What `check` says, and what it finds wrong."""
    configured = configure(environ)
    link = Link(lambda: Wire(fake), lambda: token_of(configured.settings), "host")
    found = check(configured, environ, link)
    return "\n".join(found.lines), found.wrong


def test_check_explains_what_it_sees(tmp_path: Path) -> None:
    """Identity, spool, streams, server, clock."""
    write(tmp_path, 3)
    text, wrong = checked(Fake(), SMON_SPOOL_DIR=str(tmp_path), SLURM_JOB_ID="77", RANK="3")
    assert not wrong
    for part in ("job = 77 (SLURM_JOB_ID)", "rank = 3 (RANK)", "acknowledged up to 0", "its clock"):
        assert part in text


def test_check_says_what_is_wrong(tmp_path: Path) -> None:
    """And masks the token."""
    fake = Fake()
    fake.tokens = {"right"}
    environ = {"SMON_TOKEN": "smon_k_wrong", "SMON_DIRECTORY": str(tmp_path / "no")}
    text, wrong = checked(fake, **environ)
    assert "smon_k_wrong" not in text
    assert any("401 unauthorized" in line for line in wrong)
    assert any("no such folder" in line for line in wrong)


# --- the page -----------------------------------------------------------------------------------


def commands() -> dict[str, argparse.ArgumentParser]:
    """Parsers by command."""
    (actions,) = [
        action for action in parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    return dict(actions.choices)


def test_every_setting_is_documented() -> None:
    """Its name, variable, flag and default stand in one row of the page, and no row is made up."""
    text = PAGE.read_text(encoding="utf-8")
    row = r"^\| `(\w+)` \| `(SMON_\w+)` \| `--([\w-]+)` \| `?([^|`]*)`? \|"
    rows = re.findall(row, text, re.MULTILINE)
    expected = [(name, variable_of(name), flag_of(name), _shown(name)) for name in names()]
    assert rows == expected


def _shown(name: str) -> str:
    value = default_of(name)
    return "empty" if value == "" else str(int(value)) if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("command", ["run", "send", "check"])
def test_every_flag_is_documented(command: str) -> None:
    """Flags that are no settings stand in the section of their command."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.split(f"## `smon-agent {command}`")[1].split("\n## ")[0]
    settings = {f"--{flag_of(name)}" for name in names()}
    for action in commands()[command]._actions:
        for option in action.option_strings:
            if option.startswith("--") and option not in settings | {"--help"}:
                assert f"`{option}" in section, option


def test_the_deployed_settings_file_is_read() -> None:
    """The example that is installed with the agent has settings that exist."""
    configure({}, file=ROOT / "ingest_agents" / "deploy" / "agent.yaml")


def test_bad_usage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and no traceback."""
    assert main(["send", "/nowhere/trace.parquet"]) == 2
    assert main(["run", "--server", "nonsense"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 2
    with pytest.raises(SystemExit):
        main(["dance"])
