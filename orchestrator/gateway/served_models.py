"""The models that a gateway serves: a queue for each, kept in line with the controller's route table."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

import msgspec.structs

from orchestrator.access.keys import ApiKey
from orchestrator.gateway.controller_client import ControllerAway, ControllerClient
from orchestrator.gateway.openai import errors
from orchestrator.gateway.received import ReceivedFiles
from orchestrator.gateway.serving.model_queue import ModelQueue
from orchestrator.gateway.serving.replica_link_pool import LinkSettings
from orchestrator.gateway.serving.tokenizers import Tokenizers
from orchestrator.messages.replica_states import ModelState
from orchestrator.messages.route_table import ModelRoutes, RouteTable
from orchestrator.scaling.demand_report import DemandReport
from workers.host.task_boundary import task_boundary

log = logging.getLogger(__name__)

CONTROLLER_SILENT_S = 10.0  # without an answer to a long poll: the controller is down


class ServedModels:
    """The queues by model, and the names that clients use. Used from one event loop."""

    def __init__(
        self,
        controller: ControllerClient,
        gateway: str,
        machine: str,
        tokenizers: Tokenizers,
        retried: Callable[[str, str], None],
        read_again: Callable[[ModelQueue], None],
        files: ReceivedFiles | None = None,
    ) -> None:
        """``machine`` is that of LinkSettings, ``retried`` and ``read_again`` are those of ModelQueue. ``files``, on a
        joined cluster, keep the routes: they are used without the controller."""
        self._controller = controller
        self._gateway = gateway
        self._machine = machine
        self._tokenizers = tokenizers
        self._retried = retried
        self._read_again = read_again
        self.queues: dict[str, ModelQueue] = {}
        self._names: dict[str, ModelQueue] = {}  # by name and alias, also of adapters
        self.forwards = False  # a model gets the clients' own bodies
        self._table: RouteTable | None = None
        self._routes_at = 0.0  # the last answer of the controller (monotonic)
        self._routes_known = asyncio.Event()
        self._tokenizes = False  # the tokenizers of the first ready fleet have loaded
        self._files = files
        self._wakes: set[asyncio.Task[None]] = set()

    async def follow(self) -> None:
        """Applies each new route table, until cancelled. While the controller is down the last table stays in use."""
        known_version = 0
        while True:
            try:
                version, table = await self._controller.routes(known_version, CONTROLLER_SILENT_S / 3)
            except ControllerAway as error:
                log.warning("cannot get routes from the controller: %s", error)
                await self._use_kept()
                await asyncio.sleep(0.2)
                known_version = 0
                continue
            self._routes_at = time.monotonic()
            self._routes_known.set()
            changed = version != known_version
            if changed:
                known_version = version
                self._update(table)
            if self._files is not None:
                with task_boundary(log, "the routes are not kept on this machine"):
                    await asyncio.to_thread(self._files.keep_routes, table, changed=changed)

    async def wait_for_routes(self, within_s: float) -> None:
        """Returns when the first routes have arrived, or after ``within_s``."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._routes_known.wait(), within_s)
        await self._use_kept()

    async def _use_kept(self) -> None:
        """Without routes, use those of an earlier gateway of this machine, if there are any."""
        kept = None if self._table is not None or self._files is None else await asyncio.to_thread(self._files.routes)
        if kept is not None and self._table is None:
            table, age_s = kept
            log.warning("the controller does not answer: the routes of %.0f s ago are used", age_s)
            self._routes_at = time.monotonic() - age_s
            self._routes_known.set()
            self._update(table)

    @property
    def routes_age_s(self) -> float | None:
        """The time since the controller has confirmed the routes; None without routes."""
        return None if self._table is None else time.monotonic() - self._routes_at

    def drains(self, label: str) -> bool:
        """Returns whether clients must leave the gateways of that machine."""
        return self._table is not None and label in self._table.draining

    def demand(self, number: int, seconds: float, now: float) -> tuple[DemandReport, bool]:
        """Returns the report of the demand in the last ``seconds``, and whether there was any."""
        windows = [queue.report() for queue in self.queues.values()]
        report = DemandReport(
            gateway=self._gateway,
            number=number,
            seconds=round(seconds, 3),
            models=[window for window, _ in windows],
            decisions=[decision for _, decision in windows if decision is not None],
            unreachable=[route.id for queue in self.queues.values() for route in queue.links.unreachable(now)],
        )
        busy = any(window.arrived or window.ended or window.waiting or window.live for window in report.models)
        return report, busy or bool(report.unreachable)

    @property
    def is_stopping(self) -> bool:
        """The fleet ends, as far as this gateway knows."""
        return self._table is not None and self._table.stopping

    def not_ready(self) -> str | None:
        """Returns why the fleet is not ready; None when it is."""
        silent = time.monotonic() - self._routes_at > CONTROLLER_SILENT_S
        if self._table is None or (silent and self._files is None):
            return "the controller does not answer"
        if self._table.stopping:
            return "the fleet is stopping"
        if not self._table.ready:
            late = [f"{model.name}: {model.state.value}" for model in self._table.models if not model.replicas]
            return "\n".join(["not ready", *late])
        if not self._tokenizes:  # else the first requests would wait for seconds
            late = [model.name for model in self._table.models if self._reads_late(model)]
            if late:
                return "\n".join(["not ready", *(f"{name}: its tokenizer is loading" for name in late)])
            self._tokenizes = True  # a later model must not make the gateway leave its load balancer
        now = time.monotonic()
        late = [f"{name}: unreachable" for name, queue in self.queues.items() if queue.links.cut_off(now)]
        lacking = ((name, queue.lacking_s(now)) for name, queue in self.queues.items())
        late += [f"{name}: no replica for {seconds:.0f} s" for name, seconds in lacking if seconds]
        return "\n".join(["not ready", *late]) if late else None

    def allowed(self, key: ApiKey | None) -> dict[str, ModelQueue]:
        """Returns the queues that the key allows, by name and alias."""
        if key is None or not key.models:
            return self._names
        return {name: queue for name, queue in self._names.items() if set(key.models) & set(queue.names.synonyms(name))}

    def serves(self, name: str) -> bool:
        """Returns whether requests for the model of that name or alias can begin."""
        queue = self._names.get(name)
        return queue is not None and (queue.links.slots > 0 or queue.routes.loads_on_request)

    def has(self, name: str) -> bool:
        """Returns whether there is a model of that name or alias."""
        return name in self._names

    def queue(self, key: ApiKey | None, model: str) -> ModelQueue:
        """Returns the queue of the model with that name or alias, if the key allows it. Raises ApiError."""
        if self._table is None:
            raise errors.model_unavailable(model, "loading", "the gateway has just started")
        queue = self._names.get(model)
        if (
            key is not None
            and key.models
            and not set(key.models) & set((model,) if queue is None else queue.names.synonyms(model))
        ):
            raise errors.key_not_for(f"the model {model!r}")
        if queue is None:
            raise errors.model_not_found(model, list(self.allowed(key)))
        if self._table.stopping:
            raise errors.model_unavailable(model, "stopping", None)
        return queue

    def _reads_late(self, routes: ModelRoutes) -> bool:
        return not routes.forwards and self._tokenizers.is_loading(routes)

    async def stop(self) -> None:
        await asyncio.gather(*[queue.links.stop() for queue in self.queues.values()])
        self._tokenizers.retain(())  # ends their processes

    def _update(self, table: RouteTable) -> None:
        if self._table is not None and self._table.ready and not table.ready:
            table = msgspec.structs.replace(table, ready=True)  # a restarted controller has forgotten it
        self._table = table
        for routes in table.models:
            queue = self.queues.get(routes.name)
            if queue is None:
                queue = ModelQueue(
                    routes,
                    LinkSettings(self._gateway, table.token, self._machine, table.credentials),
                    wake=self._wake,
                    retried=self._retried,
                    read_again=self._read_again,
                )
                self.queues[routes.name] = queue
            if _needs_tokenizer(queue.routes, routes):
                self._tokenizers.fetch(routes)
            queue.update(routes)
            if table.stopping:
                queue.close()
        for name in self.queues.keys() - {routes.name for routes in table.models}:
            self.queues.pop(name).close()
        queues = self.queues.values()
        self._names = {name: queue for queue in queues for name in queue.names}
        self.forwards = any(queue.routes.forwards for queue in queues)
        self._tokenizers.retain(routes for routes in table.models if not routes.forwards)

    def _wake(self, model: str) -> None:
        task = asyncio.get_running_loop().create_task(self._controller.wake(model))
        self._wakes.add(task)
        task.add_done_callback(self._woken)

    def _woken(self, task: asyncio.Task[None]) -> None:
        self._wakes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:  # the next routes retry it
            log.warning("cannot request a first replica from the controller: %s", error)


def _needs_tokenizer(before: ModelRoutes, routes: ModelRoutes) -> bool:
    """Returns whether a tokenizer must be loaded for these routes. ``before`` are those in use, at first the same. That
    of an unloaded model is loaded by its first request."""
    new = before is routes or before.state is ModelState.UNLOADED or before.reading != routes.reading
    return new and not routes.forwards and routes.state is not ModelState.UNLOADED
