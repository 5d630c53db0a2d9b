"""Pages of hosts: each record with its numbers, what it means, and what to type."""

from __future__ import annotations

import re
from html import unescape
from urllib.parse import quote

import pytest
from sqlalchemy import update

from dashboards.web.figures.strip import WIDTH, Span, strip_of
from dashboards.web.links import host_link
from dashboards.web.views.host import commands_for, record_words
from smon.store.models import Stream
from smon.store.queries.hosts import HostKind, HostRow
from tests.api.conftest import Filled
from tests.api.filled import NOW, SECOND, World, add_job, report_of
from tests.web.places import DAY, forget_findings, page, section, suspect, table, words

HOSTILE = [
    "<script>alert(1)</script>",
    "'; rm -rf /; '",
    "{{ 7 * 7 }}",
    "../../x",
    "..",
    "a/b?c#d",
    "=1+1",
    "n[1-9],n12",
    "\u202egnp.exe",
]


def row(**fields: object) -> HostRow:
    """The record of a host, a suspect once."""
    plain = {
        "id": "node-1", "kind": HostKind.HOST, "jobs": 1, "findings": 1, "open_findings": 0,
        "causes": ("slow_gpu",), "gpu_hours_per_day": 0.0, "cost_per_day": None,
        "lost_gpu_hours": 1.0, "lost_cost": None, "first_s": 1.0, "last_s": 2.0,
    }  # fmt: skip
    return HostRow(**{**plain, **fields})  # type: ignore[arg-type]


@pytest.fixture
def recurring(filled: Filled) -> Filled:
    """One host that was a suspect in two jobs, one in one, of 16 and 4 GPUs."""
    forget_findings(filled.world)
    suspect(filled.world, filled.slow, host="node-1", cause="slow_gpu", state="cleared")
    suspect(filled.world, filled.healthy, host="node-1", cause="thermal", rank=3)
    suspect(filled.world, filled.slow, host="node-2", cause="slow_link", state="cleared")
    return filled


def test_who_recurs_comes_first(recurring: Filled) -> None:
    """Suspects in several jobs stand apart from those seen in one."""
    text = page(recurring.world, "/hosts")
    assert "node-1" in section(text, "recurring")
    assert "node-2" not in section(text, "recurring")
    assert "node-2" in section(text, "single")
    assert "slow GPU, GPU slowed down by heat" in words(section(text, "recurring")) or (
        "GPU slowed down by heat, slow GPU" in words(section(text, "recurring"))
    )


def test_the_page_the_file_and_rest_agree(recurring: Filled) -> None:
    """One number in one place: what the page shows is what programs get."""
    world = recurring.world
    # 0.36 s in each of 100 steps: on 16 GPUs 0.16 hours, on 4 of them 0.04.
    hours = pytest.approx(0.2)
    (first, _) = world.client().json("/api/v1/hosts")["items"]
    assert (first["id"], first["jobs"], first["lost_gpu_hours"]) == ("node-1", 2, hours)
    assert float(table(world, "/hosts?as=csv")[0]["lost_gpu_hours"]) == hours
    shown = re.findall(r'data-value="([^"]+)"', page(world, "/hosts/node-1"))
    assert [float(value) for value in shown] == [2, hours]
    one = world.client().json("/api/v1/hosts/node-1")
    assert {each["job"] for each in one["findings"]} == {"slow-job", "healthy-job"}
    rows = table(world, "/hosts/node-1?as=csv")
    assert {each["job"] for each in rows} == {"slow-job", "healthy-job"}
    assert sum(float(each["lost_gpu_hours"]) for each in rows) == hours


def test_a_record_says_what_it_means(recurring: Filled) -> None:
    """Several jobs are a pattern, one is not; and how many others are as bad."""
    text = words(section(page(recurring.world, "/hosts/node-1"), "verdict"))
    assert "A suspect in 2 jobs: it recurs and is worth a repair." in text
    assert "1 finding is open now." in text
    assert "Of 2 hosts that were ever suspects, 1 recurs; none is in more jobs" in text
    single = words(section(page(recurring.world, "/hosts/node-2"), "verdict"))
    assert "A suspect in 1 job: no pattern across jobs." in single


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"jobs": 0, "findings": 0}, "Never a suspect."),
        ({"open_findings": 1}, "A suspect now in 1 job: no pattern across jobs."),
        ({"findings": 4}, "A suspect in 1 job, 4 times there: no pattern across jobs."),
        ({"jobs": 3, "findings": 3}, "A suspect in 3 jobs: it recurs and is worth a repair."),
    ],
)
def test_records_in_words(fields: dict[str, object], said: str) -> None:
    """Once, often in one job, in several jobs, never."""
    assert record_words(row(**fields)) == said


def test_every_finding_leads_to_its_job_and_rank(recurring: Filled) -> None:
    """Links of the attempt in which it was found."""
    text = section(page(recurring.world, "/hosts/node-1"), "findings")
    assert f'href="/jobs/{recurring.healthy.job_id}"' in text
    assert f'href="/jobs/{recurring.healthy.job_id}/ranks/3?attempt=0"' in text


def test_the_list_can_be_narrowed(recurring: Filled) -> None:
    """By name, by time, and by GPU instead of host; and it says when nothing is left."""
    world = recurring.world
    suspect(world, recurring.slow, host="node-3", gpu_uuid="GPU-9", last_ns=NOW - 40 * DAY)
    assert "node-1" not in page(world, "/hosts?q=NODE-2")
    assert "node-3" in page(world, "/hosts")
    assert "node-3" not in page(world, "/hosts?days=30")
    by_gpu = page(world, "/hosts?by=gpu")
    assert "GPU-9" in by_gpu
    assert "node-1" not in by_gpu
    assert "No host that was a suspect has “zebra” in its name" in words(
        page(world, "/hosts?q=zebra")
    )


