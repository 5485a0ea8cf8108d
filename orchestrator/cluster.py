"""All Ray calls: starting Ray's nodes on one machine, the named actors, and what the controller does to replicas."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.effects import HostLost, Owner, ReplicaDied, Survivor, actor_name
from workers import host as this_host
from workers.claims import held_cores
from workers.config import ReplicaConfig
from workers.facts.machine import owners
from workers.facts.reading import read_host_facts
from workers.faults import fault_of
from workers.interpreter import Interpreter, Interpreters
from workers.replica import Replica
from workers.status import Failure, ReplicaStatus

log = logging.getLogger(__name__)

NAMESPACE = "corewright"
CONTROLLER = "controller"
WATCH_S = 5.0  # a watch answers at least this often
CALL_DEADLINE_S = 10.0  # silence for longer is a hung process: a call takes a millisecond
ADOPT_S = 3.0  # for a living replica to say what it is, while nobody is served anew
CONFIRM_DEATH_S = 10.0
TOOLS_PERIOD_S = 10.0  # between two runs of the Neuron tools, which take seconds
NODES_STOP_S = 2.5  # for all further nodes together: a second to end in order, then they are killed
OBJECT_STORE_BYTES = 100 * 2**20  # tokens go over sockets: Ray's store stays all but empty
HOST_LABEL = "corewright-host"  # of a Ray node: which of our hosts it stands for

# Health checks that find a dead host in seconds; at Ray's defaults it takes 13 s, and 65 s for a frozen one.
_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


def host_label(index: int) -> str:
    """The label of the Ray node of the planner's host ``index``."""
    return f"emu-{index}"


def host_labels(names: Iterable[str]) -> dict[str, str]:
    """The label of each of the planner's hosts, given their names in the planner's order."""
    return {name: host_label(index) for index, name in enumerate(names)}


def core_resources(cores: int) -> dict[str, float]:
    """The custom resources that a node with that many NeuronCores declares: one a core, so that Ray itself refuses a
    second actor on the same core."""
    return {f"nc{core}": 1.0 for core in range(cores)}


def start_ray(folder: Path, *, cores: int, cpus: int, dashboard: bool) -> dict[str, Any]:
    """Start a Ray of our own, whose processes die with this thread's process. Gives Ray's addresses.

    Raises RuntimeError when Ray does not come up.
    """
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # the monitor kills replicas while they load
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.pop("NEURON_RT_VISIBLE_CORES", None)  # the raylet misreads a range as one accelerator
    os.environ.pop("NEURON_RT_NUM_CORES", None)
    os.environ.pop("RAY_ADDRESS", None)
    with _agent_on_a_free_port():
        context = ray.init(
            num_cpus=cpus,
            resources=core_resources(cores),
            labels={HOST_LABEL: host_label(0)},
            include_dashboard=dashboard,
            dashboard_host="127.0.0.1",
            object_store_memory=OBJECT_STORE_BYTES,
            namespace=NAMESPACE,
            log_to_driver=False,
            logging_level="error",
            _temp_dir=str(folder),
            _node_ip_address="127.0.0.1",
            _system_config=_HEALTH_CHECKS,
        )
    return dict(context.address_info)


@contextlib.contextmanager
def _agent_on_a_free_port() -> Iterator[None]:
    """Have ``ray.init``, which has no argument for it, start the node's dashboard agent on a port that is free.

    At the fixed default, 52365, the agent of a machine's second Ray goes without its port and is never made known: the
    dashboard then shows no log, "Agent for node id ... doesn't exist" (Ray 2.60).
    """
    parameters = ray._private.parameter
    plain = parameters.RayParams
    parameters.RayParams = functools.partial(plain, dashboard_agent_listen_port=0)
    try:
        yield
    finally:
        parameters.RayParams = plain


