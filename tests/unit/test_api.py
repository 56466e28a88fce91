# SPDX-License-Identifier: Apache-2.0
"""The API's application over a daemon on a fake machine."""

import io
import json
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
import schemathesis
from hypothesis import given, settings
from schemathesis.core.result import Ok

from tests.unit.fake_commands import FakeCommands
from tests.unit.machine import HOT, SPAN, FakeSampler, Machine
from tierd.api import schemas
from tierd.api.app import App
from tierd.api.operation import Operation
from tierd.api.operations import OPERATIONS, Commands
from tierd.api.view import View
from tierd.errors import Busy, ConfigError, Problem, TierdError
from tierd.observe.events import History


class Answer:
    """What an application answers with."""

    def __init__(self, status: str, headers: Mapping[str, str], body: bytes) -> None:
        self.status, self.headers, self.body = int(status[:3]), headers, body

    @property
    def json(self) -> Any:
        assert self.headers["Content-Type"] == "application/json"
        return json.loads(self.body)


class Client:
    """Asks an application as a server would."""

    def __init__(self, app: App[View, Commands]) -> None:
        self.app = app

    def __call__(
        self, method: str, path: str, body: object = None, media: str = "application/json"
    ) -> Answer:
        told: list[Any] = []
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        environ = {
            "REQUEST_METHOD": method,
            "PATH_INFO": path.partition("?")[0],
            "QUERY_STRING": path.partition("?")[2],
            "CONTENT_TYPE": media,
            "wsgi.input": io.BytesIO(sent),
        }
        chunks = self.app(environ, lambda *head: told.append(head))
        ((status, headers),) = told
        return Answer(status, dict(headers), b"".join(chunks))


@pytest.fixture
def ask(view: View, commands: FakeCommands) -> Client:
    return Client(App(view, commands, OPERATIONS))


BODIES: Mapping[str, object] = {
    "/v1/config": {"policy": {"hysteresis": 2, "payback": None}},
    "/v1/targets/{pid}/pin": {"pin": "fastest"},
}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: f"{o.method} {o.path}")
def test_each_operation_answers_as_described(
    ask: Client, operation: Operation[View, Commands]
) -> None:
    number = ask("POST", "/v1/recordings").json["id"] if "{id}" in operation.path else None
    path = operation.path.format(pid=HOT, node=1, id=number)
    answer = ask(operation.method, path, BODIES.get(operation.path))
    assert answer.status == 200, answer.body
    if operation.path == "/metrics":
        assert b"tierd_targets 1.0" in answer.body
    else:
        jsonschema.validate(answer.json, operation.answer)


def test_the_description_names_every_operation(ask: Client) -> None:
    described = ask("GET", "/openapi.json").json["paths"]
    found = {(method.upper(), path) for path, methods in described.items() for method in methods}
    assert found == {(operation.method, operation.path) for operation in OPERATIONS}


def test_a_target_is_explained(ask: Client) -> None:
    told = ask("GET", f"/v1/targets/{HOT}").json
    assert sum(told["why"].values()) == len(SPAN)
    assert set(told["why"]) == {
        "it is in the fastest tier",
        "it is too cold to win back the cost of a move",
    }
    hottest = max(told["ranges"], key=lambda part: part["heat"])
    assert hottest["resident"]["cxl"] == 0
    assert hottest["end"] - hottest["start"] == hottest["resident"]["dram"]


def test_ranges_are_pinned_and_their_addresses_not_told_to_anybody(ask: Client) -> None:
    part = {"start": SPAN.start + 5000, "end": SPAN.start + 9000}
    whole_pages = {"start": SPAN.start + 4096, "end": SPAN.start + 12288}
    told = ask("PUT", PIN, {"pin": "here", "range": part})
    jsonschema.validate(told.json, schemas.PINNED)
    assert told.json["pins"] == [{**whole_pages, "pin": "here", "by": "operator"}]
    explained = ask("GET", f"/v1/targets/{HOT}")
    jsonschema.validate(explained.json, schemas.EXPLANATION)
    assert explained.json["pins"] == told.json["pins"]
    assert explained.json["pinned"] == {"fastest": 0, "here": 8192}
    address = str(whole_pages["start"])
    for operation in OPERATIONS:
        if operation.is_for_monitoring:
            assert address not in ask("GET", operation.path).body.decode(), operation.path
    query = "&".join(f"{name}={at}" for name, at in whole_pages.items())
    assert ask("DELETE", f"{PIN}?{query}").json["pins"] == []


def test_what_happened_is_told_from_where_a_reader_was(ask: Client) -> None:
    events = ask("GET", "/v1/events").json["events"]
    assert (events[0]["kind"], events[0]["fields"]["pid"]) == ("target.new", HOT)
    assert {event["kind"] for event in events[1:]} == {"moved"}
    assert ask("GET", f"/v1/events?after={events[0]['id']}").json["events"] == events[1:]
    assert ask("GET", "/v1/events?most=1").json["events"] == events[-1:]


PIN = f"/v1/targets/{HOT}/pin"


