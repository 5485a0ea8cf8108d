"""What docs/security.md promises of the daemon: where it listens, who may change it, and what a spec may name."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from orchestrator.access.audit_log import Audit
from orchestrator.access.keys import KeyFile
from orchestrator.access.source_policy import SourcePolicy, allowed_by_setting, allowed_to_keys, interpreters_of
from orchestrator.api.schemas import OperationRefused
from orchestrator.cli import up as up_module
from orchestrator.cli.main import run
from orchestrator.cluster.settings import SETTINGS, resolve
from orchestrator.control.resolve.spec_file import examine, load
from orchestrator.gateway.settings import GatewaySettings
from orchestrator.messages.controller_settings import ADMIN_PATH
from orchestrator.process.addresses import is_loopback
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from placements.facts.topology import Machine
from placements.spec.parse import parse
from placements.spec.problems import Problem
from tests.fleet import LiveFleet, until
from tests.orchestrator.certificates import Authority
from tests.orchestrator.fakefleet import SPEC, TOKEN, FakeFleet, LiveAdmin
from tests.orchestrator.fakes import FakeCluster, Operations, Played, virtually

ECHO = "hosts: {emulate: inf2.xlarge}\nmodels: {a: {engine: echo}}\n"


def test_the_page_names_the_ports_of_rays_public_metrics() -> None:
    """They require no token, so a firewall must block them: the numbers are those of the installed Ray."""
    from ray.autoscaler._private.constants import AUTOSCALER_METRIC_PORT
    from ray.dashboard.consts import DASHBOARD_METRIC_PORT

    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    named = re.findall(r"port (\d+)", page.partition("## Ray")[2].partition("\n## ")[0])
    assert {int(port) for port in named} == {AUTOSCALER_METRIC_PORT, DASHBOARD_METRIC_PORT}


# Settings of the gateway


def test_every_field_of_a_gateways_settings_can_be_set(tmp_path: Path) -> None:
    """With the defaults of the struct, so that no default is defined twice."""
    plain = resolve({}, {"COREWRIGHT_HOME": str(tmp_path)}).fill(GatewaySettings)
    assert plain == GatewaySettings(host="127.0.0.1", port=8080, home=str(tmp_path))


GIVEN: dict[str, tuple[str, Any]] = {
    "gateways": ("4", 4),
    "insecure": ("yes", True),
    "tls_cert": ("/c.pem", "/c.pem"),
    "tls_key": ("/k.pem", "/k.pem"),
    "tls_client_ca": ("/a.pem", "/a.pem"),
    "cors_origins": ("https://a.example, http://b.example:8080", ("https://a.example", "http://b.example:8080")),
    "max_body_bytes": ("2048", 2048),
    "max_header_bytes": ("2048", 2048),
    "max_messages": ("5", 5),
    "max_prompt_tokens": ("100", 100),
    "max_connections": ("7", 7),
    "max_connections_per_key": ("3", 3),
    "read_s": ("1.5", 1.5),
    "idle_s": ("2", 2.0),
    "write_s": ("3", 3.0),
    "log_format": ("json", "json"),
    "log_prompts": ("true", True),
    "allowed_sources": ("/models,s3://bucket/models", ("/models", "s3://bucket/models")),
    "data_plane": ("tcp", "tcp"),
    "store_bytes": ("1073741824", 2**30),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_setting_comes_from_a_variable_or_the_file(name: str, tmp_path: Path) -> None:
    """With the same meaning; the variable takes precedence."""
    text, value = GIVEN[name]
    setting = next(setting for setting in SETTINGS if setting.name == name)
    environ = {"COREWRIGHT_HOME": str(tmp_path)}
    (tmp_path / "config.yaml").write_text(f"{name}: {json.dumps(list(value) if isinstance(value, tuple) else value)}\n")
    settings = resolve({}, environ)
    assert (settings[name], settings.origin(name).origin, settings.problems) == (value, "file", ())
    settings = resolve({}, {**environ, setting.env: text})
    assert (settings[name], settings.origin(name).where, settings.problems) == (value, setting.env, ())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("gateways", "0"),
        ("gateways", "65"),
        ("gateways", "1.5"),
        ("insecure", "perhaps"),
        ("cors_origins", "https://a.example/path"),
        ("cors_origins", "a.example"),
        ("max_body_bytes", "0"),
        ("max_body_bytes", "-1"),
        ("max_header_bytes", "1e6"),
        ("max_prompt_tokens", "0"),
        ("max_connections", "many"),
        ("read_s", "0"),
        ("write_s", "nan"),
        ("idle_s", "-1"),
        ("log_format", "xml"),
        ("allowed_sources", "models"),
        ("allowed_sources", "s3://"),
        ("data_plane", "udp"),
        ("store_bytes", "0"),
    ],
)
def test_an_invalid_value_is_reported_before_anything_starts(name: str, wrong: str, tmp_path: Path) -> None:
    """By its variable."""
    setting = next(setting for setting in SETTINGS if setting.name == name)
    settings = resolve({}, {"COREWRIGHT_HOME": str(tmp_path), setting.env: wrong})
    assert [problem.id for problem in settings.problems] == ["setting-wrong"]
    assert setting.env in settings.problems[0].what


def test_options_exist_for_settings_that_users_type() -> None:
    """The others are in the environment and the file."""
    from orchestrator.cli.main import application

    options = {option for parameter in application().commands["up"].params for option in parameter.opts}
    expected = {setting.option.partition("/")[0] for setting in SETTINGS if setting.option}
    assert expected <= options
    hidden = {"--" + setting.name.replace("_", "-") for setting in SETTINGS if not setting.option}
    assert hidden & options == set()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses_are_recognized(host: str) -> None:
    """Of both families."""
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "fleet.example", "", "127.0.0.1.example", "localhost."])
def test_all_other_addresses_are_the_network(host: str) -> None:
    """A name too, whatever it resolves to today."""
    assert not is_loopback(host)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    return Home(tmp_path / "home")


def checked(**flags: Any) -> str:
    """The id of what `up` refuses; empty when it would start."""
    try:
        up_module.check_listening(resolve(flags))
    except Failed as failed:
        return failed.problem.id
    return ""


def test_up_listens_on_the_network_only_with_a_valid_key(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """Not without one, nor with an expired one, or one for the admin API only."""
    file = KeyFile(home.keys)
    assert checked(host="0.0.0.0") == "host-without-keys"
    file.create("ops", scopes=("admin",))
    file.create("old", expires=time.time() - 1)
    assert checked(host="0.0.0.0") == "host-without-keys"
    file.create("ci")
    assert checked(host="0.0.0.0") == ""
    assert "warning: host-without-tls: " in capsys.readouterr().err
    file.path.write_text("{")
    assert checked() == "keys-broken"


def test_insecure_is_reported(home: Home, capsys: pytest.CaptureFixture[str]) -> None:
    """It starts, and reports who can use it."""
    assert checked(host="0.0.0.0", insecure=True) == ""
    assert "warning: keys-not-required: --insecure: requests to 0.0.0.0 on the network" in capsys.readouterr().err
    assert checked(insecure=True) == ""
    assert capsys.readouterr().err == ""
    KeyFile(home.keys).create("ci")
    assert checked(insecure=True) == ""
    assert "keys-not-required" in capsys.readouterr().err


def test_certificates_are_verified_before_anything_starts(home: Home, tmp_path: Path) -> None:
    """A pair, and with it an authority for clients; one alone is rejected."""
    authority = Authority(tmp_path)
    pair, other = authority.sign("server"), authority.sign("other")
    cert, key, ca = str(pair.cert), str(pair.key), str(authority.file)
    assert checked(tls_cert=cert, tls_key=key, tls_client_ca=ca) == ""
    assert checked(tls_cert=cert) == "tls-incomplete"
    assert checked(tls_key=key) == "tls-incomplete"
    assert checked(tls_client_ca=ca) == "tls-incomplete"
    assert checked(tls_cert=cert, tls_key=str(other.key)) == "tls-unusable"
    assert checked(tls_cert=cert, tls_key="/no/such.pem") == "tls-unusable"


def test_the_printed_curl_command_has_the_needed_options(home: Home, tmp_path: Path) -> None:
    """A key if keys are required, the authority if there is TLS."""
    assert up_module._curl_needs(resolve({})) == ""
    KeyFile(home.keys).create("ci")
    options = up_module._curl_needs(resolve({"tls_cert": "/c", "tls_key": "/k", "tls_client_ca": "/a"}))
    assert options == "--cacert CA.pem --cert CLIENT.pem --key CLIENT-KEY.pem -H 'authorization: Bearer KEY' "
    assert "authorization" not in up_module._curl_needs(resolve({"insecure": True}))


# What a spec may name


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder that is allowed, with a model, and links out of it and into it."""
    for name in ("models/chat", "elsewhere/secret", "models-of-others"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "models" / "out").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "in").symlink_to(tmp_path / "models")
    (tmp_path / "models" / "loop").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize(
    ("place", "allowed"),
    [
        ("models", True),
        ("models/chat", True),
        ("models/not-yet/there", True),
        ("elsewhere/in/chat", True),
        ("models/chat/../chat", True),
        ("elsewhere/secret", False),
        ("models/../elsewhere/secret", False),
        ("models/chat/../../elsewhere", False),
        ("models/out/secret", False),
        ("models-of-others", False),
        ("models/loop/x", False),
        ("", False),
    ],
)
def test_an_allowed_folder_includes_only_its_real_content(place: str, allowed: bool, models: Path) -> None:
    """Links and .. are resolved before the comparison; a longer name is another folder."""
    assert SourcePolicy((str(models / "models"),)).allows(f"{models}/{place}") == allowed


