"""LMI's requests and answers, as its clients send them to `/invocations`: `{"inputs": ..., "parameters": ...}`.

By the page "LMI handlers Inference API Schema" of DJL Serving 0.28, and its code (`output_formatter.py`,
`encode_decode.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from orchestrator.gateway.http.exchange import JSON, Exchange, decoded
from orchestrator.gateway.openai import body_reader
from orchestrator.gateway.openai.answers import EVENTS, AnswerWriter, Choice
from orchestrator.gateway.openai.errors import ApiError, invalid, renamed
from orchestrator.gateway.openai.protocol import CompletionRequest
from workers.messages.requests import FinishReason, TokenEvent

INVOCATIONS = "/invocations"
LINES = b"application/jsonlines"
NEW_TOKENS = 30  # LMI's default of max_new_tokens
_encode = msgspec.json.encode


_NAMES = {"max_tokens": "max_new_tokens", "stop": "stop_sequences", "ignore_eos": "ignore_eos_token"}  # LMI's own
_REFUSED = {"parameters.num_beams": "none; there is no beam search"}
_OWN = ("do_sample", "return_full_text", "details")  # parameters without a field of completions


class Parameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename=_NAMES):
    """The parameters of a request, with the names of a completion's fields. Values are checked as those of one."""

    max_tokens: int | None = None
    do_sample: bool | None = None  # default false
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_full_text: bool = False
    details: bool = False


class LmiRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request. ``model`` is corewright's."""

    model: str
    inputs: Annotated[str, Meta(min_length=1)] | Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)]
    parameters: Parameters = msgspec.field(default_factory=Parameters)
    stream: bool = False


class LmiCompletion(CompletionRequest, kw_only=True):
    """The completion that a request of LMI asks for."""

    sent: LmiRequest
    names: ClassVar[Mapping[str, str]] = MappingProxyType(  # of the fields of completions
        {"prompt": "inputs", "n": "inputs", **_NAMES}
    )

    @property
    def default_tokens(self) -> int | None:
        return NEW_TOKENS

    @property
    def leaves_temperature(self) -> bool:
        """The request may sample, and does not say at which temperature."""
        return self.sent.parameters.do_sample is not False and self.sent.parameters.temperature is None


_decoder = msgspec.json.Decoder(LmiRequest)


def content_types(header: bytes) -> frozenset[bytes]:
    """Returns the types of a header Accept or Content-Type, without their parameters."""
    return frozenset(part.partition(b";")[0].strip().lower() for part in header.split(b","))


def joined_lines(body: bytes) -> bytes:
    """Returns a body of JSON lines as one of JSON: a line alone as it is, several as one request with all their
    ``inputs``. LMI reads one line only. Raises ApiError 400."""
    lines = [line for line in body.splitlines() if line.strip()]
    if len(lines) <= 1:
        return body
    joined: dict[str, Any] = {}
    inputs: list[Any] = []
    for number, line in enumerate(lines, 1):
        fields = decoded(line, dict[str, Any], f"The body, line {number}")
        if "inputs" not in fields:
            raise invalid(f"The body, line {number}: each of several lines must have `inputs`.", param="inputs")
        own = fields.pop("inputs")
        inputs += own if isinstance(own, list) else [own]
        if number > 1 and fields != joined:
            differing = sorted(
                name for name in fields.keys() | joined.keys() if fields.get(name, ...) != joined.get(name, ...)
            )
            message = (
                f"The body, line {number}: {', '.join(differing)} must be as in line 1; send different lines apart."
            )
            raise invalid(message, param=differing[0])
        joined = fields
    return _encode({**joined, "inputs": inputs})


def read_lmi(body: bytes) -> LmiCompletion:
    """Decodes and checks a body. Raises ApiError 400 that names the wrong parameter."""
    sent = body_reader.decode(_decoder, body, _REFUSED)
    parameters = sent.parameters
    if sent.stream and isinstance(sent.inputs, list) and len(sent.inputs) > 1:
        raise invalid("stream: only one input can be streamed", param="stream")
    fields: dict[str, Any] = {
        name: getattr(parameters, name) for name in parameters.__struct_fields__ if name not in _OWN
    }
    fields["temperature"] = (
        (1.0 if parameters.temperature is None else parameters.temperature) if parameters.do_sample else 0.0
    )
    fields["logprobs"] = 0 if parameters.details else None
    completion = {name: value for name, value in fields.items() if value is not None}
    encoded = _encode({"model": sent.model, "prompt": sent.inputs, "stream": sent.stream, **completion})
    with renamed(LmiCompletion.names):
        read = body_reader.read_completion(encoded)
    return LmiCompletion(sent=sent, **{name: getattr(read, name) for name in read.__struct_fields__})


