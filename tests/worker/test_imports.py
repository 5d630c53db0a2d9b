from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from smon.analysis import Options, analyze_prepared
from smon.errors import FencedError
from smon.prepare import prepare
from smon.report import ReportOptions
from smon.reports import report_without_ops
from smon.store import work
from smon.store.models import (
    Attempt,
    EventFile,
    Finding,
    Import,
    Job,
    Result,
    StepResult,
    Stream,
    Window,
    WindowState,
    WorkState,
)
from smon.store.results import unpacked
from smon.synth.presets import scenario
from smon.synth.scenario import Scenario, Synthetic, generate
from smon.synth.write import write_synthetic
from smon.trace.context import context_beside
from smon.trace.load import load
from smon.worker.housekeeping import remove_uploads
from smon.worker.imports import FILE_ROWS, pieces, run_import, safe_name
from tests.kineto_files import Ddp, write_ddp
from tests.worker.feed import Store, plain


def upload(store: Store, files: dict[str, bytes], **options: Any) -> str:  # noqa: ANN401  # JSON
    """An import that waits for a worker."""

    def add() -> str:
        with store.database.write() as session:
            row = plain(
                session,
                Import,
                tenant_id=store.tenant_id,
                state=WorkState.QUEUED.value,
                options=options,
                files=[
                    {"n": n, "name": name, "bytes": len(body), "sha256": ""}
                    for n, (name, body) in enumerate(files.items())
                ],
                created_ns=store.clock(),
            )
            return str(row.id)

    import_id = add()
    for n, body in enumerate(files.values()):
        store.objects.put(f"imports/{import_id}/{n}", body)
    return import_id


