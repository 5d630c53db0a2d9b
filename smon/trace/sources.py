"""Which files a trace consists of, and which meta file belongs to them.

Flow: paths → **here** → `smon.trace.load`.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from smon.errors import MetaError, TraceError, UnknownFormatError
from smon.trace.formats import (
    HEAD_BYTES,
    Reader,
    description,
    looked_for,
    reader_named,
    reader_of,
)
from smon.trace.formats.reading import printable, quoted
from smon.trace.meta import Job, read_meta

_META_SUFFIXES = (".yaml", ".yml", ".json")

#: What stands beside a trace and is none: side evidence, and the answer of a synthetic job.
_BESIDE = frozenset({"context.json", "truth.json"})

_META_NAME = re.compile(r"(meta([-_.].*)?|.*\.meta)\.(yaml|yml|json)", re.IGNORECASE | re.DOTALL)

#: Notes name at most this many of the files that were passed over.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Source:
    """A file that a reader recognises.

    Attributes
    ----------
    folder
        The folder that was given and held it; None if the file itself was given.
    """

    path: Path
    reader: Reader
    folder: Path | None = None

    @property
    def stem(self) -> str:
        """The file's name without ``.gz`` and one more suffix."""
        path = Path(self.path.stem) if self.path.suffix == ".gz" else self.path
        return path.stem

    def meta_candidates(self) -> list[Path]:
        """Where its meta file may be, the most specific first."""
        stem = self.stem
        names = [f"{stem}.meta", "meta"]
        if stem.startswith("trace-"):
            names.insert(0, f"meta-{stem.removeprefix('trace-')}")
        parent = self.path.parent
        found = [parent / f"{name}{suffix}" for name in names for suffix in _META_SUFFIXES]
        if self.folder is not None and self.folder != parent:
            found += [self.folder / f"meta{suffix}" for suffix in _META_SUFFIXES]
        return found

    def missing_meta(self) -> str:
        """The sentence that says that there is none."""
        names = dict.fromkeys(path.stem for path in self.meta_candidates())
        return (
            f"{printable(self.path)}: the layout is unknown: no meta file beside it (looked for "
            f"{', '.join(map(printable, names))}, each .yaml, .yml, .json): give --meta FILE or "
            "--layout tp4-dp4-pp4"
        )


def find_sources(
    paths: Sequence[Path], format_name: str | None = None
) -> tuple[list[Source], list[str]]:
    """The trace files among `paths` and in folders among them, and notes on what was passed over.

    Raises
    ------
    ConfigError
        There is no format of this name.
    UnknownFormatError
        A file that was given is not recognised, or none in a folder is.
    TraceError
        A path does not exist, cannot be read, is no file, or is empty.
    """
    forced = None if format_name is None else reader_named(format_name)
    if not paths:
        raise TraceError("no trace given: expected files, or folders of files")
    sources: dict[Path, Source] = {}
    notes: list[str] = []
    for path in paths:
        if _is_folder(path):
            found, passed_over = _in_folder(path, forced)
            notes += passed_over
        else:
            found = [Source(path, _reader(path, forced))]
        for source in found:
            # A file that is given twice, or by two names, counts once.
            sources.setdefault(source.path.resolve(), source)
    return list(sources.values()), notes


