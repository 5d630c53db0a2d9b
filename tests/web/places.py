"""Hosts, ranks and agents in a store, by hand, where a test must know the numbers."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson
import zstandard
from sqlalchemy import delete

from smon.store.models import Attempt, EventFile, Finding, FindingEvent, new_id
from tests.api.filled import NOW, SECOND, Made, World, add_finding, report_of

HTML: Final = {"accept": "text/html"}
DAY: Final = 86_400 * SECOND


def page(world: World, path: str, code: int = 200) -> str:
    """A page, in one line."""
    answer = world.client().get(path, headers=HTML)
    assert answer.status_code == code, answer.text
    return " ".join(answer.text.split())


def section(text: str, name: str) -> str:
    """A section of a page, by its id."""
    found = re.search(rf'<section[^>]* id="{name}".*?</section>', text)
    assert found is not None, name
    return found[0]


def words(text: str) -> str:
    """What is left of HTML without its elements."""
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def table(world: World, path: str) -> list[dict[str, str]]:
    """A CSV file."""
    answer = world.client().get(path)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/csv")
    return list(csv.DictReader(io.StringIO(answer.text)))


def suspect(world: World, made: Made, **fields: Any) -> str:  # noqa: ANN401  # of the row
    """A finding about a host; its id.

    Unless told otherwise: 0.36 s per step, a tenth of the step, in steps 0 to 99.
    """
    document = report_of("slow").to_dict()["findings"][0]
    row: dict[str, Any] = {
        "excess_s": 0.36, "excess_share": 0.1, "onset_step": None, "opened_step": 0,
        "last_step": 99, "opened_ns": NOW - 2 * DAY, "last_ns": NOW - DAY,
        "host": "node-1", "gpu_uuid": None, **fields,
    }  # fmt: skip
    if row.get("state") == "cleared":
        row |= {"cleared_step": row["last_step"], "cleared_ns": row["last_ns"]}
    with world.database.write() as session:
        attempt = session.get(Attempt, made.attempt_id)
        assert attempt is not None
        last_step = row.pop("last_step")
        return add_finding(session, attempt, document, last_step, **row).id


def finding_row(attempt: Attempt, **fields: Any) -> Finding:  # noqa: ANN401  # of the row
    """A finding about a host, not in the database: 0.36 s per step in steps 0 to 99, open."""
    plain: dict[str, Any] = {
        "id": new_id(), "tenant_id": attempt.tenant_id, "job_id": attempt.job_id,
        "attempt_id": attempt.id, "key": new_id(), "state": "open", "verdict": "straggler",
        "cause": "slow_gpu", "scope": "rank", "severity": "warning", "rank": 1, "host": "node-1",
        "excess_s": 0.36, "excess_share": 0.1, "opened_step": 0, "opened_ns": NOW - 2 * DAY,
        "last_step": 99, "last_ns": NOW - DAY, "document": {},
    }  # fmt: skip
    return Finding(**{**plain, **fields})


def forget_findings(world: World) -> None:
    """Leave no finding, and no event of one."""
    with world.database.write() as session:
        session.execute(delete(FindingEvent))
        session.execute(delete(Finding))


def put_context(
    world: World, made: Made, documents: Iterable[Mapping[str, Any] | bytes], first: int = -1
) -> None:
    """A file of side evidence; `first` -1: of the whole attempt."""
    lines = [one if isinstance(one, bytes) else orjson.dumps(one) for one in documents]
    path = f"events/job={made.job_id}/day=2026-09-21/w0-{len(lines)}-{first}.jsonl.zst"
    packed = zstandard.ZstdCompressor().compress(b"\n".join(lines))
    world.objects.put(path, packed)
    with world.database.write() as session:
        session.add(
            EventFile(
                tenant_id=world.tenant_id, job_id=made.job_id, attempt_id=made.attempt_id,
                window_id=made.window_id if first >= 0 else None, kind="context", path=path,
                rows=1, bytes=len(packed), first_step=first,
                last_step=first if first < 0 else first + 23, created_ns=NOW,
            )
        )  # fmt: skip


def readings(*rows: tuple[int, int, str, float]) -> dict[str, list[Any]]:
    """A table of counters: step, rank, name, value."""
    columns = zip(*rows, strict=True)
    return dict(zip(("step", "rank", "name", "value"), map(list, columns), strict=True))
