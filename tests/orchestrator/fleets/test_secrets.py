"""No credential and no signed address is to be seen, whatever becomes of a source: real servers, every kind of fault.

What is looked through, and for what, is in tests/leaks.py.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from orchestrator.compiling.hub_push import push_to_hub
from orchestrator.messages.controller_settings import ADMIN_PATH
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from tests import leaks
from tests.checkpoints import make_checkpoint
from tests.doubles.machine import make_interpreter
from tests.fleet import COREWRIGHT, LiveFleet, until
from tests.hub import TOKEN, HubServer, Repo
from tests.leaks import PASSWORD, USER
from tests.s3 import ACCESS_KEY, FaultProxy, S3Server
from workers.artifacts.fetch.artifact_fetcher import ArtifactFetcher, WantedArtifact
from workers.artifacts.fetch.progress import Progress
from workers.artifacts.fetch.retry_policy import RetryPolicy
from workers.artifacts.sources.listing import SourceError
from workers.artifacts.store.store import Store
from workers.compiled.host_sets import MANIFEST

DEADLINE_S = 120.0
NOBODY = f"http://{USER}:{PASSWORD}@127.0.0.1:9"  # nobody listens there
TALKATIVE = ("huggingface_hub", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "botocore")
HURRIED = RetryPolicy(seconds=0.5, first_s=0.01, longest_s=0.1)
WEIGHTS = "model.safetensors"
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", WEIGHTS: os.urandom(300_000)}


@dataclass
class World:
    """What a scenario may set going wrong."""

    proxy: FaultProxy  # before an S3 that has the model m
    hub: HubServer  # that has org/m, private
    patch: pytest.MonkeyPatch

    def setenv(self, **variables: str) -> None:
        for name, value in variables.items():
            self.patch.setenv(name, value)

    def use_proxy(self, url: str) -> None:
        """Of HTTP, for S3 and the hub."""
        self.patch.delenv("NO_PROXY", raising=False)
        self.patch.delenv("no_proxy", raising=False)
        self.setenv(HTTP_PROXY=url, http_proxy=url)

    def inside(self, url: str) -> str:
        """With user and password."""
        return url.replace("://", f"://{USER}:{PASSWORD}@")


@pytest.fixture
def world(
    s3_server: S3Server, s3_proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[World]:
    from huggingface_hub import close_session, constants

    close_session()  # its client has read the environment of an earlier test
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # files go to and come from signed addresses
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    for name in TALKATIVE:  # whatever an earlier test has silenced
        logging.getLogger(name).setLevel(logging.NOTSET)
    with HubServer() as hub:
        made = World(s3_proxy, hub, monkeypatch)
        hub.repos["org/m"] = Repo(private=True)
        hub.repos["org/m"].commit(FILES)
        made.setenv(**hub.env, HF_HOME=str(tmp_path / "hf"), HF_TOKEN=TOKEN, HF_HUB_DISABLE_XET="1")
        yield made
        close_session()


Scenario = Callable[[World], object]
IN_S3: dict[str, tuple[Scenario, str]] = {
    "all is well": (lambda world: None, ""),
    "no permission": (lambda world: world.proxy.answer(403, "AccessDenied"), "s3-denied"),
    "no permission for weights": (
        lambda world: world.proxy.answer(403, "AccessDenied", key=f"m/{WEIGHTS}"),
        "s3-denied",
    ),
    "a wrong secret": (lambda world: world.proxy.answer(403, "SignatureDoesNotMatch"), "s3-denied"),
    "a wrong secret for weights": (
        lambda world: world.proxy.answer(403, "SignatureDoesNotMatch", key=f"m/{WEIGHTS}"),
        "s3-denied",
    ),
    "a wrong secret for the list": (
        lambda world: world.proxy.answer(403, "SignatureDoesNotMatch", key=""),
        "s3-denied",
    ),
    "an expired token": (lambda world: world.proxy.answer(400, "ExpiredToken", key=""), "s3-denied"),
    "a token that expires meanwhile": (
        lambda world: world.proxy.answer(400, "ExpiredToken", key=f"m/{WEIGHTS}", methods=("GET",)),
        "s3-denied",
    ),
    "S3 is away": (lambda world: world.proxy.away(), "s3-unreachable"),
    "S3 is busy": (lambda world: world.proxy.answer(503), "s3-unreachable"),
    "weights are busy": (lambda world: world.proxy.answer(503, key=f"m/{WEIGHTS}"), "s3-unreachable"),
    "an answer that nobody knows": (lambda world: world.proxy.answer(418, "Teapot"), "s3-refused"),
    "a damaged object": (lambda world: world.proxy.flip(f"m/{WEIGHTS}", 1000, times=1e9), "s3-damaged"),
    "a cut object": (lambda world: world.proxy.cut(f"m/{WEIGHTS}", 1000, times=1e9), "s3-unreachable"),
    "a short object": (lambda world: world.proxy.shorten(f"m/{WEIGHTS}", 1000), "s3-damaged"),
    "an endpoint where nobody is": (lambda world: world.setenv(AWS_ENDPOINT_URL_S3=NOBODY), "s3-unreachable"),
    "an endpoint with a password": (
        lambda world: world.setenv(AWS_ENDPOINT_URL_S3=world.inside(world.proxy.url)),
        "",
    ),
    "an endpoint that is none": (
        lambda world: world.setenv(AWS_ENDPOINT_URL_S3=f"{USER}:{PASSWORD}@no address"),
        "s3-url-wrong",
    ),
    "a proxy where nobody is": (lambda world: world.use_proxy(NOBODY), "s3-unreachable"),
    "a proxy that is none": (lambda world: world.use_proxy(f"http://{USER}:{PASSWORD}@[no"), "s3-unreachable"),
}
ON_THE_HUB: dict[str, tuple[Scenario, str]] = {
    "all is well": (lambda world: None, ""),
    "a wrong token": (lambda world: world.setenv(HF_TOKEN=f"{TOKEN}x"), "hub-not-found"),
    "a token that none can be": (lambda world: world.setenv(HF_TOKEN=f"{TOKEN}\nx"), "hub-"),
    "gated": (lambda world: setattr(world.hub.repos["org/m"], "gated", True), "hub-denied"),
    "a signed address that has expired": (
        lambda world: setattr(world.hub.repos["org/m"], "expired", True),
        "hub-denied",
    ),
    "a damaged file": (lambda world: world.hub.flips.update({WEIGHTS: 99}), "hub-damaged"),
    "a file that is cut": (lambda world: world.hub.cuts.update({WEIGHTS: 10**6}), "hub-"),
    "the hub is busy": (lambda world: setattr(world.hub, "busy", 10**6), "hub-unreachable"),
    "the hub is away": (lambda world: world.hub.away(), "hub-unreachable"),
    "an endpoint where nobody is": (lambda world: world.setenv(HF_ENDPOINT=NOBODY), "hub-unreachable"),
    "an endpoint with a password": (lambda world: world.setenv(HF_ENDPOINT=world.inside(world.hub.url)), "hub-"),
    "an endpoint that is none": (
        lambda world: world.setenv(HF_ENDPOINT=f"{USER}:{PASSWORD}@no address"),
        "hub-",
    ),
    "a proxy where nobody is": (lambda world: world.use_proxy(NOBODY), "hub-unreachable"),
}


def brought(source: str, root: Path) -> tuple[str, str]:
    """Fetch it, and again; the id of the error if there was one, and all that could be printed of it."""
    id, texts = "", []
    bringing = ArtifactFetcher(Store(root), lambda wanted, _: wanted.open(HURRIED))
    for _ in range(2):
        progress = Progress(source)
        try:
            texts.append(repr(bringing(WantedArtifact(source=source), progress, threading.Event())))
        except SourceError as error:
            id = error.id
            texts += [str(error), repr(error), *map(str, error.args), *traceback.format_exception(error)]
        texts.append(repr(progress.status()))
    return id, "\n".join(texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_S3)
def test_a_fetch_from_s3_reveals_no_secret(
    name: str,
    world: World,
    s3_server: S3Server,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """At the finest log level of all libraries, in the error and its traceback, in the store, on the screen."""
    caplog.set_level(logging.DEBUG)
    scenario, wanted = IN_S3[name]
    source = s3_server.bucket(files={f"m/{file}": data for file, data in FILES.items()}) + "/m"
    caplog.clear()
    scenario(world)
    id, texts = brought(source, tmp_path / "store")
    shown = capfd.readouterr()
    assert id == wanted
    assert leaks.in_text("\n".join((texts, caplog.text, shown.out, shown.err))) == []
    assert leaks.in_files(tmp_path / "store") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_THE_HUB)
def test_a_fetch_from_the_hub_reveals_no_secret(
    name: str, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor the redirect address of large files."""
    caplog.set_level(logging.DEBUG)
    scenario, wanted = ON_THE_HUB[name]
    scenario(world)
    id, texts = brought("org/m", tmp_path / "store")
    shown = capfd.readouterr()
    assert id.startswith(wanted)
    assert bool(id) == bool(wanted)
    assert leaks.in_text("\n".join((texts, caplog.text, shown.out, shown.err))) == []
    assert leaks.in_files(tmp_path / "store", tmp_path / "hf") == []


