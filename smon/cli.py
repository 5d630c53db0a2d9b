"""The ``smon`` command: parse, call, print.

Exit codes: 0 analysed, 2 bad usage or unreadable input (one line on stderr), 3 analysed but the
data is insufficient. Heavy modules are imported by the commands that need them, so that
``smon --help`` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from smon import __version__
from smon.commands.shared import Progress, price, progress_bar
from smon.errors import ConfigError, NothingUsableError, SMonError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from smon.diagnose.history import History
    from smon.report import JobReport
    from smon.topology import Layout
    from smon.trace.load import Trace

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_INSUFFICIENT = 3
_EXIT_INTERRUPTED = 130

#: No stage has a million layers.
_MAX_DIGITS = 7

_EXIT_CODES = """\
exit codes: 0 analysed, 2 bad usage or unreadable input, 3 insufficient data
"""


class _Parser(argparse.ArgumentParser):
    """Errors in one line, with the way to the help."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns
    -------
    int
        The exit code.
    """
    parsed = _parser().parse_args(arguments)
    try:
        code: int = parsed.run(parsed)
        sys.stdout.flush()
    except NothingUsableError as error:
        return _fail(parsed, error, EXIT_INSUFFICIENT)
    except SMonError as error:
        return _fail(parsed, error, EXIT_USAGE)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has seen enough; what is still buffered has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    return code


def _fail(parsed: argparse.Namespace, error: SMonError, code: int) -> int:
    line = " ".join(str(error).split())
    print(f"smon {parsed.command}: error: {line}", file=sys.stderr)
    return code


def _parser() -> _Parser:
    parser = _Parser(
        prog="smon",
        description="Find out why a large training job is slower than it should be.",
        epilog=_EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"smon {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    _add_analyze(commands)
    _add_plan(commands)
    _add_synth(commands)
    _add_service(commands)
    return parser


#: Modules of `smon.commands`, in the order of the help.
_SERVICE = (
    "demo",
    "serve",
    "worker",
    "import_",
    "fleet",
    "db",
    "token",
    "backup",
    "config",
    "notify",
)


def _add_service(commands: _SubParsersAction[_Parser]) -> None:
    for name in _SERVICE:
        importlib.import_module(f"smon.commands.{name}").add(commands)


def _add_analyze(commands: _SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "analyze",
        help="say how much time a job loses, and where",
        description="Analyse the trace of one job.",
        epilog=_EXIT_CODES,
    )
    _add_trace_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="OUT",
        help="write the actual and the ideal timeline, for Perfetto",
    )
    parser.add_argument(
        "--repair",
        type=_worker,
        metavar="DP,STAGE",
        action="append",
        default=[],
        help="add the slowdown against this worker computing like its peers; "
        "may be given several times",
    )
    parser.add_argument(
        "--history",
        type=Path,
        metavar="REPORT",
        action="append",
        default=[],
        help="an earlier report of the same job (--json): adds the slowdown against it; may be "
        "given several times",
    )
    parser.set_defaults(run=_analyze)


def _add_trace_arguments(parser: _Parser) -> None:
    """Which trace, which part of it, and the price of its GPUs."""
    parser.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="trace file, or directory of the files of all ranks",
    )
    parser.add_argument(
        "--meta",
        type=Path,
        metavar="FILE",
        help="meta file, YAML or JSON; by default looked for beside the trace",
    )
    parser.add_argument(
        "--layout",
        type=_layout,
        metavar="tp4-dp4-pp4",
        help="parallel sizes, if there is no meta file",
    )
    parser.add_argument(
        "--format", metavar="NAME", help="read the files as this format instead of recognising it"
    )
    parser.add_argument(
        "--steps",
        type=_steps,
        metavar="A-B",
        default=(None, None),
        help="only steps A to B; either may be left out",
    )
    parser.add_argument(
        "--price",
        type=price,
        metavar="USD_PER_GPU_HOUR",
        help="price of one GPU for one hour: adds what the loss costs",
    )


def _add_plan(commands: _SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "plan",
        help="say what each fix would buy",
        description="Simulate every fix on the trace of the job itself: what it would buy, what it "
        "assumes; and the step time to expect with other numbers of DP ranks.",
        epilog=_EXIT_CODES,
    )
    _add_trace_arguments(parser)
    parser.add_argument(
        "--layers",
        type=_layers,
        metavar="9,9,9,9",
        help="layers of each stage now; without, moves are given in shares of a stage",
    )
    parser.set_defaults(run=_plan)


def _add_synth(commands: _SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "synth",
        help="make the trace of a synthetic job",
        description="Write traces of synthetic jobs, to try SMon on. Each scenario gets a folder "
        "with trace.parquet and meta.yaml; the options replace its sizes.",
    )
    parser.add_argument("scenarios", nargs="+", metavar="SCENARIO", help=_scenario_names())
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where to write")
    for name, meaning in _SIZES.items():
        parser.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    parser.add_argument(
        "--overlap",
        action="store_true",
        default=None,
        help="reduce gradients while the backward still runs",
    )
    parser.set_defaults(run=_synth)


_SIZES = {
    "dp": "data-parallel size",
    "pp": "pipeline stages",
    "tp": "tensor-parallel size",
    "vpp": "model chunks per stage (interleaved)",
    "microbatches": "microbatches per step and DP rank",
    "steps": "number of steps",
    "seed": "seed of the noise: the same seed makes the same trace",
}


def _scenario_names() -> str:
    return (
        "schedules without a fault: gpipe, 1f1b, interleaved, zero-bubble, healthy, N-small … "
        "N-1-step; with one: slow-worker, long-stage, C01 … C14 (docs/reference/cli.md)"
    )


def _layout(text: str) -> Layout:
    from smon.topology import parse_layout

    try:
        return parse_layout(text)
    except SMonError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _steps(text: str) -> tuple[int | None, int | None]:
    first, dash, last = text.partition("-")
    message = f"expected A-B, A-, -B or A with whole numbers, found {text!r}"
    if not all(part.isdigit() or not part for part in (first, last)) or text in {"", "-"}:
        raise argparse.ArgumentTypeError(message)
    begin = int(first) if first else None
    end = (int(last) if last else None) if dash else begin
    if begin is not None and end is not None and end < begin:
        raise argparse.ArgumentTypeError(f"{message}: the last step lies before the first")
    return begin, end


def _layers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdigit() and len(part) < _MAX_DIGITS for part in parts):
        raise argparse.ArgumentTypeError(f"expected layers such as 9,9,9,9, found {text!r}")
    return tuple(int(part) for part in parts)


def _worker(text: str) -> tuple[int, int]:
    dp, _, stage = text.partition(",")
    if not (dp.isdigit() and stage.isdigit()):
        raise argparse.ArgumentTypeError(f"expected DP,STAGE such as 3,1, found {text!r}")
    return int(dp), int(stage)


def _analyze(parsed: argparse.Namespace) -> int:
    with progress_bar() as progress:
        trace = _load(parsed, progress)
        report = _report(parsed, trace, progress)
    if parsed.json:
        print(report.to_json())
    else:
        _print(report)
    if report.verdict == "insufficient_data":
        used = report.window.steps_used
        reasons = "; ".join(
            f"step {part.step}: {part.reason}" for part in report.window.skipped[:1]
        )
        line = f"insufficient data: {used} of {report.window.steps} steps usable"
        untimed = not report.window.steps or report.series is not None
        if untimed and report.quality.notes:
            line = f"insufficient data: {report.quality.notes[-1]}"
        print(f"smon analyze: {line}{'; ' + reasons if reasons else ''}", file=sys.stderr)
        return EXIT_INSUFFICIENT
    return EXIT_OK


def _load(parsed: argparse.Namespace, progress: Progress) -> Trace:
    from smon.trace.load import load

    return load(
        parsed.paths,
        meta=parsed.meta,
        layout=parsed.layout,
        format_name=parsed.format,
        steps=parsed.steps,
        progress=progress,
    )


def _report(parsed: argparse.Namespace, trace: Trace, progress: Progress) -> JobReport:
    from smon.report import ReportOptions
    from smon.reports import WITHOUT_OPS, kind_of, report_without_ops

    why = WITHOUT_OPS.get(kind_of(trace))
    if why is not None:
        _refuse_what_needs_ops(parsed, why)
    without = report_without_ops(trace, ReportOptions(trace.notes, parsed.price))
    if without is not None:
        return without
    from smon.analysis import Options, analyze_prepared, empty_report
    from smon.prepare import prepare
    from smon.trace.context import context_beside

    options = Options(
        notes=trace.notes,
        price_per_gpu_hour=parsed.price,
        repair=tuple(parsed.repair),
        history=_history(parsed.history, trace.job.job_id),
        progress=progress,
    )
    try:
        prepared = prepare(trace.table, trace.job, trace.evidence(context_beside(parsed.paths)))
    except NothingUsableError as error:
        return empty_report(trace.job, error, options)
    report = analyze_prepared(prepared, options)
    if parsed.timeline is not None:
        from smon.timeline import write_timeline

        write_timeline(prepared, parsed.timeline, progress=progress)
    return report


def _refuse_what_needs_ops(parsed: argparse.Namespace, why: str) -> None:
    if parsed.timeline is not None or parsed.repair or parsed.history:
        raise ConfigError(f"--timeline, --repair and --history need ops, and {why}")


def _history(paths: Sequence[Path], job_id: str) -> History | None:
    from smon.diagnose.history import earlier_of, history_of

    earlier = []
    for path in paths:
        try:
            earlier.append(earlier_of(json.loads(path.read_bytes())))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{str(path)!r}: cannot read an earlier report: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"{str(path)!r}: {error}") from error
    return history_of(earlier, job_id)


def _plan(parsed: argparse.Namespace) -> int:
    from rich.console import Console

    from smon.analysis import fixes_of, study
    from smon.plan.tail import forecast
    from smon.prepare import prepare
    from smon.render.plan import print_plan
    from smon.trace.context import context_beside

    with progress_bar() as progress:
        trace = _load(parsed, progress)
        prepared = prepare(trace.ops(), trace.job, trace.evidence(context_beside(parsed.paths)))
        studied = study(prepared, progress)
        fixes = fixes_of(studied, parsed.price, parsed.layers)
        expected = forecast(studied.evidence, suspects=studied.diagnosis.suspects())
    console = Console(highlight=False, emoji=False, markup=False)
    print_plan(fixes, expected.series(), expected.assumptions, console)
    return EXIT_OK


def _print(report: JobReport) -> None:
    from rich.console import Console

    from smon.render import print_report

    print_report(report, Console(highlight=False, emoji=False, markup=False))


def _synth(parsed: argparse.Namespace) -> int:
    from smon.synth.presets import scenario
    from smon.synth.scenario import generate
    from smon.synth.write import write_synthetic

    names = (*_SIZES, "overlap")
    given = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    # All of them are checked before the first is written.
    chosen = [scenario(name, **given) for name in dict.fromkeys(parsed.scenarios)]
    for each in chosen:
        made = generate(each)
        folder = parsed.out / each.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_synthetic(made, folder)
        except OSError as error:
            raise ConfigError(f"cannot write to {str(folder)!r}: {error.strerror}") from error
        print(f"{folder}: {len(made.table):,} ops, {made.job.layout}")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
