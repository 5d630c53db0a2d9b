"""Prolog and epilog, run with bash beside an agent that only notes what it is given."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.slurm_node import SCRIPTS, Node, make_node
from tests.deploy.units import options
from tests.waiting import wait_until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node on which job 7 is about to begin."""
    made = make_node(tmp_path)
    yield made
    made.end()


def test_the_prolog_starts_an_agent_on_the_jobs_own_spool(node: Node) -> None:
    """The job's user owns the folder; the agent outlives what slurmd ends after the prolog."""
    done = node.run("prolog.sh")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    pid = node.agent_pid()
    assert node.agent() == [f"{pid} run", str(node.config), str(node.spool)]
    assert node.spool.stat().st_uid == os.getuid()
    assert node.spool.stat().st_mode & 0o777 == 0o700
    assert node.agent_runs()
    assert not node.complaints


def test_the_agent_goes_before_the_trainer(node: Node) -> None:
    """Lowest priority, and the first that the kernel ends when memory is short."""
    node.run("prolog.sh")
    pid = node.agent_pid()
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    assert Path(f"/proc/{pid}/oom_score_adj").read_text(encoding="ascii").strip() == "1000"


@pytest.mark.parametrize(
    "change, words",
    [
        ("no config", "agent.yaml cannot be read"),
        ("no agent", "is missing: no agent"),
        ("no token", "token is missing: no agent"),
        ("no spool", "cannot make /dev/null/spool/job-7"),
        ("relative spool", "spool_dir must begin with a slash"),
        ("no job", "SLURM_JOB_ID is no number"),
        ("no user", "there is no user 987654321"),
    ],
)
def test_a_prolog_that_cannot_start_an_agent_says_so_and_succeeds(
    node: Node, change: str, words: str
) -> None:
    """Slurm drains a node whose prolog fails: no trouble with the agent is worth that."""
    environ = {}
    if change == "no config":
        node.config.unlink()
    elif change == "no agent":
        (node.folder / "bin" / "smon-agent").unlink()
    elif change == "no token":
        node.config.write_text(f"token_file: {node.folder}/token\n", encoding="utf-8")
    elif change == "no spool":
        node.config.write_text("spool_dir: '/dev/null/spool'\n", encoding="utf-8")
    elif change == "relative spool":
        node.config.write_text("spool_dir: spool\n", encoding="utf-8")
    elif change == "no job":
        environ = {"SLURM_JOB_ID": "7; touch pwned"}
    else:
        environ = {"SLURM_JOB_UID": "987654321"}
    assert node.run("prolog.sh", **environ).returncode == 0
    wait_until(lambda: words in node.log, words)
    assert not node.agent()


def test_a_prolog_whose_disk_hangs_does_not_hold_the_job_up(node: Node) -> None:
    """It returns while the folder is still being made; the agent comes when the disk does."""
    real = shutil.which("install")
    node.tool(
        "install",
        f'#!/bin/bash\nuntil [[ -e {node.folder}/open ]]; do sleep 0.05; done\nexec {real} "$@"\n',
    )
    assert node.run("prolog.sh").returncode == 0
    assert "the job goes on without waiting" in node.log
    assert not node.spool.exists()
    (node.folder / "open").touch()
    assert node.agent_pid()


def test_nothing_in_the_settings_is_run(node: Node) -> None:
    """The scripts are root's; a settings file is data."""
    text = f"spool_dir: /dev/null/$(touch {node.folder}/pwned)`touch {node.folder}/pwned`\n"
    node.config.write_text(text, encoding="utf-8")
    node.run("prolog.sh")
    wait_until(lambda: "cannot make" in node.log, "it fails")
    assert not (node.folder / "pwned").exists()


def test_the_epilog_stops_the_agent_and_clears_up(node: Node) -> None:
    """When everything is shipped, neither process nor folder stays."""
    node.run("prolog.sh")
    node.agent_pid()
    (node.spool / "stream").mkdir()
    (node.spool / "flush.json").write_text("{}", encoding="utf-8")
    assert node.run("epilog.sh").returncode == 0
    wait_until(lambda: not node.spool.exists(), "the spool goes")
    assert node.agent()[-1] == "stopped"
    wait_until(lambda: not list((node.folder / "run").iterdir()), "the notes go")
    assert not node.agent_runs()
    assert not node.complaints


def test_the_epilog_lets_the_agent_ship_the_rest_behind_the_job(node: Node) -> None:
    """It returns at once; the agent is stopped when the last segment is gone, and not before."""
    node.run("prolog.sh")
    node.agent_pid()
    segment = node.spool / "stream" / "seg-000000000000"
    segment.parent.mkdir()
    segment.write_bytes(b"x")
    assert node.run("epilog.sh").returncode == 0
    ending = node.folder / "run" / "job-7.ending"
    wait_until(ending.exists, "the epilog's other half runs")
    assert node.agent_runs()
    segment.unlink()
    wait_until(lambda: not node.spool.exists(), "the spool goes")
    assert node.agent()[-1] == "stopped"


