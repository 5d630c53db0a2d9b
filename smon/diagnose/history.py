"""The job's own earlier windows: the only reference that sees all ranks slow alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smon.errors import ConfigError

_EXPECTED = "expected an earlier report (smon analyze --json) with step times"
#: No step takes a year.
_MAX_S = 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class Earlier:
    """What an earlier report of the same job says.

    Attributes
    ----------
    last_step
        Of its window.
    simulated_s, ideal_s
        Mean step times without launch delays, and ideal.
    """

    job_id: str
    last_step: int
    simulated_s: float
    ideal_s: float


@dataclass(frozen=True, slots=True)
class History:
    """Typical step times of the earlier windows, in seconds."""

    windows: int
    simulated_s: float
    ideal_s: float
    last_step: int


def earlier_of(report: object) -> Earlier:
    """Read an earlier report (``smon analyze --json``).

    Raises
    ------
    ConfigError
        It is no report of schema ``smon.report/1``, or one without numbers.
    """
    try:
        if report["schema"] != "smon.report/1":  # type: ignore[index]
            raise ConfigError(f"expected schema smon.report/1, found {report['schema']!r}")  # type: ignore[index]
        times = report["step_time"]  # type: ignore[index]
        one = Earlier(
            job_id=str(report["job"]["job_id"]),  # type: ignore[index]
            last_step=int(report["window"]["last_step"]),  # type: ignore[index]
            simulated_s=float(times["simulated_s"]),
            ideal_s=float(times["ideal_s"]),
        )
    except (TypeError, KeyError, ValueError, IndexError, OverflowError) as error:
        raise ConfigError(_EXPECTED) from error
    if not all(0.0 < seconds < _MAX_S for seconds in (one.simulated_s, one.ideal_s)):
        raise ConfigError(_EXPECTED)
    return one


def history_of(earlier: Sequence[Earlier], job_id: str) -> History | None:
    """Typical times over the earlier windows of one job; None without any.

    Raises
    ------
    ConfigError
        A report belongs to another job.
    """
    for one in earlier:
        if one.job_id != job_id:
            raise ConfigError(
                f"the earlier report is about job {one.job_id!r}, this trace about {job_id!r}: "
                "give reports of the same job"
            )
    if not earlier:
        return None
    return History(
        windows=len(earlier),
        simulated_s=float(np.median([one.simulated_s for one in earlier])),
        ideal_s=float(np.median([one.ideal_s for one in earlier])),
        last_step=max(one.last_step for one in earlier),
    )
