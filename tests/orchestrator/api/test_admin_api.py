"""The admin API over HTTP: every verb, strict requests, one shape of errors, and a document that leaves nothing out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from orchestrator.access.audit_log import Audit
from orchestrator.api import schemas
from orchestrator.api import server as module
from orchestrator.api.routes import ROUTES, AdminRoute, console_calls, documented, openapi
from orchestrator.api.schemas import OperationRefused
from orchestrator.api.server import MAX_BODY_BYTES, MAX_CONNECTIONS
from orchestrator.messages.controller_settings import ADMIN_PATH
from orchestrator.process.home import Home
from tests.fleet import until
from tests.orchestrator.fakefleet import EVENTS, LOG, SPEC, TOKEN, FakeFleet, LiveAdmin, bad_spec, event
from tests.orchestrator.fakes import FakeCluster, Played, virtually
from tests.orchestrator.hostile import Wire

SENT = {"text": SPEC, "file": "new.yaml", "base_dir": "/specs"}
ASKED: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = [
    ("plan", SENT, ("propose", SPEC, "new.yaml", "/specs")),
    ("plan", {**SENT, "defrag": 8}, ("propose", SPEC, "new.yaml", "/specs", 8)),
    ("explain", {**SENT, "model": "chat"}, ("explain", SPEC, "new.yaml", "/specs", "chat")),
    ("apply", SENT, ("apply", SPEC, "new.yaml", "/specs", "me", "apply", None, None)),
    (
        "apply",
        {**SENT, "check_index": 7, "canary": 0.1},
        ("apply", SPEC, "new.yaml", "/specs", "me", "apply", 7, 0.1),
    ),
    ("rollout/undo", {}, ("undo", None, "me")),
    ("rollout/undo", {"to": 2}, ("undo", 2, "me")),
    ("rollout/pause", {}, ("pause", "me")),
    ("rollout/resume", {}, ("resume", "me")),
    ("rollout/promote", {}, ("promote", "me")),
    ("rollout/restart", {"model": "chat"}, ("restart", "chat", "me")),
    ("scale", {"model": "chat", "count": 3}, ("scale", "chat", 3, "me")),
    ("scale", {"model": "chat", "count": None}, ("scale", "chat", None, "me")),
    ("load", {"model": "chat"}, ("load", "chat", "me")),
    ("unload", {"model": "chat"}, ("unload", "chat", "me")),
    ("cordon", {"host": "inf2.48xlarge/0", "cores": "0-3"}, ("cordon", "inf2.48xlarge/0", "0-3", True, "me")),
    ("uncordon", {"host": "inf2.48xlarge/0"}, ("cordon", "inf2.48xlarge/0", None, False, "me")),
    ("scale", {"model": "chat", "count": 3, "check_index": 41}, ("scale", "chat", 3, "me", 41)),
    ("rollout/undo", {"to": 2, "check_index": 41}, ("undo", 2, "me", 41)),
    ("requests/cancel", {"request": "r-1"}, ("cancel_request", "r-1", "me")),
    ("preview", {"action": "scale", "target": "chat", "count": 3}, ("preview", "scale", "chat", 3)),
    ("drain", {"target": "chat/0"}, ("drain", "chat/0", "me")),
    (
        "drain",
        {"target": "a/0", "deadline_s": 9.0, "keep_served": True},
        ("drain", "a/0", 9.0, "keep_served", "me"),
    ),
]


@pytest.fixture
def http(admin: LiveAdmin) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {TOKEN}", "x-corewright-by": "me"}
    with httpx.Client(base_url=f"{admin.url}{ADMIN_PATH}/", headers=headers, timeout=20) as client:
        yield client


def problem(answer: httpx.Response) -> tuple[int, str]:
    """Status and code; every refusal has the same shape."""
    body = answer.json()
    assert body.keys() == {"error", "problems"}
    assert body["error"].keys() == {"code", "message", "hint"}
    return answer.status_code, body["error"]["code"]


@pytest.mark.parametrize(("path", "body", "call"), ASKED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_post_passes_every_field_and_the_caller_to_the_fleet(
    path: str, body: dict[str, Any], call: tuple[Any, ...], admin: LiveAdmin, http: httpx.Client
) -> None:
    assert http.post(path, json=body).status_code == 200
    assert admin.fleet.calls == [call]


def test_every_post_route_calls_its_operation() -> None:
    """Except `down`, which has a separate test."""
    assert {f"/{path}" for path, _, _ in ASKED} == {r.path for r in ROUTES if r.method == "POST"} - {"/down"}


def test_a_new_route_is_served_documented_and_audited_without_another_edit(admin: LiveAdmin) -> None:
    """The types of its handler are those of its request and of the schema of its answer."""

    async def rename(fleet: Any, request: schemas.ModelName, by: str) -> schemas.CancelledRequest:
        return schemas.CancelledRequest(request=f"{request.model} by {by}")

    row = AdminRoute("POST", "/rename", "Rename a model.", rename, (404,), changes=True)
    routes = documented((row,))
    assert console_calls(routes)["rename"] == {"method": "POST", "path": "/rename"}
    operation = openapi(routes)["paths"][f"{ADMIN_PATH}/rename"]["post"]
    schema = {"$ref": "#/components/schemas/CancelledRequest"}
    assert operation["responses"]["200"]["content"]["application/json"]["schema"] == schema
    assert {"400", "401", "403", "404", "413", "500"} == operation["responses"].keys() - {"200"}
    with contextlib.closing(LiveAdmin(routes=routes)) as other:
        url, headers = f"{other.url}{ADMIN_PATH}/rename", {"authorization": f"Bearer {TOKEN}"}
        assert httpx.post(url, json={"model": "a"}, headers=headers).json() == {"request": "a by admin"}
        assert problem(httpx.post(url, json={"x": 1}, headers=headers)) == (400, "invalid_request")
        entries = Audit(Home(Path(other.fleet.settings.home)).audit).entries(10)
    assert [(entry.action, entry.status) for entry in entries] == [("POST /rename", "200")]


def test_a_get_returns_the_fleets_response_unchanged(admin: LiveAdmin, http: httpx.Client) -> None:
    assert http.get("status").json() == msgspec.to_builtins(admin.fleet.status())
    assert http.get("rollout").json() == admin.fleet.rollout()
    assert http.get("revisions").json() == admin.fleet.revisions()
    assert http.get("revisions/2").json()["text"] == SPEC
    assert http.get("events", params={"after": 5, "limit": 2}).json() == {"events": EVENTS[1:3], "next": 9}
    log = http.get("logs", params={"model": "chat", "replica": 1, "offset": 4}).json()
    assert (log["replica"], log["text"]) == ("chat/1", LOG[4:].decode())
    assert http.get("config").json() == admin.fleet.config()


@pytest.mark.parametrize("route", ROUTES[:-1], ids=lambda route: f"{route.method} {route.path}")
def test_a_response_has_the_schema_of_the_document(route: AdminRoute, http: httpx.Client) -> None:
    """Each answer of the played fleet, which another test compares with a real one."""
    if route.method == "GET":
        query = {"model": "chat"} if route.path == "/logs" else {}
        answers = [http.get(route.path[1:].replace("{number}", "2"), params=query)]
    else:
        answers = [http.post(path, json=body) for path, body, _ in ASKED if f"/{path}" == route.path]
        answers = answers or [http.post(route.path[1:])]
    document: Any = openapi(ROUTES)
    response = document["paths"][f"{ADMIN_PATH}{route.path}"][route.method.lower()]["responses"][str(route.status)]
    schema = {**response["content"]["application/json"]["schema"], "components": document["components"]}
    for answer in answers:
        assert answer.status_code == route.status
        Draft202012Validator(schema).validate(answer.json())


def test_the_spec_route_returns_the_running_revision(admin: LiveAdmin, http: httpx.Client) -> None:
    """With its index, for a conditional `apply`."""
    assert http.get("spec").json() == {"file": "old.yaml", "base_dir": "/specs", "text": SPEC, "revision": 3}


def test_down_notifies_the_daemon_at_once(admin: LiveAdmin, http: httpx.Client) -> None:
    """The response is 202."""
    assert http.post("down").status_code == 202
    assert admin.downs == 1


@pytest.mark.parametrize("token", ["", "Bearer wrong", TOKEN, f"bearer {TOKEN}x"])
def test_without_the_token_every_route_is_401(token: str, admin: LiveAdmin) -> None:
    """A client without a token cannot discover routes."""
    for method, path in [*((route.method, route.path) for route in ROUTES), ("GET", "/nope"), ("PUT", "/status")]:
        answer = httpx.request(method, f"{admin.url}{ADMIN_PATH}{path}", headers={"authorization": token})
        assert problem(answer) == (401, "invalid_token")
    assert admin.fleet.calls == []


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("scale", '{"model": "chat", "count": "3"}', "$.count"),
        ("scale", '{"model": "chat", "count": 3.5}', "$.count"),
        ("scale", '{"model": "chat", "count": -1}', "$.count"),
        ("scale", '{"model": "chat"}', "count"),
        ("scale", '{"model": "chat", "count": 1, "cout": 1}', "cout"),
        ("apply", '{"text": "", "file": "x", "base_dir": "relative"}', "$.base_dir"),
        ("apply", '{"text": "", "file": "x", "base_dir": "/", "canary": 1}', "$.canary"),
        ("apply", '{"text": "", "file": "x", "base_dir": "/", "check_index": "a"}', "$.check_index"),
        ("cordon", '{"host": "h", "cores": "0,3"}', "$.cores"),
        ("rollout/undo", '{"to": 0}', "$.to"),
        ("rollout/pause", '{"x": 1}', "x"),
        ("load", "[]", "object"),
        ("load", "{", "truncated"),
        ("load", '{"model": "\udcff"}', ""),
        ("load", "[" * 100_000, ""),
        ("load", "", "model"),
    ],
)
def test_an_invalid_body_is_rejected_with_the_field(
    path: str, body: str, says: str, admin: LiveAdmin, http: httpx.Client
) -> None:
    """The fleet is not called."""
    answer = http.post(path, content=body.encode(errors="surrogateescape"))
    assert problem(answer) == (400, "invalid_request")
    assert says in answer.json()["error"]["message"]
    assert admin.fleet.calls == []


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("events?after=x", "$.after"),
        ("events?after=-1", "$.after"),
        ("events?limit=0", "$.limit"),
        ("events?wait_s=31", "$.wait_s"),
        ("events?wait_s=nan", "$.wait_s"),
        ("events?since=3", "since"),
        ("events?after=1&after=2", "after"),
        ("logs", "model"),
        ("revisions/x", "$.number"),
        ("status?x=1", "x"),
    ],
)
def test_an_invalid_query_is_rejected_like_a_body(path: str, says: str, http: httpx.Client) -> None:
    answer = http.get(path)
    assert problem(answer) == (400, "invalid_request")
    assert says in answer.json()["error"]["message"]


def test_the_content_type_does_not_matter(admin: LiveAdmin, http: httpx.Client) -> None:
    """curl's default is a form."""
    headers = {"content-type": "application/x-www-form-urlencoded"}
    assert http.post("load", content='{"model": "chat"}', headers=headers).status_code == 200


