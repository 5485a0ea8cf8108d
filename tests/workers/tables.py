"""A model that is one table, as an engine and as a transformers model: both give the very same logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from workers.batching.batcher import Batcher
from workers.messages.engine_protocol import EngineSpec
from workers.messages.requests import FinishReason, GenerateRequest, TokenEvent
from workers.text.tokenizer import ByteTokenizer, Tokenizer

torch.set_num_threads(1)  # on such small tensors two threads mostly wait for each other


def table(vocab_size: int, spread: float = 3.0, seed: int = 5) -> torch.Tensor:
    """The logits after each token, ``[vocab_size, vocab_size]``."""
    return torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


class TableEngine:
    """Keeps ``GenerateEngine``. Its next logits depend on the last token alone."""

    def __init__(self, logits: torch.Tensor, slots: int = 4, max_len: int = 512, eos: Sequence[int] = ()) -> None:
        self.logits = logits
        self.spec = EngineSpec(slots, max_len, (max_len,), (max_len,), logits.shape[1], frozenset(eos))

    def load(self) -> None: ...

    def close(self) -> None: ...

    def prefill(self, slots: Sequence[int], prompts: Sequence[Sequence[int]]) -> torch.Tensor:
        return self.logits[[prompt[-1] % len(self.logits) for prompt in prompts]]

    def decode(self, slots: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        return self.logits[[token % len(self.logits) for token in tokens]]


class _TableConfig(PretrainedConfig):
    model_type = "table"


class _TableModel(PreTrainedModel, GenerationMixin):
    config_class = _TableConfig

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(_TableConfig(vocab_size=logits.shape[1]))  # type: ignore[call-arg]
        self.table = torch.nn.Parameter(logits, requires_grad=False)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.table[input_ids])

    def prepare_inputs_for_generation(  # type: ignore[override]
        self, input_ids: torch.Tensor, attention_mask: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids}


def generated(
    logits: torch.Tensor,
    prompt: Sequence[int],
    n: int,
    seed: int | None,
    processors: Sequence[Any] = (),
    eos: int | None = None,
    **how: Any,
) -> list[int]:
    """What transformers' ``generate`` answers; greedy without a seed."""
    model = _TableModel(logits)
    config = GenerationConfig(
        max_new_tokens=n, eos_token_id=eos, pad_token_id=0, use_cache=False, do_sample=seed is not None, **how
    )
    ids = torch.tensor([list(prompt)])
    torch.manual_seed(seed or 0)
    answer = model.generate(  # type: ignore[misc]
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        logits_processor=list(processors),  # type: ignore[arg-type]
    )
    tokens: list[int] = answer[0, len(prompt) :].tolist()
    return tokens


class Answers:
    """What a batcher emitted, by request."""

    def __init__(self) -> None:
        self.events: list[TokenEvent] = []

    def __call__(self, events: list[TokenEvent]) -> None:
        self.events += events

    def of(self, id: str) -> list[TokenEvent]:
        return [event for event in self.events if event.id == id]

    def ids(self, id: str) -> list[int]:
        return [token for event in self.of(id) for token in event.token_ids]

    def text(self, id: str) -> str:
        return "".join(event.text for event in self.of(id))

    def finish(self, id: str) -> FinishReason | None:
        return self.of(id)[-1].finish


def answers(engine: Any, requests: Sequence[GenerateRequest], tokenizer: Tokenizer | None = None) -> Answers:
    """All requests through one batcher over ``engine``, submitted together."""
    received = Answers()
    batcher = Batcher(engine, tokenizer or ByteTokenizer(), received)
    for request in requests:
        batcher.submit(request)
    while batcher.step():
        pass
    return received
