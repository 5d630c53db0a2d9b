"""The page of a rank: who it is, what it did step by step, and its counters beside that."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sqlalchemy import update

from dashboards.web.figures.rank import Onset, Panel, rank_figure
from dashboards.web.views.rank import counter_words
from smon.report import JobReport
from smon.store.models import Attempt, Result
from smon.store.results import packed
from tests.api.conftest import Filled
from tests.api.filled import World, report_of
from tests.web.places import page, put_context, readings, section, table, words

#: Of the slow job: 4 × 4 workers, rank 6 (DP rank 2, stage 1) is slow.
CULPRIT = 6


def path(filled: Filled, rank: int = CULPRIT) -> str:
    """Address of the page of a rank of the slow job."""
    return f"/jobs/{filled.slow.job_id}/ranks/{rank}"


def figure(text: str) -> dict[str, Any]:
    """The figure of the page."""
    found = re.search(r'<script type="application/json" id="figure-rank">(.*?)</script>', text)
    assert found is not None
    drawn: dict[str, Any] = orjson.loads(found[1])
    return drawn


def put_steps(world: World, filled: Filled, compute: dict[tuple[int, int], float]) -> None:
    """Two steps of every worker: half a second of computing, or what is given, and 0.1 of wait."""
    rows = [
        {
            "step": step, "dp": dp, "stage": stage, "slowdown": 1.0 + 0.1 * step + dp,
            "compute_s": compute.get((dp, stage), 0.5 + 0.01 * dp), "wait_s": 0.1 * dp,
        }
        for step in (0, 1)
        for dp in range(4)
        for stage in range(4)
    ]  # fmt: skip
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    made = filled.slow
    world.objects.put(
        f"results/job={made.job_id}/{made.window_id}-workers.parquet", sink.getvalue()
    )


def store_report(filled: Filled, report: JobReport) -> None:
    """Put another report in place of the slow job's."""
    with filled.world.database.write() as session:
        session.execute(
            update(Result)
            .where(Result.window_id == filled.slow.window_id)
            .values(report=packed(report))
        )


def test_the_culprit_is_named_with_what_to_do(filled: Filled) -> None:
    """The sentence of the finding, its exact S_w, and the commands of the finding."""
    text = section(page(filled.world, path(filled)), "verdict")
    report = report_of("slow")
    assert "role-culprit" in text
    assert "Culprit. Rank 6 (DP rank 2, stage 1): slow GPU, +" in words(text)
    mine = next(each for each in report.workers if each.rank == CULPRIT)
    assert f'data-value="{mine.slowdown}"' in text
    assert text.count('<pre class="copy">') == len(report.findings[0].next)


def test_all_others_are_victims_also_those_not_listed(filled: Filled) -> None:
    """A finding lists sixteen of its victims at most, and counts all of them."""
    text = section(page(filled.world, path(filled, 0)), "verdict")
    assert "role-victim" in text
    assert "Victim. It waits for rank 6 (slow GPU)" in words(text)
    assert 'class="copy"' not in text
    report = report_of("slow")
    victims = report.findings[0].victims
    assert victims is not None
    few = replace(report.findings[0], victims=replace(victims, ranks=(1,)))
    store_report(filled, replace(report, findings=(few,)))
    assert "Victim." in page(filled.world, path(filled, 15))


def test_in_a_healthy_job_nobody_is_named(filled: Filled) -> None:
    """Not a culprit, and not a victim of nobody."""
    text = page(filled.world, f"/jobs/{filled.healthy.job_id}/ranks/1")
    assert "Not named: this job has no finding." in text
    assert "role-unnamed" in text


def test_a_finding_of_the_whole_job_names_no_rank(filled: Filled) -> None:
    """It is said beside, and blames nobody."""
    report = report_of("slow")
    whole = replace(report.findings[0], scope="job", victims=None)
    store_report(filled, replace(report, findings=(whole,)))
    text = words(section(page(filled.world, path(filled)), "verdict"))
    assert "Not named: the findings of this job are about others, or about all ranks." in text
    assert "Whole job: slow GPU" in text