def pin_of(start: object, end: object) -> object:
    return {"pin": "fastest", "range": {"start": start, "end": end}}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "told"),
    [
        ("GET", "/", None, 404, "openapi.json"),
        ("GET", "/v1/targets/1", None, 404, "process 1 is no target"),
        ("GET", "/v1/targets/0", None, 404, "pid"),
        ("GET", "/v1/targets/-1", None, 404, "nothing"),
        ("GET", "/v1/targets/\u0661", None, 404, "nothing"),
        ("GET", "/v1/targets/99999999999999999999", None, 404, "nothing"),
        ("DELETE", "/v1/status", None, 405, "GET"),
        ("GET", "/v1/pause", None, 405, "POST"),
        ("POST", "/openapi.json", None, 405, "GET"),
        ("GET", "/v1/events?most=0", None, 400, "from 1 to 2000"),
        ("GET", "/v1/events?most=x", None, 400, "from 1 to 2000"),
        ("GET", "/v1/events?least=1", None, 400, "known: after, most"),
        ("GET", "/v1/status?" + "a" * 2000, None, 400, "longer"),
        ("PUT", f"/v1/targets/{HOT}/pin", {}, 422, "lacks 'pin'"),
        ("PUT", f"/v1/targets/{HOT}/pin", {"pin": "up"}, 422, "one of fastest, here"),
        ("PUT", f"/v1/targets/{HOT}/pin", {"pin": []}, 422, "one of fastest, here"),
        ("PUT", f"/v1/targets/{HOT}/pin", {"pin": "here", "x": 1}, 422, "has 'x'"),
        ("PUT", "/v1/targets/1/pin", {"pin": "here"}, 404, "is no target"),
        ("PUT", PIN, {"pin": "here", "range": 5}, 422, "range must be an object"),
        ("PUT", PIN, {"pin": "here", "range": {"start": 0}}, 422, "range lacks 'end'"),
        ("PUT", PIN, pin_of(-1, 4096), 422, "start must be a whole number from 0 to"),
        ("PUT", PIN, pin_of(0, 1 << 57), 422, "end must be a whole number from 0 to"),
        ("PUT", PIN, pin_of(0, True), 422, "end must be a whole number from 0 to"),
        ("PUT", PIN, pin_of(0, 4096.5), 422, "end must be a whole number from 0 to"),
        ("PUT", PIN, pin_of(8192.0, 4096), 409, "its end must be above its start"),
        ("PUT", PIN, pin_of(0, 10**400), 422, "end must be a whole number from 0 to"),
        ("PUT", PIN, pin_of(0, "4096"), 422, "end must be a whole number from 0 to"),
        ("PUT", PIN, pin_of(4096, 8192), 409, "is not all mapped"),
        ("DELETE", f"{PIN}?start={SPAN.start}&end={SPAN.stop}", None, 404, "nothing is pinned"),
        ("DELETE", f"{PIN}?start=-1", None, 400, "start must be from 0 to"),
        ("PATCH", "/v1/config", [], 422, "must be an object"),
        ("PATCH", "/v1/config", {"policy": 1}, 422, "must be an object"),
        ("PATCH", "/v1/config", {"polizy": {}}, 422, "has 'polizy'"),
        ("PATCH", "/v1/config", {"policy": {"x": 1}}, 422, "has 'x'"),
        ("PATCH", "/v1/config", b"{", 400, "not JSON"),
        ("PATCH", "/v1/config", b"\xff", 400, "not JSON"),
        ("PATCH", "/v1/config", b"NaN", 400, "NaN"),
        ("PATCH", "/v1/config", b"[" * 60000, 400, "not JSON"),
        ("PATCH", "/v1/config", b"1" * 5000, 400, "not JSON"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(
    ask: Client, method: str, path: str, body: object, status: int, told: str
) -> None:
    answer = ask(method, path, body)
    assert answer.status == status, answer.body
    assert told in answer.json["error"]


def test_a_body_of_another_kind_is_refused(ask: Client) -> None:
    assert ask("PATCH", "/v1/config", b"a=1", media="text/plain").status == 415


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError([Problem(file="x", line=None, key="k", message="wrong")]), 422),
        (Busy("later"), 503),
        (TierdError("no"), 409),
    ],
)
def test_what_a_command_refuses_is_told(
    ask: Client, commands: FakeCommands, error: TierdError, status: int
) -> None:
    commands.refuses = error
    answer = ask("PATCH", "/v1/config", {})
    assert (answer.status, answer.json["error"]) == (status, str(error))


def test_a_defect_ends_one_answer_and_not_the_daemon(
    ask: Client, commands: FakeCommands, caplog: pytest.LogCaptureFixture
) -> None:
    commands.refuses = ZeroDivisionError()
    assert ask("PATCH", "/v1/config", {}).status == 500
    assert "a defect in answering /v1/config" in caplog.text
    assert ask("GET", "/v1/status").status == 200


def test_before_the_first_round_there_is_no_status(machine: Machine, history: History) -> None:
    daemon = machine.daemon(FakeSampler([], machine))
    ask = Client(App(View(daemon, history), FakeCommands(daemon), OPERATIONS))
    assert ask("GET", "/v1/status").status == 503
    assert ask("GET", "/v1/version").status == 200


def test_the_read_only_part_changes_nothing_and_tells_of_no_process() -> None:
    watched = {(o.method, o.path) for o in OPERATIONS if o.is_for_monitoring}
    assert {method for method, _ in watched} == {"GET"}
    assert not any("{pid}" in path for _, path in watched)
    assert ("GET", "/metrics") in watched


def test_the_description_is_true(ask: Client) -> None:
    """Every request that schemathesis thinks of is answered as the description says."""
    described = schemathesis.openapi.from_wsgi("/openapi.json", ask.app)
    tried = []
    for found in described.get_all_operations():
        assert isinstance(found, Ok)
        operation = found.ok()

        @given(case=operation.as_strategy())
        @settings(max_examples=20)
        def conforms(case: schemathesis.Case[Any]) -> None:
            case.call_and_validate()

        conforms()
        tried.append(operation.label)
    assert len(tried) == len(OPERATIONS)
