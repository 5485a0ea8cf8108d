"""The shapes of answers: choices, usage and logprobs, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.gateway.openai import body_reader
from orchestrator.gateway.openai.answers import Answer, Choice
from orchestrator.gateway.openai.request_builder import RequestLimits, requests_for
from workers.messages.requests import AnswerConstraint, FinishReason, GenerateRequest, TokenEvent, TokenLogprobs

LIMITS = RequestLimits(max_len=100, max_prompt=100, vocab_size=1000)


def event(text: str, id: int, finish: FinishReason | None = None) -> TokenEvent:
    top = [(id, -0.5, text, list(text.encode())), (9, -1.5, "z", [122])]
    logprobs = TokenLogprobs(id=id, logprob=-0.5, text=text, bytes=list(text.encode()), top=top)
    return TokenEvent(id="r", text=text, token_ids=[id], logprobs=[logprobs], finish=finish)


def answer(chat: bool, choices: list[Choice]) -> Answer:
    return Answer(id="i", model="m", created=1, chat=chat, choices=choices)


def whole(chat: bool, *answers: tuple[Choice, list[TokenEvent]]) -> Any:
    """The body of an answer that is not streamed, whose events have come one after the other."""
    writer = answer(chat, [choice for choice, _ in answers])
    for choice, events in answers:
        for count in range(1, len(events) + 1):
            so_far = events[:count]
            writer.add_logprobs(choice, so_far)
            events[:count] = so_far
    body = writer.whole(answers)
    return json.loads(body if isinstance(body, bytes) else b"".join(body))


def requests_of(body: dict[str, Any]) -> list[GenerateRequest]:
    """The requests of a completion of the prompts [1, 2] and [3]."""
    read = body_reader.read_completion(json.dumps({"model": "m", "prompt": [[1, 2], [3]], **body}).encode())
    prompts = [prompt for prompt in read.prompts() if isinstance(prompt, list)]
    return requests_for(read, prompts, LIMITS, 16, iter("abcdefgh"))


def test_chat_logprobs_have_openais_format() -> None:
    """content: token, logprob, bytes and the top tokens, each with the same fields."""
    choice = Choice(0, [1, 2])

    body = whole(True, (choice, [event("a", 5), event("é", 6, FinishReason.STOP)]))

    (only,) = body["choices"]
    assert only["message"] == {"role": "assistant", "content": "aé", "refusal": None}
    assert only["logprobs"]["content"][1] == {
        "token": "é",
        "logprob": -0.5,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
            {"token": "z", "logprob": -1.5, "bytes": [122]},
        ],
    }


def test_completion_logprobs_have_openais_format_with_offsets() -> None:
    """tokens, token_logprobs, top_logprobs and text_offset, which continues after an echoed prompt."""
    choice = Choice(0, [1, 2], echo="pre")

    body = whole(False, (choice, [event("ab", 5), event("c", 6, FinishReason.LENGTH)]))

    (only,) = body["choices"]
    assert only["text"] == "preabc"
    assert only["logprobs"] == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"ab": -0.5, "z": -1.5}, {"c": -0.5, "z": -1.5}],
        "text_offset": [3, 5],
    }


@pytest.mark.parametrize("chat", [False, True])
def test_usage_counts_each_prompt_once_and_the_tokens_of_every_choice(chat: bool) -> None:
    """Two choices of one prompt: its tokens once, the output tokens of both."""
    prompt = [1, 2, 3]
    choices = [Choice(0, prompt), Choice(1, prompt)]

    body = whole(chat, *[(c, [event("a", 5, FinishReason.STOP)]) for c in choices])

    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def test_n_choices_of_each_prompt_have_separate_seeds() -> None:
    """Each choice can be reproduced with its own seed."""
    requests = requests_of({"n": 2, "seed": 7})

    assert [(request.prompt_ids, request.seed) for request in requests] == [
        ([1, 2], 7),
        ([1, 2], 8),
        ([3], 7),
        ([3], 8),
    ]


def test_every_sampling_parameter_reaches_the_replica() -> None:
    """The request has the values of the body, and neutral values for missing fields."""
    fields = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "no_repeat_ngram_size": 3,
        "stop_token_ids": [7],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "logprobs": 2,
    }
    whole = requests_of({**fields, "stop": "x", "logit_bias": {"5": -100}, "response_format": {"type": "json_object"}})[
        0
    ]

    assert {name: getattr(whole, name) for name in fields} == fields
    assert (whole.stop, whole.logit_bias, whole.guide) == (["x"], {5: -100.0}, AnswerConstraint('{"type":"object"}'))
    assert requests_of({})[1] == GenerateRequest(
        id="b", prompt_ids=[3], max_tokens=16, temperature_is_default=True, whole=True
    )


def test_a_json_schema_is_handed_on_as_text() -> None:
    """The schema inside response_format, not its wrapping."""
    schema = {"type": "array", "items": {"type": "integer"}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}

    (request, _) = requests_of({"response_format": wanted})

    assert request.guide is not None
    assert json.loads(request.guide.text) == schema
