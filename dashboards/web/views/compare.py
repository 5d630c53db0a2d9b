"""A job as the published method sees it, beside what SMon says.

Flow: a stored report → **here** → `dashboards.web.views.job`. Every number is the report's: M_W and
M_S, S_t of each op type, and the two slowdowns of each worker, min(S_dp, S_stage) and exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dashboards.web.text import percent, times

_MOST: Final = 5
_OP_TYPES: Final = 12


@dataclass(frozen=True, slots=True)
class Ranked:
    """A worker by both numbers, and its place in both orders, from 1."""

    rank: int
    dp: int
    stage: int
    exact: float
    approximate: float
    exact_place: int
    approximate_place: int


@dataclass(frozen=True, slots=True)
class CompareView:
    """Both views of one job."""

    slowdown: float
    worker_share: float | None
    last_stage_share: float | None
    by_optype: tuple[tuple[str, float], ...]
    workers: tuple[Ranked, ...]
    largest_difference: float
    words: tuple[str, ...]


def compare_view(document: Mapping[str, Any]) -> CompareView | None:
    """Both views of one job; None without usable steps."""
    slowdown = document["slowdown"]["paper"]
    known = [
        worker
        for worker in document["workers"]
        if worker["slowdown"] is not None and worker["approx_slowdown"] is not None
    ]
    if slowdown is None or not known:
        return None
    exact = sorted(known, key=lambda worker: (-worker["slowdown"], worker["rank"]))
    approximate = sorted(known, key=lambda worker: (-worker["approx_slowdown"], worker["rank"]))
    kinds = sorted(document["by_optype"].items(), key=lambda item: -item[1])
    return CompareView(
        slowdown=slowdown,
        worker_share=document["worker_share"],
        last_stage_share=document["last_stage_share"],
        by_optype=tuple(kinds[:_OP_TYPES]),
        workers=_ranked(exact, approximate),
        largest_difference=max(abs(one["slowdown"] - one["approx_slowdown"]) for one in known),
        words=tuple(_words(document, exact, approximate)),
    )


def _ranked(
    exact: Sequence[Mapping[str, Any]], approximate: Sequence[Mapping[str, Any]]
) -> tuple[Ranked, ...]:
    """The first of either order, by exact slowdown."""
    place = {worker["rank"]: number for number, worker in enumerate(approximate, start=1)}
    first = {worker["rank"] for worker in approximate[:_MOST]}
    return tuple(
        Ranked(
            rank=worker["rank"],
            dp=worker["dp"],
            stage=worker["stage"],
            exact=worker["slowdown"],
            approximate=worker["approx_slowdown"],
            exact_place=number,
            approximate_place=place[worker["rank"]],
        )
        for number, worker in enumerate(exact, start=1)
        if number <= _MOST or worker["rank"] in first
    )


def _words(
    document: Mapping[str, Any],
    exact: Sequence[Mapping[str, Any]],
    approximate: Sequence[Mapping[str, Any]],
) -> list[str]:
    ours, theirs = exact[0], approximate[0]
    if ours["rank"] == theirs["rank"]:
        first = (
            f"Both name rank {ours['rank']} first: exact {times(ours['slowdown'])}, published "
            f"approximation {times(ours['approx_slowdown'])}."
        )
    else:
        first = (
            f"They name different workers: exact S_w is highest for rank {ours['rank']} "
            f"({times(ours['slowdown'])}; approximated, {times(ours['approx_slowdown'])}), the "
            f"published approximation for rank {theirs['rank']} "
            f"({times(theirs['approx_slowdown'])}; exactly, {times(theirs['slowdown'])})."
        )
    return [first, _share_words(document)]


def _share_words(document: Mapping[str, Any]) -> str:
    """What the published method would conclude from its two shares, and what SMon found."""
    worker, stage = document["worker_share"], document["last_stage_share"]
    if worker is None or stage is None:
        return "M_W and M_S are not defined: nothing is lost."
    half = 0.5
    blamed = []
    if worker >= half:
        blamed.append("the slowest 3 % of the workers")
    if stage >= half:
        blamed.append("the last stage")
    theirs = " and ".join(blamed) or "neither the slowest workers nor the last stage"
    causes = [finding["cause"].replace("_", " ") for finding in document["findings"]]
    ours = f"SMon finds: {', '.join(causes[:3])}." if causes else "SMon finds nothing."
    return (
        f"By M_W = {percent(worker)} and M_S = {percent(stage)}, most of the loss lies with "
        f"{theirs}. {ours}"
    )
