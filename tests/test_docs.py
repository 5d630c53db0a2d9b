"""The documentation says what the code does: nothing is missing in it, and nothing made up."""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import io
import json
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from smon import analysis, errors
from smon.analysis import Options, analyze
from smon.attribute import ledger, persistence
from smon.attribute.ledger import Factor
from smon.cli import _parser
from smon.collectives.report import analyze_collectives
from smon.diagnose import thresholds
from smon.graph import stuck
from smon.ops import BY_LABEL, OP_TYPES, metric_key
from smon.plan import fix, microbatches, replicas, stages
from smon.plan.fix import FixName
from smon.plan.undo import FIX_OF
from smon.render import print_report
from smon.render.words import CAUSES
from smon.report import JobReport
from smon.series.report import analyze_series
from smon.simulate import clock, clock_estimate, warmup
from smon.synth import truth
from smon.synth.catalogue import CATALOGUE
from smon.synth.presets import PRESETS, scenario
from smon.synth.scenario import generate
from smon.topology import Layout
from smon.trace import context, quality
from smon.trace.formats import READERS
from smon.trace.formats.ndtimeline import METRICS
from smon.trace.formats.parquet import PUBLIC, STEP_RELATIVE_KEY
from smon.trace.load import load
from smon.trace.meta import Job
from smon.trace.schema import COLUMNS
from smon.trace.series import Section, StepSeries
from tests.kineto_files import Ddp, write_ddp

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.rglob("*.md")])

#: Keys of maps that are numbers: what stands for them in the documentation.
NUMBERED = {"by_dp_rank": "RANK", "by_stage": "STAGE"}

FENCE = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
COMMAND = re.compile(r"^(?:\.venv/bin/)?smon(?: .*)?$", re.MULTILINE)
MENTION = re.compile(r"\b(docs/[\w/.-]+\.md)(?:`*,?(?: section)? (\d+(?:\.\d+)*))?")


def read(name: str) -> str:
    """A page of the documentation."""
    return (DOCS / name).read_text(encoding="utf-8")


def without_fences(text: str) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", text)


def spans(text: str) -> set[str]:
    """All inline code of a page."""
    return set(SPAN.findall(without_fences(text)))


def first_cells(text: str) -> list[str]:
    """Inline code in the first cell of every table row."""
    rows = [line for line in without_fences(text).splitlines() if line.startswith("| `")]
    return [span for row in rows for span in SPAN.findall(row.split(" | ")[0])]


def section(text: str, title: str) -> str:
    """A section of a page, up to the next heading of its level."""
    _, found, rest = text.partition(f"\n## {title}\n")
    assert found, f"no section {title}"
    return rest.partition("\n## ")[0]


def anchors(text: str) -> set[str]:
    """What links can point to, as GitHub makes it of the headings."""
    kept = [
        re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(FENCE.sub("", text))
    ]
    return {title.replace(" ", "-") for title in kept}


