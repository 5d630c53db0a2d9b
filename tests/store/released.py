"""Databases, event files and logs as released versions left them, and how a new one is kept.

``python -m tests.store.released`` writes ``golden/REVISION/`` for the newest schema: its tables as
SQL for both databases (``sqlite.sql``, ``postgresql.sql``), rows in every table (``rows.jsonl``),
event files (``objects/``) and a log that was not stored yet (``wal/``). ``docs/releases.md`` says
when. What a release has made is never made anew.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psycopg
from alembic.script import ScriptDirectory
from sqlalchemy import JSON, Connection, MetaData, Table, create_engine, insert, select
from sqlalchemy.orm import Session

from smon.ingest.wal import Wal
from smon.store import schema
from smon.store.database import Database
from smon.store.models import (
    Attempt,
    Base,
    FileDrop,
    Import,
    Mode,
    Node,
    Notice,
    SentFile,
    Task,
    Tenant,
    Token,
)
from smon.store.objects import Objects
from smon.store.results import packed
from smon.store.streams import StreamInfo, heartbeat
from smon.topology import Layout
from tests.api.filled import Made, add_job, put_workers, report_of
from tests.faults.postgres import Postgres, postgres, programs
from tests.ingest.batches import metrics, ops, record_head, settings
from tests.store.rows import NOW, open_stream, request, stored_job
from tests.system.server import quiet_environ
from tests.waiting import wait_until

GOLDEN: Final = Path(__file__).with_name("golden")

#: Opens everything of the tenant of these databases.
TOKEN: Final = "smon_golden01_" + "golden" * 7  # of no server
TENANT: Final = "golden"

#: Ops that are in the log and in no file.
LOGGED_EVENTS: Final = 24

_BYTES: Final = "base64:"
_ROWS: Final = "rows.jsonl"

#: What pg_dump writes besides statements that make something.
_NOISE: Final = re.compile(r"--.*|SET .*|SELECT pg_catalog\.set_config.*|\\.*|")


@dataclass(frozen=True, slots=True)
class Released:
    """What one version left behind.

    Attributes
    ----------
    revision
        Of its schema.
    """

    revision: str

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return GOLDEN / self.revision

    def rows(self) -> dict[str, list[dict[str, Any]]]:
        """Rows by table, bytes as they are."""
        found: dict[str, list[dict[str, Any]]] = {}
        for line in (self.folder / _ROWS).read_text(encoding="utf-8").splitlines():
            table, row = json.loads(line)
            found.setdefault(table, []).append({name: _plain(row[name]) for name in row})
        return found

    def load(self, url: str, data: Path) -> None:
        """Make an empty database and an empty data folder what they were."""
        sqlite = url.startswith("sqlite:///")
        script = self.folder / ("sqlite.sql" if sqlite else "postgresql.sql")
        _execute(url, script.read_text(encoding="utf-8"))
        engine = create_engine(_driver(url))
        with engine.begin() as connection:
            _insert(connection, self.rows())
        engine.dispose()
        for name in ("objects", "wal"):
            shutil.copytree(self.folder / name, data / name)


def revisions() -> list[str]:
    """All revisions of the schema that there are, the oldest first."""
    scripts = ScriptDirectory.from_config(schema._config()).walk_revisions()
    return [script.revision for script in scripts][::-1]


def released() -> list[Released]:
    """All that is kept, the oldest first."""
    return [Released(path.name) for path in sorted(GOLDEN.iterdir()) if path.is_dir()]


def _plain(value: object) -> object:
    if isinstance(value, str) and value.startswith(_BYTES):
        return base64.b64decode(value.removeprefix(_BYTES))
    return value


def _encoded(value: object) -> object:
    return _BYTES + base64.b64encode(value).decode() if isinstance(value, bytes) else value


def _driver(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://")


def _execute(url: str, script: str) -> None:
    if url.startswith("sqlite:///"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        connection.executescript(script)
        connection.close()
        return
    with psycopg.connect(url) as session:
        session.execute(script.encode())


def _insert(connection: Connection, rows: dict[str, list[dict[str, Any]]]) -> None:
    for table in tables(connection):
        if rows.get(table.name):
            connection.execute(insert(table), rows[table.name])


def tables(connection: Connection) -> list[Table]:
    """Tables as the database itself describes them, those that others refer to first."""
    found = MetaData()
    found.reflect(connection)
    for table in found.sorted_tables:
        for column in table.columns:
            if isinstance(column.type, JSON):
                # Otherwise None becomes the JSON text null, which is not the NULL of SQL.
                column.type.none_as_null = True
    return found.sorted_tables


# --- what a version leaves behind -------------------------------------------------------------


def keep(folder: Path) -> None:
    """Write what this version leaves behind into a new folder.

    Raises
    ------
    ValueError
        A table has no row.
    """
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="smon-golden-") as name:
        path = Path(name) / "smon.db"
        database, objects = Database(f"sqlite:///{path}"), Objects(str(folder / "objects"))
        schema.upgrade(database)
        _fill(database, objects, folder)
        database.close()
        (folder / "sqlite.sql").write_text(_of_sqlite(path), encoding="utf-8")
        lines = list(_rows_of(path))
    missing = set(Base.metadata.tables) - {json.loads(line)[0] for line in lines}
    if missing:
        raise ValueError(f"expected rows in every table, found none in {', '.join(missing)}")
    (folder / _ROWS).write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    with postgres() as server:
        (folder / "postgresql.sql").write_text(_of_postgres(server), encoding="utf-8")


def _of_sqlite(path: Path) -> str:
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid")
    statements = [re.sub(r"\s+\n", "\n", statement) for (statement,) in found]
    connection.close()
    return "".join(f"{statement};\n" for statement in statements)


def _rows_of(path: Path) -> Iterator[str]:
    engine = create_engine(f"sqlite:///{path}")
    with engine.connect() as connection:
        for table in tables(connection):
            for row in connection.execute(select(table).order_by(*table.columns)).mappings():
                values = {name: _encoded(value) for name, value in row.items()}
                yield json.dumps([table.name, values], ensure_ascii=False)
    engine.dispose()


def _of_postgres(server: Postgres) -> str:
    url = server.new("golden")
    database = Database(url)
    schema.upgrade(database)
    database.close()
    dump = (programs() or Path()) / "pg_dump"
    command = [str(dump), "--schema-only", "--no-owner", "--no-privileges", "--no-comments", url]
    done = subprocess.run(command, env=quiet_environ(), capture_output=True, text=True, check=True)
    kept = (line.rstrip() for line in done.stdout.splitlines() if not _NOISE.fullmatch(line))
    return "".join(line + "\n" for line in kept)


def _fill(database: Database, objects: Objects, folder: Path) -> None:
    """A job with everything, a live one with event files, one that is in the log alone."""
    report = report_of("slow")
    with database.write() as session:
        tenant = _add_tenant(session)
        made = add_job(session, tenant, "golden job", report, live_report=packed(report))
        _add_others(session, tenant, made)
        usage = {"spool_bytes": 12, "oldest_unsent_s": 0.5, "dropped": {"full": 2}}
        heartbeat(session, tenant, made.stream_id, usage, (-5, 10), NOW)
    put_workers(objects, made, report)
    stored_job(database, objects, windows=2, tenant=tenant)
    _log(open_stream(database, tenant, _late()), folder)


def _add_tenant(session: Session) -> str:
    tenant = Tenant(name=TENANT, created_ns=NOW)
    session.add(tenant)
    session.flush()
    secret = TOKEN.rpartition("_")[2]
    session.add(
        Token(
            kid="golden01", tenant_id=tenant.id, name="everything", scopes="ingest read admin",
            sha256=hashlib.sha256(secret.encode()).hexdigest(), created_ns=NOW,
        )
    )  # fmt: skip
    return tenant.id


def _add_others(session: Session, tenant: str, made: Made) -> None:
    """What neither an agent nor a worker leaves behind when all goes well."""
    of_job: dict[str, Any] = {"tenant_id": tenant, "job_id": made.job_id}
    attempt = session.get_one(Attempt, made.attempt_id)
    attempt.live_step, attempt.live_analysed_ns, attempt.live_verdict = 23, NOW, "single-worker"
    path = f"events/job={made.job_id}/part-0"
    session.add_all(
        [
            SentFile(
                **of_job, attempt_id=made.attempt_id, key="file 1", state="gathering",
                name="rank0.json.gz", format="rank-events", rank=0, world_size=16,
                sha256="0" * 64, bytes=10, parts=2, have=[[0, path]], created_ns=NOW,
            ),
            FileDrop(
                **of_job, attempt_id=made.attempt_id, reason="incomplete", files=3,
                name="rank7.json.gz", last_ns=NOW,
            ),
            Import(
                tenant_id=tenant, state="failed", options={"job": "an import"}, created_ns=NOW,
                files=[{"n": 0, "name": "a.parquet", "bytes": 1, "sha256": "0" * 64}],
                error="expected a trace", finished_ns=NOW,
            ),
            Task(
                tenant_id=tenant, key="timeline 1", kind="timeline", options={"steps": [0, 1]},
                state="failed", error="expected a worker", created_ns=NOW, finished_ns=NOW,
            ),
            Notice(
                **of_job, channel="webhook", key="slow-device worker", told_severity="critical",
                opened_ns=NOW, told_ns=NOW, messages=1, state="done", created_ns=NOW,
            ),
            Node(
                id="api-golden", role="api", host="node-1", started_ns=NOW, seen_ns=NOW,
                version="0.1.0",
            ),
        ]
    )  # fmt: skip


def _late() -> Any:  # noqa: ANN401  # a request of a stream
    """A recorded job, all of whose ops are in the log."""
    return replace(
        request("late"), job="late job", mode=Mode.RECORDED, layout=Layout(dp=4, pp=2), ranks=(1,),
        window_steps=10,
    )  # fmt: skip


def _log(stream: StreamInfo, folder: Path) -> None:
    """A log of two batches that were acknowledged."""
    log = Wal(settings(folder), metrics().wal)
    log.open()
    log.start()
    for seq in range(2):
        batch = ops(seq, LOGGED_EVENTS // 2)
        head = record_head(batch, stream.id)
        origin = replace(
            head.origin,
            tenant_id=stream.tenant_id,
            job_id=stream.job_id,
            attempt_id=stream.attempt_id,
        )
        log.append(replace(head, origin=origin), batch.body, lambda _: None)
    log.flush()
    wait_until(lambda: log.pending_records == 2, "two records in the log")
    log.close()
    (folder / "wal" / "lock").unlink(missing_ok=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep what the newest schema looks like."""
    parser = argparse.ArgumentParser(prog="python -m tests.store.released", description=__doc__)
    parser.add_argument("--again", action="store_true", help="in place of what no release has yet")
    parsed = parser.parse_args(arguments)
    folder = GOLDEN / schema.newest()
    if folder.exists() and not parsed.again:
        print(f"{folder} is kept already; --again if no release has this schema")  # noqa: T201  # a command
        return 0
    with tempfile.TemporaryDirectory(prefix="smon-golden-") as name:
        keep(Path(name) / "new")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(Path(name) / "new", folder)
    print(f"{folder}: schema {schema.newest()}")  # noqa: T201  # a command
    return 0


if __name__ == "__main__":
    sys.exit(main())
