"""What clients are tested against: a gateway in this process, with the demo's model and one that calls tools."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tests.checkpoints import EOS_ID
from tests.clients.families import FAMILIES, Call, Family
from tests.orchestrator.gateways import LiveGateway, routes
from tests.orchestrator.scripted import ScriptedEngine, ScriptedReplica, save_tools_tokenizer
from tests.workers.tables import TableEngine, table
from workers.engines.cpu.engine import CpuEngine
from workers.text.tokenizer import Tokenizer, load_tokenizer

DEMO = Path(__file__).parents[2] / "placements" / "examples" / "models" / "tiny"
DEMO_ANSWER = "A NeuronCore is one compute core of an AWS Inferentia or Trainium chip."
MAX_LEN = 512
AGENT_MAX_LEN = 40_960  # as docs/agents.md has it
SUMMARY = "So far: fact-1-rain, fact-2-noon."
COMPACTS = ("create a detailed summary of the conversation", "CONTEXT CHECKPOINT COMPACTION")  # Claude Code, Codex
CALL: dict[str, Any] = {"name": "get_weather", "arguments": {"city": "Paris"}}
SAYS = f"Wait. <tool_call>\n{json.dumps(CALL)}\n</tool_call>"


class Place:
    """Its model `assistant` is the demo's, on the CPU engine; `caller` answers every chat with a call of a tool, and
    `any` has random weights."""

    def __init__(self, folder: Path) -> None:
        self.gateway = LiveGateway()
        engine = CpuEngine(DEMO, slots=2, max_len=MAX_LEN)
        engine.load()
        assistant = ScriptedReplica(engine, load_tokenizer("cpu", str(DEMO)))
        tokenizer = save_tools_tokenizer(folder, "<tool_call>")
        self.caller = ScriptedEngine(tokenizer, SAYS)
        caller = ScriptedReplica(self.caller, tokenizer)
        random = TableEngine(table(tokenizer.vocab_size, spread=2.0), max_len=4096, eos=[EOS_ID])
        anything = ScriptedReplica(random, tokenizer)
        self._replicas = (assistant, caller, anything)
        demo = routes("assistant", assistant, engine="cpu", source=str(DEMO), max_len=MAX_LEN)  # type: ignore[arg-type]
        self.gateway.serve(
            msgspec.structs.replace(
                demo, aliases=["claude-demo"], request_defaults={"claude-demo": {"temperature": 0}}
            ),
            routes("caller", caller, engine="cpu", source=str(folder)),  # type: ignore[arg-type]
            routes("any", anything, engine="cpu", source=str(folder)),  # type: ignore[arg-type]
        )

    @property
    def url(self) -> str:
        return self.gateway.url

    def close(self) -> None:
        self.gateway.close()
        for replica in self._replicas:
            replica.close()


class CertainEngine(ScriptedEngine):
    """Its logits leave one token to choose, so that a grammar can forbid it."""

    def __init__(self, tokenizer: Tokenizer, says: Callable[[str], str], max_len: int) -> None:
        super().__init__(tokenizer, says, max_len=max_len)
        self.spec = dataclasses.replace(self.spec, returns="logits")

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> Any:
        return self._logits(super().prefill(slots, prompts))

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Any:
        return self._logits(super().decode(slots, tokens, positions))

    def _logits(self, tokens: Sequence[int]) -> Any:
        import torch

        return 100.0 * torch.nn.functional.one_hot(torch.tensor(tokens), self.spec.vocab_size).float()


class AgentPlace:
    """A gateway with one model of each family, which all follow one script: the step of a prompt is the number of
    results in it. Prompts without tools, such as those for a title, and those with a summary get the last step;
    those that ask for a summary get it."""

    def __init__(self, folder: Path) -> None:
        self.gateway = LiveGateway()
        self.steps: Sequence[Call | str] = ()
        self.prompts: list[str] = []
        self._replicas: list[ScriptedReplica] = []
        models = []
        for name, family in FAMILIES.items():
            tokenizer = family.save(folder / name)
            engine = CertainEngine(tokenizer, partial(self._says, family), AGENT_MAX_LEN)
            self._replicas.append(ScriptedReplica(engine, tokenizer))
            source = str(folder / name)
            models.append(
                routes(name, self._replicas[-1], engine="cpu", source=source, max_len=AGENT_MAX_LEN)  # type: ignore[arg-type]
            )
        self.gateway.serve(*models)

    @property
    def url(self) -> str:
        return self.gateway.url

    def close(self) -> None:
        self.gateway.close()
        for replica in self._replicas:
            replica.close()

    def _says(self, family: Family, prompt: str) -> str:
        self.prompts.append(prompt)
        if any(words in prompt for words in COMPACTS):
            return family.text(f"<summary>{SUMMARY}</summary>", prompt)
        step = prompt.count(family.result) if family.tools in prompt and SUMMARY not in prompt else -1
        return family.text(self.steps[min(step, len(self.steps) - 1)], prompt)
