"""A node as the Slurm scripts see it: their tools, an agent that only notes what it is given."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.deploy.files import ROOT
from tests.waiting import PATIENCE_S, wait_until

SCRIPTS = ROOT / "ingest_agents" / "deploy" / "slurm"

#: Programs that the scripts may use; nothing else is on their PATH.
TOOLS = (
    *("bash", "cat", "env", "find", "grep", "id", "install", "ionice", "nice", "rm", "rmdir"),
    *("setpriv", "setsid", "sleep", "stat"),
)

AGENT = """#!/bin/bash
trap 'echo stopped >>"$SMON_SPOOL_DIR/../agent.txt"; exit 0' TERM
printf '%s\\n' "$$ $*" "$SMON_AGENT_CONFIG" "$SMON_SPOOL_DIR" >"$SMON_SPOOL_DIR/../agent.part"
mv "$SMON_SPOOL_DIR/../agent.part" "$SMON_SPOOL_DIR/../agent.txt"
while :; do sleep 0.05; done
"""

# With a message it is called as `logger -t NAME -- MESSAGE`; without, it passes its input on.
LOGGER = """#!/bin/bash
if [[ $3 == -- ]]; then echo "$4" >>"{log}"; else cat >>"{log}"; fi
"""


@dataclass(frozen=True)
class Node:
    """Folders of one node, and what runs on it."""

    folder: Path

    @property
    def spool(self) -> Path:
        """Folder of job 7."""
        return self.folder / "spool" / "job-7"

    @property
    def config(self) -> Path:
        """Settings of the agent."""
        return self.folder / "agent.yaml"

    @property
    def log(self) -> str:
        """What the scripts said."""
        path = self.folder / "log.txt"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def complaints(self) -> list[str]:
        """What they said, but for that this machine is slow just now."""
        return [line for line in self.log.splitlines() if "still starting" not in line]

    def tool(self, name: str, text: str) -> None:
        """Put a program on the PATH of the scripts, instead of any other of this name."""
        path = self.folder / "bin" / name
        path.unlink(missing_ok=True)
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)

    def run(self, script: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a script as slurmd does: as the leader of a process group, with little around it."""
        variables = {
            "PATH": str(self.folder / "bin"),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_UID": str(os.getuid()),
            "SMON_SLURM_RUN_DIR": str(self.folder / "run"),
            "SMON_SLURM_SYSTEMD": str(self.folder / "systemd"),
            **environ,
        }
        command = ["/bin/bash", str(SCRIPTS / script), str(self.config)]
        process = subprocess.Popen(
            command,
            env=variables,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        out, err = process.communicate(timeout=PATIENCE_S)
        # As slurmd does: what is left in the group is ended.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def agent(self) -> list[str]:
        """What the agent noted: number and arguments, settings, spool; empty if there is none."""
        path = self.folder / "spool" / "agent.txt"
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []

    def agent_pid(self) -> int:
        """Number of the agent's process, once it runs."""
        wait_until(self.agent, "the agent starts")
        return int(self.agent()[0].split()[0])

    def agent_runs(self) -> bool:
        """Whether the agent that noted its number is there."""
        return bool(self.agent()) and Path(f"/proc/{self.agent_pid()}").exists()

    def end(self) -> None:
        """End what a test has left running."""
        (self.folder / "open").touch()
        pids = self.folder / "run" / "job-7.pid"
        if pids.exists() and (number := pids.read_text(encoding="utf-8").strip()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(number), signal.SIGKILL)


def make_node(folder: Path) -> Node:
    """A node with everything in place."""
    node = Node(folder)
    (folder / "bin").mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found, f"expected the program {name} (bash, coreutils, util-linux, findutils, grep)"
        (folder / "bin" / name).symlink_to(found)
    mv = shutil.which("mv")
    assert mv
    (folder / "bin" / "mv").symlink_to(mv)
    node.tool("smon-agent", AGENT)
    node.tool("logger", LOGGER.format(log=folder / "log.txt"))
    node.config.write_text(f"server: http://x\nspool_dir: {folder}/spool  # here\n", "utf-8")
    return node
