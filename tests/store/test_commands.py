from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from smon.commands import backup, config, db, token
from smon.config import Settings, default_of, meaning_of, variable_of
from smon.errors import ConfigError, MissingError
from smon.store import schema
from smon.store.database import Database
from smon.store.models import EventFile, Node, Token
from smon.store.objects import Objects
from smon.store.tokens import verify
from tests.store.rows import NOW, all_rows, stored_job

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "settings.md"

Run = Callable[..., int]


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of a server, named in the environment; no other setting is."""
    import os

    for name in [name for name in os.environ if name.startswith("SMON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SMON_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


@pytest.fixture
def run(data: Path) -> Run:
    """Runs a command line and gives its exit code."""

    def call(*words: object) -> int:
        parser = argparse.ArgumentParser()
        commands = parser.add_subparsers(required=True)
        for module in (db, token, backup, config):
            module.add(commands)
        parsed = parser.parse_args([str(word) for word in words])
        return int(parsed.run(parsed))

    return call


def database_of(data: Path) -> Database:
    """The database in a data folder."""
    return Database(f"sqlite:///{data}/smon.db")


# --- db -------------------------------------------------------------------------------------


def test_upgrade_says_what_it_did(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """From nothing to the newest revision, and then nothing to do."""
    assert run("db", "upgrade") == 0
    assert capsys.readouterr().out == f"schema empty → {schema.newest()}\n"
    assert run("db", "upgrade") == 0
    assert "nothing to do" in capsys.readouterr().out


def test_check_of_a_sound_store_finds_nothing(
    run: Run, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0, and no trace of the check."""
    run("db", "upgrade")
    stored_job(database_of(data), Objects(str(data / "objects")))
    capsys.readouterr()
    assert run("db", "check") == 0
    assert capsys.readouterr().out.startswith("all is well")
    assert all_rows(database_of(data), Node) == []
    assert list(Objects(str(data / "objects")).list("checks")) == []


