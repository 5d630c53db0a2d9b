"""Imports: what is asked for, and how far it is."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from smon.api.schemas.base import ID_EXAMPLE, Model, Question, Time

_NAME = r"^[^\x00-\x1f\x7f]+$"


class ImportQuestion(Question):
    """What is known of the files before they come; all of it can be left out."""

    job: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        pattern=_NAME,
        description="name of the job; by default that of the trace",
        examples=["llama-70b-pretrain"],
    )
    attempt: int | None = Field(
        default=None, ge=0, le=2**31 - 1, description="restart count", examples=[0]
    )
    layout: str | None = Field(
        default=None,
        max_length=64,
        pattern=r"^[A-Za-z0-9-]+$",
        description="parallel sizes, if there is no meta file",
        examples=["tp8-dp8-pp4"],
    )
    meta: str | None = Field(
        default=None,
        max_length=256 * 1024,
        description="text of the meta file, YAML or JSON",
        examples=["dp_size: 8\npp_size: 4\n"],
    )
    format: str | None = Field(
        default=None,
        max_length=64,
        pattern=r"^[A-Za-z0-9._-]+$",
        description="read the files as this format instead of recognising it",
        examples=["parquet"],
    )


class FileModel(Model):
    """A file of an import."""

    n: int = Field(description="its number, from 0", examples=[0])
    name: str = Field(description="as its owner calls it", examples=["trace.parquet"])
    bytes: int = Field(description="its size", examples=[48_213])
    sha256: str = Field(
        description="its digest, hexadecimal",
        examples=["2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"],
    )


class ImportModel(Model):
    """An import and how far it is."""

    id: str = Field(description="id of the import", examples=[ID_EXAMPLE])
    state: str = Field(description="uploading, queued, running, done or failed", examples=["done"])
    options: dict[str, Any] = Field(description="as given", examples=[{"job": "llama-70b"}])
    file_count: int = Field(description="files that have come", examples=[1])
    bytes: int = Field(description="their size together", examples=[48_213])
    files: list[FileModel] = Field(description="the first 100 of them")
    progress: float = Field(description="from 0 to 1", examples=[1.0])
    phase: str | None = Field(description="what is being done", examples=[None])
    error: str | None = Field(description="why it failed", examples=[None])
    job_id: str | None = Field(description="the job that it became", examples=[ID_EXAMPLE])
    window_id: str | None = Field(description="its window", examples=[ID_EXAMPLE])
    created_s: Time
    finished_s: Time | None
