"""A disconnected client frees its slots within two engine steps: counted, with an engine that steps on command.

The engine stands in the midst of a step when the client goes. That step is the first; before the second begins, the
slots are free, and when it ends, the gateway knows.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fleet import until
from tests.orchestrator.certificates import Authority
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.hostile import Wire, post
from tests.served import Served
from workers.engines.echo.engine import echo_tokens

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SLOTS = 4
FORMS: dict[str, tuple[str, dict[str, Any], int]] = {  # the route, the body, and how many slots it wants
    "chat": (CHAT, {"messages": [{"role": "user", "content": "hi"}]}, 1),
    "chat n=3": (CHAT, {"messages": [{"role": "user", "content": "hi"}], "n": 3}, 3),
    "completion": (COMPLETIONS, {"prompt": "hello"}, 1),
    "completion n=3": (COMPLETIONS, {"prompt": "hello", "n": 3}, 3),
    "three prompts": (COMPLETIONS, {"prompt": ["a", "b", "c"]}, 3),
}
SLOW = ("chat n=3", "completion n=3", "three prompts")
EACH = [pytest.param(form, marks=pytest.mark.slow) if form in SLOW else form for form in FORMS]
BESIDE = 40  # tokens of the answer that is not to be disturbed


@pytest.fixture
def served() -> Iterator[Served]:
    replica = Served(slots=SLOTS, stepped=True)
    yield replica
    replica.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def plain() -> Iterator[LiveGateway]:
    live = LiveGateway()
    yield live
    live.close()


@pytest.fixture(scope="module")
def secure(authority: Authority) -> Iterator[LiveGateway]:
    pair = authority.sign("server")
    live = LiveGateway(tls_cert=str(pair.cert), tls_key=str(pair.key))
    yield live
    live.close()


class Beside:
    """Other clients' streams, of which no token may be lost."""

    def __init__(self, gateway: LiveGateway, served: Served, slots: int, tls: ssl.SSLContext | None = None) -> None:
        self._served = served
        self._wires = [Wire(gateway.port, tls=tls) for _ in range(slots)]
        for number, wire in enumerate(self._wires):
            body = {"model": "m", "prompt": f"beside {number}", "max_tokens": BESIDE, "return_token_ids": True}
            wire.send(post(body))
        until(lambda: gateway.queue("m").links.live == slots, 10, "they have their slots")
        run_until(served, lambda: started(gateway) == slots)

    def end(self) -> None:
        """All get their whole answer."""
        self._served.run_free()
        for number, wire in enumerate(self._wires):
            answer = wire.answer()
            expected = echo_tokens(list(b"beside %d" % number), BESIDE)
            assert answer.json["choices"][0]["token_ids"] == expected
            wire.close()


def started(gateway: LiveGateway) -> int:
    """Requests on a replica that have had a token."""
    return sum(link.live - link.prefilling for link in gateway.queue("m").links)


def run_until(served: Served, condition: Callable[[], bool]) -> None:
    """Let the engine step until it is so; it stands in the midst of the next step then."""

    def met() -> bool:
        until(lambda: served.in_step, 10, "the engine is in a step")
        try:
            until(condition, 0.05, "met")
        except AssertionError:
            served.turn()
            return False
        return True

    until(met, 20, "it has come so far")
    until(lambda: served.in_step, 10, "the engine is in a step")


def fin(wire: Wire) -> None:
    wire.close()


def rst(wire: Wire) -> None:
    wire.reset()


def shutdown(wire: Wire) -> None:
    """TLS' own goodbye, and no end of the connection beneath it."""
    assert isinstance(wire.socket, ssl.SSLSocket)
    wire.socket.settimeout(0.2)
    try:
        wire.socket.unwrap()
    except (OSError, ValueError):  # the other side may still be sending
        return


