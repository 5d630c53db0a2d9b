"""Whose file it is: what processes say about themselves, from a fake ``/proc``."""

from __future__ import annotations

from pathlib import Path

import pytest

from ingest_agents.config import AgentSettings, configure
from ingest_agents.sources.listing import FileKind
from ingest_agents.sources.processes import Owner, Processes, rank_in
from ingest_agents.sources.survey import surveys
from tests.agents.builders import Clock
from tests.agents.watching import Bench, torchrun
from tests.kineto_files import Ddp, write_ddp


class Host:
    """A host whose processes tests make."""

    def __init__(self, root: Path, **environ: str) -> None:
        self.bench = Bench(root, FileKind.KINETO)
        self.clock = Clock()
        settings = configure(environ).settings
        self.processes = Processes(self.bench.proc, settings, environ, clock=self.clock)

    def look(self, seconds: float = 6.0) -> None:
        """Look at all processes after so long."""
        self.clock.now += seconds
        self.processes.look()

    def who(self, name: str, *, dump: bool = False) -> tuple[str | None, int, int | None]:
        """Job, attempt and rank of a file of this name."""
        who = self.processes.owner(name, dump=dump).identity
        return who.job, who.attempt, who.rank


@pytest.mark.parametrize(
    "name, dump, rank",
    [
        ("rank7.json", False, 7),
        ("iteration_10/rank12_trace.json", False, 12),
        ("rank[3].pt.trace.json.gz", False, 3),
        ("RANK-4.json", False, 4),
        ("nccl_trace_rank_15", True, 15),
        ("_dump_2", True, 2),
        ("dump.9.pickle.gz", True, 9),
        ("host1-pid77.log", False, None),
        ("_dump_2", False, None),
        ("trace.json", True, None),
    ],
)
def test_the_rank_in_a_name(name: str, *, dump: bool, rank: int | None) -> None:
    """Behind the word; of dumps also at the end."""
    assert rank_in(name, dump=dump) == rank


@pytest.mark.parametrize(
    "environ, expected",
    [
        (torchrun(3), ("77", 0, 3)),
        (torchrun(3, SMON_RANK="5", SMON_JOB_ID="a", SMON_ATTEMPT="2"), ("a", 2, 5)),
        ({"SLURM_PROCID": "4", "SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "1"}, ("9", 1, 4)),
        ({"OMPI_COMM_WORLD_RANK": "6", "TORCHELASTIC_RUN_ID": "r"}, ("r", 0, 6)),
        (torchrun(2, TORCHELASTIC_RUN_ID="none"), ("77", 0, 2)),
    ],
)
def test_a_process_says_who_it_is(
    tmp_path: Path, environ: dict[str, str], expected: tuple[str, int, int]
) -> None:
    """By the number in the file's name, in the order of launchers."""
    host = Host(tmp_path)
    host.bench.process(41, environ)
    host.look()
    assert host.who("node-pid41.log") == expected
    assert host.who("node_41.1700.pt.trace.json.gz") == expected


def test_the_agents_own_setting_goes_before_names_of_launchers(tmp_path: Path) -> None:
    """And the job's own variable before the agent's setting."""
    host = Host(tmp_path, SMON_JOB_ID="named")
    host.bench.process(1, torchrun(0))
    host.bench.process(2, torchrun(1, SMON_JOB_ID="mine"))
    host.look()
    assert host.who("x-pid1.log")[0] == "named"
    assert host.who("x-pid2.log")[0] == "mine"


def test_a_process_is_remembered_for_an_hour(tmp_path: Path) -> None:
    """Files appear late; a number that is used again is the new process's."""
    host = Host(tmp_path)
    host.bench.process(5, torchrun(1))
    host.look()
    host.bench.ends(5)
    host.look()
    assert host.who("x-pid5.log") == ("77", 0, 1)
    host.bench.process(5, torchrun(0, SLURM_JOB_ID="78"))
    host.look()
    assert host.who("x-pid5.log") == ("78", 0, 0)
    host.bench.ends(5)
    host.look()
    host.look(4000)
    assert host.who("x-pid5.log") == (None, 0, None)


def test_a_young_process_is_looked_at_again(tmp_path: Path) -> None:
    """Between fork and exec it has its parent's environment."""
    host = Host(tmp_path)
    host.bench.process(5, torchrun(0))
    host.look()
    host.bench.ends(5)
    host.bench.process(5, torchrun(1))
    host.look()
    assert host.who("x-pid5.log") == ("77", 0, 1)


def test_two_containers_with_one_number_are_left_undecided(tmp_path: Path) -> None:
    """A wrong rank would be worse than none."""
    host = Host(tmp_path)
    host.bench.process(100, torchrun(0), inner=7)
    host.look()
    assert host.who("x-pid7.log") == ("77", 0, 0)
    host.bench.process(200, torchrun(1), inner=7)
    host.look()
    assert host.who("x-pid7.log") == ("77", 0, None)


def test_a_rank_in_a_name_leads_to_its_process(tmp_path: Path) -> None:
    """The newest attempt counts; with two jobs that have this rank nobody can tell."""
    host = Host(tmp_path)
    host.bench.process(1, torchrun(3, TORCHELASTIC_RESTART_COUNT="1"))
    host.bench.process(2, torchrun(4))
    host.look()
    assert host.who("rank3.json") == ("77", 1, 3)
    host.bench.process(3, torchrun(3, SLURM_JOB_ID="88"))
    host.look()
    assert host.who("rank3.json") == (None, 0, 3)


def test_damaged_environments_are_passed_over(tmp_path: Path) -> None:
    """Numbers that are none, bytes that are no text, processes that cannot be read."""
    host = Host(tmp_path)
    host.bench.process(1, {"RANK": "many"})
    host.bench.process(2, torchrun(2))
    environ = b"\xff\xfe=\x80\0RANK=2\0noise\0SLURM_JOB_ID=7\0"
    (host.bench.proc / "2" / "environ").write_bytes(environ)
    (host.bench.proc / "3").mkdir()
    (host.bench.proc / "self").mkdir()
    host.look()
    assert host.who("x-pid1.log") == ("7", 0, None)
    assert host.who("x-pid2.log") == ("7", 0, 2)
    assert isinstance(host.processes.owner("x"), Owner)


def test_check_explains_what_a_folder_holds(tmp_path: Path) -> None:
    """What would be shipped and whose it is, and what not and why."""
    bench = Bench(tmp_path, FileKind.KINETO)
    bench.process(9, torchrun(1, SMON_JOB_ID="mine"))
    write_ddp(bench.folder, Ddp(ranks=2, steps=2))
    (bench.folder / "notes.txt").touch()
    (bench.folder / "cut.json").write_text("{")
    (bench.folder / "link.json").symlink_to("nowhere")
    settings = AgentSettings(kineto_dir=str(bench.folder), flight_recorder_dir=str(tmp_path / "no"))
    kineto, dumps = surveys(settings, {}, proc=bench.proc)
    text = "\n".join(kineto.lines())
    assert "2 files would be shipped, 3 not" in text
    assert "rank1.pt.trace.json.gz: rank 1, job mine, attempt 0, from the environment" in text
    for line in ("other-name: notes.txt", "not-whole: cut.json", "no-plain-file: link.json"):
        assert line in text
    assert not kineto.wrong
    assert any("no such folder" in line for line in dumps.wrong)
