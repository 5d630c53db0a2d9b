from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from smon.errors import ConfigError, TaskLostError, TraceError
from smon.executors import Executor, ExecutorName, Here, open_executor
from smon.executors.pool import Pool
from smon.executors.spread import TRIES, spread
from smon.study import Asked, analysed, document
from smon.synth.presets import scenario
from smon.synth.scenario import generate
from smon.synth.write import write_synthetic
from smon.topology import Layout
from tests.executors import tasks
from tests.executors.tasks import PATIENCE_S
from tests.ray_nodes import need_ray, patiently

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def ray() -> Iterator[Executor]:
    """Ray on this machine."""
    need_ray()
    with ExitStack() as stack:
        yield patiently(
            lambda: stack.enter_context(open_executor(ExecutorName.RAY, 2)), ConfigError
        )


@pytest.fixture
def pool() -> Iterator[Executor]:
    """Two processes."""
    with open_executor(ExecutorName.LOCAL, 2) as executor:
        yield executor


@pytest.fixture(params=["here", "pool", "ray"])
def executor(request: pytest.FixtureRequest) -> Executor:
    """Each kind."""
    if request.param == "here":
        return Here()
    made: Executor = request.getfixturevalue(request.param)
    return made


@pytest.fixture(params=["pool", "ray"])
def elsewhere(request: pytest.FixtureRequest) -> Executor:
    """Each kind that works in other processes."""
    made: Executor = request.getfixturevalue(request.param)
    return made


def until_file(path: Path) -> int:
    """Wait until a task has written its process into a file."""
    deadline = time.monotonic() + PATIENCE_S
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline, f"waited in vain: {path}"
        time.sleep(0.01)
    return int(path.read_text())


def until_gone(pid: int) -> None:
    """Wait until a process has ended."""
    deadline = time.monotonic() + PATIENCE_S
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, f"process {pid} goes on"
            time.sleep(0.01)


# --- what each executor does ------------------------------------------------------------------


def test_work_gives_its_value(executor: Executor) -> None:
    """Whatever can be pickled goes there and comes back."""
    assert executor.submit(tasks.double, 21).result(PATIENCE_S) == 42
    assert executor.submit(tasks.ranks, Layout(dp=4, pp=2)).result(PATIENCE_S) == 8


def test_what_work_raises_its_future_raises(executor: Executor) -> None:
    """As the very class, so that it can be told what to do."""
    future = executor.submit(tasks.refuse, "no such step")
    with pytest.raises(TraceError, match="no such step"):
        future.result(PATIENCE_S)


def test_each_error_of_elsewhere_tells_where_it_was(elsewhere: Executor) -> None:
    """Its cause has the traceback of the process."""
    error = elsewhere.submit(tasks.refuse, "no").exception(PATIENCE_S)
    assert error is not None
    assert "in refuse" in str(error.__cause__)


def test_work_whose_process_ends_is_lost_and_no_other(elsewhere: Executor, tmp_path: Path) -> None:
    """What runs beside it goes on; what comes after it has a process again."""
    beside = elsewhere.submit(tasks.appear, str(tmp_path / "beside"))
    until_file(tmp_path / "beside")
    with pytest.raises(TaskLostError):
        elsewhere.submit(tasks.end, 0).result(PATIENCE_S)
    assert elsewhere.submit(tasks.double, 3).result(PATIENCE_S) == 6
    (tmp_path / "beside.go").touch()
    assert beside.result(PATIENCE_S) == "beside"


def test_work_elsewhere_is_not_done_here(elsewhere: Executor) -> None:
    """But in other processes of this machine."""
    assert elsewhere.submit(tasks.where, 0).result(PATIENCE_S) != os.getpid()


# --- many pieces of work ----------------------------------------------------------------------


def test_all_work_is_done_each_once(executor: Executor) -> None:
    """In any order."""
    found = {number: future.result() for number, future in spread(executor, tasks.double, range(9))}
    assert found == {number: 2 * number for number in range(9)}


class Counted:
    """Threads that count what is under way."""

    parallel = 2

    def __init__(self) -> None:
        self._pool, self._lock = ThreadPoolExecutor(), threading.Lock()
        self.under_way = self.most = 0

    def submit(self, do: Callable[[Any], Any], argument: Any) -> Future[Any]:  # noqa: ANN401
        """One more."""
        self._add(1)
        return self._pool.submit(self._do, do, argument)

    def _do(self, do: Callable[[Any], Any], argument: Any) -> Any:  # noqa: ANN401
        try:
            return do(argument)
        finally:
            # Not when the future is done: whoever waits for it may be told first.
            self._add(-1)

    def _add(self, more: int) -> None:
        with self._lock:
            self.under_way += more
            self.most = max(self.most, self.under_way)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()


def test_no_more_is_under_way_than_an_executor_works_on() -> None:
    """A million references need not wait in it."""
    counted = Counted()
    assert len(list(spread(counted, tasks.pause, range(9)))) == 9
    counted.close()
    assert counted.most == counted.parallel


def test_lost_work_is_done_again_and_given_up_in_the_end(pool: Executor, tmp_path: Path) -> None:
    """What was lost twice is done the third time; what ends its process every time is not."""
    good = str(tmp_path / "good")
    assert {future.result() for _, future in spread(pool, tasks.end_until, [good])} == {TRIES - 1}
    ((_, lost),) = spread(pool, tasks.end, [good])
    assert isinstance(lost.exception(), TaskLostError)


