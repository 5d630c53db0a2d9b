"""Lists of counters: in the code, in the diagnosis, on the pages, and for dcgm-exporter."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import yaml

from ingest_agents.sources.counters.catalogue import ALL
from tests.deploy.files import AGENT, ROOT, tool
from tests.deploy.units import options

DCGM = AGENT / "dcgm"
PAGE = (ROOT / "docs" / "dcgm.md").read_text(encoding="utf-8")
AGENT_PAGE = (ROOT / "docs" / "reference" / "agent.md").read_text(encoding="utf-8")

#: Counters that the diagnosis reads and others bring: the recorder, readers of traces.
OF_OTHERS = {"alloc_retries", "tp_wait_s", "tp_comm_s"}


def section(text: str, heading: str) -> str:
    """A part of a page, up to the next heading of its level."""
    level = heading.split(maxsplit=1)[0]
    return re.split(rf"^{level} ", text.partition(f"{heading}\n")[2], flags=re.MULTILINE)[0]


def fields() -> dict[str, str]:
    """Fields of the list for the exporter, and the type of each."""
    lines = (DCGM / "counters.csv").read_text(encoding="utf-8").splitlines()
    rows = [line.split(",") for line in lines if line.strip() and not line.startswith("#")]
    assert all(len(row) == 3 for row in rows), "field, type, help without a comma"
    found = {field.strip(): kind.strip() for field, kind, _ in rows}
    assert len(found) == len(rows), "each once"
    return found


def queries(text: str) -> list[str]:
    """Queries of a page, without line breaks."""
    return [" ".join(each.split()) for each in re.findall(r"```promql\n(.*?)```", text, re.DOTALL)]


def test_every_counter_is_documented() -> None:
    """The table on the page of the agent has each with its kind, unit and source, and no other."""
    row = re.compile(r"^\| `([a-z_]+)` \|([^|]*)\|([^|]*)\|([^|]*)\|", re.MULTILINE)
    cells = row.findall(section(AGENT_PAGE, "## Counters"))
    shown = {name: tuple(each.strip() for each in rest) for name, *rest in cells}
    known = {name: (each.kind.value, each.unit, each.source) for name, each in ALL.items()}
    assert shown == known


def test_the_diagnosis_reads_counters_that_somebody_brings() -> None:
    """A name that is only asked for is a typing error."""
    source = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "smon" / "diagnose").rglob("*.py")
    )
    asked = set(re.findall(r'Shown\(\s*"([a-z_]+)"', source))
    asked |= set(
        re.findall(r'(?:counter|more_than_peers|change_against_peers)\([^"()]*"([a-z_]+)"', source)
    )
    assert {"gpu_clock_mhz", "gpu_throttle_thermal", "nic_errors", "host_cpu_ratio"} <= asked
    assert asked <= set(ALL) | OF_OTHERS


def test_the_list_for_the_exporter_is_well_formed() -> None:
    """Fields as DCGM writes them, with types that the exporter takes."""
    for field, kind in fields().items():
        assert re.fullmatch(r"DCGM_FI_(DEV|PROF)_[A-Z0-9_]+", field)
        assert kind in {"gauge", "counter"}


def test_the_page_names_fields_of_the_list_and_counters_of_the_agent() -> None:
    """In tables, text and queries."""
    named = set(re.findall(r"DCGM_FI_\w+", PAGE)) - {"DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"}
    assert named <= set(fields())
    table = section(PAGE, "## What it shall read")
    last = [line.rsplit("|", 2)[1] for line in table.splitlines() if line.startswith("| ")]
    counters = set(re.findall(r"`([a-z_]+)`", " ".join(last)))
    assert len(counters) > 10
    assert counters <= set(ALL)


def test_every_query_of_the_page_is_tested() -> None:
    """The unit test of Prometheus has each of them as it stands there, and no other."""
    path = ROOT / "dashboards" / "prometheus" / "tests" / "dcgm_test.yml"
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    tested = [" ".join(test["expr"].split()) for test in document["tests"][0]["promql_expr_test"]]
    assert queries(PAGE) == tested


def test_the_findings_become_lines_for_the_textfile_collector(tmp_path: Path) -> None:
    """The command of the page, on an answer as the server gives it."""
    jq = tool("jq", "jq")
    (script,) = re.findall(r"jq -r --arg job \"\$JOB\" '(.*?)'\n```", PAGE, re.DOTALL)
    finding = {"rank": 42, "host": "gpu-node-17", "gpu_uuid": "GPU-5d1a93c2", "cause": "thermal"}
    whole = {"items": [finding, {**finding, "cause": "slow_gpu"}, {**finding, "gpu_uuid": None}]}
    answer = tmp_path / "findings.json"
    answer.write_text(json.dumps(whole))
    done = subprocess.run(
        [jq, "-r", "--arg", "job", "llama", script, str(answer)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == (
        'site_suspect_gpu{train_job="llama",rank="42",Hostname="gpu-node-17",'
        'UUID="GPU-5d1a93c2"} 1\n'
    )


def test_the_values_of_the_chart_mount_the_list() -> None:
    """The exporter reads the file where the chart puts it, under the name that it has here."""
    values = yaml.safe_load((DCGM / "values.yaml").read_text(encoding="utf-8"))
    (mount,) = values["extraVolumeMounts"]
    (volume,) = values["extraConfigMapVolumes"]
    assert values["arguments"] == ["-f", f"{mount['mountPath']}/counters.csv"]
    assert mount["name"] == volume["name"]
    assert volume["configMap"]["name"] in PAGE


def test_for_gpus_the_agent_may_do_little_more() -> None:
    """The devices of the driver, and looking at processes; all else stays as the unit says."""
    unit = options(AGENT / "systemd" / "smon-agent.service")
    more = options(AGENT / "systemd" / "gpu.conf")
    assert set(more) == {
        "PrivateDevices",
        "DevicePolicy",
        "DeviceAllow",
        "ProtectProc",
        "CapabilityBoundingSet",
        "AmbientCapabilities",
    }
    assert more["DeviceAllow"] == ["char-nvidia* rw"]
    for name in ("CapabilityBoundingSet", "AmbientCapabilities"):
        assert set(more[name][0].split()) - set(unit[name][0].split()) == {"CAP_SYS_PTRACE"}


def test_systemd_understands_what_gpus_need(tmp_path: Path) -> None:
    """`systemd-analyze verify` of the unit with it has nothing to say."""
    analyze = tool("systemd-analyze", "systemd")
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n", encoding="utf-8")
    program.chmod(0o755)
    unit = tmp_path / "smon-agent.service"
    text = (AGENT / "systemd" / unit.name).read_text(encoding="utf-8")
    unit.write_text(re.sub(r"/opt/smon/bin/\S+", str(program), text), encoding="utf-8")
    (tmp_path / f"{unit.name}.d").mkdir()
    drop_in = (AGENT / "systemd" / "gpu.conf").read_text(encoding="utf-8")
    (tmp_path / f"{unit.name}.d" / "gpu.conf").write_text(drop_in, encoding="utf-8")
    command = [analyze, "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if "gpu.conf" in line or "smon" in line]
    assert (done.returncode, ours) == (0, [])
