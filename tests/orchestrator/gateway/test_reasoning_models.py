"""Chats with models that reason, or have a response template: from the files of the tokenizer to the replica."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.gateway.openai.body_reader import read_chat
from orchestrator.gateway.openai.request_builder import Prompts, RequestLimits, prompts_of, requests_for
from orchestrator.gateway.reading.events import CallBegin, Content, Event, Reasoning
from tests.checkpoints import save_tokenizer
from workers.messages.requests import GenerateRequest, ReasoningLimit
from workers.text.tokenizer import load_tokenizer

TEMPLATE = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>assistant\n"
THINKS = TEMPLATE + "<think>\n{# </think> #}"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]


def prompts(folder: Path, template: str, own: Any = None, **fields: Any) -> tuple[Prompts, list[GenerateRequest]]:
    """The prompts of a chat with a model of these files, and the requests for its replica."""
    save_tokenizer(folder, template)
    if own is not None:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "response_template": own}))
    chat = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}
    request = read_chat(json.dumps(chat).encode())
    made = prompts_of(request, load_tokenizer("cpu", str(folder)), "auto")
    ids = map(str, itertools.count())
    return made, requests_for(request, made[0], RequestLimits(2048, 2048, None), None, ids, made[2])


def read(made: Prompts, text: str) -> list[Event]:
    assert made[2] is not None
    reader = made[2]()
    return [*reader.push(text), *reader.flush()]


def test_a_checkpoints_own_template_reads_its_answers(tmp_path: Path) -> None:
    """It comes before the signs in the chat template."""
    own = {"start_anchor": "assistant\n", "fields": {"content": {}, "thinking": {"open": "((", "close": "))"}}}
    made, _ = prompts(tmp_path, THINKS, own)
    assert read(made, "((a)) b") == [Reasoning("a"), Content("b")]


@pytest.mark.parametrize(("template", "opened"), [(THINKS, True), (TEMPLATE + "{# <think></think> #}", False)])
def test_a_thinking_budget_reaches_the_replica(tmp_path: Path, template: str, opened: bool) -> None:
    """With the marks of the template, and whether the prompt has begun the reasoning. The answer arrives in pieces, so
    that the tokens of the reasoning can be counted."""
    _, requests = prompts(tmp_path, template, thinking={"type": "enabled", "budget_tokens": 5}, n=2)
    assert [request.reasoning_limit for request in requests] == [ReasoningLimit(5, "<think>", "</think>", opened)] * 2
    assert not requests[0].whole


def test_a_model_that_does_not_reason_has_no_budget(tmp_path: Path) -> None:
    """Its answer arrives whole, also with tools."""
    for tools in (None, TOOLS):
        template = TEMPLATE + "{# <tool_call> #}"
        _, (request,) = prompts(tmp_path, template, thinking={"type": "enabled", "budget_tokens": 5}, tools=tools)
        assert (request.reasoning_limit, request.whole) == (None, True)


def test_the_ids_of_calls_count_those_of_earlier_answers(tmp_path: Path) -> None:
    """In the form that Kimi's chat template requires, also if the call is forced."""
    call = {"id": "functions.f:0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    template = TEMPLATE + "{# <|tool_calls_section_begin|> #}"
    forced = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "f"}}}
    made, _ = prompts(tmp_path, template, messages=history, **forced)
    begin, _ = read(made, "{}")
    assert begin == CallBegin(0, "functions.f:1", "f")


@pytest.mark.parametrize("wanted", [False, True])
def test_special_tokens_without_a_meaning_are_dropped_unless_the_client_asks_for_them(
    tmp_path: Path, wanted: bool
) -> None:
    """The reader gets them in any case."""
    made, (request,) = prompts(tmp_path, THINKS, **({"skip_special_tokens": False} if wanted else {}))
    assert request.skip_special_tokens is False
    assert read(made, "a</think>b<|bos|>c") == [Reasoning("a"), Content("b<|bos|>c" if wanted else "bc")]