def test_a_body_is_limited_to_8_mib(admin: LiveAdmin, http: httpx.Client) -> None:
    """One byte more is rejected."""
    frame = '{"model": ""}'
    assert http.post("load", content=frame.replace('""', f'"{"x" * (MAX_BODY_BYTES - len(frame))}"')).status_code == 200
    assert problem(http.post("load", content=b" " * (MAX_BODY_BYTES + 1))) == (413, "body_too_large")


def test_an_unknown_route_and_a_wrong_method_are_json_too(http: httpx.Client) -> None:
    """404 and 405, the latter with what is allowed."""
    assert problem(http.get("nope")) == (404, "route_not_found")
    assert problem(http.get("status/")) == (404, "route_not_found")
    wrong = http.post("status")
    assert problem(wrong) == (405, "method_not_allowed")
    assert "GET" in wrong.headers["allow"]


def test_a_rejection_has_its_status_and_the_problems_of_the_spec(admin: LiveAdmin, http: httpx.Client) -> None:
    """The code is the controller's id."""
    admin.fleet.refusal = bad_spec()
    answer = http.post("apply", json=SENT)
    assert problem(answer) == (422, "spec-invalid")
    assert answer.json()["problems"] == [problem.as_dict() for problem in bad_spec().problems]
    admin.fleet.refusal = OperationRefused("journal-unwritable", "the disk is full", "make room", status=507)
    answer = http.post("load", json={"model": "chat"})
    assert problem(answer) == (507, "journal-unwritable")
    assert answer.json()["error"]["hint"] == "make room"


