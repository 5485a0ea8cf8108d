"""The wire protocol between a gateway and a replica: four bytes of length (big endian), then msgpack.

A message that does not fit into a frame, such as a very long prompt, is split over several; the length of all but the
last of them has its highest bit set.

One connection carries all requests of a gateway to a replica. The gateway opens with ``Hello``; the replica answers
``Welcome`` or ``Refused``. After that the gateway sends ``Submit`` and ``Cancel``, and the replica one ``Step`` for
each engine step. Where several gateways share a replica, the replica grants its slots: a request beyond them is
answered BUSY, and ``Room`` follows when it may be sent again. A replica sends a forwarded answer only a limited number
of bytes ahead of the gateway's ``Taken``, so that no answer fills the connection. End of file means that the peer has
disconnected.

Machines may have different versions of corewright with the same ``PROTOCOL``: new fields of structs have defaults, and
unknown ones are ignored. What such a peer could not read, such as another message, another finish reason or another
method of an actor, raises ``PROTOCOL``.
"""

from __future__ import annotations

import socket
from typing import Any

import msgspec

from workers.messages.requests import GenerateRequest, TokenEvent

PROTOCOL = 4
MAX_FRAME_BYTES = 2**20  # a larger length means a broken or foreign peer
MAX_MESSAGE_BYTES = 16 * 2**20  # far above the longest prompt, and above a step of 128 requests with logprobs
_LENGTH_BYTES = 4
_MORE = 2**31  # in a length: the message continues in the next frame


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Opens a connection, to one epoch of the replica: another one is refused."""

    gateway: str
    token: str
    epoch: int
    protocol: int = PROTOCOL


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The replica's limits, which a gateway needs before it sends a request."""

    version: str
    package: str  # the folder that the replica's code was imported from; "" in the engine's own interpreter
    slots: int
    max_len: int  # tokens: prompt + generated
    max_prompt: int  # tokens: the largest prefill bucket
    vocab_size: int
    prefix_block: int = 0  # tokens in a prefix-cache block; 0: prompts are always read from their beginning
    protocol: int = PROTOCOL
    width: int = 0  # numbers that each input gives, of an encoder; 0: it generates
    labels: list[str] = []  # of a classification, in their order


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The replica will not serve this connection."""

    reason: str


class Submit(msgspec.Struct, frozen=True, tag=True):
    request: GenerateRequest


class Cancel(msgspec.Struct, frozen=True, tag=True):
    id: str


class Taken(msgspec.Struct, frozen=True, tag=True):
    """The gateway has read more bytes of the answer to a forwarded request."""

    id: str
    count: int


class Step(msgspec.Struct, frozen=True, tag=True):
    """The results of one engine step for the requests of this connection."""

    events: list[TokenEvent]


class Room(msgspec.Struct, frozen=True, tag=True):
    """Slots are free again; sent to a gateway whose request was answered BUSY."""

    free: int


Message = Hello | Welcome | Refused | Submit | Cancel | Taken | Step | Room

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def mismatch(protocol: int) -> str | None:
    """Returns why a peer with that protocol cannot be served; None: it has the same one."""
    if protocol == PROTOCOL:
        return None
    return f"its protocol is {protocol}, here it is {PROTOCOL}: install one version of corewright on all machines"


class WireError(Exception):
    """The peer sent something that is not a frame of this protocol."""


def encode(message: Message) -> bytes:
    """Returns the frames of a message, ready to be written. Raises WireError when it is larger than peers accept."""
    body = _encoder.encode(message)
    if len(body) <= MAX_FRAME_BYTES:
        return len(body).to_bytes(_LENGTH_BYTES, "big") + body
    if len(body) > MAX_MESSAGE_BYTES:
        raise WireError(f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    frames = bytearray()
    for start in range(0, len(body), MAX_FRAME_BYTES):
        part = body[start : start + MAX_FRAME_BYTES]
        mark = _MORE if start + MAX_FRAME_BYTES < len(body) else 0
        frames += (len(part) | mark).to_bytes(_LENGTH_BYTES, "big") + part
    return bytes(frames)


class FrameReader:
    """Splits a byte stream into messages, however the bytes arrive."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._begun = b""  # of a message split over several frames

    def feed(self, data: bytes | bytearray) -> list[Message]:
        """Returns the messages that ``data`` completes. Raises WireError for anything else."""
        if self._buffer:
            self._buffer += data
            data = self._buffer
        messages: list[Message] = []
        start, size = 0, len(data)
        while size - start >= _LENGTH_BYTES:
            length = int.from_bytes(data[start : start + _LENGTH_BYTES], "big")
            more = length > MAX_FRAME_BYTES
            if more and (length := length ^ _MORE) > MAX_FRAME_BYTES:
                raise WireError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
            end = start + _LENGTH_BYTES + length
            if size < end:
                break
            body = data[start + _LENGTH_BYTES : end]
            start = end
            if more or self._begun:
                self._begun += body
                if len(self._begun) > MAX_MESSAGE_BYTES:
                    raise WireError(f"a message is over the limit of {MAX_MESSAGE_BYTES} bytes")
                if more:
                    continue
                body, self._begun = self._begun, b""
            try:
                messages.append(_decoder.decode(body))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise WireError(f"a frame that is not a message: {error}") from None
        if start < size or self._buffer:  # most reads end with a frame: nothing to keep
            self._buffer = bytearray(data[start:])
        return messages


PROBE_S = 1  # without data; also between two probes
GATEWAY_S = 4  # without an acknowledgement: the gateway gives the replica up, and sends its requests elsewhere
REPLICA_S = 30  # the replica gives the gateway up. Longer: a gateway that is paused, and reads nothing, also counts


def watch_link(connection: Any, silent_s: int) -> None:
    """End a connection whose peer has not acknowledged data or a probe for ``silent_s``. ``connection`` is a socket, or
    a transport's view of one."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, silent_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silent_s)  # of data that was sent
