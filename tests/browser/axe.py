"""axe-core, which looks for what keeps people out of a page."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Page

#: Where `npm install --prefix ~/.cache/smon/axe axe-core` puts it.
_DEFAULT: Final = "~/.cache/smon/axe/node_modules/axe-core/axe.min.js"

#: Whoever cannot see or use what these are about is kept out.
_GRAVE: Final = frozenset({"serious", "critical"})


def axe_path() -> Path:
    """The script: SMON_AXE, or in the cache of the user."""
    return Path(os.environ.get("SMON_AXE") or _DEFAULT).expanduser()


def violations(page: Page, script: Path) -> list[str]:
    """What is grave on this page as it is now: rule, element, reason."""
    # Not as a script element, which the policy of the pages refuses.
    page.evaluate(script.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, {resultTypes: ['violations'], iframes: false})")
    return [_told(rule, node) for rule in found["violations"] if rule["impact"] in _GRAVE
            for node in rule["nodes"]]  # fmt: skip


def _told(rule: dict[str, Any], node: dict[str, Any]) -> str:
    return f"{rule['id']}: {json.dumps(node['target'])}: {node['failureSummary']}"