@pytest.mark.parametrize(
    ("place", "allowed"),
    [
        ("s3://bucket/models", True),
        ("s3://bucket/models/chat", True),
        ("s3://bucket/models-of-others", False),
        ("s3://bucket/models/../private", False),
        ("s3://bucket", False),
        ("s3://bucket-of-others/models", False),
        ("/bucket/models", False),
        ("org/model", False),
    ],
)
def test_an_allowed_s3_prefix_is_a_folder(place: str, allowed: bool) -> None:
    """A path is not an S3 address, and a hub id is not in a folder."""
    assert SourcePolicy(("s3://bucket/models/",)).allows(place) == allowed


FIELDS = [
    ("source: FOLDER/elsewhere/secret", "a: source "),
    ("source: ../elsewhere/secret", "a: source "),
    ("source: ./models/out/secret", "a: source "),
    ("source: org/model", "a: source "),
    ("source: s3://bucket/model", "a: source "),
    ("source: ./models/chat, draft: {source: /etc}", "a: draft.source "),
    ("source: ./models/chat, neff_cache: /etc/cache", "a: neff_cache "),
    ("source: ./models/chat, neff_cache: s3://bucket/x", "a: neff_cache "),
    ("source: ./models/chat, engine_options: {a: [{b: /etc/shadow}]}", "a: engine_options "),
    ("source: ./models/chat, engine_options: {a: some/folder/../../..}", "a: engine_options "),
    ("source: ./models/chat, compiler: {flags: '-O2 --dump=/etc'}", "a: compiler.flags "),
    ("source: ./models/chat, engine_options: {a: 'http://models/chat'}", "a: engine_options "),
    ("source: ./models/chat, compiler: {flags: '-I/etc'}", "a: compiler.flags "),
]