def test_a_finding_of_a_node_names_each_rank_there(filled: Filled) -> None:
    """By the host that the report knows of the rank."""
    report = report_of("slow")
    where = replace(report.findings[0].where, node="node-x")
    node = replace(report.findings[0], scope="node", where=where)
    workers = tuple(
        replace(each, host="node-x" if each.rank in (6, 7) else "node-y") for each in report.workers
    )
    store_report(filled, replace(report, findings=(node,), workers=workers))
    assert "Culprit." in page(filled.world, path(filled, 7))
    assert "Culprit." not in page(filled.world, path(filled, 8))
    text = page(filled.world, path(filled, 6))
    assert 'href="/hosts/node-x"' in text
    neighbours = section(text, "neighbours")
    assert f'href="/jobs/{filled.slow.job_id}/ranks/7?attempt=0"' in neighbours
    assert "ranks/8?" not in neighbours


def test_a_rank_without_usable_steps_is_absent(filled: Filled) -> None:
    """No number is shown as a fast one."""
    report = report_of("slow")
    workers = tuple(
        replace(each, slowdown=None, approx_slowdown=None) if each.rank == 3 else each
        for each in report.workers
    )
    store_report(filled, replace(report, workers=workers))
    text = section(page(filled.world, path(filled, 3)), "verdict")
    assert "Absent: its worker was in no step that could be analysed." in text
    assert "<dl" not in text


def test_a_job_without_report_says_so(filled: Filled) -> None:
    """Waiting is a state, not an error."""
    with filled.world.database.write() as session:
        session.execute(update(Result).values(workers_path=None))
    text = page(filled.world, f"/jobs/{filled.empty.job_id}/ranks/0")
    assert "What each worker did in single steps is not kept for this attempt." in text


def test_steps_stand_beside_the_median_of_the_peers(filled: Filled) -> None:
    """The other DP ranks of its stage, itself left out: the figure, the table, the file, REST."""
    put_steps(filled.world, filled, {(2, 1): 0.9})
    text = page(filled.world, path(filled))
    peers, mine = figure(text)["data"][:2]
    assert mine["x"] == [0, 1]
    assert mine["y"] == pytest.approx([900.0, 900.0], abs=1e-3)
    # Medians of DP ranks 0, 1 and 3: 500, 510 and 530 ms.
    assert peers["y"] == pytest.approx([510.0, 510.0], abs=1e-3)
    rows = table(filled.world, f"{path(filled)}?as=csv")
    assert [row["step"] for row in rows] == ["0", "1"]
    assert float(rows[1]["compute_s"]) == pytest.approx(0.9)
    assert float(rows[1]["peers_wait_s"]) == pytest.approx(0.1)
    assert float(rows[1]["slowdown"]) == pytest.approx(3.1)
    rest = filled.world.client().json(f"/api/v1{path(filled)}")
    assert [each["compute_s"] for each in rest["steps"]] == pytest.approx([0.9, 0.9])
    assert "900 ms" in section(text, "steps")


def test_counters_stand_under_the_durations_on_one_axis(filled: Filled) -> None:
    """Of this rank and the median of all others, the telling ones first; also in the file."""
    put_steps(filled.world, filled, {})
    rows = [
        (step, rank, name, value)
        for step in (0, 1)
        for rank, clock, heat in ((6, 1200.0, 88.0), (0, 1980.0, 70.0), (1, 1960.0, 71.0))
        for name, value in (("gpu_temperature_c", heat), ("gpu_clock_mhz", clock))
    ]
    put_context(filled.world, filled.slow, [{"counters": readings(*rows)}], first=0)
    text = page(filled.world, path(filled))
    drawn = figure(text)
    titles = [each["text"] for each in drawn["layout"]["annotations"]]
    assert titles[3:] == ["SM clock, MHz", "GPU temperature, °C"]
    clock = {each["name"]: each["y"] for each in drawn["data"] if each["yaxis"] == "y4"}
    assert clock == {"this rank": [1200.0, 1200.0], "median of its peers": [1970.0, 1970.0]}
    assert "xaxis2" not in drawn["layout"]
    said = words(section(text, "steps"))
    assert "SM clock: 1,200 MHz in step 1; median of 2 other ranks 1,970 MHz (−39.1 %)" in said
    first = table(filled.world, f"{path(filled)}?as=csv")[0]
    assert (first["gpu_clock_mhz"], first["gpu_clock_mhz (peers)"]) == ("1200.0", "1970.0")
    rest = filled.world.client().json(f"/api/v1{path(filled)}")["evidence"]["counters"]
    assert [each["name"] for each in rest] == ["gpu_clock_mhz", "gpu_temperature_c"]