def test_a_bug_is_a_500_and_the_api_continues(admin: LiveAdmin, http: httpx.Client) -> None:
    """The details are in the log only."""
    admin.fleet.refusal = ZeroDivisionError("secret")
    answer = http.post("load", json={"model": "chat"})
    assert problem(answer) == (500, "internal_error")
    assert "secret" not in answer.text
    admin.fleet.refusal = None
    assert http.post("load", json={"model": "chat"}).status_code == 200


@pytest.mark.parametrize(
    ("given", "by"), [(None, "admin"), ("", "admin"), ("ada@wright", "ada@wright"), ("a" * 500, "a" * 200)]
)
def test_the_callers_name_is_passed_to_the_fleet(given: str | None, by: str, admin: LiveAdmin) -> None:
    """It comes from a header of bounded length."""
    headers = {"authorization": f"Bearer {TOKEN}"} | ({} if given is None else {"x-corewright-by": given})
    httpx.post(f"{admin.url}{ADMIN_PATH}/rollout/pause", headers=headers)
    assert admin.fleet.calls == [("pause", by)]


def test_a_request_for_events_waits_for_the_next_event(admin: LiveAdmin, http: httpx.Client) -> None:
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(
        target=lambda: answers.append(http.get("events", params={"after": 12, "wait_s": 15}).json())
    )
    asking.start()
    until(lambda: admin.fleet.calls, 10, "it is asked")
    assert not answers
    admin.tell(event(13, "Ready", "serves", model="chat"))
    asking.join(10)  # before its wait_s
    assert not asking.is_alive()
    assert [item["seq"] for item in answers[0]["events"]] == [13]
    assert answers[0]["next"] == 13


