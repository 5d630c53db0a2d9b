"""Reports of windows: exactly one for each window and code version.

Flow: `smon.worker.windows` → **here** → table ``results``, which lists and pages read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import zstandard
from sqlalchemy import insert, select, update
from sqlalchemy.orm import Session

from smon.errors import StoreError
from smon.report import JobReport
from smon.store.models import Result, new_id

_LEVEL: Final = 6

#: No report is larger: that of 16,384 workers takes some 5 MB.
MAX_REPORT_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class ResultKey:
    """Whose report it is, and of what.

    Attributes
    ----------
    revision
        Of the window when its events were read.
    fence
        Of the claim under which it was made.
    """

    tenant_id: str
    job_id: str
    attempt_id: str
    window_id: str
    code_version: str
    revision: int
    fence: int


def packed(report: JobReport) -> bytes:
    """A report as tables keep it: its JSON in zstd."""
    return zstandard.ZstdCompressor(level=_LEVEL).compress(report.to_json().encode())


def unpacked(report: bytes) -> bytes:
    """The JSON of a report.

    Raises
    ------
    StoreError
        It is damaged.
    """
    try:
        return zstandard.ZstdDecompressor().decompress(report, max_output_size=MAX_REPORT_BYTES)
    except zstandard.ZstdError as error:
        raise StoreError(f"a stored report is damaged: {error}") from error


def finite(value: float | None) -> float | None:
    """A number that a table can hold: None for NaN and infinity, as in the report's JSON."""
    return value if value is not None and math.isfinite(value) else None


def workers_path(job_id: str, result_id: str) -> str:
    """Where the Parquet file of every worker in every step lies."""
    return f"results/job={job_id}/{result_id}-workers.parquet"


@dataclass(frozen=True, slots=True)
class NewResult:
    """A report and what stands beside it.

    Attributes
    ----------
    id
        Of the row, if it is a new one.
    analysis_s
        How long it took.
    workers_path
        None if nothing is known of the workers.
    """

    id: str
    report: JobReport
    analysis_s: float
    workers_path: str | None


def fresh_id() -> str:
    """An id for a result; the file of its workers is named after it."""
    return new_id()


def numbers_of(report: JobReport) -> dict[str, Any]:
    """What lists show of a report, by column of ``results``; no number is NaN."""
    return {
        "verdict": report.verdict,
        "slowdown": finite(report.slowdown.paper),
        "waste_ratio": finite(report.waste_ratio),
        "recorded_s": finite(report.step_time.recorded_s),
        "ideal_s": finite(report.step_time.ideal_s),
        "aligned": report.quality.clock.aligned,
    }


def put_result(session: Session, key: ResultKey, new: NewResult, now: int) -> str | None:
    """Write the report of a window, in place of an earlier one of the same code version.

    Returns
    -------
    str or None
        Path of the file that nothing refers to any more.
    """
    report = new.report
    values = {
        "revision": key.revision,
        "fence": key.fence,
        "created_ns": now,
        "analysis_s": new.analysis_s,
        **numbers_of(report),
        "cause": report.findings[0].cause if report.findings else None,
        "coverage_ratio": report.window.coverage_ratio,
        "report": packed(report),
        "workers_path": new.workers_path,
    }
    found = session.execute(
        select(Result.id, Result.workers_path).where(
            Result.window_id == key.window_id, Result.code_version == key.code_version
        )
    ).first()
    if found is None:
        ids = {name: getattr(key, name) for name in ("tenant_id", "job_id", "attempt_id")}
        session.execute(
            insert(Result).values(
                id=new.id,
                window_id=key.window_id,
                code_version=key.code_version,
                **ids,
                **values,
            )
        )
        return None
    session.execute(
        update(Result)
        .where(Result.id == found.id)
        .values(**values)
        .execution_options(synchronize_session=False)
    )
    old: str | None = found.workers_path
    return old if old != new.workers_path else None
