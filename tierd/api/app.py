# SPDX-License-Identifier: Apache-2.0
"""The API as a WSGI application (PEP 3333).

A handful of fixed paths does not pay for a framework: the smallest that was tried costs the daemon
12 MiB, a fifth of its memory (docs/decisions/0010).
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Generic
from urllib.parse import parse_qsl

from tierd.api.openapi import document
from tierd.api.operation import JSON, Asked, C, Operation, V
from tierd.api.schemas import Schema
from tierd.errors import Busy, ConfigError, NotFound, TierdError

log = logging.getLogger("tierd")

Environ = Mapping[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], Any]
Answer = tuple[str, str]
"""A media type, and a text of it."""

DESCRIPTION_PATH = "/openapi.json"
QUERY_BYTES = 1024
DIGITS = 19


class Refused(Exception):
    """A request that is wrong."""

    def __init__(self, status: HTTPStatus, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class App(Generic[V, C]):
    """Some operations on a daemon, and the document that describes them.

    Args:
        view: what can be asked.
        commands: what can be told.
        operations: of these.
        name: of the daemon.
    """

    def __init__(
        self, view: V, commands: C, operations: Sequence[Operation[V, C]], name: str = "tierd"
    ) -> None:
        self._view, self._commands = view, commands
        self._description = json.dumps(document(operations, name))
        self._routes: dict[tuple[str, ...], dict[str, Operation[V, C]]] = {}
        for operation in operations:
            at = self._routes.setdefault(_segments(operation.path), {})
            at[operation.method] = operation

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        headers: Mapping[str, str] = {}
        try:
            status, (media, text) = HTTPStatus.OK, self._answer(environ)
        except Refused as refused:
            status, headers = refused.status, refused.headers
            media, text = _error(str(refused), None)
        except TierdError as error:
            status = _STATUS.get(type(error), HTTPStatus.CONFLICT)
            media, text = _error(str(error), error.hint)
        except Exception:
            log.exception("a defect in answering %s", environ["PATH_INFO"])
            status = HTTPStatus.INTERNAL_SERVER_ERROR
            media, text = _error("a defect in tierd; its log has more", None)
        body = text.encode()
        told = {"Content-Type": media, "Content-Length": str(len(body)), **headers}
        start_response(f"{status.value} {status.phrase}", [*told.items()])
        return [body]

    def _answer(self, environ: Environ) -> Answer:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if path == DESCRIPTION_PATH:
            if method != "GET":
                raise _not_allowed(["GET"])
            return JSON, self._description
        operation, parameters = self._find(method, path)
        asked = Asked(
            path=parameters,
            query=_query(environ, operation.query),
            body=None if operation.body is None else _body(environ, operation.body),
        )
        made = operation.run(self._view, self._commands, asked)
        return operation.media, made if isinstance(made, str) else json.dumps(made)

    def _find(self, method: str, path: str) -> tuple[Operation[V, C], Mapping[str, int]]:
        given = _segments(path)
        for route, operations in self._routes.items():
            parameters = _matched(route, given)
            if parameters is None:
                continue
            if method not in operations:
                raise _not_allowed(operations)
            operation = operations[method]
            for name, schema in operation.path_parameters.items():
                if not schema["minimum"] <= parameters[name] <= schema["maximum"]:
                    raise Refused(HTTPStatus.NOT_FOUND, f"there can be no {name} like this")
            return operation, parameters
        raise Refused(HTTPStatus.NOT_FOUND, f"nothing is here; {DESCRIPTION_PATH} tells what is")


_STATUS: Mapping[type[TierdError], HTTPStatus] = {
    ConfigError: HTTPStatus.UNPROCESSABLE_ENTITY,
    NotFound: HTTPStatus.NOT_FOUND,
    Busy: HTTPStatus.SERVICE_UNAVAILABLE,
}
"""What isn't here is a conflict with how things are."""


def _segments(path: str) -> tuple[str, ...]:
    return tuple(path.split("/"))


def _matched(route: Sequence[str], given: Sequence[str]) -> dict[str, int] | None:
    """Returns the numbers in the place of {names}, None where the path is another."""
    if len(route) != len(given):
        return None
    parameters = {}
    for wanted, segment in zip(route, given, strict=True):
        if wanted.startswith("{") and _is_number(segment):
            parameters[wanted.strip("{}")] = int(segment)
        elif wanted != segment:
            return None
    return parameters


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= DIGITS


def _query(environ: Environ, schemas: Mapping[str, Schema]) -> dict[str, int]:
    """Returns the parameters, with their defaults."""
    text = environ.get("QUERY_STRING", "")
    if len(text) > QUERY_BYTES:
        raise Refused(HTTPStatus.BAD_REQUEST, f"the query is longer than {QUERY_BYTES} bytes")
    given = parse_qsl(text, keep_blank_values=True)
    values = {name: schema["default"] for name, schema in schemas.items()}
    for name, value in given:
        if name not in schemas:
            known = ", ".join(schemas) or "none"
            raise Refused(HTTPStatus.BAD_REQUEST, f"unknown parameter {name!r}; known: {known}")
        low, high = schemas[name]["minimum"], schemas[name]["maximum"]
        if not _is_number(value) or not low <= int(value) <= high:
            raise Refused(HTTPStatus.BAD_REQUEST, f"{name} must be from {low} to {high}")
        values[name] = int(value)
    return values


def _body(environ: Environ, schema: Schema) -> Mapping[str, Any]:
    media = environ.get("CONTENT_TYPE", "").partition(";")[0].strip().lower()
    if media != JSON:
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body must be {JSON}")
    try:
        body = json.loads(environ["wsgi.input"].read(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from None
    _check_keys(body, schema, "the body")
    return dict(body)


def _check_keys(value: Any, schema: Schema, name: str) -> None:
    """Checks which keys an object has, choices, and whole numbers.

    Other values are for the operation to check.
    """
    if value not in schema.get("enum", [value]):
        raise _wrong(f"{name} must be one of {', '.join(schema['enum'])}")
    if schema.get("type") == "integer":
        low, high = schema["minimum"], schema["maximum"]
        if not _is_whole(value) or not low <= value <= high:
            raise _wrong(f"{name} must be a whole number from {low} to {high}")
    if schema.get("type") != "object":
        return
    if not isinstance(value, dict):
        raise _wrong(f"{name} must be an object")
    known = schema["properties"]
    unknown, missing = value.keys() - known.keys(), {*schema.get("required", ())} - value.keys()
    if unknown or missing:
        wrong = f"has {min(unknown)!r}" if unknown else f"lacks {min(missing)!r}"
        raise _wrong(f"{name} {wrong}; known are {', '.join(known)}")
    for key, part in value.items():
        _check_keys(part, known[key], key)


def _is_whole(value: Any) -> bool:
    """Tells what JSON Schema calls an integer: 1.0 is one too."""
    if isinstance(value, float):
        return value.is_integer()
    return isinstance(value, int) and not isinstance(value, bool)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _wrong(message: str) -> Refused:
    return Refused(HTTPStatus.UNPROCESSABLE_ENTITY, message)


def _not_allowed(methods: Iterable[str]) -> Refused:
    allowed = ", ".join(methods)
    return Refused(HTTPStatus.METHOD_NOT_ALLOWED, f"allowed here: {allowed}", Allow=allowed)


def _error(message: str, hint: str | None) -> Answer:
    return JSON, json.dumps({"error": message, "hint": hint})
