"""Real training with a pipeline: what was done to it is what SMon says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.system.server import ServerProcess
from tests.torch.pipelines import HEALTHY, first, ran, told
from tests.torch.plans import Batches, Collect


def test_a_healthy_job_is_left_alone(server: ServerProcess, tmp_path: Path) -> None:
    """Nothing was done: verdict none."""
    report = ran("healthy", HEALTHY, server, tmp_path).report
    assert report["verdict"] == "none", told(report)
    assert not report["findings"], told(report)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_works_longer_is_named(
    rank: int, server: ServerProcess, tmp_path: Path
) -> None:
    """20 % more work of the processor in each compute: that rank, and it lasts."""
    plan = replace(HEALTHY, slow_rank=rank)
    found = first(ran(f"slow-rank-{rank}", plan, server, tmp_path).report)
    assert found["verdict"] == "straggler", found
    assert found["where"]["rank"] == rank, found
    assert found["persistence"]["kind"] == "persistent", found


def test_a_last_stage_with_more_layers_is_named(server: ServerProcess, tmp_path: Path) -> None:
    """6 layers after 4: the partition, and that stage."""
    plan = replace(HEALTHY, layers=(4, 6))
    found = first(ran("long-stage", plan, server, tmp_path).report)
    assert (found["cause"], found["where"]["stage"]) == ("stage_partition", 1), found


def test_packed_batches_of_uneven_length_are_told(server: ServerProcess, tmp_path: Path) -> None:
    """As many tokens in each microbatch, but not as much attention: the data, and no rank."""
    plan = replace(HEALTHY, batches=Batches.PACKED)
    found = first(ran("packed", plan, server, tmp_path).report)
    assert found["cause"] == "sequence_length", found
    assert found["where"]["rank"] is None, found
    assert any("with Σlen²" in each for each in found["evidence"]), found


def test_collections_at_different_times_are_told(server: ServerProcess, tmp_path: Path) -> None:
    """Each rank collects real garbage when it likes: gc, with the events of the recorder."""
    plan = replace(HEALTHY, collect=Collect.ALONE)
    found = first(ran("gc-alone", plan, server, tmp_path).report)
    assert found["cause"] == "gc", found
    assert any("collections recorded" in each for each in found["evidence"]), found


def test_a_slow_loader_is_told_from_a_slow_rank(server: ServerProcess, tmp_path: Path) -> None:
    """One rank of the first stage waits for its data: the loader there."""
    plan = replace(HEALTHY, loader_rank=1)
    found = first(ran("slow-loader", plan, server, tmp_path).report)
    assert (found["cause"], found["where"]["rank"]) == ("dataloader", 1), found


def test_the_step_in_which_a_fault_begins_is_told(server: ServerProcess, tmp_path: Path) -> None:
    """A rank is slow from step 18 on: onset there."""
    plan = replace(HEALTHY, steps=36, slow_rank=2, slow_from=18)
    found = first(ran("onset", plan, server, tmp_path).report)
    assert found["where"]["rank"] == 2, found
    assert found["persistence"]["onset_step"] == pytest.approx(18, abs=1), found
