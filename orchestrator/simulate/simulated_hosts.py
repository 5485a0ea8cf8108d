"""The hosts of a simulated fleet, some of which come and go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.fleet.host_timing import CHECK_S, SPARE_S
from orchestrator.simulate.virtual_clock import Clock
from placements.facts.topology import Host
from placements.planner.host_choice import spare_host
from placements.planner.host_groups import host_groups, least_hosts
from placements.planner.plan import Plan
from placements.spec.schema import Spec


@dataclass(eq=False)
class SimHosts:
    """Which hosts of a spec have a machine. Decides as `orchestrator.control.host_requests` does.

    A run begins with the ``min`` hosts of each entry. A requested machine joins ``start_s`` later, always.
    """

    spec: Spec
    all: Sequence[Host]  # those of the spec, up to ``max`` of each entry
    clock: Clock
    start_s: float  # from the request of a machine until it joins
    on_joined: Callable[[], None]

    requests: int = field(default=0, init=False)  # machines that were requested

    def __post_init__(self) -> None:
        self.groups = host_groups(self.spec, self.all)
        self.elastic = any(group.elastic for group in self.groups)
        self._since = {host.name: 0.0 for host in least_hosts(self.groups)}  # by host, when its machine was requested
        self._coming: dict[str, int] = {}  # the scheduled joining, by host
        self._leaving: set[str] = set()
        self._released = dict.fromkeys((host.name for host in self.all), 0.0)  # seconds with former machines
        self._spare: tuple[str, float] | None = None  # instance type of which a host is spare, and since when
        self._check_at = 0.0

    @property
    def usable(self) -> tuple[Host, ...]:
        """The hosts for replicas: those with a machine that is not to be given back."""
        without = self._coming.keys() | self._leaving
        return tuple(host for host in self.all if host.name in self._since and host.name not in without)

    def with_coming(self, added: Collection[Host] = (), without: Host | None = None) -> tuple[Host, ...]:
        """The hosts for replicas once all requested machines are there, with ``added`` hosts and without one."""
        chosen = {*self.usable, *added}
        return tuple(host for host in self.all if (host in chosen or host.name in self._coming) and host != without)

    @property
    def coming(self) -> list[Host]:
        """The hosts that wait for their machine."""
        return [host for host in self.all if host.name in self._coming]

    @property
    def absent(self) -> list[Host]:
        """The hosts without a machine and without a request."""
        return [host for host in self.all if host.name not in self._since]

    def host_seconds(self) -> dict[str, float]:
        """Returns by host how long it had a machine until now, from the request on."""
        now = self.clock.now
        own = {name: now - since for name, since in self._since.items()}
        return {host.name: self._released[host.name] + own.get(host.name, 0.0) for host in self.all}

    def keep_leaving(self) -> bool:
        """Keeps the hosts that were to be given back. Returns whether there were any."""
        kept, self._leaving, self._spare = bool(self._leaving), set(), None
        return kept

    def request(self, hosts: Collection[Host]) -> None:
        """Requests a machine for each of these absent hosts."""
        for host in hosts:
            self.requests += 1
            self._since[host.name] = self.clock.now
            self._coming[host.name] = self.clock.at(self.clock.now + self.start_s, self._join, host.name)

    def give_back(self, held_cores: Mapping[str, int], draw: Callable[[tuple[Host, ...]], Plan]) -> bool:
        """Releases hosts that are empty and were to be given back; else looks for one that is spare for long enough.
        Returns whether the hosts for replicas have changed.

        ``held_cores``: by host, those of its replicas. ``draw``: plans the present counts on these hosts.
        """
        now = self.clock.now
        if self._leaving or now < self._check_at:
            for name in [name for name in self._leaving if not held_cores.get(name)]:
                self._release(name)
            return False
        self._check_at = now + CHECK_S
        known = {host.name: held_cores.get(host.name, 0) for host in self.usable}
        host = spare_host(self.groups, self._since.keys(), known, lambda without: draw(self.with_coming((), without)))
        if host is None:
            self._spare = None
            return False
        if host.name in self._coming:
            self.clock.cancel(self._coming.pop(host.name))
            self._release(host.name)
            return False
        instance = host.name.rpartition("/")[0]
        if self._spare is None or self._spare[0] != instance:
            self._spare = instance, now
        if now - self._spare[1] < max(SPARE_S, self.start_s):
            return False
        self._spare = None
        self._leaving.add(host.name)
        return True

    def stop(self) -> None:
        """Withdraws all requests, at the end of a run."""
        for name, number in self._coming.items():
            self.clock.cancel(number)
            self._release(name)
        self._coming.clear()

    def _join(self, name: str) -> None:
        del self._coming[name]
        self.on_joined()

    def _release(self, name: str) -> None:
        self._leaving.discard(name)
        self._released[name] += self.clock.now - self._since.pop(name)
