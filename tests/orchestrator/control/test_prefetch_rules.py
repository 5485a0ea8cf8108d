"""Rules of what is made ready before a start, and of what is seen of hosts, that nothing else would notice the breach
of."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec.structs
import pytest

from orchestrator.cli import cache as cache_commands
from orchestrator.cli import main as cli
from orchestrator.control.decisions.preparation import Preparation
from orchestrator.control.decisions.replica_view import BREAKER_AFTER, BREAKER_PAUSE_S, FIRST_BACKOFF_S
from orchestrator.control.effects import CoreOwner
from orchestrator.control.host_watch import STALE_S
from orchestrator.control.journal.journal import Journal
from placements.spec.schema import HostsSpec, Spec
from tests.orchestrator.control.test_prefetch import spec
from tests.orchestrator.elsewhere import alone as alone
from tests.orchestrator.fakes import FakeCluster, Played, play, starting_fleet, virtual
from tests.placements.fleets import model, places, planned
from tests.placements.fleets import spec as spec_of
from tests.workers.fake_remote import FakeRemote
from tests.workers.neffs import graph
from tests.workers.played_process import process_of
from tests.workers.tnx_runs import config
from workers.artifacts.store.store import Store
from workers.compiled import neuron_cache, preparation, shared_sets
from workers.compiled.host_sets import Buildable, always, entry
from workers.compiled.memory_gate import startable
from workers.compiled.orders import Built, Order, Predicted, Reply, Wanted
from workers.compiled.places import find
from workers.compiled.prediction import Prediction
from workers.compiled.preparation import Warmed
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure, Phase, Reaction, Trouble
from workers.serving import prepare

ONE, TWO = "s3://models/one", "s3://models/two"


def now() -> float:
    return asyncio.get_running_loop().time()


# Updates


def test_pauses_grow_after_each_failed_preparation() -> None:
    """Up to a maximum; a permanent error is not retried."""
    preparation, pauses = Preparation("m", "v", "h"), list[float]()
    assert preparation.retry_at == 0.0
    for _ in range(BREAKER_AFTER):
        preparation = preparation.failed(Failure("s3-unreachable", "no answer"), 10.0, stopped=False)
        pauses.append(preparation.retry_at - 10.0)
    assert pauses == [*(FIRST_BACKOFF_S * 2.0**n for n in range(BREAKER_AFTER - 1)), BREAKER_PAUSE_S]
    assert preparation.failed(Failure("pickle-refused", "pickled"), 10.0, stopped=True).retry_at == float("inf")


def test_an_update_with_a_permanent_error_is_tried_once(tmp_path: Path) -> None:
    """Other updates are tried as often as starts."""
    failed = {}
    for reaction in (Reaction.STOP, Reaction.RETRY):
        cluster = FakeCluster()
        cluster.unfetchable[TWO] = Failure("refused", "no", reaction=reaction)

        async def story(played: Played, reaction: Reaction = reaction) -> None:
            await played.settled()
            await played.apply(spec(TWO, degree=24))
            await played.until(lambda: "RolledBack" in played.happened(), "rolled back", 600.0)
            failed[reaction] = played.happened().count("PreparationFailed")

        play(tmp_path / reaction.name, spec(degree=24), story, cluster=cluster)
    assert failed[Reaction.STOP] == 1 < failed[Reaction.RETRY]


def test_an_update_waits_for_its_artifacts_up_to_the_deadlines_of_the_spec(tmp_path: Path) -> None:
    """20 s to fetch, and 40 s in all with 20 s to compile; the old replica serves."""
    cluster = FakeCluster()

    async def story(played: Played) -> None:
        await played.settled()
        cluster.fetch_s = 10_000.0
        began = now()
        await played.apply(shorter(spec(TWO, degree=24)))
        await played.until(lambda: "PreparationFailed" in played.happened(), "reported", 100.0)
        assert 20.0 <= now() - began <= 42.0
        assert "fetch-deadline" in next(e.message for e in played.journal.events() if e.reason == "PreparationFailed")
        assert (cluster.drained, len(cluster.stopped_fetches)) == ([], 1)

    def shorter(text: str) -> str:
        return text.replace("fetch_s: 200, compile_s: 200", "fetch_s: 20, compile_s: 20")

    play(tmp_path, shorter(spec(degree=24)), story, cluster=cluster)


@starting_fleet(spec(degree=24, strategy="in_place"), drain_s=15.0)
async def test_a_replica_loads_the_artifacts_that_were_prepared_for_it(played: Played) -> None:
    """Even if the source has changed before the old replica stops."""
    await played.settled()
    await played.apply(spec(TWO, degree=24, strategy="in_place"))
    await played.until(lambda: played.cluster.drained, "the old one is drained", 60.0)
    played.cluster.contents[TWO] = "2"
    await played.settled()
    assert played.cluster.started[-1].source == f"/store/{TWO}@1"
    assert len(played.cluster.fetches) == 2


class Asked(FakeCluster):
    """Remembers of which versions it was asked what they would compile."""

    def __init__(self) -> None:
        super().__init__()
        self.foreseen: list[str] = []

    async def foresee(self, config: ReplicaConfig) -> Sequence[str] | Failure:
        self.foreseen.append(config.run.version)
        return await super().foresee(config)


def test_the_compile_check_of_an_update_runs_once(tmp_path: Path) -> None:
    """It does not run again when the old replica has stopped and the model does not serve."""
    cluster = Asked()

    async def story(played: Played) -> None:
        await played.settled()
        await played.apply(spec(degree=24, batch=4, compiles=True, strategy="in_place"))
        new = played.controller.state.current.versions["m"]
        await played.settled()
        assert cluster.foreseen.count(new) == 1

    play(tmp_path, spec(degree=24, compiles=True, strategy="in_place"), story, cluster=cluster)


# What is seen of hosts


class Claimed(FakeCluster):
    """Processes hold their cores before their start is answered, and the tools tell of dead ones for ``late_s``."""

    def __init__(self, late_s: float = 0.0) -> None:
        super().__init__()
        self.start_s = 20.0
        self.late_s = late_s
        self._ended: list[tuple[float, ReplicaConfig, int]] = []

    async def start(self, config: ReplicaConfig) -> None:
        await super().start(config)
        await asyncio.sleep(self.start_s)

    async def held_cores(self, claims: str | None, host: str | None = None) -> dict[int, CoreOwner]:
        held = dict[int, CoreOwner]()
        for replica in self.replicas.values():
            if replica.dead is None:
                held |= dict.fromkeys(replica.config.place.cores, CoreOwner(replica.status.pid, "ours"))
        for at, ended, pid in self._ended:
            if now() - at < self.late_s:
                held |= dict.fromkeys(ended.place.cores, CoreOwner(pid, "dead"))
        return held

    async def lose_process(self, id: str) -> None:
        replica = self.find(id)
        assert replica.status.pid is not None
        self._ended.append((now(), replica.config, replica.status.pid))
        await replica.die("killed")


def test_the_cores_of_a_starting_replica_are_not_foreign(tmp_path: Path) -> None:
    """Its process holds them before its pid is known."""
    cluster = Claimed()

    async def story(played: Played) -> None:
        await played.settled()
        assert now() >= cluster.start_s
        assert "CoreQuarantined" not in played.happened()

    play(tmp_path, spec(), story, cluster=cluster)


@pytest.mark.parametrize(("late_s", "quarantined"), [(STALE_S - 10.0, False), (STALE_S + 30.0, True)])
def test_the_tools_may_report_a_dead_replica_for_a_while(tmp_path: Path, late_s: float, quarantined: bool) -> None:
    """After that its process counts as a foreign owner of the cores."""
    cluster = Claimed(late_s)
    cluster.start_s = 0.0

    async def story(played: Played) -> None:
        await played.settled()
        await cluster.lose_process("m/0")
        await played.operator.unload("m", "tester")
        began = now()
        await played.until(lambda: now() > began + STALE_S + 40.0, "a while", 200.0)
        assert ("CoreQuarantined" in played.happened()) == quarantined

    play(tmp_path, spec(), story, cluster=cluster)


@starting_fleet(spec(), fetch_s=5.0)
async def test_a_host_that_has_fetched_a_model_is_preferred_at_once(played: Played) -> None:
    """For the next replica."""
    await played.settled()
    state = played.controller.state
    await played.until(lambda: any(ONE in held for held in state.held.values()), "it is known", 5.0)
    assert [host for host, held in state.held.items() if ONE in held] == [played.cluster.started[0].place.host]


@virtual
async def test_a_foreign_owner_does_not_clear_the_fault_of_a_core(tmp_path: Path) -> None:
    """A restarted controller still knows which cores are faulty."""
    journal, cluster = Journal(None, clock=now), FakeCluster()
    broken = Failure("memory-uncorrectable", "bad memory", "replace it", Reaction.QUARANTINE)
    async with Played(tmp_path, cluster, spec(), journal=journal) as played:
        await played.settled()
        await cluster.replicas["m/0.1"].report(phase=Phase.FAILED, failure=broken)
        await played.until(lambda: len(cluster.started) == 2, "elsewhere", 60.0)
        for held in ({3: 7}, {}):
            cluster.held = dict[int, int | None](held)
            await asyncio.sleep(10.0)
    async with Played(tmp_path, cluster, spec(), journal=journal) as played:
        await played.settled()
        assert {core["core"] for core in played.host()["quarantine"]} == set(range(8))


# What a start would compile


@dataclass
class Looked:
    """A model of transformers-neuronx whose interpreter is played, and its neff_cache."""

    home: Path
    there: Path

    def foreseen(self, monkeypatch: pytest.MonkeyPatch, ahead_too: bool) -> list[str]:
        """What is missing; ``ahead_too``: it can be compiled without a device."""
        make = (lambda held, tell: None) if ahead_too else None
        unit = Buildable(source=Path("/models/m"), manifest=MANIFEST, make=make)
        monkeypatch.setattr(prepare, "buildables", lambda config, read: [unit])

        def answers(_: str, order: Order, *__: Any) -> Iterator[Reply]:
            prepare.run("predict", order, replies.append)
            yield from replies

        replies: list[Reply] = []
        monkeypatch.setattr(preparation, "run_process", process_of(answers))
        replica = config(Path("/models/m"), compiled=str(self.home), neff_cache=str(self.there))
        return preparation.foresee(replica, threading.Event()).missing


MANIFEST = {"engine": "transformers-neuronx", "model": "digest", "versions": {}}


@pytest.fixture
def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Looked:
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "neffs"))
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    return Looked(tmp_path / "compiled", tmp_path / "there")


def test_remote_artifacts_are_fetched_before_a_start(looked: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start itself does not look for them; afterwards nothing is missing on this host."""
    assert looked.foreseen(monkeypatch, True) == ["model: this model has not been compiled"]
    with entry(looked.home.parent / "another host", MANIFEST) as made:
        (made.path / "a.neff").write_text("NEFF")
        made.finish()
    shared_sets.push(made, str(looked.there))
    assert looked.foreseen(monkeypatch, True) == ["model: its neff_cache has artifacts compiled by another host"]
    with entry(looked.home, MANIFEST) as held:
        assert shared_sets.pull(held, str(looked.there))
    assert looked.foreseen(monkeypatch, True) == []


