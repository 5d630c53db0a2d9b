"""Bad hosts among many, over a month of jobs that are placed by chance.

Each job runs on hosts of its own; what runs on a bad one is slow, some other jobs lose time for
reasons that no host is to blame for. All are imported into a real server, which must find the bad
hosts, and only these.
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from smon.cli import main as smon_main
from smon.store.queries.hosts import RECURS
from smon.synth import causes
from smon.synth.faults.data import PackedSequences
from smon.synth.scenario import generate
from smon.synth.spec import Scenario
from smon.synth.truth import Cause
from smon.synth.write import write_synthetic
from smon.trace.context import Context
from tests.proof.line import Form, Line, at_most, exactly
from tests.system.server import ServerProcess

_DAY_S: Final = 86_400
_DAYS: Final = 30
_WAIT_S: Final = 600.0


#: Of the durations: (DP, PP) of jobs.
_SHAPES: Final = ((4, 2), (8, 2), (8, 4), (16, 2), (16, 4))


@dataclass(frozen=True, slots=True)
class Size:
    """Of the fleet."""

    jobs: int
    hosts: int
    bad: int


@dataclass(frozen=True, slots=True)
class Placed:
    """A job, the hosts it ran on, and those of them that are bad."""

    name: str
    scenario: Scenario
    hosts: tuple[str, ...]
    bad: tuple[str, ...]


_SIZE: Final = {Form.SHORT: Size(jobs=10, hosts=100, bad=2), Form.LONG: Size(200, 500, 3)}


def prove(form: Form, folder: Path) -> Line:
    """Run the month."""
    begin, size = time.monotonic(), _SIZE[form]
    bad = [f"node-{number:03d}" for number in range(size.bad)]
    placed = list(jobs(size, bad))
    with ServerProcess(folder / "server") as server:
        for job in placed:
            _import(job, folder / "job", server.url)
        _analysed(server, size.jobs)
        asked = time.monotonic()
        summary = server.get(f"fleet/summary?days={_DAYS + 2}")
        seconds = time.monotonic() - asked
        hosts = _all(server, "hosts")
        known = {host: _jobs_that_name(server, host) for host in bad}
    flagged = {host["id"] for host in hosts if host["jobs"] >= RECURS}
    named = {host["id"] for host in hosts}
    often = [host for host in bad if sum(host in job.bad for job in placed) >= RECURS]
    after = [until_flagged(host, placed, known[host]) for host in often]
    goals = (
        exactly("bad hosts that were used by two jobs or more, flagged", len(flagged & set(often)),
                len(often)),
        exactly("good hosts flagged", len(flagged - set(bad)), 0),
        exactly("good hosts named in any job", len(named - set(bad)), 0),
        exactly("jobs in the fleet report", int(summary["period"]["jobs"]), size.jobs),
        at_most("fleet report over HTTP, s", seconds, 10, timed=True),
    )  # fmt: skip
    figures = {
        "jobs": size.jobs,
        "hosts": size.hosts,
        "bad_hosts": size.bad,
        "jobs_that_used_one": sum(bool(job.bad) for job in placed),
        "jobs_on_each_until_it_is_flagged": ", ".join(map(str, after)),
    }
    return Line("fleet", form, goals, figures, round(time.monotonic() - begin, 1))


def jobs(size: Size, bad: list[str]) -> Iterator[Placed]:
    """Jobs of a month, oldest first; the same for the same size."""
    chance = random.Random(size.jobs)  # noqa: S311  # no secret
    names = [f"node-{number:03d}" for number in range(size.hosts)]
    started = int(time.time()) - _DAYS * _DAY_S
    for number in range(size.jobs):
        dp, pp = chance.choice(_SHAPES)
        used = _with_some_bad(chance, chance.sample(names, dp * pp), bad)
        slow = [place for place, host in enumerate(used) if host in bad]
        found = tuple(_slow(chance, place, dp) for place in slow[:1]) or _other(chance)
        scenario = Scenario(
            name=f"job-{number:03d}",
            dp=dp,
            pp=pp,
            tp=8,
            microbatches=8,
            steps=24,
            seed=number,
            causes=found,
            start_unix_s=started + number * _DAYS * _DAY_S // size.jobs,
        )
        yield Placed(scenario.name, scenario, tuple(used), tuple(used[place] for place in slow[:1]))


def _with_some_bad(chance: random.Random, used: list[str], bad: list[str]) -> list[str]:
    """At most one bad host, in about every third job: they are never free for long."""
    good = [host for host in used if host not in bad]
    while len(good) < len(used):
        good.append(f"spare-{len(good)}-{chance.randrange(1000):03d}")
    if chance.random() < 1 / 3:
        good[chance.randrange(len(good))] = chance.choice(bad)
    return good


def _slow(chance: random.Random, place: int, dp: int) -> Cause:
    return causes.slow_gpu(place % dp, place // dp, chance.uniform(1.08, 1.4))


def _other(chance: random.Random) -> tuple[Cause, ...]:
    """Nothing, mostly; else something that no host is to blame for."""
    roll = chance.random()
    if roll < 0.2:
        return (causes.sequence_length(PackedSequences()),)
    if roll < 0.35:
        return (causes.stage_partition(1, 1.3, 1.3),)
    return ()


def _import(job: Placed, folder: Path, url: str) -> None:
    made = generate(job.scenario)
    layout = job.scenario.layout
    hosts = {
        layout.rank(place % layout.dp, place // layout.dp): host
        for place, host in enumerate(job.hosts)
    }
    made = replace(made, context=replace(made.context or Context(), hosts=hosts))
    shutil.rmtree(folder, ignore_errors=True)
    write_synthetic(made, folder)
    (folder / "truth.json").unlink()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = smon_main(["import", str(folder), "--server", url])
    if code:
        raise RuntimeError(f"an import ended with {code}: {said.getvalue()[-500:]}")


def _analysed(server: ServerProcess, count: int) -> None:
    """Wait until every job has a report."""
    end = time.monotonic() + _WAIT_S
    while time.monotonic() < end:
        found = _all(server, "jobs")
        if sum(job["verdict"] is not None for job in found) >= count:
            return
        time.sleep(0.5)
    raise RuntimeError(f"not all of {count} jobs were analysed in {_WAIT_S:g} s")


def _jobs_that_name(server: ServerProcess, host: str) -> set[str]:
    """Names of the jobs in which a host is a suspect."""
    return {each["job"] for each in server.get(f"hosts/{host}")["findings"]}


def _all(server: ServerProcess, route: str) -> list[dict[str, Any]]:
    """All items of a paged list."""
    items: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = server.get(f"{route}?limit=100{cursor}")
        items += page["items"]
        if not page.get("next"):
            return items
        cursor = f"&cursor={page['next']}"


def until_flagged(host: str, placed: Sequence[Placed], known: set[str]) -> int:
    """Jobs that used a bad host, up to the one with which it is known to recur; 0: it is not."""
    used = [job.name in known for job in placed if host in job.bad]
    for count in range(1, len(used) + 1):
        if sum(used[:count]) >= RECURS:
            return count
    return 0
