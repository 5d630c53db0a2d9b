"""The pages on installing and operating name what exists."""

from __future__ import annotations

import re
import shlex

import pytest

from smon.config import PREFIX
from tests.deploy.files import AGENT, AGENT_VARIABLES, ROOT, SERVER_VARIABLES, parses

PAGES = ("install.md", "operate.md")

#: Of the scripts for Slurm, not of a program.
OTHERS = {"SMON_SLURM_DRAIN_S"}

FENCE = re.compile(r"^```\w+\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: At the start of a line, or behind what runs it elsewhere.
CALL = re.compile(
    r"(?:^|^SMON_\S+ |-- |migrate )(?:\.venv/bin/|/opt/smon/bin/)?"
    r"(smon-agent|smon|as_smon) (\w[^\n]*)",
    re.MULTILINE,
)


def page(name: str) -> str:
    """A page of the documentation."""
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def calls(text: str) -> list[list[str]]:
    """Calls of the programs in code blocks."""
    return [
        [program.replace("as_", ""), *shlex.split(rest.partition(" > ")[0])]
        for block in FENCE.findall(text)
        for program, rest in CALL.findall(block)
    ]


@pytest.mark.parametrize("name", PAGES)
def test_every_call_in_the_pages_parses(name: str) -> None:
    """Also those that run as another user, in a container or on a cluster."""
    found = calls(page(name))
    assert {"token"} <= {words[1] for words in found}
    assert not [words for words in found if not parses(words)]


def test_a_wrong_call_is_noticed() -> None:
    """The check above sees calls behind others."""
    lines = ("kubectl exec x -- smon tokn list", "as_smon token list", "SMON_X=1 smon-agent go")
    found = calls("```console\n{}\n```\n".format("\n".join(lines)))
    assert [parses(words) for words in found] == [False, True, False]


@pytest.mark.parametrize("name", PAGES)
def test_every_variable_in_the_pages_is_a_setting(name: str) -> None:
    """Of the server, or of the agent."""
    named = set(re.findall(rf"\b{PREFIX}[A-Z_]+\b", page(name)))
    assert named
    assert named <= SERVER_VARIABLES | AGENT_VARIABLES | OTHERS


def test_every_metric_in_the_pages_is_documented() -> None:
    """A runbook that names a metric which does not exist costs time at night."""
    named = set(re.findall(r"`(smon_[a-z_]+)", page("operate.md")))
    known = set(re.findall(r"`(smon_[a-z_]+)", page("reference/metrics.md")))
    assert named
    assert named <= known


def test_every_file_for_hosts_is_in_the_pages() -> None:
    """Whoever installs finds each of them."""
    text = page("install.md")
    files = [path for path in AGENT.rglob("*") if path.is_file()]
    files += [path for path in (ROOT / "docs" / "deploy").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path.name for path in files if path.name not in text]


def test_the_settings_of_the_proxy_page_fit_its_example() -> None:
    """What the page says of bodies and connections stands in the file."""
    text = (ROOT / "docs" / "deploy" / "nginx.conf").read_text(encoding="utf-8")
    assert re.search(r"client_max_body_size 5m;", text)
    assert re.search(r"proxy_set_header Host \$http_host;", text)
    assert re.search(r"keepalive_timeout 75s;", text)