def test_graphs_that_only_a_start_compiles_are_not_waited_for(looked: Looked, monkeypatch: pytest.MonkeyPatch) -> None:
    assert looked.foreseen(monkeypatch, False) == []


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("wanted", "built", "result"),
    [
        ({"folder": ""}, None, "needs-device"),  # kept by the package alone
        ({"folder": "/c/k"}, None, "needs-device"),  # neither here nor in a neff_cache
        ({"folder": "/c/k", "complete": True}, Built(wanted=[], seconds=0.0), "there"),
        ({"folder": "", "unread": ["w"]}, Built(wanted=[], seconds=0.0), "there"),
        (
            {"folder": "", "unread": ["w"]},
            Trouble(Failure("compile-needs-device", "on its cores")),
            "needs-device",
        ),
    ],
)
def test_graphs_that_only_a_start_compiles_are_not_a_failure(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wanted: dict[str, Any],
    built: Built | Trouble | None,
    result: str,
) -> None:
    """`compile` finds those that are here, also if only digests of the weights show it, and exits with 0."""
    commands: list[str] = []

    def answers(command: str, order: Order, *_: Any, **__: Any) -> Iterator[Reply]:
        commands.append(command)
        if command == "predict":
            fields = {"role": "model", "source": "/m", "manifest": MANIFEST, "complete": False, "ahead": False}
            yield Predicted(engine=order.config.model.engine, wanted=[Wanted(**{**fields, **wanted})])
        else:
            assert built is not None
            yield built

    monkeypatch.setattr(preparation, "run_process", process_of(answers))
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "compiled").mkdir(parents=True)
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "spec.yaml").write_text(spec(str(tmp_path / "m"), degree=2, compiles=True))
    code = cli.run(["compile", str(tmp_path / "spec.yaml"), "-o", "json"])
    (answer,) = json.loads(capsys.readouterr().out)["models"]
    assert (code, answer["result"], answer["failure"]) == (0, result, None)
    assert commands == (["predict"] if built is None else ["predict", "compile"])