def test_a_server_without_suspects_says_how_they_come(world: World) -> None:
    """Nothing to list is not an empty table."""
    text = page(world, "/hosts")
    assert "No host was ever a suspect." in text
    assert "<table" not in text


def test_a_host_where_a_job_runs_has_a_page(filled: Filled) -> None:
    """Streams know hosts: what runs there, its ranks and its agent, though it was no suspect."""
    text = page(filled.world, "/hosts/node-0")
    assert "Never a suspect." in text
    running = section(text, "running")
    assert f'href="/jobs/{filled.slow.job_id}/ranks/1"' in running
    assert "foreign-job" not in text
    agents = words(section(text, "agents"))
    assert "✓ sending" in agents
    assert "2 full" in agents
    assert 'class="copy"' not in text


def test_what_has_ended_does_not_run_there(filled: Filled) -> None:
    """A stream that is complete is no job that runs."""
    with filled.world.database.write() as session:
        session.execute(update(Stream).values(ended=True))
    page(filled.world, "/hosts/node-0", 404)


def test_an_unknown_host_is_not_found(filled: Filled) -> None:
    """Neither a suspect nor in use; nor is one that only another tenant knows."""
    with filled.world.database.write() as session:
        add_job(session, filled.world.other_id, "other", report_of("slow"))
    suspect(filled.world, filled.foreign, host="secret-node")
    page(filled.world, "/hosts/nobody", 404)


def test_a_gpu_has_a_page_of_its_own(filled: Filled) -> None:
    """By its UUID, with the host that it is in and that host's commands."""
    text = page(filled.world, "/hosts/GPU-00000007")
    assert '<span class="chip">GPU</span>' in text
    assert 'href="/hosts/node-7"' in text
    assert "kubectl cordon node-7" in text


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_are_text_and_their_links_lead_here(filled: Filled, name: str) -> None:
    """In the list, on its page, and in no command that could mean something else."""
    suspect(filled.world, filled.slow, host=name)
    link = host_link(name)
    listed = page(filled.world, "/hosts")
    assert f'href="{link}"' in listed
    text = page(filled.world, link)
    assert "<script>alert" not in listed + text
    title = re.search(r"<h1><code>(.*?)</code></h1>", text)
    assert title is not None
    assert unescape(title[1]) == " ".join(name.split())
    assert "scontrol" not in text
    assert "no command is offered" in text


def test_cells_of_the_file_are_no_formulas(filled: Filled) -> None:
    """A spreadsheet must not run a name."""
    suspect(filled.world, filled.slow, host="=1+1")
    assert "'=1+1" in {each["id"] for each in table(filled.world, "/hosts?as=csv")}


def test_commands_name_one_node_exactly() -> None:
    """As the report does; not for Kubernetes if it cannot be a name there."""
    texts = [each.text for each in commands_for("node-1", row(jobs=3))]
    assert "scontrol update NodeName=node-1 State=DRAIN Reason=smon_slow_gpu" in texts
    assert "kubectl cordon node-1" in texts
    upper = [each.text for each in commands_for("Node_1", row())]
    assert any("scontrol" in text for text in upper)
    assert not any("kubectl" in text for text in upper)


@pytest.mark.parametrize("name", ["n[1-9]", "a,b", "-x", "a b", "$(id)", "n;id", ""])
def test_no_command_for_what_is_no_node(name: str) -> None:
    """Slurm would take some of these for many nodes."""
    assert commands_for(name, row()) == ()


@pytest.mark.parametrize("name", ["a/b", "..", ".", "a?b=c", "ü", "%2F"])
def test_links_survive_any_name(name: str) -> None:
    """No character of a name is a part of the address."""
    link = host_link(name)
    assert quote(name, safe="") in link
    assert link.startswith("/hosts?name=" if name in (".", "..") else "/hosts/")
    assert "/" not in link.removeprefix("/hosts/").removeprefix("/hosts?name=")


def test_bars_stand_where_their_times_are() -> None:
    """Linear in time, in the box, and never too thin to be seen."""
    spans = [Span(0.0, 100.0, "a", is_open=False), Span(900.0, 1000.0, "b", is_open=True)]
    strip = strip_of(
        [("job", "/jobs/1", spans), ("x", "/", [Span(500.0, 500.0, "c", is_open=False)])]
    )
    first, last = strip.rows[0].bars
    assert (first.x, first.width) == (0.0, WIDTH / 10)
    assert (last.x, last.width, last.is_open) == (0.9 * WIDTH, WIDTH / 10, True)
    (thin,) = strip.rows[1].bars
    assert thin.x == pytest.approx(WIDTH / 2)
    assert 0 < thin.width < 10
    assert len(strip.ticks) == 5


def test_a_page_that_has_not_changed_is_not_sent_again(recurring: Filled) -> None:
    """The browser's copy stays good until something happens, or time goes by."""
    client = recurring.world.client()
    first = client.get("/hosts/node-1", headers={"accept": "text/html"})
    tag = {"accept": "text/html", "if-none-match": first.headers["etag"]}
    assert client.get("/hosts/node-1", headers=tag).status_code == 304
    assert client.get("/hosts/node-2", headers=tag).status_code == 200
    suspect(recurring.world, recurring.slow, last_ns=NOW + SECOND)
    assert client.get("/hosts/node-1", headers=tag).status_code == 200