@pytest.mark.parametrize(("fields", "begins"), FIELDS, ids=[begins + fields for fields, begins in FIELDS])
def test_every_field_with_a_path_is_checked(fields: str, begins: str, models: Path) -> None:
    """With the line and column of the field, and the remedy; nothing is read there."""
    fields = fields.replace("FOLDER", str(models))
    text = f"hosts: {{emulate: inf2.xlarge}}\nmodels:\n  a: {{engine: cpu, {fields}}}\n"
    allowed = SourcePolicy((str(models / "models"),), frozenset())
    file = examine(text, "f.yaml", str(models), Machine((0, 1)), allowed)
    refusals = [problem for problem in file.problems if problem.id == "source-not-allowed"]
    assert [problem.what[: len(begins)] for problem in refusals] == [begins]
    assert re.fullmatch(r"f\.yaml:3:\d+", refusals[0].where)
    assert refusals[0].hint
    assert not file.checkpoints


@pytest.mark.parametrize(
    "fields", ["engine_options: {a: ./models/log.json}", "compiler: {flags: '--dump=./models -I./models'}"]
)
def test_a_relative_path_that_the_engine_resolves_is_refused(fields: str, models: Path) -> None:
    """It is relative to the folder of the engine's process, and not to the folder that the client names."""
    text = f"models: {{a: {{engine: vllm, source: ./models/chat, {fields}}}}}\n"
    spec = parse(text, "f.yaml", str(models)).spec
    assert spec is not None
    assert [problem.id for problem in SourcePolicy((str(models / "models"),)).problems(spec)] == [
        "source-not-allowed"
    ] * len(fields.split("./models")[1:])


def test_allowed_sources_are_read(models: Path) -> None:
    """And an echo model needs no source."""
    text = "models: {a: {engine: echo}, b: {engine: cpu, source: ./models/chat, neff_cache: ./models/cache}}\n"
    allowed = SourcePolicy((str(models / "models"),), frozenset())
    ids = {problem.id for problem in examine(text, "f.yaml", str(models), Machine((0, 1)), allowed).problems}
    assert "source-not-allowed" not in ids


def test_only_the_interpreters_of_ups_own_spec_are_run(tmp_path: Path) -> None:
    """An interpreter is a program, which later specs cannot add."""
    own = "engines: {cpu: {python: ./env/bin/python}}\nmodels: {a: {engine: echo}}\n"
    evil = own.replace("./env", "./models/evil")
    parsed, other = parse(own, "f", str(tmp_path)).spec, parse(evil, "f.yaml", str(tmp_path)).spec
    assert parsed is not None
    assert other is not None
    allowed = SourcePolicy((str(tmp_path),), interpreters_of(parsed))
    assert allowed.problems(parsed) == ()
    (problem,) = allowed.problems(other)
    assert (problem.id, problem.where) == ("interpreter-not-allowed", "f.yaml:1:17")


