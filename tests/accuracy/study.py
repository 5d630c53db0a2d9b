"""The study of accuracy: random jobs with a known answer, and how often the diagnosis is right.

``python -m tests.accuracy.study`` (`make accuracy`): windows → scores → summary → page.
One line of JSON on stdout, the page in ``docs/accuracy.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from smon import __version__
from tests.accuracy.page import Run, page
from tests.accuracy.real import real_traces
from tests.accuracy.score import score
from tests.accuracy.summary import Summary, summarise, upper_bound
from tests.accuracy.windows import FIRST_SEED, Case, Outcome, cases, outcome, run

ROOT: Final = Path(__file__).resolve().parent.parent.parent
TRACES: Final = ROOT.parent / "shared" / "traces"

#: With fewer windows some groups would be empty.
_FEWEST: Final = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the study.

    Returns
    -------
    int
        The exit code.
    """
    parsed = _parser().parse_args(arguments)
    # One thread per process; the processes inherit it.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    todo = all_cases(parsed.windows, parsed.clean, parsed.seed)
    if parsed.show is not None:
        return _show(todo, parsed.show)
    begin = time.monotonic()
    cores = os.cpu_count() or 1
    outcomes = _outcomes(todo, cores)
    how = Run(
        windows=parsed.windows,
        clean=parsed.clean,
        seed=parsed.seed,
        seconds=time.monotonic() - begin,
        cores=cores,
        date=datetime.now(UTC).date().isoformat(),
        version=__version__,
        python=platform.python_version(),
    )
    publish(how, outcomes, parsed.out)
    return 0


def all_cases(windows: int, clean: int, seed: int) -> list[Case]:
    """The windows of the study, then so many clean ones on top."""
    more = [Case(number, "clean") for number in range(seed + windows, seed + windows + clean)]
    return cases(windows, seed) + more


def publish(how: Run, outcomes: Sequence[Outcome], out: Path) -> None:
    """Judge, write the page, and print the headline."""
    summary = summarise([score(one) for one in outcomes])
    out.write_text(page(how, outcomes, summary, list(real_traces(TRACES))), encoding="utf-8")
    sys.stdout.write(json.dumps(headline(how, summary)) + "\n")


def headline(how: Run, summary: Summary) -> dict[str, Any]:
    """The figures that count, as plain numbers."""
    clean, pairs = summary.clean, summary.pairs
    return {
        "windows": how.windows + how.clean,
        "seconds": round(how.seconds, 1),
        "clean": clean.of,
        "false_alarms": clean.hits,
        "false_alarms_per_1000_upper95": round(1000 * upper_bound(clean.hits, clean.of), 2),
        "false_alarms_bad_recording": summary.recording.hits,
        "big_single": summary.big_cause.of,
        "big_single_cause_right_ratio": _rounded(summary.big_cause.ratio),
        "big_single_place_right_ratio": _rounded(summary.big_place.ratio),
        "due": sum(row.due for row in summary.rows),
        "found": sum(row.found for row in summary.rows),
        "pairs": pairs.both_found.of,
        "pairs_both_found_ratio": _rounded(pairs.both_found.ratio),
        "failures": len(summary.failures),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _outcomes(todo: Sequence[Case], processes: int) -> list[Outcome]:
    done = []
    shown = sys.stderr.isatty()
    for number, one in enumerate(run(list(todo), processes), 1):
        done.append(one)
        if shown:
            sys.stderr.write(f"\r{number} of {len(todo)} windows")
    if shown:
        sys.stderr.write("\n")
    return done


def _show(todo: Sequence[Case], seed: int) -> int:
    """One window again: what is true, and what is said."""
    wanted = [case for case in todo if case.seed == seed]
    if not wanted:
        sys.stderr.write(
            f"seed {seed} is not one of this study: {todo[0].seed} to {todo[-1].seed}\n"
        )
        return 2
    sys.stdout.write(json.dumps(asdict(outcome(wanted[0])), indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.accuracy.study", description=__doc__)
    parser.add_argument("--windows", type=_windows, default=1000, metavar="N")
    parser.add_argument(
        "--clean", type=int, default=1000, metavar="N", help="clean windows on top of these"
    )
    parser.add_argument("--seed", type=int, default=FIRST_SEED, help="of the first window")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "accuracy.md", metavar="FILE")
    parser.add_argument("--show", type=int, metavar="SEED", help="one window only, as JSON")
    return parser


def _windows(text: str) -> int:
    number = int(text)
    if number < _FEWEST:
        raise argparse.ArgumentTypeError(f"expected at least {_FEWEST}, found {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
