"""Runs the processes of `corewright verify` on this machine: tiny models, claims of cores, and the reference."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec

from orchestrator.control.resolve.offline_configs import OfflineConfigs
from orchestrator.control.resolve.spec_file import SpecFile, examine, this_machine
from orchestrator.process.failure import Failed
from orchestrator.process.home import Home
from orchestrator.verify.trials import TinyTrial, is_here, spec_text
from placements.facts.checkpoints import Checkpoint
from placements.facts.topology import Host
from placements.resources.host_memory import host_memory
from placements.spec.schema import ModelSpec
from workers.artifacts.fetch.progress import Progress
from workers.compiled import preparation
from workers.compiled.host_sets import compiles
from workers.compiled.orders import NEEDS_DEVICE
from workers.engines.tiny_models import ScoredAnswer, Scores, TinyJob, TinyModel
from workers.host import host_facts, json_process
from workers.host.core_claims import held_cores
from workers.host.core_probe import Claimed, ClaimRefused, ProbeRequest
from workers.host.facts.machine import HostFacts, owners
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.serving.timed_answers import Finished, TimedAnswer, TimedJob, TimedRequest, Trouble, WarmModel

TOKENIZER = Path(__file__).parents[2] / "placements/examples/models/tiny"
MAX_START_S = 900.0  # for one process: a load, its warm-up and its requests
MAX_CLAIM_S = 60.0
Message = WarmModel | TimedAnswer | Finished | Trouble


@dataclass
class TrialRun:
    """What a model's process said."""

    loaded: WarmModel | None = None
    answers: dict[str, TimedAnswer] = field(default_factory=dict)
    peak_gib: float = 0.0
    failure: Failure | None = None


@dataclass(frozen=True)
class Placed:
    """A trial with its place."""

    config: ReplicaConfig
    model: ModelSpec
    checkpoint: Checkpoint | None
    hosts: tuple[Host, ...]

    @property
    def host(self) -> Host:
        """The host of its place."""
        return next(host for host in self.hosts if host.name == self.config.place.host)

    @property
    def needs_gib(self) -> float:
        """The host memory that `plan` expects it to need, in GiB; 0.0 if its checkpoint was not read."""
        return (
            0.0 if self.checkpoint is None else host_memory(self.model, self.checkpoint, self.config.model.engine).load
        )

    def at(self, compiled: str, env: Mapping[str, str] | None = None) -> Placed:
        """Returns the trial with another folder of compiled artifacts, and other variables of its process."""
        config = self.config.with_run(compiled=compiled)
        place = config.place if env is None else msgspec.structs.replace(config.place, env=dict(env))
        return replace(self, config=msgspec.structs.replace(config, place=place))


