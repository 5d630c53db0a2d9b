"""What senders of damaged batches count, from one process to the other."""

from __future__ import annotations

import json
from collections import Counter

from tests.proof.mutated import Tally


def test_counts_survive_the_way_between_processes() -> None:
    """As JSON, whose keys are text; and they add up."""
    tally = Tally(Counter({200: 1, 400: 2}), Counter({"JSON": 3}), 1, 0, 0)
    same = Tally.of(json.loads(json.dumps(tally.plain())))
    assert same == tally
    same.add(Tally(Counter({400: 5}), Counter({"Arrow": 5}), 0, 1, 2))
    assert same == Tally(Counter({200: 1, 400: 7}), Counter({"JSON": 3, "Arrow": 5}), 1, 1, 2)
