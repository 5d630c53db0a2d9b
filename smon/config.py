"""Settings of the server: one frozen value, made from the environment; nothing is read at import.

Every setting has a name in the environment (``SMON_`` and the field's name in capitals), a default
and a line of meaning; ``smon config show`` prints them, ``docs/reference/settings.md`` lists them.
Flow: environment → **here** → `smon.api`, `smon.ingest`, `smon.store`, `smon.worker`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from smon.errors import ConfigError

PREFIX: Final = "SMON_"

#: Not a setting: tells a worker whose child it is, so that it stops when that process is gone.
PARENT_VARIABLE: Final = "SMON_WORKER_PARENT"

_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_DATA_DIR: Final = Path("smon-data")


def _setting(default: Any, meaning: str, low: float = 0, high: float = math.inf) -> Any:  # noqa: ANN401  # fields of many types
    return field(default=default, metadata={"meaning": meaning, "low": low, "high": high})


def _secret_url(meaning: str) -> Any:  # noqa: ANN401  # as above
    """Left out where settings are printed as a whole."""
    return field(default="", repr=False, metadata={"meaning": meaning, "low": 0, "high": math.inf})


@dataclass(frozen=True, slots=True)
class Settings:
    """What a server process runs with; sizes in bytes, times in seconds."""

    # where things are
    data_dir: Path = _setting(  # noqa: RUF009  # paths are immutable
        _DATA_DIR, "folder of the database, events, log and uploads"
    )
    database_url: str = _setting(
        "", "database, e.g. postgresql+psycopg://user@host/smon; empty: SQLite in the data folder"
    )
    trace_url: str = _setting(
        "", "root of the event files, e.g. s3://bucket/prefix; empty: the data folder"
    )
    wal_dir: str = _setting("", "folder of the write-ahead log; empty: in the data folder")
    # network
    host: str = _setting("127.0.0.1", "address to listen on; only loopback works without tokens")
    port: int = _setting(8080, "port of API and pages", 0, 65535)
    ops_port: int = _setting(-1, "port of /healthz, /readyz, /metrics; -1: port + 1", -1, 65535)
    ops_host: str = _setting("", "address of the ops port; empty: as the API")
    public_url: str = _setting("", "address under which people reach the pages, for links")
    runbook_url: str = _setting(
        "", "address below which runbooks lie, for links; empty: the pages of this server"
    )
    start_wait_s: float = _setting(60.0, "wait for a database that is not there at the start")
    worker_ops_port: int = _setting(
        -1, "ops port of a worker; -1: the first free one after the ops port", -1, 65535
    )
    # limits of one request
    max_body_bytes: int = _setting(4 * _MIB, "encoded body of a batch", 1)
    max_decoded_bytes: int = _setting(32 * _MIB, "decoded body of a batch", 1)
    max_ratio: int = _setting(20, "decoded over encoded size, above 64 KiB decoded", 1)
    max_events: int = _setting(100_000, "events of a batch", 1)
    max_json_bytes: int = _setting(1 * _MIB, "body of a request that is no batch", 1)
    max_duration_s: float = _setting(3600.0, "duration of one op", 0)
    max_past_s: float = _setting(7 * 86400.0, "age of an op in live ingest", 0)
    max_future_s: float = _setting(600.0, "how far an op in live ingest may lie ahead", 0)
    receive_timeout_s: float = _setting(15.0, "time for a request to arrive", 0.1)
    keep_alive_s: float = _setting(75.0, "time that an idle connection is kept", 1)
    max_connections_per_address: int = _setting(64, "connections of one address at a time", 1)
    max_connections: int = _setting(8192, "connections of all addresses at a time", 1)
    max_in_flight_bytes: int = _setting(256 * _MIB, "bodies being taken in at a time", 1)
    tenant_requests_per_s: float = _setting(0.0, "ingest requests of one tenant; 0: no limit", 0)
    tenant_events_per_s: float = _setting(0.0, "events of one tenant; 0: no limit", 0)
    max_streams_per_tenant: int = _setting(200_000, "streams of one tenant that are open", 1)
    max_attempt_files: int = _setting(100_000, "files of ranks that one job attempt may send", 1)
    max_attempt_file_bytes: int = _setting(
        64 * _GIB, "bytes of files of ranks that one job attempt may send in a day", 1
    )
    max_import_bytes: int = _setting(8 * _GIB, "files of one import together", 1)
    max_import_files: int = _setting(20_000, "files of one import", 1)
    # decoding of bodies
    decode_processes: int = _setting(
        2, "processes that decode bodies; 0: the server decodes, and a crash there ends it", 0, 64
    )
    decode_timeout_s: float = _setting(
        10.0, "CPU time of one body; the process is ended then", 0.1, 3600
    )
    decode_memory_bytes: int = _setting(1 * _GIB, "memory for one body", 64 * _MIB)
    # write-ahead log
    wal_segment_bytes: int = _setting(64 * _MIB, "size at which a new log segment begins", 4096)
    max_wal_bytes: int = _setting(8 * _GIB, "log that waits to be stored; beyond: 503", 4096)
    min_free_bytes: int = _setting(
        64 * _MIB, "free disk below which the server reads only; it resumes at 1.5 times that", 0
    )
    drain_interval_s: float = _setting(0.5, "pause between two moves from the log to files", 0.01)
    drain_max_bytes: int = _setting(64 * _MIB, "encoded bodies that one move takes", 1)
    # agents
    flush_interval_s: float = _setting(
        0.0, "time between two sends of an agent; 0: 1 s, and up to 10 s as streams become many", 0
    )
    heartbeat_interval_s: float = _setting(15.0, "time between two heartbeats of an agent", 0.1)
    agent_down_s: float = _setting(60.0, "without heartbeat for so long, an agent is down", 1)
    lost_after_s: float = _setting(
        1800.0, "a live job of which nothing is heard for so long is over", 10
    )
    # windows and analysis
    window_steps: int = _setting(40, "steps of a window of a live job", 2, 100_000)
    window_timeout_s: float = _setting(60.0, "wait for missing ranks since the last data", 0.1)
    step_timeout_s: float = _setting(5.0, "wait for missing ranks of one step", 0.1)
    live_steps: int = _setting(24, "steps that the running diagnosis looks back", 2, 10_000)
    live_max_ops: int = _setting(1_000_000, "ops that the running diagnosis looks back", 1000)
    max_window_ops: int = _setting(
        50_000_000, "ops of a window; of larger ones, steps are left out", 1000
    )
    clear_steps: int = _setting(3, "steps without it after which a finding is cleared", 1)
    lease_s: float = _setting(30.0, "time after which work of a silent worker is taken over", 0.5)
    max_tries: int = _setting(3, "tries at a window before it is given up", 1)
    poll_interval_s: float = _setting(0.25, "pause of an idle worker", 0.01)
    price_per_gpu_hour: float = _setting(-1.0, "price of a GPU hour; -1: costs in hours only", -1)
    # notification
    notify_webhook_url: str = _secret_url(
        "where messages about findings go, as JSON; an https address; empty: nowhere"
    )
    notify_slack_url: str = _secret_url(
        "as notify_webhook_url, of an incoming webhook of Slack or one that is like it"
    )
    notify_severity: str = _setting("warning", "least severity of a finding that is told")
    notify_cooldown_s: float = _setting(
        900.0, "a finding that comes back is told again only so long after it was told last", 0
    )
    notify_timeout_s: float = _setting(5.0, "time for one message to be taken", 0.1, 15)
    notify_private: int = _setting(
        0, "1: messages may go to private addresses and this machine, here also by http", 0, 1
    )
    # keeping
    retention_days: float = _setting(30.0, "age at which event files go; 0: never", 0)
    retention_bytes: int = _setting(0, "size of all event files, oldest go first; 0: no limit", 0)
    report_days: float = _setting(0.0, "age at which reports and findings go; 0: never", 0)
    compact_after_s: float = _setting(60.0, "rest of a finished window before it is compacted", 0)
    doomed_grace_s: float = _setting(600.0, "time that replaced files are still readable", 0)
    maintenance_interval_s: float = _setting(30.0, "pause between two rounds of housekeeping", 0.1)
    # metrics
    metrics_max_series: int = _setting(
        20_000, "series of one scrape; beyond, the jobs that lose least are left out", 2_000
    )
    metrics_silent_s: float = _setting(
        900.0, "a job of which nothing was heard for so long has no metrics", 1
    )
    # process
    stop_timeout_s: float = _setting(5.0, "time to finish requests and the log when stopping", 0.1)
    log_level: str = _setting("info", "debug, info, warning or error")

    @classmethod
    def from_env(cls, environ: Mapping[str, str], **given: object) -> Settings:
        """Settings of an environment; what is `given` and not None goes before it.

        Raises
        ------
        ConfigError
            A value cannot be read or is out of range.
        """
        values: dict[str, Any] = {}
        for each in fields(cls):
            text = environ.get(PREFIX + each.name.upper())
            if given.get(each.name) is not None:
                values[each.name] = _checked(each.name, given[each.name])
            elif text is not None:
                values[each.name] = _checked(each.name, _parsed(each.name, text))
        return cls(**values)

    def to_env(self) -> dict[str, str]:
        """The environment that makes these settings, for a process of the same server."""
        return {variable_of(each.name): str(getattr(self, each.name)) for each in fields(self)}

    @property
    def database(self) -> str:
        """SQLAlchemy URL of the database."""
        return self.database_url or f"sqlite:///{(self.data_dir / 'smon.db').absolute()}"

    @property
    def traces(self) -> str:
        """Root of the event files: a local folder, or a URL."""
        return self.trace_url or str((self.data_dir / "objects").absolute())

    @property
    def wal(self) -> Path:
        """Folder of the write-ahead log."""
        return Path(self.wal_dir) if self.wal_dir else self.data_dir / "wal"

    @property
    def operations_port(self) -> int:
        """Port of health and metrics."""
        return self.ops_port if self.ops_port >= 0 else (self.port + 1 if self.port else 0)

    @property
    def price(self) -> float | None:
        """Price of a GPU hour; None if there is none."""
        return None if self.price_per_gpu_hour < 0 else self.price_per_gpu_hour


_META: Final = {each.name: each for each in fields(Settings)}
_CHOICES: Final = {
    "log_level": ("debug", "info", "warning", "error"),
    "notify_severity": ("info", "warning", "critical"),
}

#: Addresses that whoever knows them can use: shown without path, in no log and no error.
SECRET_URLS: Final = frozenset({"notify_webhook_url", "notify_slack_url"})
_SECRET_URL: Final = re.compile(
    r"(https?)://([\w.\-]+|\[[0-9a-fA-F:.]+\])(:\d{1,5})?(/[!-\"$-~]*)?"
)
MASK: Final = "***"


def meaning_of(name: str) -> str:
    """What a setting is, in a few words."""
    return str(_META[name].metadata["meaning"])


def default_of(name: str) -> object:
    """What a setting is if nobody says otherwise."""
    return _META[name].default


def variable_of(name: str) -> str:
    """Name of a setting in the environment."""
    return PREFIX + name.upper()


def masked_url(url: str) -> str:
    """An address of `SECRET_URLS` without what makes it secret."""
    match = _SECRET_URL.fullmatch(url)
    return f"{match[1]}://{match[2]}{match[3] or ''}/{MASK}" if match else MASK


def _is_secret_url(text: str) -> bool:
    try:
        return bool(_SECRET_URL.fullmatch(text)) and urlsplit(text).port != 0
    except ValueError:  # a port or an address that there cannot be
        return False


def _parsed(name: str, text: str) -> object:
    kind = type(_META[name].default)
    parse: Callable[[str], object] = Path if issubclass(kind, Path) else kind
    try:
        return parse(text.strip())
    except ValueError as error:
        wanted = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{variable_of(name)}: expected {wanted}, found {text!r}") from error


def _checked(name: str, value: object) -> object:
    data = _META[name].metadata
    choices = _CHOICES.get(name)
    if choices and value not in choices:
        raise ConfigError(
            f"{variable_of(name)}: expected one of {', '.join(choices)}, found {value!r}"
        )
    if name in SECRET_URLS and value and not _is_secret_url(str(value)):
        raise ConfigError(
            f"{variable_of(name)}: expected https://HOST/PATH without name, password and fragment, "
            "found something else"
        )
    # Comparing is False for NaN.
    if isinstance(value, int | float) and not data["low"] <= value <= data["high"]:
        raise ConfigError(
            f"{variable_of(name)}: expected a number from {data['low']} to {data['high']}, "
            f"found {value!r}"
        )
    return value
