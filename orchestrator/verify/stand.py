"""Runs the processes of `corewright verify` on this machine: tiny models, claims of cores, and the reference."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from workers.host.core_probe import Claimed, ClaimRefused, ProbeReply, ProbeRequest
from workers.host.facts.machine import HostFacts, owners
from workers.host.neuron_faults import VAGUE
from workers.messages.replica_config import ReplicaConfig
from workers.messages.status import Failure
from workers.serving.timed_answers import Finished, Reply, TimedAnswer, TimedJob, TimedRequest

TOKENIZER = Path(__file__).parents[2] / "placements/examples/models/tiny"
MAX_START_S = 900.0  # for one process: a load, its warm-up and its requests
MAX_CLAIM_S = 60.0


@dataclass
class TrialRun:
    """What a model's process has replied."""

    answers: dict[str, TimedAnswer] = field(default_factory=dict)
    load_s: float = 0.0  # claim, weights, graphs, warm-up
    peak_gib: float = 0.0  # host memory
    failure: Failure | None = None

    @property
    def trouble(self) -> str:
        """Why it has no answers; "" if it has."""
        if self.failure is None:
            return ""
        known = "" if self.failure.id not in VAGUE else " (not recognized)"
        return f"{self.failure.id}{known}: {self.failure.what}"

    def silent(self, least: int = 2) -> str:
        """Returns the first answer with fewer than ``least`` times of tokens, and why; "" if there is none."""
        short = (answer for answer in self.answers.values() if len(answer.at) < least)
        return next(
            (f"the answer {each.id} has {len(each.at)} steps: {each.error or each.finish}" for each in short), ""
        )


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
        """Makes the checkpoints. Raises Failed if the interpreter of the engine cannot make them."""
        self.home, self.folder, self.engine = home, folder, engine
        self.trials = {trial.name: trial for trial in trials}
        self._sections = hosts, engines
        self._placed: dict[str, Placed] = {}
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

    def placed(self, name: str) -> Placed:
        """Returns a trial with the configuration that its replica would get. Raises Failed if it has none."""
        if name not in self._placed:
            self._placed[name] = self.place(self._file(self.trials[name]), name)
        return self._placed[name]

    def place(self, file: SpecFile, name: str) -> Placed:
        """Returns a model of a spec with its configuration. Raises Failed if it has none."""
        error = next((problem for problem in file.problems if problem.severity == "error"), None)
        model = None if file.spec is None else file.spec.model(name)
        if error is not None or model is None:
            raise Failed.of(error or Failure("model-unknown", f"{file.name} has no model {name}"))
        offline = OfflineConfigs(file, self.home)
        places = offline.places(model)
        if isinstance(places, Failure):
            raise Failed.of(places)
        here = {host.name for host in file.hosts if is_here(host, file.machine)}
        config = offline.config(max(places.values(), key=lambda place: place.host in here))
        if isinstance(config, Failure):
            raise Failed.of(config)
        config = config.with_run(log=str(self.folder / f"{name}.log"))
        return Placed(config, model, file.checkpoints.get(name), file.hosts)

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
        """Compiles and loads a trial, and sends it requests. ``env``: changed variables of its process; ``during`` is
        called with its pid once it has answered, while it holds its cores and memory."""
        run = TrialRun()
        try:
            config = (self.placed(trial) if isinstance(trial, str) else trial).config
            run.failure = self.compiled(config)
        except Failed as failed:
            run.failure = Failure(failed.problem.id, failed.problem.what, failed.problem.hint)
        if run.failure is None:
            self._answer(run, config, groups, env or {}, during)
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
        job = TimedJob(config=config, groups=[list(group) for group in groups])
        with self._process("workers.serving.timed_answers", job, config, env) as process:
            for line in cast(Any, process.stdout):
                reply: Reply = msgspec.json.decode(line, type=Reply)
                if isinstance(reply, TimedAnswer):
                    run.answers[reply.id] = reply
                elif isinstance(reply, Finished):
                    run.load_s, run.peak_gib = reply.load_s, reply.peak_gib
                    during(process.pid)
                    return
                else:
                    run.failure = reply.failure
                    return
            code = process.wait()
        run.failure = Failure("replica-died", f"its process ended with code {code}", f"the log is {config.run.log}")

    def compiled(self, config: ReplicaConfig, stop: threading.Event | None = None) -> Failure | None:
        """Compiles the missing artifacts of a trial. Returns the failure, if any. Raises Stopped after ``stop``."""
        if not compiles(config):
            return None
        result = preparation.build(config, Progress(config.model.name), stop or threading.Event())
        return result if isinstance(result, Failure) and result.id != NEEDS_DEVICE else None

    @contextmanager
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

    def _process(
        self, module: str, request: json_process.ChildRequest, config: ReplicaConfig, env: Mapping[str, str]
    ) -> AbstractContextManager[subprocess.Popen[bytes]]:
        return json_process.running(
            (module,),
            request,
            python=config.run.python,
            env={**config.place.env, **env},
            log_file=config.run.log,
            limit_s=MAX_START_S,
        )


class Claiming:
    """A process that claims cores."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.refusals: list[ClaimRefused] = []

    def result(self) -> Claimed | None:
        """Waits for the claim; None: it was refused until the limit, for the reasons in ``refusals``."""
        while (reply := self._next()) is not None:
            if isinstance(reply, Claimed):
                return reply
            self.refusals.append(reply)
        return None

    def refused(self) -> ClaimRefused | None:
        """Waits for the first reply; None: it was a claim."""
        reply = self._next()
        return reply if isinstance(reply, ClaimRefused) else None

    def _next(self) -> ProbeReply | None:
        line = cast(Any, self._process.stdout).readline()
        return msgspec.json.decode(line, type=ProbeReply) if line else None

    def kill(self) -> float:
        """Kills the process that holds the cores. Returns the time by the monotonic clock."""
        at = time.monotonic()
        self._process.kill()
        return at


def busy_cores(host: Host, home: Home, facts: HostFacts) -> dict[int, str]:
    """Returns the cores of this host that processes hold, with pid and command as far as they are known."""
    if host.emulated:
        return {core: f"pid {pid or 'unknown'}" for core, pid in held_cores(home.claims(0)).items()}
    return {core: f"pid {owner.pid} ({owner.command})" for core, owner in owners(facts).items()}
