"""Unit files of systemd, as tests read them."""

from __future__ import annotations

from pathlib import Path


def options(path: Path) -> dict[str, list[str]]:
    """Values of every option, in the order of the file; sections do not share names here."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found