def test_the_search_for_secrets_finds_them(tmp_path: Path) -> None:
    """Otherwise the tests here could not fail."""
    (tmp_path / "a.log").write_text(f"told {ACCESS_KEY.lower()}")
    (tmp_path / f"{TOKEN}.txt").write_text("")
    assert len(leaks.in_files(tmp_path)) == 2
    assert leaks.in_text("?x-amz-signature=0") != []
    assert leaks.in_processes([os.getpid()]) == []


@pytest.mark.parametrize(
    "name", ["all is well", "a wrong token", "a signed address that has expired", "the hub is away"]
)
def test_a_push_to_the_hub_reveals_no_secret(
    name: str, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Large files go to a signed address."""
    caplog.set_level(logging.DEBUG)
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry" / "large.bin").write_bytes(FILES[WEIGHTS])
    (tmp_path / "entry" / MANIFEST).write_text("{}")  # it is whole
    ON_THE_HUB[name][0](world)
    text = ""
    try:
        push_to_hub("org/m", [tmp_path / "entry"])
    except Failed as error:
        text = "".join(traceback.format_exception(error))
    shown = capfd.readouterr()
    assert bool(text) == (name != "all is well")
    assert ("entry/large.bin" in str(world.hub.repos["org/m"].files)) == (name == "all is well")
    assert leaks.in_text("\n".join((text, caplog.text, shown.out, shown.err))) == []


# Commands


SERVED = """\
version: 1
hosts: {{emulate: inf2.xlarge}}
defaults: {{max_len: 64, max_batch: 2}}
models:
  s: {{source: {bucket}/m, engine: cpu}}
  h: {{source: org/m, engine: cpu}}
"""
COMPILED = """\
hosts: {{emulate: inf2.xlarge}}
engines: {{transformers-neuronx: {{python: {python}}}}}
models:
  n:
    source: {bucket}/m
    engine: transformers-neuronx
    dtype: fp32
    tp_degree: 2
    max_len: 64
    max_batch: 2
    neff_cache: {bucket}/{place}
"""
COMPILER = "2.16.345.0+69131dd3"


@dataclass
class Shell:
    """Runs `corewright` as a user does, and keeps all that it says."""

    home: Path
    said: list[str]

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "COREWRIGHT_HOME": str(self.home), "NO_COLOR": "1"}
        done = subprocess.run(
            [str(COREWRIGHT), *arguments], env=env, capture_output=True, text=True, timeout=DEADLINE_S
        )
        self.said += [f"{' '.join(arguments)}: {done.stdout}{done.stderr}"]
        return done


@pytest.fixture
def model(tmp_path: Path) -> dict[str, bytes]:
    """The files of a small llama, by name."""
    return {path.name: path.read_bytes() for path in sorted(make_checkpoint(tmp_path / "model", "llama").iterdir())}


@pytest.mark.slow
def test_no_command_reveals_a_secret(
    world: World, s3_server: S3Server, model: dict[str, bytes], tmp_path: Path
) -> None:
    """Nor does a process that it starts, by its command line or its title; nor a file. With success, and if S3, the
    hub, or the cache of a push rejects access.
    """
    world.hub.repos["org/m"].commit(model)
    bucket = s3_server.bucket(files={f"m/{name}": data for name, data in model.items()})
    python = make_interpreter(tmp_path / "venv", instead={"neuronx_cc": COMPILER})
    spec, neuron, other = (str(tmp_path / f"{name}.yaml") for name in ("spec", "neuron", "other"))
    Path(spec).write_text(SERVED.format(bucket=bucket))
    Path(neuron).write_text(COMPILED.format(bucket=bucket, python=python, place="neffs"))
    Path(other).write_text(COMPILED.format(bucket=bucket, python=python, place="others"))
    world.setenv(
        NEURON_DOUBLE_STATE=str(tmp_path / "cores"),
        NEURON_DOUBLE_CC_VERSION=COMPILER,
        NEURON_PLATFORM_TARGET_OVERRIDE="trn1",
        NEURON_COMPILE_CACHE_URL=str(tmp_path / "neffs"),
        AWS_ENDPOINT_URL_S3=world.inside(world.proxy.url),
    )
    run = Shell(tmp_path / "home", [])
    with leaks.Watch() as watch:
        assert run("validate", spec).returncode == 0
        assert run("plan", spec).returncode == 2
        pushed = run("compile", neuron, "--push", "--push-to-hub", "me/neffs", "-o", "json")
        (compiled,) = json.loads(pushed.stdout)["models"]
        assert (compiled["result"], len(compiled["pushed"])) == ("compiled", 1)
        assert any(name.startswith("corewright/") for name in world.hub.repos["me/neffs"].files)
        assert run("cache", "ls", neuron).returncode == 0
        assert run("cache", "ls", "--cache", f"{bucket}/neffs", "-o", "json").returncode == 0
        verified = run("cache", "verify", neuron, "-o", "json").stdout
        assert json.loads(verified)["hit"], verified
        assert run("cache", "warm", spec).returncode == 0
        assert run("cache", "retry", "--cache", f"{bucket}/neffs").returncode == 0
        assert "cache-elsewhere" in run("cache", "prune", "--cache", f"{bucket}/neffs").stderr
        answered = run("generate", spec, "s", "--prompt", "A slot", "--max-tokens", "4")
        assert answered.returncode == 0, answered.stderr
        assert run("cache", "prune", "--models").returncode == 0
        shutil.rmtree(tmp_path / "home" / "store")  # what has just been fetched was left
        run("doctor", spec)
        run("config", "view")

        world.proxy.answer(403, "AccessDenied", methods=("PUT", "POST"))
        world.patch.setenv("HF_TOKEN", f"{TOKEN}x")
        refused = run("compile", other, "--push")
        assert "s3:PutObject" in refused.stdout + refused.stderr, refused
        assert "has no model org/m, or it is private" in run("validate", spec).stderr
        world.proxy.heal()
        world.patch.setenv("HF_TOKEN", TOKEN)
        world.hub.repos["org/m"].expired = True
        world.proxy.answer(403, "SignatureDoesNotMatch", key="")
        assert "s3-denied" in run("cache", "ls", "--cache", f"{bucket}/neffs").stderr
        assert "hub-denied" in run("cache", "warm", spec).stdout
        assert "hub-denied" in run("generate", spec, "h", "--prompt", "A slot").stderr
        world.setenv(AWS_ENDPOINT_URL_S3=NOBODY, HF_ENDPOINT=NOBODY)
        run("validate", spec)
        world.use_proxy(NOBODY)
        run("plan", spec, "-o", "json")
    leaked = leaks.in_text("\n".join(run.said)) + leaks.in_files(run.home, tmp_path / "hf", tmp_path / "neffs")
    assert leaked + sorted(watch.found) == []
    assert len(watch.seen) > len(run.said)  # it has looked at them, and at what they started


# A fleet


FLEET = """\
version: 1
hosts: {{emulate: inf2.48xlarge}}
defaults: {{engine: cpu, max_batch: 2, max_len: 64}}
models:
  good: {{source: {bucket}/good}}
  hubgood: {{source: org/m}}
  denied: {{source: {bucket}/denied}}
  wrong: {{source: {bucket}/wrong}}
  expired: {{source: {bucket}/expired}}
  damaged: {{source: {bucket}/damaged}}
  gated: {{source: org/gated}}
  late: {{source: org/late}}
"""
FAILS = {  # with which problem
    "denied": "s3-denied",
    "wrong": "s3-denied",
    "expired": "s3-denied",
    "damaged": "s3-damaged",
    "gated": "hub-denied",
    "late": "hub-denied",
}
ENDS = {**FAILS, "good": "ready", "hubgood": "ready"}
QUESTIONS = (
    ("status",),
    ("status", "-o", "json"),
    ("events", "-o", "json"),
    *(("get", what, "-o", "json") for what in ("models", "replicas", "hosts", "revisions", "events")),
    *(("describe", name, "-o", "json") for name in ("good", "hubgood", *FAILS, "good/0", "inf2.48xlarge/0")),
    *(("logs", name) for name in ("good", "hubgood")),
    ("rollout", "history"),
    ("audit",),
    ("cache", "ls"),
)
IN_DASHBOARD = (
    "/nodes?view=details",
    "/nodes?view=summary",
    "/logical/actors",
    "/events",
    "/api/v0/actors?detail=1",
    "/api/v0/workers?detail=1",
    "/api/v0/tasks?detail=1",
    "/api/v0/runtime_envs?detail=1",
    "/api/v0/cluster_events",
    "/api/jobs/",
)


def ends(fleet: LiveFleet) -> dict[str, str | None]:
    """What came of each model: ready, or the id of its problem; None while that is open. Empty: nobody answers yet."""
    assert fleet.process.poll() is None, fleet.output()
    status = fleet.corewright("status", "-o", "json")
    models = json.loads(status.stdout)["models"] if status.returncode == 0 else []
    reasons: dict[str, str | None] = {}
    for name, replicas in ((model["name"], model["replicas"]) for model in models):
        replica = replicas[0] if replicas else {"state": "", "reason": None}
        reasons[name] = (
            "ready" if replica["state"] == "ready" else replica["reason"] and replica["reason"].partition(":")[0]
        )
    return reasons


def wait_for_ends(fleet: LiveFleet) -> None:
    last: dict[str, str | None] = {}

    def ended() -> bool:
        last.update(ends(fleet))
        return bool(last) and None not in last.values()

    with contextlib.suppress(AssertionError):
        until(ended, DEADLINE_S, "all have come to an end")
    assert last == ENDS, fleet.output()


def answers(fleet: LiveFleet, home: Path) -> dict[str, str]:
    """What commands, the admin API, the gateway and Ray's dashboard say."""
    texts = {}
    for question in QUESTIONS:
        done = fleet.corewright(*question)
        texts[" ".join(question)] = done.stdout + done.stderr
    record = Home(home).read_record()
    assert record is not None
    assert record.dashboard_url is not None
    head = {"authorization": f"Bearer {record.token}"}
    paths = [f"{ADMIN_PATH}/{what}" for what in ("status", "events", "audit", "spec", "revisions", "openapi.json")]
    for url, headers in (
        *((f"{record.admin_url}{path}", head) for path in paths),
        *((f"{fleet.url}{path}", {}) for path in ("/metrics", "/v1/models", "/readyz")),
        *((f"{record.dashboard_url}{path}", {}) for path in IN_DASHBOARD),
    ):
        texts[url] = httpx.get(url, headers=headers, timeout=30.0).text
    return texts


@pytest.mark.soak
def test_no_fleet_reveals_a_secret(
    world: World, s3_server: S3Server, model: dict[str, bytes], home: Path, tmp_path: Path
) -> None:
    """Two of its models are served and the others are rejected or damaged, each in another way; in no file of its
    home and of Ray, by no command, port or process of it. S3 is reached by an address with a password, and becomes
    unreachable in the end.
    """
    names = [name for name in ("good", *FAILS) if name not in ("gated", "late")]
    bucket = s3_server.bucket(files={f"{name}/{file}": data for name in names for file, data in model.items()})
    world.hub.repos["org/m"].commit(model)
    world.hub.repos |= {"org/gated": Repo(private=True, gated=True), "org/late": Repo(private=True, expired=True)}
    for name in ("org/gated", "org/late"):  # with weights that the host does not have from another model
        world.hub.repos[name].commit({**model, WEIGHTS: FILES[WEIGHTS]})
    world.proxy.answer(403, "AccessDenied", key=f"denied/{WEIGHTS}")
    world.proxy.answer(403, "SignatureDoesNotMatch", key=f"wrong/{WEIGHTS}", methods=("GET",))
    world.proxy.answer(400, "ExpiredToken", key=f"expired/{WEIGHTS}", methods=("GET",))
    world.proxy.flip(f"damaged/{WEIGHTS}", 1000, times=1e9)
    world.setenv(AWS_ENDPOINT_URL_S3=world.inside(world.proxy.url))
    live = LiveFleet(FLEET.format(bucket=bucket), home=home, arguments=("--dashboard",))
    with leaks.Watch() as watch, live as fleet:
        wait_for_ends(fleet)
        world.proxy.away()
        os.kill(fleet.replica("good/0")["pid"], signal.SIGKILL)

        def again() -> bool:
            replica = fleet.replica("good/0")
            return (replica["epoch"], replica["state"]) == (2, "ready")

        until(again, DEADLINE_S, "it is there again, without S3")
        texts = answers(fleet, home)
        processes = leaks.in_processes((*fleet.processes(), fleet.process.pid))
        files = leaks.in_files(home, Home(home).sockets, tmp_path / "hf")
        assert processes + files == []
        assert {name: leaked for name, text in texts.items() if (leaked := leaks.in_text(text))} == {}
        assert [name for name in FAILS if FAILS[name] not in texts[f"describe {name} -o json"]] == []
        code = fleet.stop()
        assert leaks.in_files(home) == []  # what the end writes, up.log among it
        assert code == 1  # it was never ready as a whole
    assert watch.found == set()
