"""Writes the dashboards: ``python -m dashboards.grafana.build``.

Flow: `dashboards.grafana.jobs`, `dashboards.grafana.service` → **here** → JSON files beside this
module, which Grafana reads (``dashboards/grafana/provisioning``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from dashboards.grafana import jobs, service

FOLDER: Final = Path(__file__).resolve().parent

_BOARDS: Final = {jobs.NAME: jobs.dashboard, service.NAME: service.dashboard}


def texts() -> dict[str, str]:
    """The text of each file, by its name."""
    return {
        f"{name}.json": json.dumps(make(), indent=2, ensure_ascii=False) + "\n"
        for name, make in _BOARDS.items()
    }


def main() -> None:
    """Write the files."""
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