def _is_folder(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise TraceError(f"{printable(path)}: no such file or folder") from None
    # ValueError: a zero byte in the name.
    except (OSError, ValueError) as error:
        raise TraceError(f"{printable(path)}: cannot be read: {quoted(error)}") from error
    if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
        raise TraceError(f"{printable(path)}: expected a file or a folder, found a device or pipe")
    return stat.S_ISDIR(mode)


def _reader(path: Path, forced: Reader | None) -> Reader:
    name = printable(path)
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        raise TraceError(f"{name}: cannot be read: {quoted(error)}") from error
    if not head:
        raise TraceError(f"{name}: the file is empty")
    if forced is not None and not forced.recognises(head, path):
        raise UnknownFormatError(
            f"{name}: not {forced.NAME} (looked for {forced.LOOKS_FOR}): {description(head)}"
        )
    reader = forced or reader_of(head, path)
    if reader is None:
        raise UnknownFormatError(
            f"{name}: unknown format: {description(head)}; looked for {looked_for()}"
        )
    return reader


def _in_folder(folder: Path, forced: Reader | None) -> tuple[list[Source], list[str]]:
    sources: list[Source] = []
    failures: list[tuple[Path, TraceError]] = []
    for path in _files(folder):
        try:
            if not _is_folder(path):
                sources.append(Source(path, _reader(path, forced), folder))
        except TraceError as error:
            failures.append((path, error))
    if not sources:
        raise _no_trace(folder, failures)
    unknown = [path for path, error in failures if isinstance(error, UnknownFormatError)]
    notes = [
        f"left out: {error}" for _, error in failures if not isinstance(error, UnknownFormatError)
    ]
    if unknown:
        notes.append(f"{printable(folder)}: files of unknown format left out: {_listed(unknown)}")
    return sources, notes


def _no_trace(folder: Path, failures: Sequence[tuple[Path, TraceError]]) -> TraceError:
    name = printable(folder)
    if not failures:
        return TraceError(f"{name}: the folder holds no trace file (looked one folder deep)")
    if not any(isinstance(error, UnknownFormatError) for _, error in failures):
        return failures[0][1]
    names = _listed([path for path, _ in failures])
    return UnknownFormatError(f"{name}: no trace among {names}; looked for {looked_for()}")


def _listed(paths: Sequence[Path]) -> str:
    named = ", ".join(printable(path.name) for path in paths[:_NAMED])
    more = len(paths) - _NAMED
    return f"{named} and {more} more" if more > 0 else named


def _files(folder: Path) -> Iterator[Path]:
    """What may be traces in a folder and in its folders, by name."""
    for path in _entries(folder):
        if _is_quietly(path, stat.S_ISDIR):
            yield from (inner for inner in _entries(path) if not _is_quietly(inner, stat.S_ISDIR))
        else:
            yield path


def _entries(folder: Path) -> list[Path]:
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise TraceError(f"{printable(folder)}: cannot be read: {quoted(error)}") from error
    return [folder / name for name in names if _may_be_trace(name)]


def _may_be_trace(name: str) -> bool:
    lower = name.lower()
    beside = lower in _BESIDE or _META_NAME.fullmatch(lower)
    return not (lower.startswith(".") or lower.endswith(".md") or beside)


def _is_quietly(path: Path, kind: Callable[[int], bool]) -> bool:
    """Whether the path is of this kind; False where that cannot be found out.

    ``Path.is_file`` raises in a folder that may be listed but not entered.
    """
    try:
        return kind(path.stat().st_mode)
    except (OSError, ValueError):
        return False


# --- meta files -----------------------------------------------------------------------------


def job_of_meta(path: Path) -> Job:
    """The job of a meta file.

    Raises
    ------
    MetaError
        It cannot be read, or is no meta file.
    """
    if not _is_quietly(path, stat.S_ISREG):
        raise MetaError(f"{printable(path)}: no such meta file, or it is no plain file")
    try:
        job = read_meta(path)
    except MetaError as error:
        # The path in it may hold control characters.
        raise MetaError(printable(error)) from error
    return replace(job, job_id=printable(job.job_id))


def job_beside(sources: Sequence[Source]) -> Job | None:
    """The job of the meta files that stand beside the traces; None if no trace has one.

    Raises
    ------
    MetaError
        Some traces have none though others have, or they are of different jobs.
    """
    metas = [_meta_beside(source) for source in sources]
    found = dict.fromkeys(path for path in metas if path is not None)
    if not found:
        return None
    if None in metas:
        raise MetaError(sources[metas.index(None)].missing_meta())
    jobs = {path: job_of_meta(path) for path in found}
    distinct = list(dict.fromkeys(jobs.values()))
    if len(distinct) > 1:
        names = ", ".join(printable(repr(job.job_id)) for job in distinct[:_NAMED])
        raise MetaError(
            f"expected files of one job, found meta files of {len(distinct)}: {names}: "
            "analyse them one at a time, or give --meta FILE"
        )
    return distinct[0]


def _meta_beside(source: Source) -> Path | None:
    return next(
        (path for path in source.meta_candidates() if _is_quietly(path, stat.S_ISREG)), None
    )