# Places


def placed(wish: Spec, **held: str) -> list[tuple[str, str]]:
    """The host of each replica, where the hosts of these names hold the models of the spec's order."""
    where = {host: frozenset(name for name, on in held.items() if on == host) for host in set(held.values())}
    return [(replica, host) for replica, host, _ in places(planned(wish, held=where))]


H0, H1 = "inf2.48xlarge/0", "inf2.48xlarge/1"


def test_a_host_of_another_type_is_not_preferred_for_its_artifacts() -> None:
    """It would change the number or the speed of cores: only equal hosts are exchanged."""
    kinds = ("inf2.48xlarge", "trn1.32xlarge")
    wish = Spec(models=(model("x", 2),), hosts=tuple(HostsSpec(instance=kind) for kind in kinds))
    (plain,) = placed(wish)
    assert [placed(wish, x=f"{kind}/0") for kind in kinds] == [[plain]] * 2


def test_spread_takes_precedence_over_stored_artifacts() -> None:
    assert placed(spec_of(model("x", 8, replicas=2, spread="host"), count=2), x=H1) == [("x/0", H0), ("x/1", H1)]


def test_a_replica_does_not_lose_a_host_with_its_model_to_another() -> None:
    """Nor its pin: an exchange must benefit one of the two."""
    full = spec_of(model("x", 24), model("y", 24), count=2)
    assert placed(full, x=H0, y=H0) == [("x/0", H0), ("y/0", H1)]
    pinned = spec_of(model("x", 24, f"{H0}:0-23"), model("y", 24), count=2)
    assert placed(pinned, x=H1, y=H0) == [("x/0", H0), ("y/0", H1)]


