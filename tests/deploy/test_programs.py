"""What the programs that will read these files say of them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import AGENT, ROOT, SERVER, tool

SCRIPTS = sorted((AGENT / "slurm").glob("*.sh"))


def run(*command: str) -> str:
    """What a program prints; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_in_the_scripts(path: Path) -> None:
    """Scripts that run as root on every node are checked, and can be run."""
    assert path.stat().st_mode & 0o111 == 0o111
    assert run(tool("shellcheck", "shellcheck"), str(path)) == ""


def test_prometheus_takes_its_file() -> None:
    """With all rules that it names."""
    path = ROOT / "dashboards" / "prometheus" / "prometheus.yml"
    assert "SUCCESS" in run(tool("promtool", "prometheus"), "check", "config", str(path))


def test_alertmanager_takes_its_file() -> None:
    """Routes and receivers fit each other."""
    path = ROOT / "dashboards" / "alertmanager" / "alertmanager.yml"
    found = run(tool("amtool", "prometheus-alertmanager"), "check-config", str(path))
    assert "SUCCESS" in found


def test_haproxy_takes_its_file() -> None:
    """Without a warning."""
    path = SERVER / "haproxy.cfg"
    found = run(tool("haproxy", "haproxy"), "-c", "-f", str(path))
    assert not re.search(r"WARNING|ALERT", found)


def test_nginx_takes_its_file(tmp_path: Path) -> None:
    """As a part of a whole configuration, without a warning."""
    nginx, openssl = tool("nginx", "nginx-light"), tool("openssl", "openssl")
    key, certificate = tmp_path / "smon.key", tmp_path / "smon.crt"
    run(
        *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
        *("-nodes", "-subj", "/CN=smon.example.com", "-days", "1"),
        *("-keyout", str(key), "-out", str(certificate)),
    )
    text = (SERVER / "nginx.conf").read_text(encoding="utf-8")
    text = text.replace("/etc/nginx/smon", str(tmp_path / "smon"))
    # Above 1023: whoever runs the tests may open them.
    text = re.sub(r"listen 443", "listen 127.0.0.1:48443", text)
    (tmp_path / "smon.conf").write_text(text, encoding="utf-8")
    temporary = "".join(
        f"{name}_temp_path {tmp_path}/{name}; "
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = tmp_path / "nginx.conf"
    whole.write_text(
        f"pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}} "
        f"http {{ access_log off; {temporary} include {tmp_path}/smon.conf; }}\n",
        encoding="utf-8",
    )
    found = run(nginx, "-t", "-c", str(whole))
    assert "warn" not in found