def test_a_request_for_events_ends_at_its_timeout(http: httpx.Client) -> None:
    """It returns an empty page with an unchanged cursor."""
    assert http.get("events", params={"after": 12, "wait_s": 0.05}).json() == {"events": [], "next": 12}


# The played fleet


def keys(value: Any) -> Any:
    """Of a JSON value, at every depth; of a list the union of its items'."""
    if isinstance(value, dict):
        return {key: keys(item) for key, item in value.items()}
    if isinstance(value, list):
        merged: dict[str, Any] = {}
        for item in map(keys, value):
            for key, part in (item or {}).items():
                merged[key] = part or merged.get(key)
        return merged or None
    return None


def test_the_fake_fleet_returns_the_keys_of_a_real_one(tmp_path: Path) -> None:
    """Otherwise the tests of the command line would prove nothing."""
    text = SPEC.replace("chat: {engine: echo, tp_degree: 8, replicas: 2}", "chat: {engine: echo, cores: ['0']}")
    edited = text.replace("512", "1024").replace("small: {", "small: {tp_degree: 2, ")

    async def asks(fleet: Any, new: str) -> dict[str, Any]:
        replies = {
            "plan": await fleet.propose(new, "new.yaml", "/specs"),
            "apply": await fleet.apply(new, "new.yaml", "/specs", by="me"),
            "rollout": fleet.rollout(),
            "revisions": fleet.revisions()["revisions"],
            "revision": fleet.revision(2),
            "scale": await fleet.scale("chat", 1, "me"),
            "load": await fleet.load("chat", "me"),
            "unload": await fleet.unload("small", "me"),
            "cordon": await fleet.cordon("inf2.48xlarge/0", "20-22", True, "me"),
            "events": await fleet.events(0, 10, 0.0, None),
            "logs": await fleet.logs("chat", None, None, 0.0),
            "drain": await fleet.drain("chat/0", "me"),
            "status": msgspec.to_builtins(fleet.status()),
        }
        replies["revision"]["plan"] = replies["apply"]["plan"] = replies["plan"]["placements"] = (
            None  # environments in them
        )
        for model in replies["status"]["models"]:
            for each in model["replicas"]:
                each["load_phases"] = None  # those that a start has had
        plain: dict[str, Any] = msgspec.to_builtins(replies)
        return plain

    async def real() -> dict[str, Any]:
        cluster = FakeCluster()
        cluster.held = {23: 99}
        async with Played(tmp_path, cluster, text) as played:
            await played.settled()
            return await asks(played.operator, edited)

    async def played() -> dict[str, Any]:
        return await asks(FakeFleet(), edited)

    actual, faked = keys(virtually(real)), keys(asyncio.run(played()))
    for answer in actual:
        assert faked[answer] == actual[answer], answer


# The document


def test_the_document_is_valid_openapi(http: httpx.Client) -> None:
    """3.1, as it is served."""
    served = http.get("openapi.json").json()
    OpenAPIV31SpecValidator(served).validate()
    assert served == json.loads(json.dumps(openapi(ROUTES)))  # tuples are lists there
    assert served["openapi"].startswith("3.1")


def test_the_openapi_document_has_exactly_the_routes() -> None:
    """Each with a summary, a response and its errors."""
    documented = {
        (method.upper(), path.removeprefix(ADMIN_PATH))
        for path, operations in openapi(ROUTES)["paths"].items()
        for method in operations
    }
    assert documented == {(route.method, route.path) for route in ROUTES}
    for operations in openapi(ROUTES)["paths"].values():
        for operation in operations.values():
            assert operation["summary"].endswith(".")
            assert {"400", "401", "500"} < operation["responses"].keys()


