"""Run proofs, print a line of JSON for each, and write the page.

``python -m tests.proof --short scale`` runs one in short; without names, all of them. Long forms
are kept in ``docs/proof.jsonl``, from which ``docs/proof.md`` and the table of ``docs/scale.md``
are written (`make proof`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from tests.proof.child import ROOT
from tests.proof.line import Form, Line, line_of
from tests.proof.page import NAMES, page
from tests.proof.sizing import written

KEPT = ROOT / "docs" / "proof.jsonl"
PAGE = ROOT / "docs" / "proof.md"
SIZING = ROOT / "docs" / "scale.md"

Prove = Callable[[Form, Path], Line]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run them; 1 if a goal that is not about speed is missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.proof", description="Run the proofs.")
    parser.add_argument("names", nargs="*", metavar="PROOF", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--short", action="store_true", help="the form that runs in CI")
    parser.add_argument("--page", action="store_true", help="only write the page anew")
    parsed = parser.parse_args(arguments)
    unknown = sorted(set(parsed.names) - set(NAMES))
    if unknown:
        parser.error(f"expected some of {', '.join(NAMES)}, found {', '.join(unknown)}")
    lines = [] if parsed.page else list(_lines(parsed))
    if not parsed.short:
        keep(lines, KEPT)
        write_pages(kept(KEPT))
    return 0 if all(line.holds for line in lines) else 1


def write_pages(lines: Sequence[Line]) -> None:
    """Write the page of proofs, and what is reckoned from them."""
    PAGE.write_text(page(lines), encoding="utf-8")
    SIZING.write_text(written(SIZING.read_text(encoding="utf-8"), lines), encoding="utf-8")


def _lines(parsed: argparse.Namespace) -> list[Line]:
    form = Form.SHORT if parsed.short else Form.LONG
    done = []
    for name in parsed.names or NAMES:
        with tempfile.TemporaryDirectory(prefix="smon-proof-") as folder:
            line = proof(name)(form, Path(folder))
        sys.stdout.write(line.to_json() + "\n")
        sys.stdout.flush()
        done.append(line)
    return done


def proof(name: str) -> Prove:
    """The proof of this name."""
    prove: Prove = import_module(f"tests.proof.{name}").prove
    return prove


def kept(path: Path) -> list[Line]:
    """The last long form of each proof."""
    if not path.exists():
        return []
    return [line_of(text) for text in path.read_text(encoding="utf-8").splitlines()]


def keep(lines: Sequence[Line], path: Path) -> None:
    """Put lines in place of older ones of the same proofs."""
    whole = {line.proof: line for line in (*kept(path), *lines)}
    ordered = [whole[name] for name in NAMES if name in whole]
    path.write_text("".join(line.to_json() + "\n" for line in ordered), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