def go_away(
    gateway: LiveGateway,
    served: Served,
    form: str,
    stream: bool,
    phase: str,
    leave: Callable[[Wire], None],
    tls: ssl.SSLContext | None = None,
) -> None:
    """One client goes away in that phase; raises AssertionError unless its slots are free within two steps."""
    path, fields, count = FORMS[form]
    gateway.serve(routes("m", served))
    queue, stats = gateway.queue("m"), lambda: served.batcher.stats
    others = SLOTS if phase == "queued" else 1
    beside = Beside(gateway, served, others, tls)
    wire = Wire(gateway.port, tls=tls)
    wire.send(post({"model": "m", "max_tokens": 1000, "stream": stream, **fields}, path))
    if phase == "queued":
        until(lambda: queue.waiting == count, 10, "it waits")
    else:
        until(lambda: queue.links.live == others + count, 10, "it has its slots")
        run_until(served, lambda: stats().live > others)
    if phase == "decode":
        run_until(served, lambda: started(gateway) == others + count)
    steps = stats().steps

    leave(wire)

    if phase == "queued":
        until(lambda: queue.waiting == 0, 10, "it is out of the queue")
    else:
        until(lambda: served.cancelled == count, 10, "the replica knows of it while its step still runs")
        served.turn()
        until(lambda: stats().live == others and served.cancelled == 0, 10, "the slots are free")
        served.turn()  # its events reach the gateway
        until(lambda: queue.links.live == others, 10, "the gateway may fill them")
        assert stats().steps - steps == 2
    assert queue.waiting == 0
    wire.close()
    beside.end()
    until(lambda: queue.links.live == 0 and stats().live == 0, 10, "nothing is left")


@pytest.mark.parametrize("leave", [fin, pytest.param(rst, marks=pytest.mark.slow)])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("form", EACH)
def test_a_disconnected_client_frees_its_slots_within_two_steps(
    plain: LiveGateway, served: Served, form: str, stream: bool, phase: str, leave: Callable[[Wire], None]
) -> None:
    """On every route, streamed or not, queued, in prefill or in decode, with or without a clean close."""
    go_away(plain, served, form, stream, phase, leave)


@pytest.mark.slow
@pytest.mark.parametrize("leave", [fin, rst, shutdown])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
def test_a_disconnected_tls_client_frees_its_slots(
    secure: LiveGateway,
    served: Served,
    authority: Authority,
    stream: bool,
    phase: str,
    leave: Callable[[Wire], None],
) -> None:
    """With a close in TLS, in TCP, or without one."""
    tls = ssl.create_default_context(cafile=str(authority.file))
    go_away(secure, served, "completion n=3", stream, phase, leave, tls)


def test_pipelined_requests_of_a_disconnected_client_are_never_started(plain: LiveGateway, served: Served) -> None:
    plain.serve(routes("m", served))
    with Wire(plain.port) as wire:
        wire.send(post({"model": "m", "prompt": "x", "max_tokens": 500}) * 10)
        until(lambda: served.in_step, 10, "the first runs")  # before that a cancellation is over at once
    until(lambda: served.cancelled == 1, 10, "the first is cancelled")
    served.run_free()
    until(lambda: plain.queue("m").links.live == 0 and served.batcher.stats.live == 0, 10, "nothing is left")
    assert served.batcher.stats.steps <= 2


def test_a_client_that_disconnects_during_tokenization_leaves_nothing(plain: LiveGateway, served: Served) -> None:
    """A long prompt is tokenized beside the event loop; its result is discarded."""
    plain.serve(routes("m", served))
    for _ in range(50):
        with Wire(plain.port) as wire:
            wire.send(post({"model": "m", "prompt": "x" * 3000, "max_tokens": 500}))
    served.run_free()
    until(lambda: plain.connections == 0, 10, "all are gone")
    until(lambda: plain.queue("m").links.live == 0 and plain.queue("m").waiting == 0, 10, "nothing waits or runs")
    until(lambda: served.batcher.stats.live == 0, 10, "no slot is taken")
