"""The project itself: versions, ways in, direction of imports, what is committed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import smon

ROOT = Path(__file__).resolve().parent.parent

MAX_LINES = 600

# Written in pieces, so that this file does not find itself.
MACHINE_PATHS = re.compile(
    "|".join(
        [
            r"(?<![\w.])/" + r"work/",
            r"(?<![\w.])/" + r"root/",
            r"(?<![\w.])/" + r"tmp/w/",
            r"index" + r"-url",
            r"/sim" + r"ple/",
            r"/opt/" + r"pypi",
        ]
    )
)

LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")

VIOLATIONS = [
    ("smon/report.py", "import smon.simulate", "Data flows one way"),
    ("smon/ops.py", "import smon.topology", "Data flows one way"),
    ("smon/newcomer.py", "", "Data flows one way"),
    ("smon/topology.py", "import fastapi", "no web framework"),
    ("smon/graph/__init__.py", "import sqlalchemy", "no web framework"),
    ("smon/synth/__init__.py", "import smon.graph", "Synthetic jobs"),
    ("smon/trace/table.py", "import rich", "know the terminal"),
    ("smon/render/__init__.py", "import smon.trace", "The renderer"),
    ("smon/trace/formats/parquet.py", "import smon.trace.formats.ndtimeline", "Trace formats"),
    ("smon/api/__init__.py", "import smon.analysis", "The serving half"),
    ("smon/store/__init__.py", "import fastapi", "HTTP stays"),
    ("ingest_agents/__init__.py", "import smon.store", "Agents are light"),
    ("ingest_agents/__init__.py", "import sqlalchemy", "Agents are light"),
    ("ingest_agents/sources/__init__.py", "import smon.trace.load", "recorded files"),
    ("ingest_agents/sources/__init__.py", "import torch", "knows torch"),
    ("smon/worker/loop.py", "import ray", "knows Ray"),
    ("dashboards/__init__.py", "import smon.simulate", "The serving half"),
]


def committed() -> list[Path]:
    """Files that git tracks or would add; without git the test is skipped."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("NO GIT: this is no git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    paths = [ROOT / name for name in done.stdout.decode().split("\0") if name]
    return [path for path in paths if path.is_file()]


def texts() -> dict[str, str]:
    """Committed text files by path: those without a NUL byte, which no text holds."""
    raw = {str(path.relative_to(ROOT)): path.read_bytes() for path in committed()}
    wrong = [name for name, data in raw.items() if b"\0" not in data and not _is_utf8(data)]
    assert not wrong, f"not UTF-8: {wrong}"
    return {name: data.decode() for name, data in raw.items() if b"\0" not in data}


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the import contracts of the project in `folder`."""
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package and its contracts, to be broken."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("smon", "ingest_agents", "dashboards"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_installed_version_is_the_packages_version() -> None:
    """One version, written in smon/__init__.py, and the changelog knows it."""
    assert metadata.version("smon") == smon.__version__
    assert f"## [{smon.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_an_agents_host_installs_next_to_nothing() -> None:
    """What a GPU host needs stays out of the way of training: no heavy core dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    heavy = {"numpy", "pandas", "pyarrow", "fastapi", "sqlalchemy", "torch"}
    names = {re.split(r"[^\w-]", line)[0].lower() for line in project["dependencies"]}
    assert not names & heavy


def test_the_commands_of_the_readme_exist() -> None:
    """Every `make` command that the README shows is a target."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"(?:^|`)make ([a-z]+)\b", readme, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"demo", "test"} <= shown <= set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))


def test_links_of_the_documents_lead_somewhere() -> None:
    """A relative link in a Markdown file names a file that exists."""
    dead = [
        f"{name}: {target}"
        for name, text in texts().items()
        if name.endswith(".md")
        for target in LINK.findall(text)
        if "://" not in target and not (ROOT / name).parent.joinpath(target).exists()
    ]
    assert not dead


def test_the_import_contracts_hold(copy: Path) -> None:
    """The package as it is keeps every contract."""
    done = lint_imports(copy)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module, line, contract", VIOLATIONS)
def test_one_forbidden_import_breaks_a_contract(
    copy: Path, module: str, line: str, contract: str
) -> None:
    """A violation of one line, in any module, fails the lint and names the contract."""
    with (copy / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    done = lint_imports(copy)
    assert done.returncode == 1, done.stdout
    assert re.search(rf"{contract}.* BROKEN", done.stdout), done.stdout


def test_nothing_committed_names_a_build_machine() -> None:
    """No path of a machine and no package index stands in a committed file."""
    found = [
        f"{name}: {match[0]}"
        for name, text in texts().items()
        if (match := MACHINE_PATHS.search(text))
    ]
    assert not found


def test_text_files_are_utf8() -> None:
    """Every committed file is UTF-8, or binary."""
    assert "pyproject.toml" in texts()


def test_no_module_is_too_long() -> None:
    """A Python file above 600 lines is several files."""
    lengths = {name: text.count("\n") for name, text in texts().items() if name.endswith(".py")}
    assert not {name: length for name, length in lengths.items() if length > MAX_LINES}