class LmiAnswer(AnswerWriter, eq=False):
    """Writes an answer in the shape of LMI. A stream is lines of JSON, or server-sent events."""

    sent: LmiRequest
    accepted: frozenset[bytes]  # content types
    keep_alive: ClassVar[bytes] = b""  # its clients parse every line
    _text: str = ""  # of a stream, so far

    def __post_init__(self) -> None:
        self.stream_type = EVENTS if self._as_events else LINES
        self.whole_type = LINES if self._as_lines else JSON

    @property
    def _as_events(self) -> bool:
        return b"text/event-stream" in self.accepted

    @property
    def _as_lines(self) -> bool:
        return LINES in self.accepted and JSON not in self.accepted

    def body(self, answers: Sequence[tuple[Choice, Sequence[TokenEvent]]]) -> bytes | list[bytes]:
        results = []
        for choice, events in answers:
            result: dict[str, Any] = {"generated_text": self._full(choice, "".join(event.text for event in events))}
            if self.sent.parameters.details:
                tokens = [token for event in events for token in _tokens(event)]
                result["details"] = {**self._details(choice, events[-1]), "tokens": tokens}
            results.append(result)
        if self._as_lines:
            return b"".join(_encode(result) + b"\n" for result in results)
        return _encode(results if isinstance(self.sent.inputs, list) else results[0])

    def events(self, choice: Choice, events: Sequence[TokenEvent]) -> bytes:
        lines = []
        for event in events:
            choice.tokens += len(event.token_ids)
            self._text += event.text
            tokens = list(_tokens(event))
            for number, token in enumerate(tokens, 1):
                line: dict[str, Any] = {"token": token}
                if event.finish is not None and number == len(tokens):
                    line["generated_text"] = self._full(choice, self._text)
                    if self.sent.parameters.details:
                        line["details"] = self._details(choice, event)
                lines.append(self._line(line))
        return b"".join(lines)

    def failure(self, error: ApiError) -> bytes:
        details = {"finish_reason": "error"}
        return self._line({"error": error.message, "code": error.status, "generated_text": None, "details": details})

    def _line(self, value: dict[str, Any]) -> bytes:
        return b"data: %b\n\n" % _encode(value) if self._as_events else _encode(value) + b"\n"

    def _input(self, choice: Choice) -> str:
        inputs = self.sent.inputs
        return inputs if isinstance(inputs, str) else inputs[choice.index]

    def _full(self, choice: Choice, text: str) -> str:
        return self._input(choice) + text if self.sent.parameters.return_full_text else text

    def _details(self, choice: Choice, last: TokenEvent) -> dict[str, Any]:
        reason = "length" if last.finish is FinishReason.LENGTH else "stop_sequence" if last.stop else "eos_token"
        return {"finish_reason": reason, "generated_tokens": choice.tokens, "inputs": self._input(choice)}


def lmi_answer(exchange: Exchange, body: LmiCompletion, choices: Sequence[Choice], suffix: str) -> LmiAnswer:
    """Returns the writer of an answer, which has no id."""
    return LmiAnswer(body.sent, content_types(exchange.request.headers.get(b"accept", b"")), choices=choices)


def _tokens(event: TokenEvent) -> Iterator[dict[str, Any]]:
    """Yields the tokens of an event; without `details` they have no logarithm of a probability, and tokens that came
    together are one."""
    if event.logprobs:
        for item in event.logprobs:
            yield {"id": item.id, "text": item.text, "log_prob": item.logprob}
    elif event.token_ids or event.text or event.finish is not None:
        ids = event.token_ids
        yield {"id": ids[0] if len(ids) == 1 else ids, "text": event.text, "log_prob": None}