# --- processes of this machine ----------------------------------------------------------------


def test_processes_are_used_again(pool: Executor) -> None:
    """A process begins once, not for each task."""
    used = Counter(future.result() for _, future in spread(pool, tasks.where, range(8)))
    assert len(used) <= pool.parallel


def test_a_process_that_has_ended_in_between_is_replaced(pool: Executor) -> None:
    """The next task does not pay for it."""
    first = pool.submit(tasks.where, 0).result(PATIENCE_S)
    os.kill(first, signal.SIGKILL)
    until_gone(first)
    second = pool.submit(tasks.where, 0).result(PATIENCE_S)
    third = pool.submit(tasks.where, 0).result(PATIENCE_S)
    assert first not in {second, third}


def test_closing_ends_what_is_under_way(tmp_path: Path) -> None:
    """At once: who closes has given it up."""
    pool = Pool(2)
    future = pool.submit(tasks.appear, str(tmp_path / "task"))
    pid = until_file(tmp_path / "task")
    pool.close()
    assert isinstance(future.exception(PATIENCE_S), TaskLostError)
    until_gone(pid)


def test_signals_to_all_processes_do_not_end_work(pool: Executor, tmp_path: Path) -> None:
    """Ctrl-C and a stopped unit reach every process; whoever handed the work out decides."""
    future = pool.submit(tasks.appear, str(tmp_path / "task"))
    pid = until_file(tmp_path / "task")
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    (tmp_path / "task.go").touch()
    assert future.result(PATIENCE_S) == "task"


def test_processes_end_with_the_one_that_made_them(tmp_path: Path) -> None:
    """Even if it was killed; nothing works on for nobody."""
    script = (
        "from smon.executors.pool import Pool\n"
        "from tests.executors.tasks import appear\n"
        f"Pool(1).submit(appear, {str(tmp_path / 'task')!r}).result()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as parent:
        pid = until_file(tmp_path / "task")
        parent.kill()
    until_gone(pid)


# --- Ray --------------------------------------------------------------------------------------


def test_a_node_that_lacks_a_module_is_set_up_wrongly(ray: Executor) -> None:
    """That is no fault of the work."""
    with pytest.raises(ConfigError, match="lacks what SMon needs"):
        ray.submit(tasks.lack, "smon_of_another_version").result(PATIENCE_S)


def test_ray_works_side_by_side(ray: Executor, tmp_path: Path) -> None:
    """As many tasks at a time as it was asked for."""
    paths = [tmp_path / name for name in "ab"]
    under_way = [ray.submit(tasks.appear, str(path)) for path in paths]
    assert len({until_file(path) for path in paths}) == ray.parallel
    for path in paths:
        path.with_suffix(".go").touch()
    assert not wait(under_way, PATIENCE_S).not_done


def test_a_study_on_ray_is_that_of_this_process(ray: Executor, tmp_path: Path) -> None:
    """Whatever the order in which traces end; one of these cannot be read."""
    for name in ("N-small", "long-stage"):
        (tmp_path / name).mkdir()
        write_synthetic(generate(scenario(name, dp=2, steps=3)), tmp_path / name)
    asked = [Asked(str(tmp_path / name)) for name in ("long-stage", "absent", "N-small")]
    there, here = (
        document(future.result() for _, future in spread(each, analysed, asked))
        for each in (ray, Here())
    )
    assert there == here
    assert (here["traces"], here["failed"]) == (3, 1)


def test_what_ray_tells_is_not_on_stdout() -> None:
    """A command prints one document there, whatever happens on the nodes."""
    need_ray()
    script = (
        "import io, sys, time\n"
        "from smon.errors import ConfigError\n"
        "from smon.executors import ExecutorName, open_executor\n"
        "from tests.executors.tasks import PATIENCE_S, end\n"
        "from tests.ray_nodes import patiently\n"
        "sys.stderr = told = io.StringIO()\n"
        "with patiently(lambda: open_executor(ExecutorName.RAY, 1), ConfigError) as ray:\n"
        "    error, until = ray.submit(end, 0).exception(), time.monotonic() + PATIENCE_S\n"
        "    while 'A worker died' not in told.getvalue() and time.monotonic() < until:\n"
        "        time.sleep(0.05)\n"
        "print(type(error).__name__, 'A worker died' in told.getvalue())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout == "TaskLostError True\n", done.stderr


def test_without_ray_the_error_says_what_to_install() -> None:
    """One line, exit code 2; Ray is looked for only when it is asked for."""
    script = (
        "import sys; sys.modules['ray'] = None\n"
        "from smon.cli import main\n"
        "sys.exit(main(['fleet', 'analyze', 'x', '--executor', 'ray']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "pip install 'smon[ray]'" in done.stderr


def test_an_address_where_nothing_is_is_said() -> None:
    """At once; Ray alone would look for minutes."""
    need_ray()
    with (
        pytest.raises(ConfigError, match=r"cannot use Ray at 127.0.0.1:1: .*refused"),
        open_executor(ExecutorName.RAY, 2, "127.0.0.1:1"),
    ):
        pass