# The commands' exit codes


ECHOES = "hosts: {emulate: inf2.xlarge}\nmodels: {a: {engine: echo}, b: {engine: echo}}\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a command of `cache` and returns its exit code and its JSON."""
    monkeypatch.setattr(neuron_cache, "compilers", list)
    monkeypatch.setattr(neuron_cache, "SETTLE_S", 0.0)
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", str(tmp_path / "neffs"))
    monkeypatch.delenv("NEURON_CC_FLAGS", raising=False)
    (tmp_path / "neffs").mkdir()
    (tmp_path / "spec.yaml").write_text(ECHOES)

    def ran(*arguments: str) -> tuple[int, Any]:
        code = cli.run(["cache", *arguments, "-o", "json"])
        return code, json.loads(capsys.readouterr().out or "null")

    return ran


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [(("hit", "hit"), 0), (("hit", "compile"), 1), (("compile", "hit"), 1), (("hit", "fail"), 1)],
)
def test_verify_fails_if_a_model_would_compile_at_its_start(
    tmp_path: Path, cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, outcomes: tuple[Any, Any], code: int
) -> None:
    """For any of the models; weights are read only with `--read`."""
    read: list[bool] = []

    def verdicts(config: ReplicaConfig, **options: Any) -> list[Wanted]:
        read.append(options["read"])
        prediction = Prediction(outcomes["ab".index(config.model.name)], "nothing", "why")
        nothing = Wanted(role="model", source="", manifest={}, folder="", complete=False, ahead=False)
        return [msgspec.structs.replace(nothing, prediction=prediction)]

    monkeypatch.setattr(cache_commands, "verify", verdicts)
    status, answer = cache("verify", str(tmp_path / "spec.yaml"))
    assert (status, answer["hit"], read) == (code, code == 0, [False] * 2)
    cache("verify", "--read", str(tmp_path / "spec.yaml"))
    assert read[2:] == [True] * 2


@pytest.mark.parametrize(("problem", "code"), [("", 0), ("s3-denied: no s3:GetObject", 1)])
def test_warm_fails_if_a_set_could_not_be_fetched(
    tmp_path: Path, cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, problem: str, code: int
) -> None:
    """It reports the fetched sets, and why the others are missing."""
    monkeypatch.setattr(
        preparation, "warm", lambda job, *_: Warmed(bytes=7, problem=problem if job.model.name == "a" else "")
    )
    status, answer = cache("warm", str(tmp_path / "spec.yaml"))
    assert (status, [model["problem"] for model in answer["models"]]) == (code, [problem, ""])


