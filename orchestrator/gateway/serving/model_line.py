"""The lines of one model in one gateway: who waits, and what its tenants were charged."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from orchestrator.dispatch.fair_queue import FairQueue
from orchestrator.fleet.route_table import ModelRoutes
from orchestrator.gateway.serving.ticket import Ticket


class ModelLine:
    """One for the model, and one beside it for a version that is being tried, whose requests are drawn."""

    def __init__(self, routes: ModelRoutes) -> None:
        self._routes = routes
        self._own: FairQueue[Ticket] = _line(routes)
        self._canary: FairQueue[Ticket] | None = None
        self._all: tuple[FairQueue[Ticket], ...] = (self._own,)
        self._weights: dict[str, float] = {}  # of the tenants that have asked
        self.shared = False  # whether more than one tenant has asked: only then are tokens counted
        self._random = random.Random()

    def __iter__(self) -> Iterator[FairQueue[Ticket]]:
        return iter(self._all)

    @property
    def filled(self) -> list[FairQueue[Ticket]]:
        """Those in which something waits."""
        return [line for line in self._all if len(line)]

    @property
    def waiting(self) -> int:
        return sum(map(len, self))

    @property
    def tickets(self) -> Iterator[Ticket]:
        """Those that wait, in no promised order."""
        return (ticket for line in self for ticket in line)

    def draw(self, ticket: Ticket) -> FairQueue[Ticket]:
        """Of the version that is drawn for it."""
        canary = self._routes.canary
        ticket.canary = canary is not None and self._random.random() < canary
        return self.of(ticket)

    def of(self, ticket: Ticket) -> FairQueue[Ticket]:
        """Where it waits, or would."""
        return self._canary if ticket.canary and self._canary is not None else self._own

    def enter(self, ticket: Ticket) -> FairQueue[Ticket]:
        """Returns the line of the version that is drawn for a new ticket, in which its tenant has its share."""
        tenant, weight = ticket.tenant, ticket.terms.weight
        if self._weights.get(tenant) != weight:
            self._weights[tenant] = weight
            self.shared = len(self._weights) > 1
            for line in self:
                line.set_weight(tenant, weight)
        return self._own if self._canary is None else self.draw(ticket)

    def update(self, routes: ModelRoutes, live: Iterable[Ticket]) -> None:
        """Make the lines as the routes have them now; what waits keeps its place. ``live``: requests in slots."""
        before, self._routes = self._routes, routes
        for line in self:
            line.max_count, line.max_bytes = routes.max_queue, routes.max_queue_bytes
        if (before.queue_order, before.canary is None) == (routes.queue_order, routes.canary is None):
            return
        waiting = [ticket for line in self for ticket in line.clear()]
        for ticket in (*waiting, *live):
            ticket.carried = ticket.charged
        self._own = _line(routes, self._weights)
        self._canary = None if routes.canary is None else _line(routes, self._weights)
        self._all = (self._own,) if self._canary is None else (self._own, self._canary)
        for ticket in sorted(waiting, key=lambda ticket: ticket.arrived_at, reverse=True):
            self.draw(ticket).put_back(ticket)

    # Whom tokens are counted to

    def sent(self, ticket: Ticket) -> None:
        """It gets a slot: its tenant is charged for the prompt. To be called where the lines are ``shared``."""
        if ticket.charged < 0:
            ticket.charged = 0
            self.of(ticket).charge(ticket.tenant, prompt_tokens=ticket.tokens, priority=ticket.priority)

    def charge(self, ticket: Ticket) -> None:
        """For the tokens that have come since it was charged last."""
        new = ticket.produced - ticket.charged
        if new > 0 and ticket.charged >= 0:
            ticket.charged = ticket.produced
            self.of(ticket).charge(ticket.tenant, output_tokens=new, priority=ticket.priority)

    def take_back_answer(self, ticket: Ticket) -> None:
        """What is thrown away was not served. What lines that are no more were told stays with them."""
        tokens = ticket.charged - max(0, ticket.carried)
        if tokens > 0:
            self.of(ticket).charge(ticket.tenant, output_tokens=-tokens, priority=ticket.priority)

    def take_back_prompt(self, ticket: Ticket) -> None:
        """It had no slot after all."""
        if ticket.charged >= 0 and ticket.carried < 0:
            self.of(ticket).charge(ticket.tenant, prompt_tokens=-ticket.tokens, priority=ticket.priority)
        ticket.charged = ticket.carried = -1


def _line(routes: ModelRoutes, weights: Mapping[str, float] = MappingProxyType({})) -> FairQueue[Ticket]:
    line: FairQueue[Ticket] = FairQueue(routes.max_queue, routes.max_queue_bytes, order=routes.queue_order)
    for tenant, weight in weights.items():
        line.set_weight(tenant, weight)
    return line