def add_node(index: int, *, cores: int, cpus: int) -> Any:
    """Start the Ray node of a further emulated host, and wait until Ray knows it. Give it to ``stop_ray``.

    Must run on the main thread: the raylet dies with the thread that made it. It inherits the environment (token,
    fleet's mark) and uses the first node's session folder. Raises RuntimeError or another of Ray's when it does not
    come up.

    Ray's own class, in this process, and not `ray start --address --block`. Measured with Ray 2.60 on 2 shared cores:
    1.1 to 2.1 s and 139 MB (proportional; raylet 15, dashboard agent 76, runtime env agent 48) for each node, against
    3.9 s and 282 MB with `ray start`, which keeps two Python processes more and of which two at once took one socket
    name and killed each other.
    """
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    head = ray._private.worker.global_worker.node
    parameters = RayParams(
        gcs_address=head.gcs_address,
        node_ip_address=head.node_ip_address,
        num_cpus=cpus,
        resources=core_resources(cores),
        labels={HOST_LABEL: host_label(index)},
        object_store_memory=OBJECT_STORE_BYTES,
        include_log_monitor=False,  # one for each machine
        dashboard_agent_listen_port=0,  # at its default the agent tries the first node's port for 4 s
        min_worker_port=0,
        max_worker_port=0,
    )
    # no exit hook: it would take our signal handlers. The "reaper" is the kernel's parent-death signal.
    return Node(parameters, head=False, shutdown_at_exit=False, spawn_reaper=True)


def stop_ray(further: Sequence[Any] = ()) -> None:
    """End the Ray that ``start_ray`` started, and before it the ``further`` nodes, all at once."""
    stopping = [
        threading.Thread(
            target=node.kill_all_processes, kwargs={"check_alive": False, "allow_graceful": True}, daemon=True
        )
        for node in further
    ]
    for thread in stopping:
        thread.start()
    deadline = time.monotonic() + NODES_STOP_S
    for thread in stopping:
        thread.join(max(0.0, deadline - time.monotonic()))
    ray.shutdown()


def here() -> NodeAffinitySchedulingStrategy:
    """On the Ray node of this process, and on no other."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


@ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=16)
class HostActor:
    """What the controller asks of one host (one for each Ray node)."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int | None, str | None]] = {}  # by the Neuron tools
        self._reads = False
        self._asking = threading.Lock()
        self._interpreters = Interpreters()

    def confirm_death(self, pid: int, started: float, deadline_s: float) -> bool:
        return this_host.confirm_death(pid, started, deadline_s)

    def log_tail(self, path: str, lines: int) -> list[str]:
        return this_host.log_tail(Path(path), lines)

    def log_part(self, path: str, offset: int | None, most: int, lines: int) -> tuple[str, int]:
        return this_host.log_part(Path(path), offset, most, lines)

    def fault_in_log(self, path: str) -> Failure | None:
        return fault_of(None, this_host.last_words(Path(path)))

    def interpreter(self, python: str | None) -> Interpreter:
        return self._interpreters.ask(python)

    def held_cores(self, claims: str | None) -> dict[int, tuple[int | None, str | None]]:
        """The owner's pid and command of each held core; ``claims`` None: of the real ones."""
        if claims is not None:
            return {core: (pid, this_host.command_of(pid)) for core, pid in held_cores(Path(claims)).items()}
        with self._asking:
            if not self._reads:  # the first answer is waited for, later ones are at most a period old
                self._read_tools()
                threading.Thread(target=self._keep_reading, name="neuron tools", daemon=True).start()
                self._reads = True
        return self._told

    def _keep_reading(self) -> None:
        while True:
            time.sleep(TOOLS_PERIOD_S)
            self._read_tools()

    def _read_tools(self) -> None:
        self._told = {core: (owner.pid, owner.command) for core, owner in owners(read_host_facts()).items()}


@dataclass(frozen=True)
class _Node:
    """A Ray node as Ray last told it."""

    id: str
    alive: bool
    address: str  # of the machine: emulated hosts share one
    label: str | None


def _nodes() -> list[_Node]:
    """Every node that Ray knows, the dead ones too. 2 ms."""
    return [
        _Node(node["NodeID"], node["Alive"], node["NodeManagerAddress"], node["Labels"].get(HOST_LABEL))
        for node in ray.nodes()
    ]