def test_up_reads_only_what_the_setting_allows(
    home: Home, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also for the operator's own file; its interpreters are allowed."""
    spec = models / "spec.yaml"
    spec.write_text("hosts: {emulate: inf2.xlarge}\nmodels: {a: {engine: cpu, source: ./elsewhere/secret}}\n")
    monkeypatch.setenv("COREWRIGHT_ALLOWED_SOURCES", str(models / "models"))
    assert run(["up", str(spec), "--port", "1"]) == 1
    assert f"{spec}:2:27: error: source-not-allowed: a: source './elsewhere/secret'" in capsys.readouterr().err
    assert not [problem for problem in load(str(spec)).problems if problem.id == "source-not-allowed"]


UNUSABLE = {  # paths that no file can have, as in JSON
    "a NUL": r"./m\u0000",
    "a long name": f"./{'a' * 256}",
    "a long name of few characters": "./" + "ä" * 128,
    "a long path": "./" + "a/" * 2000,
}
WITH_PATHS = {
    "source": 'a: {engine: cpu, source: "@"}',
    "draft": 'a: {engine: cpu, source: ./m, draft: {source: "@", tokens: 3}}',
    "adapter": 'a: {engine: vllm, source: ./m, adapters: {x: "@"}}',
    "neff_cache": 'a: {engine: cpu, source: ./m, neff_cache: "@"}',
}


@pytest.mark.parametrize("path", UNUSABLE.values(), ids=list(UNUSABLE))
@pytest.mark.parametrize("models", WITH_PATHS.values(), ids=list(WITH_PATHS))
@pytest.mark.parametrize("command", ["validate", "plan", "up"])
def test_a_path_that_no_file_can_have_is_an_error_of_the_command(
    command: str, models: str, path: str, tmp_path: Path, home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its place in the spec; looking for such a file raises."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"hosts: {{emulate: inf2.xlarge}}\nmodels:\n  {models.replace('@', path)}\n")

    assert run([command, str(spec)]) == 1

    assert re.search(rf"{spec}:3:\d+: error: (bad-source|yaml-syntax): ", capsys.readouterr().err)


@pytest.mark.parametrize("verb", ["apply", "propose", "explain"])
@pytest.mark.parametrize("path", ["/x\0y", "/" + "a" * 256, "/a" * 2000, "/a" * 1536 + "/"])
def test_a_running_fleet_refuses_a_folder_that_cannot_exist(verb: str, path: str, tmp_path: Path) -> None:
    """Also one with room for no name: the folder of the spec comes from the client."""
    text = "hosts: {emulate: inf2.xlarge}\nmodels: {a: {engine: cpu, source: org/m}, b: {engine: cpu, source: ./m}}\n"

    async def play() -> str:
        async with Played(tmp_path, FakeCluster(), ECHO) as played:
            await played.settled()
            more: dict[str, Any] = {"apply": {"by": "me"}, "explain": {"model": "a"}}.get(verb, {})
            with pytest.raises(OperationRefused) as refused:
                await getattr(played.operator, verb)(text, "f.yaml", path, **more)
            return refused.value.problem.id

    assert virtually(play) in ("spec-invalid", "hosts-changed")


@pytest.mark.parametrize("verb", ["apply", "propose", "explain"])
def test_a_running_fleet_reads_only_what_the_setting_allows(
    verb: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every client, and before anything there is read: a response would reveal the content of other folders."""
    text = "hosts: {emulate: inf2.xlarge}\nmodels: {a: {engine: cpu, source: ./elsewhere/secret}}\n"

    async def play() -> tuple[str, list[str]]:
        async with Played(models, FakeCluster(), ECHO) as played:
            await played.settled()
            allowed = SourcePolicy((str(models / "models"),), frozenset())
            monkeypatch.setattr("orchestrator.api.operation.allowed_by_setting", lambda settings: allowed)
            more: dict[str, Any] = {"apply": {"by": "me"}, "explain": {"model": "a"}}.get(verb, {})
            with pytest.raises(OperationRefused) as refused:
                await getattr(played.operator, verb)(text, "f.yaml", str(models), **more)
            return refused.value.problem.id, [problem.id for problem in refused.value.problems]

    id, problems = virtually(play)
    assert id == "spec-invalid"
    assert "source-not-allowed" in problems
    assert "checkpoint-unreadable" not in problems


# The admin API


@pytest.fixture
def asking(admin: LiveAdmin) -> Iterator[Callable[[str], httpx.Client]]:
    """Makes clients that come with a token or a key."""
    clients: list[httpx.Client] = []

    def make(token: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {token}", "x-corewright-by": "me@there"}
        clients.append(httpx.Client(base_url=f"{admin.url}{ADMIN_PATH}/", headers=headers, timeout=20))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def actions(admin: LiveAdmin) -> list[tuple[str, str, str, str | None]]:
    lines = Audit(Home(Path(admin.fleet.settings.home)).audit).entries(100)
    return [(entry.who, entry.by, entry.action, entry.status) for entry in lines]


def test_a_key_of_scope_admin_changes_the_fleet_until_it_is_revoked(
    admin: LiveAdmin, asking: Callable[[str], httpx.Client]
) -> None:
    """Without any restart; the journal has the key's name."""
    file = KeyFile(Home(Path(admin.fleet.settings.home)).keys)
    key, text = file.create("ops", scopes=("admin",))
    client = asking(text)
    assert client.get("status").status_code == 200
    assert client.post("scale", json={"model": "chat", "count": 3}).status_code == 200
    assert admin.fleet.calls == [("scale", "chat", 3, "me@there (key ops)")]
    assert actions(admin) == [(f"key {key.id} ops", "me@there (key ops)", "POST /scale", "200")]
    file.revoke("ops")
    assert client.get("status").status_code == 401


def test_a_key_of_scope_inference_changes_nothing_and_sees_nothing(
    admin: LiveAdmin, asking: Callable[[str], httpx.Client]
) -> None:
    """403 on every route, and nothing reaches the fleet."""
    _, text = KeyFile(Home(Path(admin.fleet.settings.home)).keys).create("ci")
    client = asking(text)
    for answer in (client.get("status"), client.post("down"), client.post("scale", json={"model": "a", "count": 0})):
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "key-without-admin")
    assert (admin.fleet.calls, admin.downs, actions(admin)) == ([], 0, [])


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer x", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x", "Bearer \xff"]
)
def test_a_client_without_valid_credentials_is_401(given: str, admin: LiveAdmin) -> None:
    """With a hint how to authenticate."""
    answer = httpx.get(f"{admin.url}{ADMIN_PATH}/status", headers={b"authorization": given.encode("latin-1")})
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")


