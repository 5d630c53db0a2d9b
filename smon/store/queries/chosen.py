"""Which workers and which step of a report a timeline shows, unless somebody says otherwise.

Flow: a stored report → **here** → `smon.api.marks` → `smon.store.queries.tasks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from smon.errors import MissingError

#: A timeline shows at most so many workers.
MAX_WORKERS: Final = 24
_MAX_SUSPECTS: Final = 8
_MAX_VICTIMS: Final = 6
_MAX_PIPELINE: Final = 4
_MAX_PEERS: Final = 6

#: Without a suspect, so many of the most slowed down are shown.
_MAX_SLOWEST: Final = 6


class Role(StrEnum):
    """Why a worker is shown; in the order of the rows."""

    SUSPECT = "suspect"
    SLOWEST = "slowest"
    VICTIM = "victim"
    PIPELINE = "pipeline"
    PEER = "peer"
    CHOSEN = "chosen"


@dataclass(frozen=True, slots=True)
class Shown:
    """A worker of a timeline."""

    dp: int
    stage: int
    rank: int
    host: str | None
    role: Role


@dataclass(frozen=True, slots=True)
class ChosenStep:
    """A step of a window; the numbers are those of its report, None if it was left out."""

    step: int
    recorded_s: float | None
    ideal_s: float | None
    slowdown: float | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class Chosen:
    """Workers to show; `asked` of them were asked for."""

    workers: tuple[Shown, ...]
    asked: int


def steps_in(document: Mapping[str, Any]) -> list[ChosenStep]:
    """All steps that a report knows, ascending: analysed, or left out with the reason."""
    used = [
        ChosenStep(one["step"], one["recorded_s"], one["ideal_s"], one["slowdown"], None)
        for one in document["per_step"]
    ]
    left_out = [
        ChosenStep(one["step"], None, None, None, one["reason"])
        for one in document["window"]["skipped"]
    ]
    return sorted([*used, *left_out], key=lambda one: one.step)


def step_of(steps: Sequence[ChosenStep], number: int | None) -> ChosenStep:
    """The step with this number; by default the one that lost most against its ideal.

    Raises
    ------
    MissingError
        The report knows no such step.
    """
    if number is None:
        if not steps:
            raise MissingError("the report of this window knows no step")
        return max(steps, key=lambda one: (one.slowdown or 0.0, -one.step))
    for one in steps:
        if one.step == number:
            return one
    span = f", {steps[0].step} to {steps[-1].step}" if steps else ""
    raise MissingError(f"expected a step of this window{span}, found {number}")


def choose(document: Mapping[str, Any], dp: Sequence[int], stage: Sequence[int]) -> Chosen:
    """Workers by DP rank and stage; by default the suspects, who waits, and the usual peers.

    Small jobs are shown whole. The order is the order of the rows.
    """
    workers = document["workers"]
    roles = _roles(document)
    if dp or stage:
        mine = [one for one in workers if _is_asked(one, dp, stage)]
        shown = [_shown(one, _role_of_asked(roles, one)) for one in mine]
        return Chosen(tuple(_by_role(shown)[:MAX_WORKERS]), len(shown))
    if len(workers) <= MAX_WORKERS:
        everyone = [_shown(one, roles.get(_place(one), Role.PEER)) for one in workers]
        return Chosen(tuple(_by_role(everyone)), len(everyone))
    known = {_place(one): one for one in workers}
    roles.update(_peers(workers, roles))
    some = [_shown(known[place], role) for place, role in roles.items()]
    return Chosen(tuple(_by_role(some)[:MAX_WORKERS]), len(some))


def _is_asked(one: Mapping[str, Any], dp: Sequence[int], stage: Sequence[int]) -> bool:
    return (not dp or one["dp"] in dp) and (not stage or one["stage"] in stage)


def _role_of_asked(roles: Mapping[tuple[int, int], Role], one: Mapping[str, Any]) -> Role:
    role = roles.get(_place(one))
    return role if role in (Role.SUSPECT, Role.VICTIM) else Role.CHOSEN


def _by_role(shown: Iterable[Shown]) -> list[Shown]:
    order = list(Role)
    return sorted(shown, key=lambda one: (order.index(one.role), one.stage, one.dp))


def _place(one: Mapping[str, Any]) -> tuple[int, int]:
    return one["dp"], one["stage"]


def _shown(one: Mapping[str, Any], role: Role) -> Shown:
    return Shown(one["dp"], one["stage"], one["rank"], one["host"], role)


def _roles(document: Mapping[str, Any]) -> dict[tuple[int, int], Role]:
    """Suspects, their victims, the stages beside them; without suspects the slowest."""
    workers = document["workers"]
    ranked = _ranked(workers)
    places = [_suspects(finding, ranked) for finding in document["findings"]]
    suspects = list(dict.fromkeys(place for group in places for place in group))
    suspects = suspects[:_MAX_SUSPECTS]
    roles = dict.fromkeys(suspects, Role.SUSPECT)
    if not roles:
        slowest = [_place(one) for one in ranked if (one["slowdown"] or 0.0) > 1.0]
        roles = dict.fromkeys(slowest[:_MAX_SLOWEST], Role.SLOWEST)
    for place in _victims(document)[:_MAX_VICTIMS]:
        roles.setdefault(place, Role.VICTIM)
    for place in _pipeline(workers, list(roles)[:1]):
        roles.setdefault(place, Role.PIPELINE)
    return roles


def _ranked(workers: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return sorted(workers, key=lambda one: (-(one["slowdown"] or 0.0), *_place(one)))


def _suspects(
    finding: Mapping[str, Any], ranked: Sequence[Mapping[str, Any]]
) -> list[tuple[int, int]]:
    """Where a finding is, most slowed down first; nowhere if it is about the whole job."""
    where = finding["where"]
    if where["dp"] is not None and where["stage"] is not None:
        return [(where["dp"], where["stage"])]
    ranks = set(where["ranks"]) | ({where["rank"]} - {None})
    if ranks:
        return [_place(one) for one in ranked if one["rank"] in ranks]
    for name in ("stage", "dp"):
        if where[name] is not None:
            return [_place(one) for one in ranked if one[name] == where[name]]
    return []


def _victims(document: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Workers that a finding says only wait."""
    by_rank = {one["rank"]: _place(one) for one in document["workers"]}
    ranks = [
        rank
        for finding in document["findings"]
        if finding["victims"] is not None
        for rank in finding["victims"]["ranks"]
    ]
    return list(dict.fromkeys(by_rank[rank] for rank in ranks if rank in by_rank))


def _pipeline(
    workers: Iterable[Mapping[str, Any]], first: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The stages next to a worker in its own replica."""
    for dp, stage in first:
        others = [_place(one) for one in workers if one["dp"] == dp and one["stage"] != stage]
        return sorted(others, key=lambda place: abs(place[1] - stage))[:_MAX_PIPELINE]
    return []


def _peers(
    workers: Sequence[Mapping[str, Any]], roles: Mapping[tuple[int, int], Role]
) -> dict[tuple[int, int], Role]:
    """The most usual workers of the stages that are shown first: those in the middle by S_w."""
    stages = {stage for (_, stage), role in roles.items() if role in (Role.SUSPECT, Role.SLOWEST)}
    others = [
        one
        for one in _ranked(workers)
        if _place(one) not in roles and (not stages or one["stage"] in stages)
    ] or [one for one in _ranked(workers) if _place(one) not in roles]
    begin = max((len(others) - _MAX_PEERS) // 2, 0)
    return {_place(one): Role.PEER for one in others[begin : begin + _MAX_PEERS]}