class RayCluster:
    """``effects.Cluster`` on Ray nodes of this machine. Used from one event loop."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        """``labels``: for each of the planner's hosts the label of its Ray node. A host that is not among them has the
        label of its number (`inf2.48xlarge/1`: `emu-1`), and ``lost_hosts`` tells of it once it has been named."""
        self._labels = dict(labels or {})
        self._here: str = ray.get_runtime_context().get_node_id()
        self._nodes: list[_Node] = _nodes()
        self._host_actors: dict[str, Any] = {}  # by node id
        self._answered: set[str] = set()  # replicas that have answered: from then on silence is a hang
        self._actors: dict[str, Any] = {}
        for node in self._nodes:
            if node.alive:
                self._host_actor(node)  # before the first question comes

    async def start(self, config: ReplicaConfig) -> None:
        node = self._node_of(config.host)
        if node is None or not node.alive:
            await self._look()
            node = self._node_of(config.host)
        if node is None or not node.alive:
            raise HostLost(f"the Ray node of {config.host} is gone")
        name = actor_name(config.model, config.replica, config.epoch)
        named = type(f"Replica[{config.model}]", (Replica,), {})  # the dashboard shows the class's name
        shown = ray.remote(concurrency_groups={"ctl": 8})(named)
        self._actors[name] = shown.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",  # a controller that is started again finds it alive
            num_cpus=0,
            resources={f"nc{core}": 1.0 for core in config.cores},
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            runtime_env={
                "env_vars": config.env,
                **({} if config.python is None else {"py_executable": config.python}),
            },
        ).remote(config)

    def know_hosts(self, names: Iterable[str]) -> None:
        """All of the planner's hosts, in its order: ``lost_hosts`` tells of those that are not there."""
        self._labels.update(host_labels(names))

    async def watch(self, name: str, seen: int) -> ReplicaStatus:
        # A process that is still being started cannot answer; the controller's start deadline is for that.
        deadline = WATCH_S + CALL_DEADLINE_S if name in self._answered else None
        try:
            status: ReplicaStatus = await asyncio.wait_for(
                _of(self._actors[name].watch.remote(seen, WATCH_S)), deadline
            )
            self._answered.add(name)
        except asyncio.TimeoutError:
            what = f"it has not answered for {WATCH_S + CALL_DEADLINE_S:.0f} s: its process hangs"
            raise ReplicaDied(what) from None
        except RayTaskError as error:
            raise ReplicaDied(f"the actor failed: {error.cause}") from None
        except RayError as error:
            raise ReplicaDied(_death(error)) from None
        return status

    async def drain(self, name: str, timeout_s: float) -> bool:
        try:
            return bool(await self._actors[name].drain.remote(timeout_s))
        except RayError:
            return True

    async def end(self, name: str, pid: int | None, started: float | None, host: str | None = None) -> bool:
        actor = self._actors.get(name)
        if actor is not None:
            with contextlib.suppress(RayActorError, ValueError):
                ray.kill(actor, no_restart=True)
        if pid is None or started is None:
            dead = actor is None or await self._is_dead(actor)
        else:
            dead = await self._confirm_death(pid, started, host)
        if dead:
            self._actors.pop(name, None)
            self._answered.discard(name)
        return dead

    async def _confirm_death(self, pid: int, started: float, host: str | None) -> bool:
        """Whether the process is gone. On a lost machine it is: Ray has declared the node dead, and all on it."""
        try:
            return bool(await self._ask(host, "confirm_death", pid, started, CONFIRM_DEATH_S))
        except HostLost:
            node = self._node_of(host)
            return node is None or not node.alive

    async def log_tail(self, path: str, lines: int, host: str | None = None) -> list[str]:
        try:
            tail: list[str] = await self._ask(host, "log_tail", path, lines)
        except HostLost:
            return []
        return tail

    async def log_part(
        self, path: str, offset: int | None, most: int, lines: int, host: str | None = None
    ) -> tuple[str, int]:
        try:
            text, end = await self._ask(host, "log_part", path, offset, most, lines)
        except HostLost:
            return "", offset or 0
        return str(text), int(end)

    async def fault_in_log(self, path: str, host: str | None = None) -> Failure | None:
        try:
            fault: Failure | None = await self._ask(host, "fault_in_log", path)
        except HostLost:
            return None
        return fault

    async def interpreter(self, python: str | None, host: str | None = None) -> Interpreter:
        found: Interpreter = await self._ask(host, "interpreter", python)
        return found

    async def held_cores(self, claims: str | None, host: str | None = None) -> dict[int, Owner]:
        try:
            held = await self._ask(host, "held_cores", claims)
        except HostLost:
            if (node := self._node_of(host)) is not None and node.alive:
                raise  # not knowing is not the same as knowing of none
            return {}
        return {core: Owner(pid, command) for core, (pid, command) in held.items()}

    async def lost_hosts(self) -> frozenset[str]:
        await self._look()
        living = {node.label for node in self._nodes if node.alive}
        return frozenset(name for name, label in self._labels.items() if label not in living)

    async def _look(self) -> None:
        self._nodes = await asyncio.to_thread(_nodes)

    def _node_of(self, host: str | None) -> _Node | None:
        """The Ray node of that host, a living one if there is any; without ``host`` the one that this process is on."""
        label = None if host is None else self._labels.setdefault(host, f"emu-{host.rpartition('/')[2]}")
        found = [node for node in self._nodes if (node.id == self._here if host is None else node.label == label)]
        return max(found, key=lambda node: node.alive, default=None)

    async def _ask(self, host: str | None, question: str, *arguments: Any) -> Any:
        """The answer of that host's actor. When its Ray node is dead, of another one on the same machine: they share
        one kernel. Raises HostLost when none answers."""
        silent: set[str] = set()
        while True:
            node = self._node_of(host)
            machine = node or self._node_of(None)
            near = [other for other in self._nodes if machine is not None and other.address == machine.address]
            order = near if node is None else [node, *near]
            asked = next((one for one in order if one.alive and one.id not in silent), None)
            if asked is None:
                raise HostLost(f"nobody answers for {host or 'this host'}")
            try:
                call = getattr(self._host_actor(asked), question).remote(*arguments)
                return await asyncio.wait_for(_of(call), CONFIRM_DEATH_S + CALL_DEADLINE_S)
            except RayTaskError:
                raise  # it answers, that it failed
            except (RayError, asyncio.TimeoutError) as error:
                log.warning("the host actor of %s does not answer: %s", asked.label, str(error).partition("\n")[0])
                self._host_actors.pop(asked.id, None)
                silent.add(asked.id)
                await self._look()

    def _host_actor(self, node: _Node) -> Any:
        if node.id not in self._host_actors:
            self._host_actors[node.id] = HostActor.options(  # type: ignore[attr-defined]
                name=f"host/{node.label or node.id[:8]}",
                namespace=NAMESPACE,
                get_if_exists=True,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            ).remote()
        return self._host_actors[node.id]

    async def survivors(self) -> tuple[Sequence[Survivor], Mapping[str, int]]:
        names = [
            entry["name"]
            for entry in ray.util.list_named_actors(all_namespaces=True)
            if entry["namespace"] == NAMESPACE and "/" in entry["name"] and not entry["name"].startswith("host/")
        ]
        found = await asyncio.gather(*(self._survivor(name) for name in names))
        lost: dict[str, int] = {}
        for name, survivor in zip(names, found, strict=True):
            if survivor is None:
                id, _, epoch = name.rpartition(".")
                lost[id] = max(int(epoch), lost.get(id, 0))
        return [survivor for survivor in found if survivor is not None], lost

    async def _survivor(self, name: str) -> Survivor | None:
        """What the replica says of itself; None, and its end, when it says nothing."""
        try:
            actor = ray.get_actor(name, NAMESPACE)
        except ValueError:
            return None
        try:
            config, status = await asyncio.wait_for(_of(actor.describe.remote()), ADOPT_S)
        except (RayError, asyncio.TimeoutError) as error:
            log.warning("%s does not answer and is ended: %s", name, error)
            ray.kill(actor, no_restart=True)
            return None
        self._actors[name] = actor
        self._answered.add(name)
        return Survivor(config, status)

    async def _is_dead(self, actor: Any) -> bool:
        try:
            await asyncio.wait_for(_of(actor.watch.remote(0, 0.0)), CALL_DEADLINE_S)
        except RayActorError:
            return True
        except (RayError, asyncio.TimeoutError):
            return False
        return False


async def _of(reference: Any) -> Any:
    return await reference


def _death(error: RayError) -> str:
    """Ray's account of an actor's death, without its advice and frames."""
    text = str(error)
    if "killed by `ray.kill`" in text:
        return "it was ended"
    if "SYSTEM_ERROR" in text:  # Ray saw only the end of its connection
        return "its process ended without a word: killed by a signal (for want of memory?), or crashed"
    if "is not schedulable" in text:
        return "its host is lost"
    if "temporarily unavailable" in text:  # the connection has ended before Ray knows why
        return "the connection to its process has ended"
    if "creation task" in text:
        return text.strip().splitlines()[-1]
    return text.splitlines()[0] if text else type(error).__name__
