"""One rank of a job over its steps, and how far the numbers of a job can be trusted."""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Path, Query
from starlette.responses import Response

from smon.api.access import Scope
from smon.api.routes.common import JobId, Reader, found, problems, router, scoped
from smon.api.schemas.fleet import AgentModel
from smon.api.schemas.ranks import (
    ClockModel,
    DropModel,
    EvidenceModel,
    FileDropModel,
    GapModel,
    NeighbourModel,
    PlaceModel,
    QualityModel,
    RankModel,
    SkipReasonModel,
    StreamCountsModel,
    WindowCoverageModel,
    WindowSlowdownModel,
    WorkerStepModel,
)
from smon.store.queries.rank import RankDetail, RankQuestion, rank_detail, rank_rows
from smon.store.queries.series import MAX_STEPS
from smon.store.queries.trust import Trust, TrustQuestion, trust_of
from smon.wire.problems import Problem

routes = router("ranks")

_MAX_NUMBER: Final = 2**31 - 1

AttemptNumber = Annotated[
    int | None, Query(ge=0, le=_MAX_NUMBER, description="number of the attempt; none: newest")
]


@routes.get(
    "/jobs/{job_id}/ranks/{rank}",
    summary="One rank of a job",
    response_model=None,
    responses={**found(RankModel, "the rank"), **problems(Problem.NOT_FOUND)},
    openapi_extra=scoped(Scope.READ),
)
def rank(
    asked: Reader,
    job_id: JobId,
    rank: Annotated[int, Path(ge=0, le=_MAX_NUMBER, description="global rank")],
    attempt: AttemptNumber = None,
    steps: Annotated[
        int, Query(ge=1, le=MAX_STEPS, description="so many of the latest steps")
    ] = MAX_STEPS,
) -> Response:
    """Its worker step by step beside its peers, its counters beside those of all other ranks."""
    question = RankQuestion(job_id, rank, attempt)
    with asked.read() as session:
        rows = rank_rows(session, asked.service.objects, asked.tenant_id, question)
    return asked.answer(_rank_model(rank_detail(asked.service.objects, rows, steps)))


def _rank_model(detail: RankDetail) -> RankModel:
    rows = detail.rows
    return RankModel(
        job_id=rows.job_id,
        attempt=rows.attempt,
        rank=rows.rank,
        place=PlaceModel.model_validate(rows.place),
        worker_rank=detail.worker_rank,
        host=detail.host,
        gpu_uuid=detail.gpu_uuid,
        slowdown=detail.slowdown,
        approx_slowdown=detail.approx_slowdown,
        finding_ids=[each.id for each in detail.history],
        steps=[WorkerStepModel.model_validate(each) for each in detail.series.steps],
        windows=[WindowSlowdownModel.model_validate(each) for each in rows.by_window],
        evidence=EvidenceModel.model_validate(detail.evidence),
        neighbours=[NeighbourModel.model_validate(each) for each in detail.neighbours],
    )


@routes.get(
    "/jobs/{job_id}/quality",
    summary="How far the numbers of a job can be trusted",
    response_model=None,
    responses={**found(QualityModel, "the quality"), **problems(Problem.NOT_FOUND)},
    openapi_extra=scoped(Scope.READ),
)
def quality(asked: Reader, job_id: JobId, attempt: AttemptNumber = None) -> Response:
    """Coverage, missing ranks, clocks, steps left out, losses, agents."""
    down_ns = round(asked.service.settings.agent_down_s * 1e9)
    question = TrustQuestion(job_id, attempt, asked.service.clock(), down_ns)
    with asked.read() as session:
        trust = trust_of(session, asked.tenant_id, question)
    return asked.answer(_quality_model(trust))


def _quality_model(trust: Trust) -> QualityModel:
    report: dict[str, Any] = {} if trust.report is None else dict(trust.report)
    said = report.get("quality", {})
    clock = said.get("clock", {})
    return QualityModel(
        job_id=trust.job_id,
        attempt=trust.attempt,
        coverage_ratio=report.get("window", {}).get("coverage_ratio"),
        simulation_error_ratio=said.get("simulation_error_ratio"),
        aligned=clock.get("aligned"),
        residual_s=clock.get("residual_s"),
        notes=list(said.get("notes", ())),
        steps=trust.steps.steps,
        skipped=trust.steps.skipped,
        reasons=[SkipReasonModel.model_validate(each) for each in trust.steps.reasons],
        windows=[WindowCoverageModel.model_validate(each) for each in trust.windows],
        clocks=[ClockModel.model_validate(each) for each in trust.clocks],
        streams=StreamCountsModel.model_validate(trust.streams),
        agents=[AgentModel.model_validate(each) for each in trust.agents],
        drops=[DropModel.model_validate(each) for each in trust.drops],
        gaps=[GapModel.model_validate(each) for each in trust.gaps],
        files_dropped=[FileDropModel.model_validate(each) for each in trust.files],
    )