def test_check_names_what_is_wrong(
    run: Run, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No schema, another schema, lost files: exit code 1 and a line for each."""
    assert run("db", "check") == 1
    assert "run smon db upgrade" in capsys.readouterr().out
    run("db", "upgrade")
    database, objects = database_of(data), Objects(str(data / "objects"))
    stored_job(database, objects)
    (lost,) = [row["path"] for row in all_rows(database, EventFile)]
    objects.delete(lost)
    capsys.readouterr()
    assert run("db", "check") == 1
    assert capsys.readouterr().out == f"1 rows without a file: {lost}\n"
    with database.write() as session:
        session.connection().exec_driver_sql("ALTER TABLE jobs DROP COLUMN pinned")
    assert run("db", "check") == 1
    assert "schema: add_column jobs pinned" in capsys.readouterr().out


def test_check_sees_that_nothing_can_be_written(
    run: Run, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A root that takes no file is named."""
    run("db", "upgrade")
    (data / "objects").mkdir()
    (data / "objects" / "checks").write_bytes(b"no folder")
    capsys.readouterr()
    assert run("db", "check") == 1
    assert capsys.readouterr().out.startswith("event files: cannot write")


# --- token ----------------------------------------------------------------------------------


def test_a_token_is_printed_once_listed_masked_and_revoked(
    run: Run, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole life of a token on the command line."""
    given = ("token", "create", "--tenant", "acme", "--scope", "ingest", "--scope", "read")
    assert run(*given, "--name", "hosts", "--days", "90") == 0
    text = capsys.readouterr().out.strip()
    with database_of(data).read() as session:
        verified = verify(session, text, NOW)
    assert verified is not None
    assert verified.scopes == {"ingest", "read"}
    run("token", "list")
    listed = capsys.readouterr().out
    assert text.split("_")[2] not in listed
    assert re.search(rf"smon_{verified.kid}_… +acme +hosts +ingest read +live", listed)
    run("token", "list", "--tenant", "acme", "--json")
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["state"], row["last_used"]) == ("live", "-")
    assert run("token", "revoke", verified.kid) == 0
    with database_of(data).read() as session:
        assert verify(session, text, NOW) is None


def test_without_tokens_the_list_says_so(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty table would leave the reader in doubt."""
    assert run("token", "list") == 0
    assert "no tokens" in capsys.readouterr().out


@pytest.mark.parametrize("days", ["0", "-1", "nan", "inf", "1e9"])
def test_a_token_of_no_time_is_not_made(run: Run, data: Path, days: str) -> None:
    """Days that make no sense are refused."""
    with pytest.raises(ConfigError, match="--days"):
        run("token", "create", "--scope", "read", "--days", days)
    assert not (data / "smon.db").exists()


def test_revoking_an_unknown_token_is_an_error(run: Run, data: Path) -> None:
    """Not a success that closes nothing."""
    with pytest.raises(MissingError):
        run("token", "revoke", "aaaaaaaa")
    assert all_rows(database_of(data), Token) == []


# --- backup ---------------------------------------------------------------------------------


def test_a_backup_is_made_verified_and_restored(
    run: Run, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The three commands one after the other."""
    run("db", "upgrade")
    stored_job(database_of(data), Objects(str(data / "objects")), files=2)
    folder = tmp_path / "backup"
    assert run("backup", "create", folder) == 0
    assert run("backup", "verify", folder) == 0
    new = tmp_path / "new"
    assert run("backup", "restore", folder, "--data-dir", new) == 0
    assert "2 files" in capsys.readouterr().out
    assert all_rows(database_of(new), EventFile) == all_rows(database_of(data), EventFile)
    next(folder.glob("objects/**/*.parquet")).write_bytes(b"x")
    assert run("backup", "verify", folder) == 1
    assert "do not rely on this backup" in capsys.readouterr().out


# --- config ---------------------------------------------------------------------------------


def test_every_setting_is_shown_with_its_origin(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Value, default, and whether it comes from the environment or an option."""
    monkeypatch.setenv("SMON_PORT", "9090")
    monkeypatch.setenv("SMON_PROT", "1")
    run("config", "show", "--json", "--data-dir", "elsewhere")
    shown = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in shown["settings"]}
    assert list(rows) == [each.name for each in fields(Settings)]
    assert (rows["port"]["value"], rows["port"]["origin"]) == (9090, "environment")
    assert (rows["port"]["default"], rows["host"]["origin"]) == (8080, "default")
    assert (rows["data_dir"]["value"], rows["data_dir"]["origin"]) == ("elsewhere", "option")
    assert shown["unknown"] == ["SMON_PROT"]
    run("config", "show")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(rows) + 1
    assert any(re.match(r"SMON_PORT +9090  \(environment\)  port of API", line) for line in lines)
    assert lines[-1].startswith("SMON_PROT: no setting")


@pytest.mark.parametrize(
    "url, shown",
    [
        ("postgresql+psycopg://smon:pa%40ss@db/smon", "postgresql+psycopg://smon:***@db/smon"),
        ("postgresql://smon:p@ss/w:rd@db/smon", "postgresql://smon:***@db/smon"),
        ("postgresql://db/smon?user=a&password=geheim&x=1", None),
        ("s3://AKIA:geheim@bucket/events?scheme=http", "s3://AKIA:***@bucket/events?scheme=http"),
        ("postgresql://smon@db/smon", "postgresql://smon@db/smon"),
        ("sqlite:////var/lib/smon/smon.db", "sqlite:////var/lib/smon/smon.db"),
    ],
)
def test_secrets_in_addresses_are_masked(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    url: str,
    shown: str | None,
) -> None:
    """What is shown can be sent to somebody who helps."""
    monkeypatch.setenv("SMON_DATABASE_URL", url)
    monkeypatch.setenv("SMON_TRACE_URL", url)
    run("config", "show", "--json")
    out = capsys.readouterr().out
    assert "geheim" not in out
    assert "pa%40ss" not in out
    rows = {row["name"]: row["value"] for row in json.loads(out)["settings"]}
    expected = shown or "postgresql://db/smon?user=a&password=***&x=1"
    assert (rows["database_url"], rows["trace_url"]) == (expected, expected)


# --- the page of settings -------------------------------------------------------------------


def limits(name: str) -> str:
    """The range of a setting as the page shows it."""
    from smon.config import _CHOICES, _META

    if name in _CHOICES:
        return ", ".join(f"`{choice}`" for choice in _CHOICES[name])
    data, default = _META[name].metadata, default_of(name)
    if not isinstance(default, int | float):
        return ""
    low, high = data["low"], data["high"]
    return f"≥ {low:,}" if high == float("inf") else f"{low:,} – {high:,}"


def row_of(name: str) -> str:
    """The row of a setting as the page must have it."""
    default = default_of(name)
    shown = "empty" if default == "" else f"`{default}`"
    return f"| `{variable_of(name)}` | {shown} | {limits(name)} | {meaning_of(name)} |"


def test_the_page_of_settings_is_complete() -> None:
    """Variable, default, limits and meaning of every setting, in the order of the code."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| `SMON_")]
    assert rows == [row_of(each.name) for each in fields(Settings)]
