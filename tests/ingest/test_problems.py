from __future__ import annotations

import logging

import pytest

from smon.api.problems import RETRY_AFTER_S, problem_response, response_of
from smon.errors import (
    ConfigError,
    ConflictError,
    FencedError,
    GraphError,
    MissingError,
    SMonError,
    StoreError,
    TopologyError,
    TraceError,
    WireError,
)
from smon.wire.problems import KINDS, Problem
from tests.ingest.serving import Answer


def _answer(error: SMonError) -> Answer:
    response = response_of(error, request_id="r1")
    return Answer(response.status_code, dict(response.headers), bytes(response.body))


@pytest.mark.parametrize("problem", list(Problem))
def test_every_problem_has_its_document(problem: Problem) -> None:
    """Status, title, detail, the request's id; those that pass say when to come again."""
    answer = _answer(WireError(problem, "expected this, found that"))
    assert answer.problem == problem
    assert answer.status == KINDS[problem].status
    assert answer.document["title"] == KINDS[problem].title
    assert answer.document["detail"] == "expected this, found that"
    assert answer.document["instance"] == "r1"


@pytest.mark.parametrize(
    "error, problem",
    [
        (MissingError("x"), Problem.NOT_FOUND),
        (ConflictError("x"), Problem.STATE_CONFLICT),
        (FencedError("x"), Problem.STATE_CONFLICT),
        (StoreError("x"), Problem.STORE_UNAVAILABLE),
        (TopologyError("x"), Problem.INVALID),
        (TraceError("x"), Problem.INVALID),
        (ConfigError("x"), Problem.INVALID),
        (GraphError("x"), Problem.INTERNAL),
        (SMonError("x"), Problem.INTERNAL),
    ],
)
def test_every_kind_of_error_is_a_problem(error: SMonError, problem: Problem) -> None:
    """The most special kind counts."""
    assert _answer(error).problem == problem


def test_what_fails_inside_is_logged_and_not_told(caplog: pytest.LogCaptureFixture) -> None:
    """A database's message may name hosts and statements."""
    with caplog.at_level(logging.WARNING):
        answer = _answer(StoreError("connection to 10.0.0.1 as smon failed"))
    assert b"10.0.0.1" not in answer.body
    assert "10.0.0.1" in caplog.text
    assert "r1" in caplog.text


@pytest.mark.parametrize("given, shown", [(0.01, "1"), (1.0, "1"), (1.2, "2"), (96.0, "96")])
def test_retry_after_is_a_whole_number_of_seconds_from_1(given: float, shown: str) -> None:
    """As HTTP wants it; never too early."""
    response = problem_response(Problem.OVERLOADED, "busy", retry_after_s=given)
    assert response.headers["retry-after"] == shown


def test_a_problem_that_passes_always_says_when_to_come_again() -> None:
    """429, 503 and 507."""
    for problem in Problem:
        response = problem_response(problem, "x")
        assert ("retry-after" in response.headers) == (KINDS[problem].status in RETRY_AFTER_S)
