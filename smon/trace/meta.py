"""The description of a job that stands beside its trace: names and parallel layout.

Meta files are YAML or JSON with the keys of the public traces (``trial_name``, ``run_id``,
``dp_size``, ``pp_size``, ``tp_size``, ``dsp_size``, ``vpp_size``, ``world_size``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from smon.errors import MetaError, TopologyError
from smon.topology import Layout, layout_from_meta

#: A meta file is a dozen lines; anything larger is something else.
MAX_META_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Job:
    """Which job a trace belongs to, and how it was laid out.

    Attributes
    ----------
    job_id
        Name of the job, as its owner knows it.
    attempt
        Restart count: a step can occur once per attempt.
    """

    job_id: str
    layout: Layout
    attempt: int = 0


def read_meta(path: Path) -> Job:
    """Read a meta file.

    Raises
    ------
    MetaError
        The file cannot be read, is not a mapping, or its layout is wrong.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_META_BYTES + 1)
    except OSError as error:
        raise MetaError(f"{path}: cannot read the meta file: {error.strerror}") from error
    if len(raw) > MAX_META_BYTES:
        raise MetaError(f"{path}: a meta file has a few lines, this one is over 1 MiB")
    return job_from_meta(_parse(raw, path), path)


def job_from_meta(meta: Mapping[str, object], source: Path) -> Job:
    """The job of a parsed meta file; `source` is named in errors and is the fallback for its name.

    Raises
    ------
    MetaError
        The layout is missing, malformed or contradicts itself.
    """
    try:
        layout = layout_from_meta(meta)
    except TopologyError as error:
        raise MetaError(f"{source}: {error}") from error
    name = meta.get("job_id", meta.get("trial_name"))
    attempt = meta.get("attempt", 0)
    if not isinstance(attempt, int) or attempt < 0:
        raise MetaError(f"{source}: attempt must be 0 or more, found {attempt!r}")
    return Job(str(name) if name is not None else source.stem, layout, attempt)


def _parse(raw: bytes, path: Path) -> Mapping[str, object]:
    if path.suffix == ".json":
        try:
            parsed = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise MetaError(f"{path}: not valid JSON: {error}") from error
    else:
        import yaml

        try:
            parsed = yaml.safe_load(raw)
        # Tags such as `!!bool maybe` make PyYAML itself stumble.
        except (
            yaml.YAMLError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            RecursionError,
        ) as error:
            line = " ".join(str(error).split())
            raise MetaError(f"{path}: not valid YAML: {line}") from error
    if not isinstance(parsed, dict):
        raise MetaError(f"{path}: expected keys such as dp_size and pp_size, found no mapping")
    return {str(key): value for key, value in parsed.items()}