def folder_files(folder: Path) -> dict[str, bytes]:
    """Files of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def state_of(store: Store, import_id: str) -> Import:
    """The row of an import."""
    (row,) = [one for one in store.all(Import) if one.id == import_id]
    assert isinstance(row, Import)
    return row


def report(store: Store) -> str:
    """The text of the only report."""
    with store.database.read() as session:
        return unpacked(session.scalars(select(Result.report)).one()).decode()


def of_the_command(paths: list[Path]) -> str:
    """What ``smon analyze --json`` prints."""
    trace = load(paths)
    prepared = prepare(trace.table, trace.job, context_beside(paths))
    return analyze_prepared(prepared, Options(notes=trace.notes)).to_json()


@pytest.fixture(scope="module")
def made() -> Synthetic:
    """A small job."""
    return generate(Scenario(dp=2, pp=2, microbatches=2, steps=4, name="small"))


@pytest.fixture
def files(made: Synthetic, tmp_path: Path) -> dict[str, bytes]:
    """Its trace and meta file."""
    write_synthetic(made, tmp_path / "small")
    found = folder_files(tmp_path / "small")
    return {name: found[name] for name in ("trace.parquet", "meta.yaml")}


# --- good ones --------------------------------------------------------------------------------


def test_an_import_becomes_a_job_with_a_report(both: Store, tmp_path: Path) -> None:
    """Trace, meta file and side evidence; the report is that of the command for these files."""
    folder = tmp_path / "C07b"
    write_synthetic(generate(scenario("C07b")), folder)
    import_id = upload(both, folder_files(folder))
    both.worker().drain()
    row = state_of(both, import_id)
    assert (row.state, row.error, row.progress, row.phase) == ("done", None, 1.0, None)
    assert row.finished_ns == both.clock()
    window = both.window()
    assert (row.window_id, row.job_id) == (window.id, window.job_id)
    assert window.state == WindowState.DONE
    assert report(both) == of_the_command([folder])
    assert list(both.objects.list("imports")) == []
    (stream,) = both.all(Stream)
    assert (stream.ended, stream.source, stream.key) == (True, "import", f"import/{import_id}")
    assert both.attempt().ended_ns is not None


def analysed(paths: list[Path]) -> dict[str, Any]:
    """The report of ``smon analyze`` for files without ops."""
    trace = load(paths)
    found = report_without_ops(trace, ReportOptions(trace.notes))
    assert found is not None
    return dict(json.loads(found.to_json()))


def imported(store: Store, paths: list[Path]) -> dict[str, Any]:
    """The report of an import of these files."""
    import_id = upload(store, {path.name: path.read_bytes() for path in paths}, job="mine")
    store.worker().drain()
    row = state_of(store, import_id)
    assert (row.state, row.error, row.progress, row.phase) == ("done", None, 1.0, None)
    window = store.window()
    assert (row.window_id, window.kind, window.state) == (window.id, "capture", "done")
    found = json.loads(report(store))
    assert found["job"]["job_id"] == "mine"
    assert list(store.objects.list("imports")) == []
    assert store.all(EventFile) == []
    return dict(found)


def test_collectives_are_imported_with_the_report_of_the_command(
    both: Store, tmp_path: Path
) -> None:
    """No op is stored; steps and findings are, and the finding is over with its trace."""
    paths = write_ddp(tmp_path / "trace", Ddp(steps=24, extra_backward=(1, 40.0)))
    found = imported(both, paths)
    expected = analysed([tmp_path / "trace"])
    assert {**found, "job": None} == {**expected, "job": None}
    (one,) = both.all(Finding)
    assert (one.rank, one.state, one.cleared_step, one.source) == (
        1,
        "cleared",
        None,
        "rank-events",
    )
    steps = both.all(StepResult)
    assert len(steps) == Ddp(steps=24).steps
    assert all(step.start_ns is not None for step in steps)
    assert both.attempt().ended_ns is not None


def test_dumps_are_imported(store: Store, traces: Path) -> None:
    """The ranks that never arrived are in the table of findings; there are no steps."""
    folder = traces / "nvrx-flight-recorder" / "gpu_error_1st"
    found = imported(store, sorted(folder.glob("_dump_*")))
    assert (found["verdict"], found["job"]["layout"]["pp"]) == ("hang", 4)
    assert {(one.rank, one.severity) for one in store.all(Finding)} == {
        (12, "critical"),
        (14, "critical"),
    }
    assert (store.all(StepResult), store.window().first_step) == ([], -1)


def test_step_times_are_imported(store: Store, traces: Path) -> None:
    """Bursts are findings of the whole job; values are in the report alone."""
    (path,) = (traces / "megatron-step-times").glob("deepseekv3*golden_values*.json*")
    found = imported(store, [path])
    assert found["series"]["bursts"]
    assert {one.cause for one in store.all(Finding)} == {"job_wide"}
    assert store.all(StepResult) == []


def test_the_folder_in_which_files_were_read_is_nobodys_business(
    store: Store, traces: Path
) -> None:
    """Notes name the files that were left out, and no path of the server."""
    folder = traces / "nvrx-flight-recorder" / "lock_gil_2nd"
    found = imported(store, [*folder.glob("_dump_*"), *folder.glob("*.log")])
    assert any(
        note.startswith("the upload: files of unknown") for note in found["quality"]["notes"]
    )
    assert str(store.settings.data_dir) not in json.dumps(found)


def test_collectives_that_say_nothing_fail_the_import(store: Store, tmp_path: Path) -> None:
    """As the command does, and nothing of a job is left."""
    (path, *_) = write_ddp(tmp_path / "trace", Ddp(steps=2))
    document = json.loads(gzip.decompress(path.read_bytes()))
    document["traceEvents"] = document["traceEvents"][:3]
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    import_id = upload(store, {path.name: path.read_bytes()})
    store.worker().drain()
    row = state_of(store, import_id)
    assert row.state == "failed"
    assert row.error
    assert (store.all(Job), store.all(Window)) == ([], [])


@pytest.mark.parametrize("name", ["AR", "ST"])
def test_a_public_trace_can_be_imported(store: Store, traces: Path, name: str) -> None:
    """With its meta file under its own name."""
    folder = traces / "straggler-analysis"
    names = [f"trace-{name}.parquet", *(one.name for one in folder.glob(f"meta-{name}.*"))]
    upload(store, {each: (folder / each).read_bytes() for each in names})
    store.worker().drain()
    assert report(store) == of_the_command([folder / f"trace-{name}.parquet"])


def test_a_meta_file_can_be_given_as_an_option(store: Store, files: dict[str, bytes]) -> None:
    """As the text that it is."""
    meta = files.pop("meta.yaml").decode()
    upload(store, files, meta=meta)
    store.worker().drain()
    assert json.loads(report(store))["job"]["job_id"] == "small"


def test_job_attempt_and_layout_can_be_given(store: Store, files: dict[str, bytes]) -> None:
    """They go before what the files say."""
    del files["meta.yaml"]
    import_id = upload(store, files, job="mine", attempt=7, layout="dp2-pp2")
    store.worker().drain()
    assert state_of(store, import_id).state == "done"
    part = json.loads(report(store))["job"]
    assert (part["job_id"], part["attempt"]) == ("mine", 7)


def test_a_job_without_a_name_is_called_after_its_file(
    store: Store, files: dict[str, bytes]
) -> None:
    """Else after the import."""
    body = files["trace.parquet"]
    upload(store, {"trace-run 7.parquet": body}, layout="dp2-pp2")
    other = upload(store, {"trace.parquet": body}, layout="dp2-pp2")
    store.worker().drain()
    assert {job.name for job in store.all(Job)} == {"run_7", f"import-{other}"}


def test_the_same_trace_again_is_another_attempt(store: Store, files: dict[str, bytes]) -> None:
    """Two imports never mix their ops."""
    first, second = upload(store, files), upload(store, files)
    store.worker().drain()
    store.worker().drain()
    assert [state_of(store, one).state for one in (first, second)] == ["done", "done"]
    assert sorted(attempt.number for attempt in store.all(Attempt)) == [0, 1]
    assert len(store.all(Job)) == 1
    assert len(store.all(Result)) == 2


def test_an_attempt_that_is_taken_is_refused(store: Store, files: dict[str, bytes]) -> None:
    """If its number was given on purpose."""
    upload(store, files, attempt=3)
    store.worker().drain()
    second = upload(store, files, attempt=3)
    store.worker().drain()
    row = state_of(store, second)
    assert row.state == "failed"
    assert "attempt 3" in str(row.error)


def test_large_traces_become_several_files(made: Synthetic) -> None:
    """Of whole steps."""
    per_step = len(made.table) // 4
    parts = list(pieces(made.table, 2 * per_step))
    assert [sorted(set(part.step.tolist())) for part in parts] == [[0, 1], [2, 3]]
    assert [len(part) for part in pieces(made.table, 1)] == [per_step] * 4
    assert len(list(pieces(made.table, FILE_ROWS))) == 1


# --- bad ones ---------------------------------------------------------------------------------


def test_a_damaged_file_is_an_error_for_its_owner(store: Store, files: dict[str, bytes]) -> None:
    """By its name, without the folder in which it was read; nothing is left in the store."""
    files["trace.parquet"] = files["trace.parquet"][:-50]
    import_id = upload(store, files)
    store.worker().drain()
    row = state_of(store, import_id)
    assert row.state == "failed"
    assert row.finished_ns == store.clock()
    assert str(row.error).startswith("trace.parquet: damaged or truncated Parquet")
    assert str(store.settings.data_dir) not in str(row.error)
    assert store.all(Job) == []
    assert list(store.objects.list("events")) == []
    assert list((store.settings.data_dir / "work").iterdir()) == []


@pytest.mark.parametrize(
    "body, sign",
    [
        (b"hello, this is text\n", "unknown format"),
        (b"", "empty"),
        (b"\x80\x04\x95abc", "pickle"),
        (gzip.compress(b"PAR1", mtime=0), "Parquet inside gzip"),
        (b"\0" * 100, "binary"),
    ],
    ids=["text", "empty", "pickle", "packed", "binary"],
)
def test_what_is_no_trace_is_refused(store: Store, body: bytes, sign: str) -> None:
    """It says what the file seems to be."""
    import_id = upload(store, {"a.bin": body})
    store.worker().drain()
    row = state_of(store, import_id)
    assert row.state == "failed"
    assert sign in str(row.error)


@pytest.mark.parametrize(
    "options, sign",
    [
        ({"layout": "dp9"}, "stage"),
        ({"layout": "nonsense"}, "expected parts such as"),
        ({"format": "zip"}, "unknown format"),
        ({"meta": "dp_size: ["}, "not valid YAML"),
        ({"meta": "{}"}, "dp_size"),
    ],
)
def test_options_that_do_not_fit_are_errors(
    store: Store, files: dict[str, bytes], options: dict[str, str], sign: str
) -> None:
    """In the words of the command line."""
    del files["meta.yaml"]
    import_id = upload(store, files, **options)
    store.worker().drain()
    row = state_of(store, import_id)
    assert row.state == "failed"
    assert sign in str(row.error)


def test_no_file_is_an_error(store: Store) -> None:
    """A row without files."""
    import_id = upload(store, {})
    store.worker().drain()
    assert "no files" in str(state_of(store, import_id).error)


@pytest.mark.parametrize(
    "name, safe",
    [
        ("trace.parquet", "trace.parquet"),
        ("../../../etc/passwd", "passwd"),
        ("..\\..\\evil.json", "evil.json"),
        ("/etc/shadow", "shadow"),
        ("..", "file"),
        ("", "file"),
        (".bashrc", "bashrc"),
        ("-rf", "rf"),
        ("a\0b.json", "a_b.json"),
        ("naïve run\n7.json.gz", "na_ve_run_7.json.gz"),
        ("x" * 300 + ".parquet", "x" * 92 + ".parquet"),
        ("$(reboot);`x`.json", "reboot_x_.json"),
    ],
)
def test_names_of_users_are_made_safe(name: str, safe: str) -> None:
    """One part of a path, of plain characters, with its suffix."""
    assert safe_name(name) == safe


def test_hostile_names_stay_in_their_folder(store: Store, files: dict[str, bytes]) -> None:
    """And do no harm: the trace is read as it is."""
    names = {"../../../../tmp/evil.parquet": files["trace.parquet"]}
    import_id = upload(store, names, layout="dp2-pp2")
    store.worker().drain()
    assert state_of(store, import_id).state == "done"
    assert not Path("/tmp/evil.parquet").exists()  # noqa: S108  # that is the point
    assert [job.name for job in store.all(Job)] == ["evil"]


def test_files_of_one_name_do_not_replace_each_other(store: Store, files: dict[str, bytes]) -> None:
    """Names are for people; numbers tell files apart."""
    body = files["trace.parquet"]
    upload(store, {"a/r.parquet": body, "b/r.parquet": body}, layout="dp2-pp2", job="twice")
    store.worker().drain()
    notes = json.loads(report(store))["quality"]["notes"]
    assert any("duplicate of another row" in note for note in notes)


# --- crashes ----------------------------------------------------------------------------------


def test_an_import_whose_worker_died_is_done_by_another(
    store: Store, files: dict[str, bytes]
) -> None:
    """Its ops count once, though the first one comes back and had all but stored them."""
    import_id = upload(store, files)
    with store.database.write() as session:
        first = work.claim(session, Import, "a", store.clock(), work.Terms(30.0, 3))
    assert first is not None
    worker = store.worker("b")
    taken: list[bool] = []

    def check(*_progress: object) -> None:
        # The other one is through while the first one writes its files.
        if state_of(store, import_id).phase == "storing the events" and not taken:
            taken.append(True)
            store.clock.go_on(31)
            worker.drain()

    with pytest.raises(FencedError):
        run_import(store.worker("a").service, first, check)
    row = state_of(store, import_id)
    assert (row.state, row.fence) == ("done", 2)
    (stream,) = store.all(Stream)
    assert stream.events == store.window().rows
    assert len(store.all(Attempt)) == 1
    assert [file.path for file in store.objects.list("events")] == [
        file.path for file in store.all(EventFile)
    ]


# --- uploads that nobody needs ----------------------------------------------------------------


def test_files_of_failed_imports_stay_for_a_day(store: Store) -> None:
    """So that somebody can look at them; then they go."""
    upload(store, {"a.txt": b"no trace"})
    worker = store.worker()
    worker.drain()
    assert len(list(store.objects.list("imports"))) == 1
    store.clock.go_on(86_000)
    assert remove_uploads(worker.service, store.clock()) == 0
    store.clock.go_on(1_000)
    assert remove_uploads(worker.service, store.clock()) == 1
    assert list(store.objects.list("imports")) == []
    assert remove_uploads(worker.service, store.clock()) == 0


def test_an_upload_that_nobody_finishes_is_given_up(store: Store) -> None:
    """After a day, with its files."""
    import_id = upload(store, {"a.parquet": b"x"})
    store.write(lambda session: _set_uploading(session, import_id))
    store.clock.go_on(90_000)
    assert remove_uploads(store.worker().service, store.clock()) == 1
    row = state_of(store, import_id)
    assert row.state == "failed"
    assert "not finished" in str(row.error)


def _set_uploading(session: Any, import_id: str) -> None:  # noqa: ANN401  # Session
    session.get(Import, import_id).state = WorkState.UPLOADING.value


def test_windows_of_imports_are_complete(store: Store, files: dict[str, bytes]) -> None:
    """Ready in the transaction that stores them: nobody waits for more."""
    upload(store, files)
    worker = store.worker()
    from smon.worker.loop import _KINDS

    worker._one(_KINDS[2])
    (window,) = store.all(Window)
    assert (window.state, window.missing, window.reason) == (WindowState.READY, None, None)
