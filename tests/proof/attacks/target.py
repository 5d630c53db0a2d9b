"""A real server with jobs of two tenants and secrets beside it; everything it answers is judged."""

from __future__ import annotations

import json
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.parser import BytesParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from starlette.routing import Route

from smon.api.pages import page_routes
from smon.store import schema, tokens
from smon.store.database import Database
from smon.store.models import Attempt, Base, Finding, Job, Stream
from smon.store.objects import Objects
from tests.api.filled import Made, add_job, put_workers, report_of
from tests.faults.outside import query
from tests.system.server import ServerProcess

CORPUS: Final = Path(__file__).parents[1] / "corpus"

#: Stands in files that nobody may get; in the names of the other tenant; in a header that an attack
#: tries to add; in the id of a request that an attack smuggles.
SECRET: Final = "c0ntents-0f-a-secret-file"  # noqa: S105  # of a test
FOREIGN: Final = "f0reign-tenant"
INJECTED: Final = "x-injected"
SMUGGLED: Final = "smuggled-request"

#: What only this tenant's token shows.
MINE: Final = "my-0wn-job"

#: What a system's own file of users begins with.
_USERS: Final = "root:x:0:0"

#: Tables that reading may change: when a token was used, who is alive, what a page asked for.
_TOUCHED: Final = frozenset({"tokens", "nodes", "tasks"})

_PATIENCE_S: Final = 60.0
_MANY: Final = re.compile(r"<<(.+?)\*(\d+)>>", re.DOTALL)
_MIME: Final = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back on one connection, first answer first.

    Attributes
    ----------
    raw
        All of it, whatever it is.
    """

    raw: bytes

    @property
    def status(self) -> int:
        """Of the first answer; 0: the connection was closed without one."""
        line = self.raw.split(b"\r\n", 1)[0].split(b" ")
        return int(line[1]) if line[0].startswith(b"HTTP/") and len(line) > 1 else 0

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the first answer, names in lower case."""
        head = _MIME.split(self.raw, maxsplit=1)[0].split(b"\r\n", 1)
        parsed = BytesParser().parsebytes(head[1] if len(head) > 1 else b"")
        return {name.lower(): str(value) for name, value in parsed.items()}

    @property
    def body(self) -> bytes:
        """Of the first answer, and what came behind it."""
        parts = _MIME.split(self.raw, maxsplit=1)
        return parts[1] if len(parts) > 1 else b""

    def json(self) -> Any:  # noqa: ANN401  # JSON
        """The body, parsed."""
        return json.loads(self.body)


