"""One answer of one model in a process of its own, without Ray: ``python -m workers.serving.generate_once``.

A ``Job`` comes as JSON on standard input; lines of JSON go to standard output, each a ``Piece`` of the answer, and last
either its ``End`` or the ``Failure`` that prevented it. All that libraries print goes to standard error. The caller has
set the whole environment. The process ends with its parent, so that no core stays taken.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from workers.batching.batcher import Batcher
from workers.engines import open_engine
from workers.host import host_facts
from workers.host.child_process import answering
from workers.host.core_claims import CoreClaim, CoresTaken
from workers.host.memory_limits import is_out_of_memory, out_of_memory
from workers.host.neuron_faults import VAGUE, fault_of
from workers.host.process_tree import end_with
from workers.messages.engine_protocol import EngineLoadError
from workers.messages.replica_config import ReplicaConfig
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.messages.status import Failure
from workers.text.tokenizer import ChatTemplateError, NoChatTemplate, Tokenizer, load_tokenizer

log = logging.getLogger(__name__)

DEFAULT_TOKENS = 128  # of an answer, where the slot has room for as many


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done."""

    config: ReplicaConfig
    prompt: str
    raw: bool = False  # the prompt is continued as it is; else it is what a user says, where there is a chat template
    max_tokens: int | None = None  # None: DEFAULT_TOKENS, or what the slot has room for
    temperature: float = 0.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    parent: int = 0  # the pid of whoever waits for the answer


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """Some more text of the answer."""

    text: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """The answer is whole."""

    tokens: int
    finish: str  # "stop" or "length"


class Trouble(msgspec.Struct, frozen=True, tag="trouble"):
    """There is no answer, or no more of it."""

    failure: Failure


Told = Piece | End | Trouble
Tell = Callable[[Told], None]


def run(job: Job, tell: Tell) -> None:
    """Load the model, answer, and tell of it. Never raises for what the model or the machine does."""
    config = job.config
    doing, id = "the load", "load-failed"
    engine = claim = None
    try:
        claim = CoreClaim(Path(config.claims), config.cores) if config.claims and config.cores else None
        engine = open_engine(config)
        engine.load()
        tokenizer = load_tokenizer(config.engine, config.source)
        doing, id = "a step of the engine", "engine-failed"
        request = _request(job, tokenizer, engine.spec.max_len)
        tell(_answer(engine, tokenizer, request, tell))
    except EngineLoadError as error:
        told = Failure(error.id, error.what, error.hint)
        tell(Trouble(_explained(told, error, config.log) if error.id in VAGUE else told))
    except CoresTaken as error:
        hint = "does a fleet serve on them? corewright unload MODEL frees those of a model"
        tell(Trouble(Failure("cores-taken", f"{error} (held: {error.held})", hint)))
    except _Refused as error:
        tell(Trouble(Failure("generate-refused", str(error), "see `corewright generate --help`")))
    except Exception as error:
        log.exception("%s failed", doing)
        if is_out_of_memory(error):
            want = out_of_memory(error, doing)
            tell(Trouble(Failure(want.id, want.what, want.hint)))
        else:
            told = Failure(id, f"{type(error).__name__}: {error}", f"the log is {config.log}")
            tell(Trouble(_explained(told, error, config.log)))
    finally:
        if engine is not None:
            engine.close()
        if claim is not None:
            claim.release()


class _Refused(Exception):
    """A prompt or a way of sampling that this model does not serve."""


def _explained(told: Failure, error: Exception, log_file: str) -> Failure:
    """In the Neuron runtime's terms, where the log or the exception tells them."""
    return fault_of(error, host_facts.last_words(Path(log_file))) or told


def _request(job: Job, tokenizer: Tokenizer, max_len: int) -> GenerateRequest:
    ids = _prompt_ids(job, tokenizer)
    return GenerateRequest(
        id="one-off",
        prompt_ids=ids,
        max_tokens=job.max_tokens or max(1, min(DEFAULT_TOKENS, max_len - len(ids))),
        temperature=job.temperature,
        top_k=job.top_k,
        top_p=job.top_p,
    )


def _prompt_ids(job: Job, tokenizer: Tokenizer) -> list[int]:
    """In the model's chat template, unless it has none or ``raw`` says otherwise: a model that was trained to chat
    often ends at once after a bare question. Raises _Refused."""
    if not job.prompt:
        raise _Refused("the prompt is empty")
    if not job.raw:
        try:
            return tokenizer.apply_chat_template([{"role": "user", "content": job.prompt}])
        except NoChatTemplate:
            pass
        except ChatTemplateError as error:
            raise _Refused(f"the chat template refuses the prompt: {error}; --raw goes without it") from error
    return tokenizer.encode(job.prompt)


def _answer(engine: Any, tokenizer: Tokenizer, request: GenerateRequest, tell: Tell) -> End:
    """By the engine's own loop where it has one for this model, else step by step."""
    done: list[TokenEvent] = []

    def emit(events: list[TokenEvent]) -> None:
        for event in events:
            if event.text:
                tell(Piece(event.text))
            done.append(event)

    batcher = Batcher(engine, tokenizer, emit)
    try:
        batcher.submit(request)  # refuses what cannot be served, whoever answers
    except ValueError as error:
        raise _Refused(str(error)) from error
    if hasattr(engine, "generate") and (end := _by_its_own(engine, tokenizer, request, tell)) is not None:
        return end
    while not (done and done[-1].finish is not None):
        batcher.step()
    last = done[-1]
    if last.finish not in (FinishReason.STOP, FinishReason.LENGTH):
        raise RuntimeError(last.error or f"the answer ended as {last.finish}")
    return End(sum(len(event.token_ids) for event in done), last.finish.value)


def _by_its_own(engine: Any, tokenizer: Tokenizer, request: GenerateRequest, tell: Tell) -> End | None:
    """The package's own generate loop (`OneOffEngine`); None where it cannot be used for the model as it is loaded."""
    stream = tokenizer.stream(request.prompt_ids)
    ends = engine.spec.eos_token_ids
    seen: list[int] = []

    def on_token(token: int) -> None:
        seen.append(token)
        if token not in ends and (text := stream.push(token)):
            tell(Piece(text))

    try:
        engine.generate(
            request.prompt_ids,
            request.max_tokens,
            temperature=request.temperature,
            top_k=request.top_k or None,
            top_p=request.top_p,
            on_token=on_token,
        )
    except ValueError as error:
        if seen:
            raise
        log.info("the package's own loop is not used: %s", error)
        return None
    if text := stream.flush():
        tell(Piece(text))
    return End(len(seen), "stop" if seen and seen[-1] in ends else "length")


def main() -> None:
    """Read the job, answer it."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    end_with(job.parent)
    run(job, answering())


if __name__ == "__main__":
    main()
