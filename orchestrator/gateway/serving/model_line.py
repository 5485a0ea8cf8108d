"""The lines of one model in one gateway: its waiting requests and the charges of its tenants."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from orchestrator.dispatch.fair_queue import FairQueue
from orchestrator.fleet.route_table import ModelRoutes
from orchestrator.gateway.serving.ticket import Ticket


class ModelLine:
    """One line for the model, and a second one for a canary version, whose requests are drawn at random."""

    def __init__(self, routes: ModelRoutes) -> None:
        self._routes = routes
        self._own: FairQueue[Ticket] = _line(routes)
        self._canary: FairQueue[Ticket] | None = None
        self._all: tuple[FairQueue[Ticket], ...] = (self._own,)
        self._weights: dict[str, float] = {}  # of the tenants with requests so far
        self.shared = False  # more than one tenant has sent requests: only then are tokens counted
        self._random = random.Random()

    def __iter__(self) -> Iterator[FairQueue[Ticket]]:
        return iter(self._all)

    @property
    def filled(self) -> list[FairQueue[Ticket]]:
        """The lines with waiting requests."""
        return [line for line in self._all if len(line)]

    @property
    def waiting(self) -> int:
        return sum(map(len, self))

    @property
    def tickets(self) -> Iterator[Ticket]:
        """The waiting tickets, in no particular order."""
        return (ticket for line in self for ticket in line)

    def draw(self, ticket: Ticket) -> FairQueue[Ticket]:
        """Draws the version of a ticket and returns the version's line."""
        canary = self._routes.canary
        ticket.canary = canary is not None and self._random.random() < canary
        return self.of(ticket)

    def of(self, ticket: Ticket) -> FairQueue[Ticket]:
        """Returns the line in which the ticket waits, or would wait."""
        return self._canary if ticket.canary and self._canary is not None else self._own

    def enter(self, ticket: Ticket) -> FairQueue[Ticket]:
        """Draws the version of a new ticket, applies its tenant's weight, and returns the line."""
        tenant, weight = ticket.tenant, ticket.terms.weight
        if self._weights.get(tenant) != weight:
            self._weights[tenant] = weight
            self.shared = len(self._weights) > 1
            for line in self:
                line.set_weight(tenant, weight)
        return self._own if self._canary is None else self.draw(ticket)

    def update(self, routes: ModelRoutes, live: Iterable[Ticket]) -> None:
        """Applies new routes; waiting requests keep their places. ``live``: requests in slots."""
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

    # Charges

    def charge_prompt(self, ticket: Ticket) -> None:
        """Charges the tenant for the prompt of a ticket that gets a slot. To be called where ``shared``."""
        if ticket.charged < 0:
            ticket.charged = 0
            self.of(ticket).charge(ticket.tenant, prompt_tokens=ticket.tokens, priority=ticket.priority)

    def charge(self, ticket: Ticket) -> None:
        """Charges the tenant for the tokens since the last charge."""
        new = ticket.produced - ticket.charged
        if new > 0 and ticket.charged >= 0:
            ticket.charged = ticket.produced
            self.of(ticket).charge(ticket.tenant, output_tokens=new, priority=ticket.priority)

    def refund_answer(self, ticket: Ticket) -> None:
        """Refunds an answer that is thrown away, but not what earlier lines were charged."""
        tokens = ticket.charged - max(0, ticket.carried)
        if tokens > 0:
            self.of(ticket).charge(ticket.tenant, output_tokens=-tokens, priority=ticket.priority)

    def refund_prompt(self, ticket: Ticket) -> None:
        """Refunds the prompt of a ticket that got no slot after all."""
        if ticket.charged >= 0 and ticket.carried < 0:
            self.of(ticket).charge(ticket.tenant, prompt_tokens=-ticket.tokens, priority=ticket.priority)
        ticket.charged = ticket.carried = -1


def _line(routes: ModelRoutes, weights: Mapping[str, float] = MappingProxyType({})) -> FairQueue[Ticket]:
    line: FairQueue[Ticket] = FairQueue(routes.max_queue, routes.max_queue_bytes, order=routes.queue_order)
    for tenant, weight in weights.items():
        line.set_weight(tenant, weight)
    return line
