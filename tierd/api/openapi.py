# SPDX-License-Identifier: Apache-2.0
"""The API's description, OpenAPI 3.1."""

from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from tierd.api import schemas
from tierd.api.operation import JSON, Operation
from tierd.version import VERSION


def document(operations: Iterable[Operation[Any, Any]], name: str) -> dict[str, Any]:
    """Returns the document of these operations of a daemon."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method.lower()] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": name,
            "version": VERSION,
            "summary": f"Ask and steer {name} over its Unix sockets",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "http://localhost"}],
        "paths": paths,
        "components": {"schemas": {"Error": schemas.ERROR}},
    }


def _described(operation: Operation[Any, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": _name(operation),
        "parameters": [*_parameters(operation)],
        "responses": {
            "200": {
                "description": "Done",
                "content": {operation.media: {"schema": operation.answer}},
            },
            **{str(int(status)): _error(status) for status in _errors(operation)},
        },
    }
    if operation.body is not None:
        content = {JSON: {"schema": operation.body}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _name(operation: Operation[Any, Any]) -> str:
    words = [word.strip("{}") for word in operation.path.split("/") if word and word != "v1"]
    return "_".join([operation.method.lower(), *words])


def _parameters(operation: Operation[Any, Any]) -> Iterator[Mapping[str, Any]]:
    for name, schema in operation.path_parameters.items():
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    for name, schema in operation.query.items():
        yield {"name": name, "in": "query", "schema": schema}


def _errors(operation: Operation[Any, Any]) -> Iterator[HTTPStatus]:
    """Yields what an operation may be refused with, besides what any request may be."""
    yield HTTPStatus.BAD_REQUEST
    if operation.path_parameters:
        yield HTTPStatus.NOT_FOUND
    if operation.body is not None:
        yield HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        yield HTTPStatus.UNSUPPORTED_MEDIA_TYPE
        yield HTTPStatus.UNPROCESSABLE_ENTITY
    if operation.changes:
        yield HTTPStatus.CONFLICT
    yield HTTPStatus.SERVICE_UNAVAILABLE


def _error(status: HTTPStatus) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    return {"description": status.phrase, "content": {JSON: {"schema": schema}}}
