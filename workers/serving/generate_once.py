"""Answers one prompt in a process of its own, without Ray: ``python -m workers.serving.generate_once``.

A ``GenerateJob`` is read as JSON from standard input. JSON lines go to standard output: each is a ``TextPiece`` of the
answer, the last one its ``End`` or the ``Failure`` that prevented it. Output of libraries goes to standard error. The
caller sets the whole environment. The process ends with its parent, so that no core stays claimed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from workers.host.json_process import ChildRequest, answering, read_request, set_variables
from workers.messages.replica_config import ReplicaConfig
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.messages.status import Failure, Trouble
from workers.serving.backend import Backend, failure_of, opened
from workers.text.tokenizer import ChatTemplateError, NoChatTemplate, TemplateInput, Tokenizer, load_tokenizer

DEFAULT_TOKENS = 128  # of an answer, if the slot has room


class GenerateJob(ChildRequest, frozen=True, kw_only=True):
    """The prompt to answer, with its model and sampling parameters."""

    config: ReplicaConfig
    prompt: str
    raw: bool = False  # continue the prompt as it is, without the chat template
    max_tokens: int | None = None  # None: DEFAULT_TOKENS, or the room in the slot
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0


class TextPiece(msgspec.Struct, frozen=True, tag="piece"):
    """Further text of the answer."""

    text: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """The end of a complete answer."""

    tokens: int
    finish: str  # "stop" or "length"


Reply = TextPiece | End | Trouble
Send = Callable[[Reply], None]


def run(job: GenerateJob, send: Send) -> None:
    """Load the model, answer, and send the result. Never raises for faults of the model or the machine."""
    config = job.config
    activity, id = "the load", "load-failed"
    answer: list[TokenEvent] = []

    def emit(events: list[TokenEvent]) -> None:
        for event in events:
            answer.append(event)
            if event.text:
                send(TextPiece(event.text))
            if event.finish is not None:
                backend.close()  # ends its ``run``

    try:
        with opened(config, emit) as backend:
            activity, id = "a step of the engine", "engine-failed"
            request = _request(job, load_tokenizer(config.model.engine, config.source), backend.spec.max_len)
            _submit(backend, request)
            backend.run()
            send(_end_of(answer))
    except _Refused as error:
        send(Trouble(Failure("generate-refused", str(error), "see `corewright generate --help`")))
    except Exception as error:  # noqa: BLE001 - it is sent as the failure
        send(Trouble(failure_of(id, error, activity, config)))


class _Refused(Exception):
    """The model does not support the prompt or the sampling parameters."""


def _request(job: GenerateJob, tokenizer: Tokenizer, max_len: int) -> GenerateRequest:
    ids = _prompt_ids(job, tokenizer)
    return GenerateRequest(
        id="one-off",
        prompt_ids=ids,
        max_tokens=job.max_tokens or max(1, min(DEFAULT_TOKENS, max_len - len(ids))),
        temperature=job.temperature,
        top_k=job.top_k,
        top_p=job.top_p,
    )


def _prompt_ids(job: GenerateJob, tokenizer: Tokenizer) -> list[int]:
    """Returns the prompt in the model's chat template, if it has one, unless ``raw``: a chat model often ends at once
    after a bare question. Raises _Refused."""
    if not job.prompt:
        raise _Refused("the prompt is empty")
    if not job.raw:
        try:
            return tokenizer.apply_chat_template(TemplateInput([{"role": "user", "content": job.prompt}]))
        except NoChatTemplate:
            pass
        except ChatTemplateError as error:
            raise _Refused(f"the chat template rejected the prompt: {error}; --raw skips the template") from error
    return tokenizer.encode(job.prompt)


def _submit(backend: Backend, request: GenerateRequest) -> None:
    try:
        backend.submit(request)
    except ValueError as error:
        raise _Refused(str(error)) from error


def _end_of(answer: Sequence[TokenEvent]) -> End:
    last = answer[-1]
    if last.finish not in (FinishReason.STOP, FinishReason.LENGTH):
        raise RuntimeError(last.error or f"the answer ended as {last.finish}")
    return End(sum(len(event.token_ids) for event in answer), last.finish.value)


def main() -> None:
    """Read the job and answer it."""
    job = read_request(GenerateJob)
    set_variables({})
    run(job, answering())


if __name__ == "__main__":
    main()
