"""No request that the OpenAPI document allows, or nearly, makes the server fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.api.conftest import Filled
from tests.api.served import served

#: Requests of each kind for each operation.
EXAMPLES: Final = 6

CHECKS: Final = (
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
)

#: Without a worker, a timeline is never ready: 503, as they say.
WAIT: Final = tuple(
    f"/api/v1/jobs/{{job_id}}/windows/{{window}}/timeline{end}" for end in ("", "/marks")
)


@pytest.fixture
def server(filled: Filled) -> Iterator[tuple[str, Filled, dict[str, Any]]]:
    """The address of a server with jobs, and its OpenAPI document."""
    with served(filled.world) as (address, world):
        yield address, filled, world.app.openapi()


def test_the_document_covers_agents_too(server: tuple[str, Filled, dict[str, Any]]) -> None:
    """Where ingest runs, its routes are described with the others."""
    assert "/api/v1/ingest/{stream}/{epoch}/{seq}" in server[2]["paths"]
    assert {"/api/v1/agents/hello", "/api/v1/agents/heartbeat"} <= set(server[2]["paths"])


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_makes_the_server_fail(
    server: tuple[str, Filled, dict[str, Any]], mode: GenerationMode
) -> None:
    """No 5xx, no status and no content type that is not in the document."""
    address, filled, document = server
    schema = schemathesis.openapi.from_dict(document)
    headers = {"authorization": f"Bearer {filled.world.tokens['admin']}"}
    known = {"job_id": filled.slow.job_id, "window": filled.slow.window_id}
    asked = set()
    for each in schema.get_all_operations():
        assert isinstance(each, Ok)
        operation = each.ok()

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), real=st.booleans())
        def ask(case: Any, real: bool) -> None:  # noqa: ANN401, FBT001  # drawn
            if real and case.method != "DELETE":
                for name, value in known.items():
                    if name in (case.path_parameters or {}):
                        case.path_parameters[name] = value
            answer = case.call(base_url=address, headers=headers)
            checks = [check for check in CHECKS if case.path not in WAIT or check is not CHECKS[0]]
            case.validate_response(answer, checks=checks)

        try:
            ask()
        except Unsatisfiable:
            # Nothing can be wrong with what takes no parameters.
            continue
        asked.add(operation.label)
    assert len(asked) > 15