@pytest.mark.parametrize(("path", "body", "call"), ASKED, ids=lambda value: value if isinstance(value, str) else "")
def test_the_documents_schema_accepts_what_the_api_accepts(path: str, body: dict[str, Any], call: Any) -> None:
    """It rejects an unknown field."""
    document = openapi(ROUTES)
    schema = document["paths"][f"{ADMIN_PATH}/{path}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    judge = Draft202012Validator({**schema, "components": document["components"]})
    assert judge.is_valid(body)
    assert not judge.is_valid({**body, "nope": 1})


def test_a_trace_is_read_page_by_page(http: httpx.Client) -> None:
    """Each page has the cursor of the next; an unknown cursor or too large a page is rejected."""
    first = http.get("trace", params={"limit": 1}).json()
    second = http.get("trace", params={"limit": 1, "after": first["next"]}).json()
    assert [page["requests"][0]["prompt_tokens"] for page in (first, second)] == [10, 20]
    assert (first["more"], second["more"]) == (True, False)
    assert problem(http.get("trace", params={"after": "x"})) == (400, "trace-cursor-wrong")
    assert http.get("trace", params={"limit": 10_001}).status_code == 400


def asking(method: str, path: str, fields: str = "") -> bytes:
    head = f"{method} {ADMIN_PATH}/{path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {TOKEN}\r\n{fields}\r\n"
    return head.encode()


def test_an_endless_header_is_refused(admin: LiveAdmin) -> None:
    """Nothing that comes without the token is kept beyond the limit."""
    with Wire(admin.port) as wire:
        wire.offer(b"GET /admin/v1/status HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 2**20)
        answer = wire.answer()
        assert (answer.status, answer.json["error"]["code"]) == (431, "headers_too_large")
        assert wire.at_end()


def test_a_query_of_many_fields_is_refused(admin: LiveAdmin) -> None:
    """Comparing 30,000 fields with each other took 28 s."""
    fields = "&".join(f"f{number}=" for number in range(30_000))
    with Wire(admin.port) as wire:
        wire.offer(asking("GET", f"events?{fields}"))
        assert wire.answer().status == 431


def test_a_long_body_of_a_stranger_is_not_read(admin: LiveAdmin) -> None:
    with Wire(admin.port) as wire:
        wire.offer(b"POST /admin/v1/apply HTTP/1.1\r\nhost: localhost\r\ncontent-length: 8000000\r\n\r\n")
        assert wire.answer().status == 401
        assert wire.at_end()


def test_a_connection_without_a_request_is_closed_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before its time; a connection that has authenticated stays."""
    monkeypatch.setattr(module, "READ_S", 600.0)
    with contextlib.ExitStack() as stack:
        admin = LiveAdmin()
        stack.callback(admin.close)
        known = stack.enter_context(Wire(admin.port))
        ask = asking("GET", "status")
        known.send(ask)
        assert known.answer().status == 200
        idle = [stack.enter_context(Wire(admin.port)) for _ in range(MAX_CONNECTIONS + 5)]
        assert idle[0].at_end()
        late = stack.enter_context(Wire(admin.port))
        late.send(ask)
        assert late.answer().status == 200
        known.send(ask)
        assert known.answer().status == 200


def test_the_time_to_the_first_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_S", 0.2)
    admin = LiveAdmin()
    try:
        with Wire(admin.port) as wire:
            assert wire.at_end()
    finally:
        admin.close()


def test_a_change_continues_after_its_client_disconnects(admin: LiveAdmin) -> None:
    """It is in the audit log, and must not be left half done."""
    began, ended, goes_on = threading.Event(), threading.Event(), asyncio.Event()

    async def load(model: str, by: str, check_index: int | None = None) -> dict[str, Any]:
        began.set()
        await goes_on.wait()
        ended.set()
        return {}

    admin.fleet.load = load  # type: ignore[method-assign]
    body = b'{"model": "chat"}'
    with Wire(admin.port) as wire:
        wire.send(asking("POST", "load", f"content-length: {len(body)}\r\n") + body)
        assert began.wait(10)
    with Wire(admin.port) as later:  # so the end of the first has been seen
        later.send(b"GET /admin/v1/status HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert later.answer().status == 401
    admin.call_soon(goes_on.set)
    assert ended.wait(10)