def dead_links(page: Path, text: str) -> list[str]:
    """Relative links of a page that lead nowhere, anchors included."""
    dead = []
    for link in LINK.findall(without_fences(text)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        known = target.exists()
        if known and anchor:
            own = text if target == page else target.read_text(encoding="utf-8")
            known = anchor in anchors(own)
        if not known:
            dead.append(link)
    return dead


CLI = read("reference/cli.md")


# --- the command line -----------------------------------------------------------------------


def commands() -> dict[str, argparse.ArgumentParser]:
    """The parser of the program, and that of every command, by what one types."""
    top = _parser()
    found: dict[str, argparse.ArgumentParser] = {"smon": top}
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {f"smon {name}": parser for name, parser in action.choices.items()}
    return found


def options(parser: argparse.ArgumentParser) -> list[str]:
    """Every option of one parser, and of the actions below it."""
    found = [option for action in parser._actions for option in action.option_strings]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and parser.prog != "smon":
            found += [option for inner in action.choices.values() for option in options(inner)]
    return list(dict.fromkeys(found))


def shown_commands(text: str) -> list[str]:
    """Command lines in the code blocks of a page."""
    return [line for block in FENCE.findall(text) for line in COMMAND.findall(block)]


def examples(text: str) -> list[tuple[str, str]]:
    """(option, example) of every row of the tables of options that has an example."""
    rows = [
        SPAN.findall(line)
        for line in without_fences(text).splitlines()
        if line.startswith("| `--") and line.count(" | ") == 2
    ]
    return [(row[0].split()[0], row[-1]) for row in rows]


def parses(line: str) -> bool:
    """Whether the parser accepts a command line."""
    words = shlex.split(line.partition(" > ")[0].removesuffix(" &"))
    try:
        _parser().parse_args(words[1:])
    except SystemExit as stop:
        return stop.code == 0
    return True


@pytest.mark.parametrize("command", commands())
def test_every_option_is_documented(command: str) -> None:
    """The section of a command has every option of it, and no other."""
    documented = {span.split()[0] for span in first_cells(section(CLI, f"`{command}`"))}
    documented |= {"-h", "--help"}  # one row for all of them
    assert {span for span in documented if span.startswith("-")} == set(
        options(commands()[command])
    )


def test_help_is_documented() -> None:
    """The one row that stands for the help of all commands is there."""
    assert {"-h", "--help"} <= set(first_cells(section(CLI, "`smon`")))


def test_every_option_has_an_example_with_it() -> None:
    """Each option of a command is shown in use."""
    shown = examples(CLI)
    wanted = {
        option
        for name, parser in commands().items()
        if name != "smon"
        for option in options(parser)
    } - {"-h", "--help"}
    assert {option for option, _ in shown} == wanted
    assert not [
        (option, example) for option, example in shown if option not in shlex.split(example)
    ]


def test_every_command_line_parses() -> None:
    """Command lines in code blocks and in the tables of options are accepted by the parser."""
    lines = [line for page in PAGES for line in shown_commands(page.read_text(encoding="utf-8"))]
    lines += [example for _, example in examples(CLI)]
    assert {line.split()[1] for line in lines} >= {"analyze", "synth", "demo", "--version"}
    assert not [line for line in lines if not parses(line)]


def test_the_answer_in_the_readme_is_the_one_that_is_given() -> None:
    """Who copies the commands sees what stands there."""
    made = generate(scenario("slow-worker"))
    out = io.StringIO()
    print_report(analyze(made.table, made.job), Console(file=out, width=100))
    shown = (ROOT / "README.md").read_text("utf-8").split("$ smon analyze jobs/slow-worker\n")[1]
    shown = shown.partition("```")[0]
    assert shown.count("\n") == 4
    assert out.getvalue().startswith(shown)


def test_a_wrong_command_line_is_noticed() -> None:
    """The check above would see a command or an option that does not exist."""
    page = "```console\n.venv/bin/smon analyse x\nmake demo\nsmon analyze x --jsn\nsmon demo\n```\n"
    shown = shown_commands(page)
    assert [parses(line) for line in shown] == [False, False, True]


def test_every_scenario_is_documented() -> None:
    """The section of `smon synth` has every scenario with its sizes, and no other."""
    text = section(CLI, "`smon synth`")
    rows = [line for line in text.splitlines() if line.startswith("| `") and "| `--" not in line]
    documented = {SPAN.findall(row)[0]: row.rstrip(" |").rpartition("| ")[2] for row in rows}
    made = {name: preset.scenario for name, preset in PRESETS.items()}
    assert documented == {
        name: f"{one.dp}, {one.pp}, {one.tp}, {one.microbatches}, {one.steps}"
        for name, one in made.items()
    }


# --- the report -----------------------------------------------------------------------------


def paths(value: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401  # parsed JSON
    """The path of every key: ``[]`` for the entries of a list, a word for numbered keys."""
    if isinstance(value, list):
        for item in value:
            yield from paths(item, f"{path}[]")
    if not isinstance(value, dict):
        return
    name = path.rpartition(".")[2]
    for key, item in value.items():
        shown = NUMBERED.get(name, "OPTYPE" if name == "by_optype" else key)
        inner = f"{path}.{shown}" if path else shown
        yield inner
        yield from paths(item, inner)


def small_report() -> dict[str, Any]:
    """The report of a small job in which one worker has lost a step."""
    made = generate(scenario("1f1b", dp=2, pp=2, microbatches=2, steps=4))
    table = made.table
    kept = table.take(~((table.step == 1) & (table.dp == 1) & (table.stage == 1)))
    report = analyze(kept, made.job, Options(price_per_gpu_hour=1.0, repair=((0, 0),)))
    return report.to_dict()


def report_of(name: str, **sizes: int) -> JobReport:
    """The report of a named scenario, with its side evidence."""
    made = generate(scenario(name, **sizes))
    return analyze(made.table, made.job, context=made.context)


def collectives_report() -> dict[str, Any]:
    """The report of a trace that has collectives but no ops."""
    with tempfile.TemporaryDirectory() as folder:
        trace = load(write_ddp(Path(folder), Ddp(ranks=3, steps=3)))
    return analyze_collectives(trace.events, trace.job).to_dict()


def series_report() -> dict[str, Any]:
    """The report of step times of a whole job, with a burst and timers."""
    seconds = np.full(400, 2.0)
    seconds[200:240] = 3.0
    timers = (Section("forward-compute", (0.5,), (0.6,)),)
    series = StepSeries(np.arange(400), seconds, timers)
    return analyze_series(series, Job("job", Layout(dp=4, pp=1))).to_dict()


@functools.cache
def reports() -> tuple[dict[str, Any], ...]:
    """Reports that together have every key.

    A step left out; a slow worker with victims and fixes; candidates; clocks put right; a trace
    of collectives; a log.
    """
    return (
        small_report(),
        report_of("slow-worker").to_dict(),
        report_of("C07a", dp=4, steps=8).to_dict(),
        report_of("C11", steps=6).to_dict(),
        collectives_report(),
        series_report(),
    )


def test_the_reports_of_these_tests_have_everything() -> None:
    """No list that is walked below is empty in all of them."""
    left_out, slow, linked, shifted, met, logged = reports()
    assert left_out["window"]["skipped"]
    assert slow["findings"][0]["victims"]
    assert slow["ledger"]
    assert slow["fixes"]
    assert linked["findings"][0]["candidates"]
    assert shifted["quality"]["clock"]["offsets"]
    assert met["collectives"]
    assert logged["series"]["bursts"]
    assert logged["series"]["levels"]
    assert logged["series"]["sections"]


def test_every_key_of_the_report_is_documented() -> None:
    """The page has every key of real reports with its path, in order, and no other."""
    documented = first_cells(read("reference/report.md"))
    occurring = [dict.fromkeys(paths(report)) for report in reports()]
    assert set(documented) == set().union(*occurring)
    for keys in occurring:
        assert [key for key in documented if key in keys] == list(keys)


def test_every_factor_of_the_ledger_is_documented() -> None:
    """The method explains each factor, and the report lists them in their order."""
    names = [str(factor) for factor in Factor]
    assert not set(names) - set(first_cells(read("method.md")))
    row = next(line for line in read("reference/report.md").splitlines() if "six entries" in line)
    assert [span for span in SPAN.findall(row) if span in names] == names


def test_every_fix_is_documented() -> None:
    """The table of the method has every fix, and the causes that have one are named with it."""
    text = read("method.md").partition("\n### 5.10 ")[2].partition("\n## ")[0]
    rows = {SPAN.findall(row)[0]: row for row in text.splitlines() if row.startswith("| `")}
    rows = {name: row for name, row in rows.items() if not name.startswith("smon.")}
    assert set(rows) == {str(name) for name in FixName}
    changing = {name for name, row in rows.items() if row.endswith("Changes training |")}
    assert changing == {"balance_experts", "backup_workers", "sync_less_often"}
    devices = {"slow_gpu", "thermal", "slow_forward", "slow_backward"}
    for cause, name in FIX_OF.items():
        known = "slow devices" if cause in devices else f"`{cause}`"
        assert known in rows[name]


# --- causes ---------------------------------------------------------------------------------

WORDS = {
    "1.1 Verdicts": {*truth.Verdict, "insufficient_data"},
    "1.2 Causes": {*CAUSES},
    "1.3 Scopes": {*truth.Scope, "tp_group", "pp_group", "leaf"},
    "1.5 Persistence": {*persistence.Kind, *truth.Pattern},
    "1.6 Severities": {"info", "warning", "critical"},
}

#: Scenarios with every verdict of a finding, and nearly every scope and kind.
TELLING = ("slow-worker", "C01", "C05", "C06", "C07a", "C08", "C09", "C10", "C13")


def subsection(title: str) -> str:
    """A part of the page on causes, up to the next heading."""
    _, found, rest = read("causes.md").partition(f"\n### {title}\n")
    assert found, f"no section {title}"
    return re.split(r"^#{2,3} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("title", WORDS)
def test_every_word_of_a_finding_is_documented(title: str) -> None:
    """The tables have the words of the code and of true answers, and no other."""
    assert set(first_cells(subsection(title))) == {str(word) for word in WORDS[title]}


def test_causes_of_true_answers_are_documented() -> None:
    """What can be put into a synthetic job, also what no finding names, is explained."""
    assert not {str(name) for name in truth.CauseName} - spans(subsection("1.2 Causes"))


def literals(pattern: str) -> set[str]:
    """Words that the causes are made with, out of their source."""
    modules = (ROOT / "smon" / "diagnose").rglob("*.py")
    found = re.findall(pattern, "\n".join(path.read_text(encoding="utf-8") for path in modules))
    assert found
    return set(found)


def test_the_words_in_the_code_are_those_of_the_tables() -> None:
    """A verdict, cause or phase that is added to a test is noticed here."""
    verdicts = set(first_cells(subsection("1.1 Verdicts")))
    assert not literals(r'verdict="(\w+)"') - verdicts
    assert not literals(r'cause="(\w+)"') - set(first_cells(subsection("1.2 Causes")))
    assert not literals(r'phase="([\w ]+)"') - spans(subsection("1.4 Phases"))
    assert not literals(r'"(\w+_group)"') - set(first_cells(subsection("1.3 Scopes")))


@pytest.mark.parametrize("name", TELLING)
def test_the_words_of_real_findings_are_documented(name: str) -> None:
    """Whatever a scenario is found to have, the page explains it."""
    findings = report_of(name).findings
    assert findings
    for finding in findings:
        words = {
            "1.1 Verdicts": finding.verdict,
            "1.2 Causes": finding.cause,
            "1.3 Scopes": finding.scope,
            "1.4 Phases": finding.phase,
            "1.5 Persistence": finding.persistence.kind,
            "1.6 Severities": finding.severity,
        }
        assert not [word for title, word in words.items() if word not in spans(subsection(title))]


def test_every_cause_has_a_test_that_is_described() -> None:
    """The headings of section 3 name every cause once."""
    titles = re.findall(r"^### 3\.\d+ .*$", read("causes.md"), re.MULTILINE)
    assert sorted(SPAN.findall("\n".join(titles))) == sorted(CAUSES)


def test_every_key_of_side_evidence_is_documented() -> None:
    """The table has the keys of ``context.json`` and of its tables, and no other."""
    columns = {**context._TABLES, "events": context._EVENT}
    keys = {f"{table}.{column}" for table, names in columns.items() for column in names}
    text = section(read("causes.md"), "6. Side evidence: `context.json`")
    assert set(first_cells(text)) == context._KNOWN | keys
    assert not {str(kind) for kind in context.EventKind} - spans(text)


def test_the_example_of_side_evidence_is_read(tmp_path: Path) -> None:
    """The one on the page is valid, and has every key."""
    text = section(read("causes.md"), "6. Side evidence: `context.json`")
    (example,) = FENCE.findall(text)
    path = tmp_path / "context.json"
    path.write_text(example, encoding="utf-8")
    found = context.read_context(path)
    assert not found.ignored
    assert set(json.loads(example)) == context._KNOWN


def test_every_true_answer_is_documented() -> None:
    """The table of scenarios has the verdict, cause and kind that ``truth.json`` has."""
    rows = {
        SPAN.findall(line)[0]: SPAN.findall(line)[1:]
        for line in section(read("causes.md"), "7. Jobs with a known answer").splitlines()
        if line.startswith("| `")
    }
    assert set(rows) == set(CATALOGUE)
    for name, words in rows.items():
        answer = generate(CATALOGUE[name].scenario).truth
        main = answer.main if answer.verdict != "none" else None
        expected = [str(answer.verdict)]
        if main is not None:
            expected += [str(main.cause), str(main.persistence.kind)]
        assert words == expected, name


def test_every_op_type_of_the_report_is_documented() -> None:
    """The keys of ``by_optype`` are listed, all that can occur."""
    text = read("reference/report.md")
    keys = next(line for line in text.splitlines() if line.startswith("Keys of `by_optype`"))
    assert set(SPAN.findall(keys)) - {"by_optype"} == {metric_key(op) for op in OP_TYPES}


# --- formats, errors, thresholds ------------------------------------------------------------


def test_every_column_and_op_type_is_documented() -> None:
    """Columns of the table and of the public form, op types and metrics stand among the formats."""
    words = spans(read("formats.md"))
    columns = {column.name for column in COLUMNS} | set(PUBLIC.values())
    assert not (columns | set(BY_LABEL) | set(METRICS)) - words
    assert STEP_RELATIVE_KEY.decode() in words


def test_the_method_names_the_columns_and_op_types() -> None:
    """The op table of the method is the table of the code."""
    text = read("method.md")
    table = section(text, "1. The op table")
    assert not ({column.name for column in COLUMNS} | set(BY_LABEL)) - spans(table)


def test_every_format_is_documented() -> None:
    """Each reader's name is in the table of formats, and no other."""
    overview = read("formats.md").partition("\n## ")[0]
    assert set(first_cells(overview)) == {reader.NAME for reader in READERS}


def test_every_error_is_documented() -> None:
    """The page has a section for every exception class, and for no other."""
    titles = re.findall(r"^## `(\w+)`$", read("reference/errors.md"), re.MULTILINE)
    classes = [
        name
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.SMonError)
    ]
    assert sorted(titles) == sorted(classes)


def test_every_error_says_when_what_and_which_exit_code() -> None:
    """The section of an error that is raised has all four parts."""
    parts = read("reference/errors.md").split("\n## ")[1:]
    raised = [part for part in parts if not part.startswith("`SMonError`")]
    words = ("*When*:", "*Message*:", "*What to do*:", "*Exit code*:")
    assert len(raised) == len(parts) - 1
    assert not [part.splitlines()[0] for part in raised if any(word not in part for word in words)]


def test_thresholds_have_the_documented_values() -> None:
    """The tables of thresholds name constants of the code, with their values, each once."""
    pages = read("method.md") + read("causes.md")
    rows = re.findall(r"^\| `(smon[\w.]+)` \| ([−\d.]+) \|", pages, re.MULTILINE)
    assert rows
    documented = {name: float(shown.replace("−", "-")) for name, shown in rows}
    values = {}
    for name in documented:
        module, _, constant = name.rpartition(".")
        values[name] = getattr(importlib.import_module(module), constant)
    assert documented == values
    assert len(rows) == len(documented)
    modules = (
        *(quality, thresholds, persistence, clock, clock_estimate, ledger, warmup, stuck),
        *(analysis, fix, stages, microbatches, replicas),
    )
    public = {f"{module.__name__}.{name}" for module in modules for name in own_numbers(module)}
    assert not public - set(documented)


def own_numbers(module: ModuleType) -> list[str]:
    """The public constants that a module itself sets to a number."""
    source = inspect.getsource(module)
    names = re.findall(r"^([A-Z][A-Z0-9_]*)(?:: Final)? = ", source, re.MULTILINE)
    return [name for name in names if type(getattr(module, name)) in (int, float)]


def test_the_text_names_thresholds_that_exist() -> None:
    """Names in capitals on the page on causes are constants of its table, and all are explained."""
    table = section(read("causes.md"), "5. Thresholds")
    prose = without_fences(read("causes.md").replace(table, ""))
    named = {name.rpartition(".")[2] for name in first_cells(table)}
    used = set(re.findall(r"\b[A-Z]{2,}_[A-Z_]+\b", prose))
    used |= {name for name in named if re.search(rf"\b{name}\b", prose)}
    assert used == named


# --- links ----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    """Relative links name files that exist, and headings that are there."""
    assert not dead_links(page, page.read_text(encoding="utf-8"))


def test_a_dead_link_is_noticed(tmp_path: Path) -> None:
    """The check above would see a file or a heading that does not exist."""
    (tmp_path / "there.md").write_text("# A `b`: c\n\n## 1.2 D\n", encoding="utf-8")
    text = (
        "[a](there.md) [b](there.md#a-b-c) [c](there.md#12-d) [d](gone.md) [e](there.md#e) [f](#f)"
    )
    assert dead_links(tmp_path / "page.md", text) == ["gone.md", "there.md#e", "#f"]


def test_the_index_links_every_page() -> None:
    """The README leads to the index, and the index to every other page."""
    index = DOCS / "index.md"
    links = LINK.findall(index.read_text(encoding="utf-8"))
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links if "://" not in link}
    assert "docs/index.md" in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert set(PAGES) - linked == {index}


def test_the_code_refers_to_pages_and_sections_that_exist() -> None:
    """A docstring or comment that names a page, or a section of it, names one that is there."""
    found = 0
    wrong = []
    for path in sorted((ROOT / "smon").rglob("*.py")):
        for name, number in MENTION.findall(path.read_text(encoding="utf-8")):
            found += 1
            page = ROOT / name
            text = page.read_text(encoding="utf-8") if page.is_file() else ""
            numbers = [title.split()[0].rstrip(".") for title in HEADING.findall(text)]
            if not text or (number and number not in numbers):
                wrong.append((path.name, name, number))
    assert found > 10
    assert not wrong