@dataclass(slots=True)
class Judged:
    """What was found wrong in all answers so far; each entry says which request.

    Attributes
    ----------
    failed
        Answers 5xx, or none where there had to be one.
    leaked, foreign, injected, smuggled
        Answers with a file's secret, with something of the other tenant, with a header that the
        client made up, to a request that was hidden in another one.
    """

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    injected: list[str] = field(default_factory=list)
    smuggled: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Target:
    """The server, and who may do what.

    Attributes
    ----------
    tokens
        By scope, and ``all``, ``other`` (of the other tenant), ``expired``, ``revoked``.
    made, foreign
        A job of each tenant.
    """

    server: ServerProcess
    url: str
    tokens: dict[str, str]
    made: Made
    foreign: Made
    hostile: dict[str, Made]
    judged: Judged = field(default_factory=Judged)

    def values(self, made: Made | None = None) -> dict[str, str]:
        """What stands for the parameters of a path."""
        made = made or self.made
        return {
            "job_id": made.job_id, "window": made.window_id, "host": f"{MINE}-host",
            "name": f"{MINE}-host", "rank": "3", "n": "0", "import_id": "0" * 16,
            "stream": made.stream_id, "epoch": "0", "seq": "0", "table": "workers",
        }  # fmt: skip

    # --- asking ---------------------------------------------------------------------------------

    def send(self, data: bytes, *, port: int = 0, seconds: float = 0.0) -> Answer:
        """Send bytes on a new connection, and read until it is closed, or for so long."""
        address = ("127.0.0.1", port or self.server.port)
        with socket.create_connection(address, _PATIENCE_S) as connection:
            parts = []
            try:
                connection.sendall(data)
                if seconds:
                    connection.settimeout(seconds)
                while part := connection.recv(1 << 16):
                    parts.append(part)
            except (TimeoutError, ConnectionError):
                pass
        return Answer(b"".join(parts))

    def ask(
        self,
        method: str,
        path: str,
        *,
        token: str | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        port: int = 0,
    ) -> Answer:
        """One request, and what is wrong with its answer; a text path goes as it is, in UTF-8."""
        lines = {"Host": "localhost", "Connection": "close", **(headers or {})}
        if token:
            lines.setdefault("Authorization", f"Bearer {token}")
        if body or method in {"POST", "PUT"}:
            lines.setdefault("Content-Length", str(len(body)))
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        data = f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogateescape") + body
        return self.judge(self.send(data, port=port), f"{method} {path}", token=token)

    def judge(self, answer: Answer, what: str, *, token: str | None = None) -> Answer:
        """Note what is wrong with an answer."""
        judged, text = self.judged, answer.raw.decode("latin-1")
        judged.requests += 1
        judged.statuses[answer.status] += 1
        # A timeline that no worker has drawn yet is 503 by contract.
        if answer.status >= 500 and "problem:not-ready" not in text:
            judged.failed.append(f"{what[:200]}: {answer.status}")
        if SECRET in text or _USERS in text:
            judged.leaked.append(what[:200])
        if FOREIGN in text and token != self.tokens["other"] and FOREIGN not in unquote(what):
            judged.foreign.append(what[:200])
        if INJECTED in answer.headers:
            judged.injected.append(what[:200])
        if SMUGGLED in text:
            judged.smuggled.append(what[:200])
        return answer

    # --- what there is --------------------------------------------------------------------------

    def operations(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Everything that the server says it can be asked, by method and path."""
        document = self.ask("GET", "/api/v1/openapi.json").json()
        return {
            (method.upper(), path): operation
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        }

    def pages(self) -> list[str]:
        """Paths of all pages that can be got."""
        return [
            re.sub(r":\w+\}", "}", route.path)
            for route in page_routes()
            if isinstance(route, Route) and "GET" in (route.methods or ())
        ]

    def paths(self) -> list[str]:
        """Paths of everything that can be got."""
        return [path for method, path in self.operations() if method == "GET"] + self.pages()

    def filled(self, path: str, **changed: str) -> str:
        """A path with its parameters."""
        values = self.values() | changed
        if "/timeline" in path and "job_id" not in changed:
            # One that is there waits for a worker, for 20 s.
            values["job_id"] = "0" * 16
        return re.sub(r"\{(\w+)(?::\w+)?\}", lambda match: values[match[1]], path)

    def rows(self) -> dict[str, list[tuple[Any, ...]]]:
        """All rows that reading must not change, by table."""
        names = sorted(set(Base.metadata.tables) - _TOUCHED)
        return {
            name: sorted(query(self.url, f"SELECT * FROM {name}"), key=repr)  # noqa: S608  # ours
            for name in names
        }


def lines_of(name: str) -> list[str]:
    r"""The lines of a corpus: ``\xNN`` a byte, ``<<TEXT*N>>`` TEXT so often, ``# `` a remark."""
    text = (CORPUS / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("# ")]
    plain = [re.sub(r"\\x([0-9a-f]{2})", _byte, line) for line in lines]
    return [_MANY.sub(lambda match: match[1] * int(match[2]), line) for line in plain]


def _byte(match: re.Match[str]) -> str:
    return bytes([int(match[1], 16)]).decode("utf-8", "surrogateescape")


def sample(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many, evenly spread."""
    step = max(len(items) / max(most, 1), 1.0)
    return [items[int(place * step)] for place in range(min(len(items), most))]


# --- setting it up ----------------------------------------------------------------------------


@contextmanager
def target(folder: Path, names: Sequence[str], url: str = "") -> Iterator[Target]:
    """A server with a job of this tenant, one for each hostile name, and one of another tenant.

    Parameters
    ----------
    url
        Of an empty database; by default SQLite.
    """
    data = folder / "server" / "data"
    data.mkdir(parents=True)
    for place in (folder, folder / "server", data):
        (place / "secret.txt").write_text(SECRET)
    url = url or f"sqlite:///{data / 'smon.db'}"
    database, objects = Database(url), Objects(str(data / "objects"))
    schema.upgrade(database)
    made = _fill(database, objects, names)
    database.close()
    settings: dict[str, Any] = {"min_free_bytes": 0, "log_level": "debug", "database_url": url}
    with ServerProcess(folder / "server", role="api", **settings) as server:
        yield Target(server, url, *made)


def _fill(
    database: Database, objects: Objects, names: Sequence[str]
) -> tuple[dict[str, str], Made, Made, dict[str, Made]]:
    now = time.time_ns()
    with database.write() as session:
        texts = {
            scope: tokens.create(session, "mine", scope, [scope], None, now)
            for scope in tokens.SCOPES
        }
        texts["all"] = tokens.create(session, "mine", "all", tokens.SCOPES, None, now)
        texts["other"] = tokens.create(session, FOREIGN, FOREIGN, tokens.SCOPES, None, now)
        texts["expired"] = tokens.create(session, "mine", "old", tokens.SCOPES, now + 1, now)
        texts["revoked"] = tokens.create(session, "mine", "lost", tokens.SCOPES, None, now)
        tokens.revoke(session, texts["revoked"].split("_")[1], now)
        mine, other = tenants_of(session)
        made = [_job(session, mine, MINE, MINE), _job(session, other, FOREIGN, FOREIGN)]
        hostile = {name: _job(session, mine, name, name) for name in names}
    for each in (*made, *hostile.values()):
        put_workers(objects, each, report_of("slow"))
    return texts, made[0], made[1], hostile


def tenants_of(session: Any) -> tuple[str, str]:  # noqa: ANN401  # a session
    """Ids of both tenants."""
    from smon.store.tenants import tenant_id

    return tenant_id(session, "mine") or "", tenant_id(session, FOREIGN) or ""


def _job(session: Any, tenant: str, name: str, text: str) -> Made:  # noqa: ANN401  # a session
    """A job that has its own text wherever an agent may send one."""
    made = add_job(session, tenant, name, report_of("slow"), notes=[f"a note: {text}"])
    now, host = time.time_ns(), f"{text}-host"
    for row in session.query(Finding).filter_by(job_id=made.job_id):
        row.host, row.gpu_uuid, row.last_ns = host, f"{text}-gpu", now
    stream = session.get_one(Stream, made.stream_id)
    stream.host, stream.source, stream.end_reason = host, text, text
    stream.heartbeat = {"dropped": {text: 2}, "agent": {"version": text, "host": host, "pid": 1}}
    stream.heartbeat_ns = session.get_one(Job, made.job_id).last_data_ns = now
    session.get_one(Attempt, made.attempt_id).last_data_ns = now
    session.flush()
    return made