def test_every_change_is_audited_and_no_read(admin: LiveAdmin, asking: Callable[[str], httpx.Client]) -> None:
    """Also rejected ones, with the outcome; a spec by its digest, no token."""
    client = asking(TOKEN)
    sent = {"text": SPEC, "file": "new.yaml", "base_dir": "/specs"}
    client.get("status")
    client.post("plan", json=sent)
    client.post("apply", json=sent)
    admin.fleet.refusal = OperationRefused("never-fits", "", "", status=422)
    client.post("apply", json=sent)
    client.post("down")
    me = "fleet token", "me@there"
    assert actions(admin) == [
        (*me, "POST /apply", "200"),
        (*me, "POST /apply", "422"),
        (*me, "POST /down", "202"),
    ]
    log = Home(Path(admin.fleet.settings.home)).audit.read_text()
    assert TOKEN not in log
    assert "models:" not in log
    assert "sha256:" in log


def test_refused_requests_of_a_key_do_not_rotate_the_audit_log(
    admin: LiveAdmin, asking: Callable[[str], httpx.Client]
) -> None:
    """19 requests with 650,000 names each deleted every older record."""
    _, text = KeyFile(Home(Path(admin.fleet.settings.home)).keys).create("ops", scopes=("admin",))
    client = asking(text)
    client.post("scale", json={"model": "chat", "count": 3})
    admin.fleet.refusal = OperationRefused("host-unknown", "", "", status=404)
    names = json.dumps({"hosts": ["h1234567"] * 650_000})
    statuses = {client.post("hosts/roll", content=names).status_code for _ in range(19)}

    assert statuses == {404}
    assert actions(admin)[0][2:] == ("POST /scale", "200")
    assert Home(Path(admin.fleet.settings.home)).audit.stat().st_size < 100_000


def test_a_change_that_cannot_be_audited_is_not_done(admin: LiveAdmin, asking: Callable[[str], httpx.Client]) -> None:
    """507, and the fleet is not called; reading still works."""
    Home(Path(admin.fleet.settings.home)).audit.mkdir()
    client = asking(TOKEN)
    for path, body in (("scale", {"model": "chat", "count": 0}), ("down", {})):
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "audit-unwritable")
    assert (admin.fleet.calls, admin.downs) == ([], 0)
    assert client.get("status").status_code == 200


