"""Names that lead out of a folder, wherever a name may stand: in addresses, and in what is sent."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Final
from urllib.parse import quote

from tests.proof.attacks.target import SECRET, Target, lines_of, sample

_JSON: Final = {"Content-Type": "application/json"}

#: Besides the places of parameters.
_PLACES: Final = ("/{}", "/static/{}", "/static/../{}", "/runbooks/{}", "/api/v1/{}", "/api/{}")

#: What a server may write below its data folder.
_OWN: Final = re.compile(
    r"(objects|uploads|wal|tmp)(/.*)?|smon\.db(-wal|-shm)?|secret\.txt|.*\.json"
)


def read(target: Target, most: int) -> int:
    """Ask for files by every name in every place, at most so many; requests made."""
    places = [place for path in target.paths() for place in _places(target, path)]
    asked = sample(list(itertools.product([*_PLACES, *places], lines_of("paths.txt"))), most)
    for place, name in asked:
        # A client that cleans up addresses would send something else.
        path = place.format(name.replace(" ", "%20"))
        target.ask("GET", path, token=target.tokens["all"])
    for name in sample(lines_of("paths.txt"), max(most // 20, 4)):
        target.ask("GET", "/" + name.replace(" ", "%20"), port=target.server.ops_port)
    return len(asked)


def _places(target: Target, path: str) -> list[str]:
    """The path once for each of its parameters, which is left open."""
    names = re.findall(r"\{(\w+)(?::\w+)?\}", path)
    return [target.filled(path, **{name: "{}"}) for name in names]


def written(target: Target, most: int) -> list[str]:
    """Send such names as those of jobs, hosts and files; what was written where nothing should."""
    data = Path(str(target.server.settings["data_dir"]))
    before = _files(target.server.folder.parent)
    for name in sample(lines_of("paths.txt"), most):
        if name.isprintable():
            _hello(target, name)
            _upload(target, name)
    after = _files(target.server.folder.parent)
    new = [path for path in after - before if not _is_own(path, data)]
    kept = (data / "secret.txt", data.parent / "secret.txt", data.parents[1] / "secret.txt")
    return [str(path) for path in new] + [
        str(path) for path in kept if path.read_text(encoding="utf-8") != SECRET
    ]


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def _is_own(path: Path, data: Path) -> bool:
    return path.is_relative_to(data) and bool(_OWN.fullmatch(str(path.relative_to(data))))


def _hello(target: Target, name: str) -> None:
    stream = {
        "key": name, "job": name, "attempt": 0, "layout": {"dp": 1, "pp": 1}, "mode": "recorded",
        "time": "unix", "window_steps": None, "host": name, "source": name, "ranks": [0],
        "epoch": 0, "notes": [name],
    }  # fmt: skip
    agent = {"version": name, "host": name, "pid": 1}
    body = json.dumps({"protocol": 1, "agent": agent, "streams": [stream]}).encode()
    path = "/api/v1/agents/hello"
    target.ask("POST", path, token=target.tokens["ingest"], headers=_JSON, body=body)


def _upload(target: Target, name: str) -> None:
    token, body = target.tokens["ingest"], json.dumps({"job": name}).encode()
    made = target.ask("POST", "/api/v1/imports", token=token, headers=_JSON, body=body)
    if made.status >= 300:
        return
    digest = base64.b64encode(hashlib.sha256(b"x").digest()).decode()
    headers = {"Content-Digest": f"sha-256=:{digest}:", "SMon-File-Name": quote(name, safe="")}
    path = f"/api/v1/imports/{made.json()['id']}/files/0"
    target.ask("PUT", path, token=token, headers=headers, body=b"x")
