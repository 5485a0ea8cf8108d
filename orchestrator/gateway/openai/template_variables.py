"""The variables of chat templates that determine whether, and how long, a model reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from orchestrator.gateway.openai.protocol import Chat, Effort

EFFORTS: tuple[Effort, ...] = get_args(Effort)  # ascending
_USUAL: tuple[Effort, ...] = ("low", "medium", "high")


def template_variables(request: Chat, template: str | None) -> dict[str, Any]:
    """Returns the variables for a template. Each family has its own names, and ignores the names of others:

    - `enable_thinking`: Qwen3, GLM, Gemma; `thinking`: DeepSeek, Granite, Kimi
    - `thinking_budget`: Seed-OSS
    - `reasoning_effort`: gpt-oss, Mistral, GLM; `thinking_effort`: Kimi

    The variables of `chat_template_kwargs` override all others.
    """
    effort, thinking, budget = request.reasoning_effort, request.thinking, thinking_budget(request)
    thinks = False if effort == "none" else None  # None: the default of the template
    if thinking is not None:
        thinks = thinking.type != "disabled"
    variables: dict[str, Any] = {} if thinks is None else {"enable_thinking": thinks, "thinking": thinks}
    if budget is not None or thinks is False:
        variables["thinking_budget"] = 0 if thinks is False else budget
    if effort is not None and template is not None:
        names = [name for name in ("reasoning_effort", "thinking_effort") if name in template]
        variables |= dict.fromkeys(names, _nearest(effort, template))
    return {**variables, **(request.chat_template_kwargs or {})}


def thinking_budget(request: Chat) -> int | None:
    """Returns the limit on the tokens of reasoning; None if the request sets none."""
    if request.thinking_token_budget is not None or request.thinking is None:
        return request.thinking_token_budget
    return request.thinking.budget_tokens


def _nearest(effort: Effort, template: str) -> Effort:
    """Returns the supported effort that is nearest to ``effort``; of two, the higher one.

    A template that compares efforts, or raises an error for unsupported ones, names all supported efforts. A template
    that names at most one, as its default, prints any effort; its model was trained with the usual efforts.
    """
    named = [each for each in EFFORTS if f"'{each}'" in template or f'"{each}"' in template]
    known: Sequence[Effort] = named if len(named) > 1 else _USUAL
    place = EFFORTS.index(effort)
    return min(known, key=lambda each: (abs(EFFORTS.index(each) - place), -EFFORTS.index(each)))