class Stand:
    """One engine on one host, and the trials that it loads."""

    def __init__(
        self, home: Home, folder: Path, engine: str, trials: Sequence[TinyTrial], hosts: Any, engines: Any
    ) -> None:
        """Makes the checkpoints. Raises Failed if the interpreter of the engine cannot."""
        self.home, self.folder, self.engine = home, folder, engine
        self.trials = {trial.name: trial for trial in trials}
        self._sections = hosts, engines
        self._placed: dict[str, Placed | Failure] = {}
        self.runs = 0
        self.failures: list[Failure] = []  # of all runs, expected ones included
        self._python = None
        if trials:
            file = self._file(trials[0])
            self._python = None if file.spec is None else file.spec.python_for(engine)
        made = {
            trial.folder: TinyModel(
                folder=str(folder / trial.folder),
                config=trial.configuration,
                tokenizer=str(TOKENIZER),
                seed=trial.seed,
            )
            for trial in trials
        }
        self._tiny(TinyJob(make=list(made.values())))

    def placed(self, name: str) -> Placed | Failure:
        """Returns a trial with the configuration that its replica would get, or why it has none."""
        if name not in self._placed:
            self._placed[name] = self.place(self._file(self.trials[name]), name)
        return self._placed[name]

    def place(self, file: SpecFile, name: str) -> Placed | Failure:
        """Returns a model of a spec with its configuration, or why it has none."""
        error = next((problem for problem in file.problems if problem.severity == "error"), None)
        if error is not None:
            return Failure(error.id, error.what, error.hint)
        model = None if file.spec is None else file.spec.model(name)
        assert model is not None
        offline = OfflineConfigs(file, self.home)
        places = offline.places(model)
        if isinstance(places, Failure):
            return places
        here = {host.name for host in file.hosts if is_here(host, file.machine)}
        config = offline.config(max(places.values(), key=lambda place: place.host in here))
        if isinstance(config, Failure):
            return config
        return Placed(
            config.with_run(log=str(self.folder / f"{name}.log")), model, file.checkpoints.get(name), file.hosts
        )

    def _file(self, trial: TinyTrial) -> SpecFile:
        text = spec_text(trial, self.folder, self.engine, *self._sections)
        return examine(text, f"{trial.name}.yaml", str(self.folder), this_machine(), folders="plan")

    def run(
        self,
        trial: str | Placed,
        groups: Sequence[Sequence[TimedRequest]] = (),
        *,
        env: Mapping[str, str] | None = None,
        during: Callable[[int], None] = lambda pid: None,
    ) -> TrialRun:
        """Compiles and loads a trial, and has it answer. ``env``: changed variables of its process; ``during`` is
        called with its pid once it has answered, while it holds its cores and memory."""
        self.runs += 1
        run, placed = TrialRun(), self.placed(trial) if isinstance(trial, str) else trial
        run.failure = placed if isinstance(placed, Failure) else self.compiled(placed.config)
        if run.failure is None and isinstance(placed, Placed):
            self._answer(run, placed.config, groups, env or {}, during)
        if run.failure is not None:
            self.failures.append(run.failure)
        return run

    def _answer(
        self,
        run: TrialRun,
        config: ReplicaConfig,
        groups: Sequence[Sequence[TimedRequest]],
        env: Mapping[str, str],
        during: Callable[[int], None],
    ) -> None:
        job = TimedJob(config=config, groups=[list(group) for group in groups], holds=True)
        with self._process("workers.serving.timed_answers", job, config, env) as process:
            for line in cast(Any, process.stdout):
                message: Message = msgspec.json.decode(line, type=Message)
                if isinstance(message, WarmModel):
                    run.loaded = message
                elif isinstance(message, TimedAnswer):
                    run.answers[message.id] = message
                elif isinstance(message, Finished):
                    run.peak_gib = message.peak_gib
                    during(process.pid)
                    return
                else:
                    run.failure = message.failure
                    return
            code = process.wait()
        run.failure = Failure("replica-died", f"its process ended with code {code}", f"the log is {config.run.log}")

    def compiled(self, config: ReplicaConfig, stop: threading.Event | None = None) -> Failure | None:
        """Has the missing artifacts of a trial compiled. Returns why they were not. Raises Stopped after ``stop``."""
        if not compiles(config):
            return None
        result = preparation.build(config, Progress(config.model.name), stop or threading.Event())
        return result if isinstance(result, Failure) and result.id != NEEDS_DEVICE else None

    @contextlib.contextmanager
    def claiming(self, config: ReplicaConfig, limit_s: float = 0.0) -> Iterator[Claiming]:
        """Runs a process that claims the cores of ``config`` and holds them inside the context."""
        request = ProbeRequest(cores=config.place.cores, claims=config.place.claims, limit_s=limit_s)
        env = {"NEURON_RT_LOG_LOCATION": "console"}
        with self._process("workers.host.core_probe", request, config, env) as process:
            yield Claiming(process)

    def score(self, answers: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> Scores:
        """Returns the reference's scores of (trial, prompt, answer). Raises Failed."""
        scored = [
            ScoredAnswer(
                folder=str(self.folder / self.trials[name].folder), prompt_ids=list(prompt), token_ids=list(ids)
            )
            for name, prompt, ids in answers
        ]
        return self._tiny(TinyJob(score=scored))

    def _tiny(self, job: TinyJob) -> Scores:
        log_file = str(self.folder / "reference.txt")
        arguments = ("workers.engines.tiny_models",)
        with json_process.running(
            arguments, job, python=self._python, env={}, log_file=log_file, limit_s=MAX_START_S
        ) as process:
            for line in cast(Any, process.stdout):
                return msgspec.json.decode(line, type=Scores)
        said = "; ".join(host_facts.last_words(Path(log_file))[-3:])
        what = f"the process that makes and scores tiny models ended: {said}"
        raise Failed("verify-failed", what, "check its interpreter with `corewright doctor SPEC`")

    @contextlib.contextmanager
    def _process(
        self, module: str, request: json_process.ChildRequest, config: ReplicaConfig, env: Mapping[str, str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        with json_process.running(
            (module,),
            request,
            python=config.run.python,
            env={**config.place.env, **env},
            log_file=config.run.log,
            limit_s=MAX_START_S,
        ) as process:
            yield process


class Claiming:
    """A process that claims cores."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.refusals: list[ClaimRefused] = []

    def result(self) -> Claimed | None:
        """Waits for the claim; None: it was refused until the limit, as ``refusals`` say."""
        for line in cast(Any, self._process.stdout):
            message: Claimed | ClaimRefused = msgspec.json.decode(line, type=Claimed | ClaimRefused)
            if isinstance(message, Claimed):
                return message
            self.refusals.append(message)
        return None

    def refused(self) -> ClaimRefused | None:
        """Waits for the first message; None: it was a claim."""
        for line in cast(Any, self._process.stdout):
            message: Claimed | ClaimRefused = msgspec.json.decode(line, type=Claimed | ClaimRefused)
            return message if isinstance(message, ClaimRefused) else None
        return None

    def kill(self) -> float:
        """Kills the process that holds the cores. Returns the time by the monotonic clock."""
        at = time.monotonic()
        self._process.kill()
        return at


def busy_cores(host: Host, home: Home, facts: HostFacts) -> dict[int, str]:
    """Returns the cores of this host that a process holds, with its pid and command as far as known."""
    if host.emulated:
        return {core: f"pid {pid or 'unknown'}" for core, pid in held_cores(home.claims(0)).items()}
    return {core: f"pid {owner.pid} ({owner.command})" for core, owner in owners(facts).items()}