@pytest.mark.parametrize("left", ["stream/seg-000000000000", "dead/x", "quarantine/seg-1"])
def test_the_epilog_keeps_what_was_not_shipped(node: Node, left: str) -> None:
    """After the time it stops the agent, but removes nothing that the server does not have."""
    node.run("prolog.sh")
    node.agent_pid()
    path = node.spool / left
    path.parent.mkdir()
    path.write_bytes(b"x")
    node.run("epilog.sh", SMON_SLURM_DRAIN_S="0")
    wait_until(lambda: f"left in {node.spool}" in node.log, "it says so")
    assert path.read_bytes() == b"x"
    assert node.agent()[-1] == "stopped"


def test_the_epilog_says_how_to_send_what_is_left(node: Node) -> None:
    """As the job's user, with the settings and the group that may read the token."""
    token = node.folder / "token"
    token.touch()
    text = node.config.read_text(encoding="utf-8")
    node.config.write_text(f"{text}token_file: {token}\n", encoding="utf-8")
    node.run("prolog.sh")
    node.agent_pid()
    (node.spool / "dead").mkdir()
    node.run("epilog.sh")
    wait_until(lambda: "left in" in node.log, "it says so")
    uid, gid, group = os.getuid(), os.getgid(), token.stat().st_gid
    groups = f"{gid},{group}" if group else f"{gid}"
    assert node.log.partition(" as root: ")[2].strip() == (
        f"setpriv --reuid {uid} --regid {gid} --groups {groups} "
        f"env SMON_SPOOL_DIR={node.spool} smon-agent run --config {node.config}"
    )


def test_an_agent_that_died_is_not_waited_for(node: Node) -> None:
    """Nobody ships the rest, so the rest stays, and the system log says so."""
    node.run("prolog.sh")
    pid = node.agent_pid()
    segment = node.spool / "stream" / "seg-000000000000"
    segment.parent.mkdir()
    segment.write_bytes(b"x")
    os.kill(pid, 9)
    node.run("epilog.sh")
    wait_until(lambda: "left in" in node.log, "it says so")
    assert segment.exists()


def test_a_requeued_job_keeps_the_agent_that_is_still_shipping(node: Node) -> None:
    """The second prolog lets the first agent go on, and the first epilog does not stop it."""
    node.run("prolog.sh")
    pid = node.agent_pid()
    segment = node.spool / "stream" / "seg-000000000000"
    segment.parent.mkdir()
    segment.write_bytes(b"x")
    node.run("epilog.sh")
    ending = node.folder / "run" / "job-7.ending"
    wait_until(ending.exists, "the epilog's other half runs")
    node.run("prolog.sh")
    wait_until(lambda: not ending.exists(), "the prolog calls it off")
    segment.unlink()
    assert node.agent_runs()
    assert node.agent_pid() == pid
    assert node.spool.exists()


def test_an_epilog_without_a_prolog_does_nothing(node: Node) -> None:
    """Nodes on which no agent was started are left as they are."""
    assert node.run("epilog.sh").returncode == 0
    node.config.unlink()
    assert node.run("epilog.sh").returncode == 0
    assert not node.complaints


def test_the_task_prolog_tells_the_recorder_where_the_spool_is(node: Node) -> None:
    """It is below spool_dir of the settings, as for prolog and epilog."""
    node.spool.mkdir(parents=True)
    done = node.run("task-prolog.sh")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"export SMON_SPOOL_DIR={node.spool}\n"


@pytest.mark.parametrize("change", ["no folder", "no config", "relative spool", "no spool_dir"])
def test_a_task_prolog_without_a_spool_says_nothing(node: Node, change: str) -> None:
    """So that a recorder keeps to its own settings, and the task begins."""
    if change == "no config":
        node.config.unlink()
    elif change == "relative spool":
        node.config.write_text("spool_dir: .\n", encoding="utf-8")
    elif change == "no spool_dir":
        node.config.write_text("server: http://x\n", encoding="utf-8")
    done = node.run("task-prolog.sh", SLURM_JOB_ID="no-such-job")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_under_systemd_the_agent_has_the_caps_of_the_service(node: Node) -> None:
    """A unit of its own for the job, with the limits that smon-agent.service has."""
    (node.folder / "systemd").mkdir()
    node.tool("systemd-run", f'#!/bin/bash\nprintf "%s\\n" "$@" >{node.folder}/given\n')
    node.tool("systemctl", "#!/bin/bash\nexit 3\n")
    assert node.run("prolog.sh").returncode == 0
    wait_until((node.folder / "given").exists, "systemd-run is called")
    wait_until(
        lambda: (node.folder / "given").read_text("utf-8").endswith("run\n"), "it is given all"
    )
    given = (node.folder / "given").read_text(encoding="utf-8").splitlines()
    properties = dict(
        line.removeprefix("--property=").split("=", 1)
        for line in given
        if line.startswith("--property=")
    )
    service = options(SCRIPTS.parent / "systemd" / "smon-agent.service")
    same = ("CPUQuota", "MemoryMax", "TasksMax", "Nice", "IOSchedulingClass", "OOMScoreAdjust")
    assert {name: properties[name] for name in same} == {name: service[name][0] for name in same}
    assert {f"--uid={os.getuid()}", f"--gid={os.getgid()}", "--unit=smon-agent-job-7"} <= set(given)
    assert f"--setenv=SMON_SPOOL_DIR={node.spool}" in given
    assert f"--setenv=SMON_AGENT_CONFIG={node.config}" in given
    assert given[-2:] == [str(node.folder / "bin" / "smon-agent"), "run"]
    assert not any("TOKEN" in line for line in given)
