"""The OpenAPI document: what the routes say of themselves, and what agents send.

Flow: routes → **here** → ``GET /api/v1/openapi.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from smon import __version__
from smon.api.routes.common import SCOPE_KEY
from smon.api.schemas.base import ProblemDocument

TITLE: Final = "SMon"
DESCRIPTION: Final = """\
Finds out why large LLM training jobs are slow.

Every route but the document itself asks for `Authorization: Bearer smon_<kid>_<secret>`, and for a
scope (`x-smon-scope`); a server on loopback without tokens lets this machine do everything. What
belongs to another tenant is not there (404). Errors are problem documents (RFC 9457). Lists come in
pages: `limit`, and `cursor` from the `next` of the page before. Times are unix times in seconds.
"""

#: Where nobody has given an example.
_PLAIN: Final[Mapping[str, Any]] = {
    "string": "text",
    "integer": 1,
    "number": 1.0,
    "boolean": True,
    "object": {},
}

_BEARER: Final = "bearer"


def document(app: FastAPI, more: Mapping[str, Any]) -> dict[str, Any]:
    """The OpenAPI document of the application.

    Parameters
    ----------
    more
        Paths of routes that are not FastAPI's: those of agents.
    """
    made: dict[str, Any] = get_openapi(
        title=TITLE,
        version=__version__,
        description=DESCRIPTION,
        routes=app.routes,
    )
    made["paths"] = {**made.get("paths", {}), **more}
    components = made.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    schemas["ProblemDocument"] = ProblemDocument.model_json_schema()
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    components["securitySchemes"] = {
        _BEARER: {"type": "http", "scheme": "bearer", "description": "a token of `smon token`"}
    }
    for operations in made["paths"].values():
        for operation in operations.values():
            if isinstance(operation, dict) and SCOPE_KEY in operation:
                operation["security"] = [{_BEARER: []}]
                _add_headers(operation)
                _add_examples(operation, schemas)
    return made


def _add_examples(operation: dict[str, Any], schemas: Mapping[str, Any]) -> None:
    for status, answer in operation["responses"].items():
        content = answer.get("content", {}).get("application/json")
        if status.startswith("2") and content is not None and "example" not in content:
            content["example"] = _example(content["schema"], schemas)


def _example(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Any:  # noqa: ANN401  # any JSON
    """What the examples of the fields make together."""
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    for given in ("examples", "enum"):
        if given in schema:
            return schema[given][0]
    if "anyOf" in schema:
        return _example(schema["anyOf"][0], schemas)
    if "properties" in schema:
        return {name: _example(each, schemas) for name, each in schema["properties"].items()}
    if "prefixItems" in schema:
        return [_example(each, schemas) for each in schema["prefixItems"]]
    if schema.get("type") == "array":
        return [_example(schema["items"], schemas)] if "items" in schema else []
    return _PLAIN.get(schema.get("type", ""))


def _add_headers(operation: dict[str, Any]) -> None:
    """Every answer has the id of its request."""
    for answer in operation["responses"].values():
        answer.setdefault("headers", {})["X-Request-Id"] = {
            "description": "id of the request, as in the server's log",
            "schema": {"type": "string"},
        }
