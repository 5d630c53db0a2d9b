"""The OpenAPI document and the reference page say all that the routes do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import validate

from smon.api.routes.common import SCOPE_KEY
from tests.api.conftest import Filled

PAGE: Final = Path(__file__).resolve().parents[2] / "docs" / "reference" / "rest.md"
HEADING: Final = re.compile(r"^### ((?:GET|POST|PUT|DELETE) \S+)$", re.MULTILINE)
PARAMETER: Final = re.compile(r"^\| `([\w-]+)` \| (?:query|path|header) ", re.MULTILINE)


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Operations by "METHOD path"."""
    return {
        f"{method.upper()} {path}": operation
        for path, each in document["paths"].items()
        for method, operation in each.items()
    }


def checked(document: dict[str, Any], schema: dict[str, Any], value: object) -> list[str]:
    """What a value breaks of a schema."""
    whole = {**schema, "components": document["components"]}
    return [error.message for error in OAS31Validator(whole).iter_errors(value)]


def test_the_document_is_valid(document: dict[str, Any]) -> None:
    """As OpenAPI 3.1 says."""
    validate(document)


def test_every_operation_is_complete(document: dict[str, Any]) -> None:
    """Words, a scope, a meaning for each parameter, an example, and all ways to fail."""
    for name, operation in operations(document).items():
        assert operation["summary"], name
        assert operation["description"], name
        assert operation[SCOPE_KEY] in ("read", "ingest", "admin"), name
        for parameter in operation.get("parameters", ()):
            assert parameter.get("description"), (name, parameter["name"])
        assert {"401", "403", "422", "500", "503"} <= set(operation["responses"]), name
        for status, answer in operation["responses"].items():
            assert answer["description"], (name, status)
            if status.startswith(("4", "5")):
                assert list(answer["content"]) == ["application/problem+json"], (name, status)
                assert answer["content"]["application/problem+json"]["examples"], (name, status)
            elif "content" in answer:
                assert answer["content"]["application/json"]["example"] is not None, (name, status)


def test_every_field_has_a_meaning(document: dict[str, Any]) -> None:
    """No field of a model is left to guessing; the report's are in its own page."""
    schemas = document["components"]["schemas"]
    models = {name: schema for name, schema in schemas.items() if name.endswith("Model")}
    assert models
    for name, schema in models.items():
        assert schema.get("description"), name
        for field, value in schema["properties"].items():
            text = json.dumps(value)
            assert "description" in text or "$ref" in text, (name, field)


def test_examples_are_valid(document: dict[str, Any]) -> None:
    """Each example is an answer as its schema describes it."""
    for name, operation in operations(document).items():
        for status, answer in operation["responses"].items():
            for content in answer.get("content", {}).values():
                values = [each["value"] for each in content.get("examples", {}).values()]
                for value in [*values, *([content["example"]] if "example" in content else [])]:
                    assert checked(document, content["schema"], value) == [], (name, status)


@pytest.mark.parametrize(
    "path",
    [
        "jobs", "jobs/{job_id}", "jobs/{job_id}/windows", "jobs/{job_id}/windows/{window}",
        "jobs/{job_id}/findings", "jobs/{job_id}/workers", "jobs/{job_id}/history",
        "jobs/{job_id}/plan", "jobs/{job_id}/ranks/{rank}", "jobs/{job_id}/quality", "hosts",
        "hosts/{host}", "fleet/summary", "agents", "version",
        "imports",
    ],
)  # fmt: skip
def test_real_answers_are_as_described(filled: Filled, document: dict[str, Any], path: str) -> None:
    """What the server answers is valid for the schema of its route."""
    schema = document["paths"][f"/api/v1/{path}"]["get"]["responses"]["200"]["content"][
        "application/json"
    ]["schema"]
    values = {"job_id": filled.slow.job_id, "window": "latest", "host": "node-7", "rank": 6}
    answer = filled.world.client().json(f"/api/v1/{path.format(**values)}")
    assert checked(document, schema, answer) == []


def sections() -> dict[str, str]:
    """Sections of the page by "METHOD path"."""
    parts = re.split(
        r"^### ((?:GET|POST|PUT|DELETE) \S+)$", PAGE.read_text("utf-8"), flags=re.MULTILINE
    )
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_reference_page_is_complete(document: dict[str, Any]) -> None:
    """Every route, with its scope, its parameters, its statuses, and nothing made up."""
    written = sections()
    assert set(written) == set(operations(document))
    for name, operation in operations(document).items():
        text = written[name]
        assert f"Scope: `{operation[SCOPE_KEY]}`" in text, name
        parameters = {each["name"] for each in operation.get("parameters", ())}
        assert (
            set(re.findall(r"^\| `([\w-]+)` \| (?:query|path|header) ", text, re.MULTILINE))
            == parameters
        )
        own = {"401", "403", "422", "500", "503"}
        statuses = {status for status in operation["responses"] if status not in own}
        assert statuses <= set(re.findall(r"\b[2-5]\d\d\b", text)), name


def test_examples_of_the_page_are_json() -> None:
    """Each example can be read."""
    blocks = re.findall(r"^```json\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) > 10
    for block in blocks:
        json.loads(block)