def test_without_counters_the_page_says_how_they_come(filled: Filled) -> None:
    """An empty place says what would fill it."""
    assert "No counters: nobody sent any of this rank." in page(filled.world, path(filled))


def test_what_happened_is_listed(filled: Filled) -> None:
    """Pauses of this rank and of the whole job, none of other ranks."""
    events = {
        "kind": ["gc", "checkpoint", "gc"], "step": [3, 4, 5], "rank": [6, None, 7],
        "start_ns": [None, None, None], "duration_s": [0.35, 6.0, 1.0],
    }  # fmt: skip
    put_context(filled.world, filled.slow, [{"events": events}], first=0)
    text = words(section(page(filled.world, path(filled)), "neighbours"))
    assert "4 checkpoint whole job 6.00 s" in text
    assert "3 gc this rank 350 ms" in text
    assert "1.00 s" not in text


def test_hostile_names_of_hosts_and_gpus_are_text(filled: Filled) -> None:
    """Side evidence names both, with any characters."""
    host, gpu = "<img src=x onerror=alert(1)>", '"><script>alert(2)</script>'
    document = {"hosts": {"6": host, "7": host}, "gpus": {"6": gpu}}
    put_context(filled.world, filled.slow, [document])
    text = page(filled.world, path(filled))
    assert "<img" not in text
    assert "<script>alert" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    assert 'href="/hosts/%3Cimg%20src%3Dx%20onerror%3Dalert%281%29%3E"' in text
    assert "ranks/7?attempt=0" in section(text, "neighbours")


def test_ranks_of_one_worker_are_shown_as_such(filled: Filled) -> None:
    """With TP, what is measured is measured of the group."""
    with filled.world.database.write() as session:
        session.execute(
            update(Attempt).where(Attempt.id == filled.slow.attempt_id).values(tp=2, dp=2)
        )
    text = words(section(page(filled.world, path(filled, 5)), "verdict"))
    assert "Measured as one worker with ranks 4 5 ; counters are of this rank alone." in text


@pytest.mark.parametrize("bad", ["16", "99999999999999", "-1", "x"])
def test_a_rank_that_the_job_does_not_have_is_not_found(filled: Filled, bad: str) -> None:
    """Beyond the world size, or no number."""
    page(filled.world, f"/jobs/{filled.slow.job_id}/ranks/{bad}", 404)


def test_another_attempt_can_be_asked_for(filled: Filled) -> None:
    """One that there never was is not found; what is no number counts as the newest."""
    page(filled.world, f"{path(filled)}?attempt=7", 404)
    page(filled.world, f"{path(filled)}?attempt=0")
    page(filled.world, f"{path(filled)}?attempt=newest")


def test_a_rank_of_another_tenant_is_not_there(filled: Filled) -> None:
    """Whoever asks."""
    page(filled.world, f"/jobs/{filled.foreign.job_id}/ranks/0", 404)


def test_panels_do_not_overlap() -> None:
    """Each has its part of the height, from top to bottom, and the axis of steps is the last's."""
    panels = [
        Panel("a", "s", [1, 2], [1.0, 2.0], [1.0, 1.0]),
        Panel("b", "", [1, 2], [1.0, None]),
        Panel("c", "MHz", [1], [1.0], [None], is_counter=True),
    ]
    drawn = rank_figure(panels, [Onset(2, "heat")], culprit=True)
    domains = [drawn["layout"][name]["domain"] for name in ("yaxis", "yaxis2", "yaxis3")]
    assert [low for low, _ in domains[:-1]] > [high for _, high in domains[1:]]
    assert domains[-1][0] == pytest.approx(0.0, abs=1e-9)
    assert drawn["layout"]["xaxis"]["anchor"] == "y3"
    assert [each["name"] for each in drawn["data"]].count("median of its peers") == 1
    assert drawn["layout"]["shapes"][0]["x0"] == 2


def test_counters_that_nobody_knows_are_shown_by_their_name() -> None:
    """Others may be there."""
    assert counter_words("fan_speed") == "fan speed"
    assert counter_words("gpu_power_w") == "GPU power, W"
