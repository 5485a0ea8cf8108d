"""``forward`` of a causal language model, by the tokens of each line of the cache and a plain model of transformers."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.runtime import runtime
from transformers.modeling_outputs import CausalLMOutputWithPast

from neuronx_distributed_inference._played import played
from neuronx_distributed_inference.models.application_base import DRAFT, NeuronApplicationBase
from neuronx_distributed_inference.modules.generation.sampling import validate_sampling_params

_HERE = "models.model_base.NeuronBaseForCausalLM"


class NeuronBaseModel(torch.nn.Module):
    """What FusedSpecNeuronConfig's ``worker_cls`` is a subclass of."""


class NeuronBaseForCausalLM(NeuronApplicationBase):
    _model_cls: Any = NeuronBaseModel

    @played(f"{_HERE}.__init__")
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lines: list[list[int]] = [[] for _ in range(self.neuron_config.max_batch_size)]  # the cache's tokens

    @played(f"{_HERE}.forward")
    def forward(
        self,
        input_ids: Any = None,
        seq_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        sampling_params: Any = None,
    ) -> CausalLMOutputWithPast:
        """``input_ids``, ``position_ids`` [rows, tokens]; ``seq_ids`` [rows]; ``sampling_params`` [rows, 3].

        It is a prompt where there are several tokens and the smallest position is 0. Raises AssertionError for rows
        that the package would answer wrongly, and ValueError where no graph is long enough.
        """
        if not self.is_loaded_to_neuron:
            raise RuntimeError("Forward called before load. Run load() or to_cpu() making calling forward")
        neuron, width = self.neuron_config, input_ids.shape[1]
        if neuron.on_device_sampling_config is not None:
            validate_sampling_params(sampling_params, neuron.on_device_sampling_config)
        is_prompt = width > 1 and int(position_ids.min()) == 0
        lines, positions = seq_ids.tolist(), position_ids.amax(dim=1).tolist()
        lengths = [position + 1 for position in positions] if is_prompt else positions
        bucket = self._bucket(self.tags()[not is_prompt], attention_mask.shape[1])
        limit = attention_mask.shape[1]
        assert attention_mask.tolist() == [[1] * length + [0] * (limit - length) for length in lengths], "the mask"
        if is_prompt:
            # The package fills positions with 1 up to the bucket, and takes the place of the first highest one.
            assert all(length > 1 or width == bucket for length in lengths), "the end of a prompt of one token"
            for line, ids, length in zip(lines, input_ids.tolist(), lengths, strict=True):
                runtime().execute()
                self._lines[line] = ids[:length]
            return self._output(
                [[self._next(line, length)] for line, length in zip(lines, lengths, strict=True)], lengths
            )
        assert width == 1, f"no graph takes {width} tokens a row"
        assert lines == sorted(set(lines)), "a full batch is taken in the order of its rows"
        runtime().execute()
        for line in {*range(neuron.tkg_batch_size)} - {*lines}:  # written too, as the first row
            self._write(line, positions[0], int(input_ids[0, 0]))
        rows = []
        for line, token, position in zip(lines, input_ids[:, 0].tolist(), positions, strict=True):
            self._write(line, position, token)
            rows.append([self._next(line, position + 1)])
            while len(rows[-1]) < neuron.speculation_length and self._guessed(line, position + len(rows[-1])) == (
                token := int(rows[-1][-1].argmax())
            ):
                self._write(line, position + len(rows[-1]), token)
                rows[-1].append(self._next(line, position + len(rows[-1]) + 1))
        return self._output(rows, [position + len(row) for position, row in zip(positions, rows, strict=True)])

    def _bucket(self, tag: str, width: int) -> int:
        """The first bucket that is longer than mask and guesses; only the largest takes its own length."""
        length = width + (0 if tag == "context_encoding_model" else self.neuron_config.speculation_length)
        buckets = self.buckets(tag)
        if length > buckets[-1]:
            raise ValueError(f"Input len {width} exceeds largest bucket ({buckets[-1]}) for {tag}")
        return next((bucket for bucket in buckets if length < bucket), buckets[-1])

    def _write(self, line: int, position: int, token: int) -> None:
        tokens = self._lines[line]
        tokens += [0] * (position + 1 - len(tokens))
        tokens[position] = token

    def _next(self, line: int, length: int, name: str = "") -> torch.Tensor:
        """Logits [vocab] after the first tokens of a line."""
        with torch.no_grad():
            logits: torch.Tensor = self.plain[name](torch.tensor([self._lines[line][:length]])).logits[0, -1].float()
        return logits

    def _guessed(self, line: int, length: int) -> int:
        return int(self._next(line, length, DRAFT).argmax())

    def _output(self, rows: list[list[torch.Tensor]], ends: list[int]) -> CausalLMOutputWithPast:
        """``rows``: the logits of each new token. Where the device samples there are tokens, and no logits."""
        neuron = self.neuron_config
        if neuron.on_device_sampling_config is None:
            logits = torch.stack([row[-1] for row in rows])[:, None]
            return CausalLMOutputWithPast(logits=logits, hidden_states=logits)
        padding = [0] * max(neuron.speculation_length, 1)
        tokens = torch.tensor(
            [([int(logits.argmax()) for logits in row] + padding)[: len(padding)] for row in rows], dtype=torch.int32
        )
        output = CausalLMOutputWithPast(logits=None, hidden_states=tokens.flatten())
        if self.config.fused_spec_config is None:
            output.tokens = output.hidden_states
        else:
            output.fused_outputs = [tokens, None, None, torch.tensor(ends, dtype=torch.int32)[:, None]]
        return output