def test_a_dry_run_of_prune_removes_nothing(
    tmp_path: Path, cache: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither graphs nor artifacts nor models; unused models are removed with `--models` only."""
    home = tmp_path / "home"
    store = Store(home / "store", grace_s=0.0)
    monkeypatch.setattr(cache_commands, "_store", lambda _: store)
    model_here = Path(store.get(FakeRemote({"config.json": b"{}"})).folder)
    stale = graph(tmp_path / "neffs", **{"model.hlo_module.pb.lock": ""})
    with entry(home / "compiled", MANIFEST) as unfinished:
        pass
    before = sorted(tmp_path.rglob("*"))

    def left() -> list[bool]:
        return [path.exists() for path in (stale / "model.hlo_module.pb.lock", unfinished.path, model_here)]

    code, answer = cache("prune", "--models", "--dry-run")
    assert (code, sorted(tmp_path.rglob("*"))) == (0, before)
    assert {item["path"] for item in answer["removed"]} >= {str(stale), str(unfinished.path)}
    assert (cache("prune")[0], left()) == (0, [False, False, True])
    assert (cache("prune", "--models")[0], left()) == (0, [False, False, False])


def test_concurrent_compilations_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if there is enough memory for more."""
    at_once: list[int] = []

    def spied(waiting: Sequence[Any], running: Collection[Any], **limits: Any) -> tuple[Any, ...]:
        begun = startable(waiting, running, **limits)
        at_once.append(len(running) + len(begun))
        return begun

    def answers(command: str, order: Order, *_: Any, **__: Any) -> Iterator[Reply]:
        config = order.config
        wanted = Wanted(
            role="model", source="/m", manifest=MANIFEST, folder=f"/{config.model.name}", complete=False, ahead=True
        )
        yield (
            Predicted(engine=config.model.engine, wanted=[wanted])
            if command == "predict"
            else Built(wanted=[], seconds=1.0)
        )

    monkeypatch.setattr("orchestrator.compiling.compile_ahead.startable", spied)
    monkeypatch.setattr(preparation, "run_process", process_of(answers))
    monkeypatch.setenv("COREWRIGHT_HOME", str(tmp_path / "home"))
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(LLAMA))
    model = spec(str(tmp_path / "m"), degree=2, compiles=True)
    (tmp_path / "spec.yaml").write_text(model + model.partition("models:\n")[2].replace("  m:", "  n:"))
    assert cli.run(["compile", str(tmp_path / "spec.yaml"), "--memory-gb", "1000", "--jobs", "1"]) == 0
    one_by_one = max(at_once)
    assert cli.run(["compile", str(tmp_path / "spec.yaml"), "--memory-gb", "1000"]) == 0
    assert (one_by_one, max(at_once)) == (1, 2)


def test_an_entry_that_the_engine_rejects_is_not_a_hit(looked: Looked) -> None:
    """An entry may match its record and still have no NEFF."""
    with entry(looked.home, MANIFEST) as made:
        made.finish()
    outcomes = []
    for is_whole in (False, True):
        check = {True: always, False: lambda _: False}[is_whole]
        unit = Buildable(source=Path("/models/m"), manifest=MANIFEST, is_whole=check)
        outcomes.append(find(unit, config(Path("/models/m"), compiled=str(looked.home))).outcome)
    assert outcomes == ["compile", "hit"]


class Deaf(FakeCluster):
    """Its hosts do not tell who holds their cores, while it is so."""

    deaf = False

    async def held_cores(self, claims: str | None, host: str | None = None) -> dict[int, CoreOwner]:
        if self.deaf:
            raise OSError("no answer")
        return await super().held_cores(claims, host)


def test_a_host_that_does_not_report_core_owners_is_logged_once(tmp_path: Path) -> None:
    """Not in each round; again after it has reported in between."""
    cluster = Deaf()

    async def story(played: Played) -> None:
        await played.settled()
        for deaf in (True, False, True):
            cluster.deaf = deaf
            await asyncio.sleep(30.0)
        assert played.happened().count("HostSilent") == 2

    play(tmp_path, spec(), story, cluster=cluster)