EVIL = [
    ("models: {a: {engine: cpu, source: /etc}}\n", "source-not-allowed"),
    ("models: {a: {engine: cpu, source: ../x}}\n", "source-not-allowed"),
    ("engines: {cpu: {python: /tmp/evil}}\nmodels: {a: {engine: cpu, source: ./m}}\n", "interpreter-not-allowed"),
    ("engines: {cpu: {python: ./evil}}\nmodels: {a: {engine: echo}}\n", "interpreter-not-allowed"),
    (
        "models: {a: {engine: server, server: {command: [evil, --port, '{port}'], slots: 1}}}\n",
        "command-not-allowed",
    ),
    (
        "engines: {vllm: {command: [evil, serve]}}\nmodels: {a: {engine: vllm, source: ./m}}\n",
        "command-not-allowed",
    ),
]


def test_a_request_with_a_key_acts_for_a_caller_with_a_key(
    admin: LiveAdmin, asking: Callable[[str], httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its specs may name less; one with the fleet's token does not."""
    _, key = KeyFile(Home(Path(admin.fleet.settings.home)).keys).create("ops", scopes=("admin",))
    for_keys = FakeFleet()
    monkeypatch.setattr(admin.fleet, "for_keys", for_keys)
    for token in (key, TOKEN):
        assert asking(token).post("rollout/undo", json={"to": 2}).status_code == 200
    assert for_keys.calls == [("undo", 2, "me@there (key ops)")]
    assert admin.fleet.calls == [("undo", 2, "me@there")]


def answered(verb: str, home: Path, text: str, base_dir: str, *, by_key: bool = True) -> list[str]:
    """The problems of a refusal to use a spec for a caller with a key, or the fleet's user; none: it is used."""

    async def play() -> list[str]:
        async with Played(home, FakeCluster(), ECHO) as played:
            await played.settled()
            operator = Operations(played.fleet.for_keys if by_key else played.fleet)
            more: dict[str, Any] = {"apply": {"by": "me"}, "explain": {"model": "a"}}.get(verb, {})
            try:
                await getattr(operator, verb)(text, "f.yaml", base_dir, **more)
            except OperationRefused as refused:
                assert played.controller.status().revision == 1
                return [refused.problem.id, *(problem.id for problem in refused.problems)]
            return []

    return virtually(play)


@pytest.mark.parametrize(("text", "id"), EVIL)
@pytest.mark.parametrize("verb", ["apply", "propose", "explain"])
def test_a_key_does_not_grant_a_shell(verb: str, text: str, id: str, tmp_path: Path) -> None:
    """Without a setting a key reaches the folder of the spec of `up`, whatever folder it claims; the token, whose
    holder is the fleet's user, reaches everything.
    """
    text = f"hosts: {{emulate: inf2.xlarge}}\n{text}"
    home = tmp_path / "fleet"
    home.mkdir()
    refused = answered(verb, home, text, str(home))
    assert refused[0] == "spec-invalid"
    assert id in refused
    assert id not in answered(verb, home, text, str(home), by_key=False)


@pytest.mark.parametrize("verb", ["apply", "propose", "explain"])
@pytest.mark.parametrize("in_base_dir", [True, False])
@pytest.mark.parametrize("unusable", ["./a\0", *list(UNUSABLE.values())[1:]])
def test_a_path_that_no_file_can_have_is_the_clients_mistake(
    unusable: str, in_base_dir: bool, verb: str, tmp_path: Path
) -> None:
    """An invalid spec, never an error of the controller; an explanation lists the problem."""
    source, base_dir = ("./m", unusable[1:]) if in_base_dir else (unusable.rstrip("\0") + "/a" * 2000, str(tmp_path))
    text = f"hosts: {{emulate: inf2.xlarge}}\nmodels: {{a: {{engine: cpu, source: {source}}}}}\n"
    explained = verb == "explain" and not in_base_dir
    assert answered(verb, tmp_path, text, base_dir)[:1] == ([] if explained else ["spec-invalid"])


def test_a_key_may_apply_sources_beside_ups_own_spec(tmp_path: Path) -> None:
    """The operator put the fleet's models there; another claimed folder has no effect."""
    (tmp_path / "m").mkdir()
    text = "hosts: {emulate: inf2.xlarge}\nmodels: {a: {engine: cpu, source: ./m}}\n"
    assert "source-not-allowed" not in answered("apply", tmp_path, text, str(tmp_path))
    assert answered("apply", tmp_path, text, "/") == ["spec-invalid", "source-not-allowed"]


@pytest.mark.parametrize("to", [2, None])
def test_a_key_cannot_repeat_a_revision_that_it_could_not_apply(to: int | None, tmp_path: Path) -> None:
    """An old revision may have programs that only the fleet's user was allowed; the one before the current too."""
    python = f"engines: {{echo: {{python: {sys.executable}}}}}\n"

    async def play() -> list[str]:
        async with Played(tmp_path, FakeCluster(), ECHO) as played:
            await played.settled()
            await played.apply(python + ECHO)
            await played.settled()
            await played.apply(f"{ECHO}# another text\n")
            with pytest.raises(OperationRefused) as refused:
                await Operations(played.fleet.for_keys).undo(to, "me")
            return [problem.id for problem in refused.value.problems]

    assert virtually(play) == ["interpreter-not-allowed"]


def test_the_allowed_sources_follow_from_the_setting(admin: LiveAdmin) -> None:
    """For all, and for clients with a key."""
    plain = admin.fleet.settings
    set_ = msgspec.structs.replace(plain, allowed_sources=("/models",))
    assert allowed_by_setting(plain) == SourcePolicy()
    assert allowed_to_keys(plain) == SourcePolicy(("/specs",), frozenset(), frozenset(), frozenset())
    assert allowed_by_setting(set_) == allowed_to_keys(set_)
    assert allowed_to_keys(set_) == SourcePolicy(("/models",), frozenset(), frozenset(), frozenset())


@pytest.mark.parametrize(
    ("applied", "refused"),
    [
        ("source: ./a, trust_remote_code: true", []),
        ("source: ./b, trust_remote_code: true", ["remote-code-not-allowed"]),
        ("source: ./a, draft: {source: ./b}, trust_remote_code: true", ["remote-code-not-allowed"]),
        ("source: ./b", []),
    ],
)
def test_only_code_that_the_spec_of_up_trusts_is_run(admin: LiveAdmin, applied: str, refused: list[str]) -> None:
    """Code of a checkpoint is a program: a key cannot add it, but may repeat a model of `up`."""
    own = "models: {m: {source: ./a, engine: cpu, trust_remote_code: true}}\n"
    allowed = allowed_to_keys(msgspec.structs.replace(admin.fleet.settings, spec_text=own, base_dir="/specs"))
    spec = parse(f"models: {{n: {{engine: cpu, {applied}}}}}\n", "f.yaml", "/specs").spec
    assert spec is not None
    assert [problem.id for problem in allowed.problems(spec)] == refused


# A whole fleet


SECRET_PROMPT = "xyzzy-a-prompt-that-nobody-logs"


def holding(folders: list[Path], *secrets: str) -> list[str]:
    """The files that hold one of the texts."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return [path.name for path in files if any(secret.encode() in path.read_bytes() for secret in secrets)]


@pytest.mark.soak
def test_no_key_and_no_prompt_is_in_any_file_of_the_home(tmp_path: Path) -> None:
    """After answers and after errors of every kind, in the logs of gateway, controller, daemon, replicas and Ray:
    with the data plane on TCP, required keys, and the admin API used with a key.
    """
    spec = "hosts: {emulate: inf2.xlarge}\nmodels: {parrot: {engine: echo}}\n"
    home = Path("/tmp") / f"cwt-{os.getpid()}-s"
    file = KeyFile(home / "keys.json")
    _, key = file.create("client")
    _, admin_key = file.create("ops", scopes=("admin",))
    os.environ["COREWRIGHT_DATA_PLANE"] = "tcp"
    try:
        fleet = LiveFleet(spec, home=home)
    finally:
        del os.environ["COREWRIGHT_DATA_PLANE"]
    try:
        fleet.wait_ready()
        head = {"authorization": f"Bearer {key}"}
        chat = {"model": "parrot", "prompt": SECRET_PROMPT, "max_tokens": 40}
        answered = fleet.http.post("/v1/completions", json=chat, headers=head)
        assert answered.status_code == 200
        fleet.http.post("/v1/completions", json={**chat, "stream": True}, headers=head)
        wrong = [{**chat, "max_tokens": 10**6}, {**chat, "model": SECRET_PROMPT}, {**chat, SECRET_PROMPT: 1}]
        for body in [*wrong, {**chat, "temperature": SECRET_PROMPT}]:
            assert 400 <= fleet.http.post("/v1/completions", json=body, headers=head).status_code < 500
        assert fleet.http.post("/v1/completions", content=f'{{"{SECRET_PROMPT}"', headers=head).status_code == 400
        for bad in (f"Bearer {key}x", f"Bearer {key[:-1]}x", key, f"Basic {key}"):
            assert fleet.http.post("/v1/completions", json=chat, headers={"authorization": bad}).status_code == 401
        record = Home(home).read_record()
        assert record is not None
        for token, status in ((admin_key, 200), (key, 403), (admin_key[:-1] + "!", 401)):
            answer = httpx.post(
                f"{record.admin_url}{ADMIN_PATH}/scale",
                json={"model": "parrot", "count": 1},
                headers={"authorization": f"Bearer {token}"},
            )
            assert answer.status_code == status, answer.text
        assert fleet.corewright("audit").returncode == 0
        assert [path for path in Home(home).sockets.iterdir() if path.is_socket()] == []  # it is the plane on TCP

        secrets = [SECRET_PROMPT, key[-43:-1], admin_key[-43:-1], "BEGIN PRIVATE KEY"]
        assert any(path.name.startswith("raylet") for path in Home(home).ray.rglob("logs/*"))
        assert holding([home, Home(home).sockets], *secrets) == []
        assert holding([home], record.token) == ["fleet.json"]
        assert fleet.stop() == 0
        assert holding([home], *secrets, record.token) == []
        assert any(path.name == "gateway.log" for path in (home / "logs").iterdir())
        recorded = [(entry.action, entry.status) for entry in Audit(home / "audit.log").entries(100)]
        assert recorded == [("up", "ready"), ("POST /scale", "200"), ("end", "done")]
    finally:
        fleet.clean()


@pytest.mark.live
def test_a_fleet_of_two_hosts_uses_tls_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients by HTTPS, replicas of both hosts by TCP; a restarted controller adopts them, and a restarted replica
    is found too.
    """
    authority = Authority(tmp_path)
    pair, client = authority.sign("server"), authority.sign("client", client=True)
    monkeypatch.setenv("COREWRIGHT_DATA_PLANE", "tcp")
    spec = "hosts: {emulate: inf2.xlarge, count: 2}\nmodels: {parrot: {engine: echo, tp_degree: 2, replicas: 2}}\n"
    certificates = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-client-ca", str(authority.file))
    with LiveFleet(spec, arguments=("--no-dashboard", "--host", "localhost", *certificates)) as fleet:
        known = ssl.create_default_context(cafile=str(authority.file))
        fleet.url = f"https://localhost:{fleet.port}"
        known.load_cert_chain(client.cert, client.key)
        fleet.http = httpx.Client(base_url=fleet.url, timeout=60.0, verify=known)
        fleet.wait_ready()
        record = Home(fleet.home).read_record()
        assert record is not None
        assert record.url == fleet.url
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{fleet.url}/livez", verify=ssl.create_default_context(cafile=str(authority.file)))

        def answer() -> list[int]:
            body = {"model": "parrot", "prompt": "well", "max_tokens": 8, "return_token_ids": True}
            completion = fleet.http.post("/v1/completions", json=body)
            assert completion.status_code == 200, completion.text
            ids: list[int] = completion.json()["choices"][0]["token_ids"]
            return ids

        expected = answer()
        assert [path for path in Home(fleet.home).sockets.iterdir() if path.is_socket()] == []
        before, dying = fleet.replica_pids(), fleet.controller_pid()
        os.kill(dying, signal.SIGKILL)
        until(lambda: fleet.named_pids("ControllerActor") not in ([], [dying]), 30, "the controller is back")
        until(lambda: fleet.corewright("status").returncode == 0, 30, "the controller has settled")
        assert fleet.replica_pids() == before
        assert answer() == expected
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(fleet.replica_pids() - before) == 2, 60, "both replicas are back")
        fleet.wait_ready()
        until(lambda: {fleet.replica(f"parrot/{n}")["state"] for n in (0, 1)} == {"ready"}, 60, "both are ready")
        assert answer() == expected
        assert fleet.stop() == 0


@pytest.mark.parametrize(
    ("prefix", "source", "allowed"),
    [
        ("hub:", "gpt2", True),
        ("hub:org", "org/model", True),
        ("hub:org/model", "org/model", True),
        ("hub:org/model", "org/model-2", False),
        ("hub:org", "organisation/model", False),
        ("hub:org", "org", True),
        ("hub:org/model", "org", False),
        ("hub:", "org/../x", False),
        ("hub:", "~/x", False),
        ("hub:", "s3://org/model", False),
        ("hub:", "/org/model", False),
        ("/org", "org/model", False),
        ("s3://org", "org/model", False),
    ],
)
def test_the_hub_models_of_an_organisation_may_be_allowed(prefix: str, source: str, allowed: bool) -> None:
    """An id is compared as a whole, and nothing else matches it."""
    assert SourcePolicy((prefix,)).allows(source) == allowed


def test_a_problem_that_names_a_place_is_complete() -> None:
    """Id, place, fact and remedy."""
    spec = parse("models: {a: {engine: cpu, source: /etc}}\n", "f.yaml", "/specs").spec
    assert spec is not None
    (problem,) = SourcePolicy(("/models",)).problems(spec)
    assert dataclasses.asdict(problem) == dataclasses.asdict(
        Problem(
            "source-not-allowed",
            "error",
            "f.yaml:1:27",
            "a: source '/etc' is not in the allowed sources: /models",
            "move it to an allowed source, or extend the setting allowed_sources and restart `up`",
        )
    )
