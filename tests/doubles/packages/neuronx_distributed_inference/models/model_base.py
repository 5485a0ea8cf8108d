"""``forward`` of a causal language model: one prefill, or one decode, of rows that are cache lines."""

from __future__ import annotations

from typing import Any

import torch
from neuron_double.runtime import runtime
from transformers.modeling_outputs import CausalLMOutputWithPast

from neuronx_distributed_inference._played import played, trimmed
from neuronx_distributed_inference.models.application_base import NeuronApplicationBase
from neuronx_distributed_inference.models.model_wrapper import Lines, lines_of, mask_width, target_bucket
from neuronx_distributed_inference.modules.generation.sampling import (
    Sampler,
    check,
    prepare_sampling_params,
)

_HERE = "models.model_base.NeuronBaseForCausalLM"


class NeuronBaseModel(torch.nn.Module):
    """What FusedSpecNeuronConfig's ``worker_cls`` is a subclass of."""


@trimmed
class NeuronBaseForCausalLM(NeuronApplicationBase):
    _model_cls: Any = NeuronBaseModel

    @played(f"{_HERE}.__init__")
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vocab_size = int(self.config.vocab_size)
        self.kv_cache_populated = False
        self.taken: list[tuple[str, int]] = []  # tag and bucket of every graph that ran, for tests
        self.on_device_sampling = self.neuron_config.on_device_sampling_config is not None
        self.sampler = Sampler(self.neuron_config) if self.on_device_sampling else None
        if getattr(self.neuron_config, "is_medusa", False):
            raise RuntimeError("the checkpoint has no Medusa heads")
        if self.fused and self.config.fused_spec_config is None:
            raise AttributeError("'NoneType' object has no attribute 'draft_config'")

    @property
    def _truncates(self) -> bool:
        return bool(getattr(self.neuron_config, "allow_input_truncation", False))

    @property
    def fused(self) -> bool:
        return bool(getattr(self.neuron_config, "enable_fused_speculation", False))

    @played(f"{_HERE}.forward")
    def forward(
        self,
        input_ids: Any = None,
        seq_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Any = None,
        sampling_params: Any = None,
        prev_hidden: Any = None,
        labels: Any = None,
        use_cache: Any = None,
        output_attentions: Any = None,
        output_hidden_states: Any = None,
        adapter_ids: Any = None,
        medusa_args: Any = None,
        return_dict: Any = None,
        llava_args: Any = [],  # noqa: B006 - as recorded
        input_capture_hook: Any = None,
        tensor_capture_hook: Any = None,
        slot_mapping: Any = None,
        block_table: Any = None,
        full_context_lens: Any = None,
        computed_context_lens: Any = None,
        rotary_position_ids: Any = None,
        tf_args: Any = None,
    ) -> CausalLMOutputWithPast:
        """``input_ids``, ``position_ids`` [rows, tokens]; ``seq_ids`` [rows]; ``sampling_params`` [rows, 3].

        It is a prefill when there are several tokens and the smallest position is 0.
        """
        if not self.is_loaded_to_neuron:
            raise RuntimeError("Forward called before load. Run load() or to_cpu() making calling forward")
        if getattr(self.neuron_config, "chunked_prefill_config", None) is not None:
            raise NotImplementedError("chunked prefill")
        ids = input_ids.to(torch.int32).long()  # the graphs have int32 inputs
        rows, count = ids.shape
        assert position_ids is not None, "need to call forward with position_ids if attention_mask is not provided"
        positions = position_ids.to(torch.int32).long()
        order = torch.arange(rows) if seq_ids is None else seq_ids.to(torch.int32).long()
        params = prepare_sampling_params(rows) if sampling_params is None else sampling_params
        if self.on_device_sampling:
            check(params, self.neuron_config.on_device_sampling_config)
        call = _Call(ids, positions, order.tolist(), params, attention_mask)
        if count > 1 and int(positions.min()) == 0:
            outputs = self._prefill(call)
            self.kv_cache_populated = True
        elif self.fused:
            outputs = self._fused_step(call)
        elif count == 1 or count == self.neuron_config.speculation_length:
            outputs = self._decode(call)
        else:
            raise RuntimeError(f"no graph takes {count} tokens a row")
        return outputs

    @played(f"{_HERE}.validate_sampling_params")
    def validate_sampling_params(self, params: torch.Tensor) -> None:
        check(params, self.neuron_config.on_device_sampling_config)

    @played(f"{_HERE}.reset")
    def reset(self) -> None:
        """Between batches; what the caches hold stays."""
        self.kv_cache_populated = False

    @played(f"{_HERE}.reset_kv_cache")
    def reset_kv_cache(self) -> None:
        for model in self._models():
            model.clear()

    def _models(self) -> list[Any]:
        """The draft before the target."""
        return [model for model in (self.draft, self.target) if model is not None]

    def _prefill(self, call: _Call) -> CausalLMOutputWithPast:
        """Each row's length is its largest position and one; what is padding is told by nothing else."""
        neuron = self.neuron_config
        tag = "context_encoding_model"
        width = call.ids.shape[1] if call.mask is None else call.mask.shape[1]
        bucket = self._bucket(tag, width, 0)
        if not neuron.is_continuous_batching and len(call.order) > neuron.ctx_batch_size:
            raise ValueError(f"batch size {len(call.order)} exceeds the compiled batch size {neuron.ctx_batch_size}")
        logits = []
        for start in range(0, len(call.order), neuron.ctx_batch_size):
            part = call.order[start : start + neuron.ctx_batch_size]
            lines = self._lines(part, neuron.ctx_batch_size, scatters=neuron.is_continuous_batching)
            runtime().execute()
            prompts = []
            for row, line in enumerate(lines.rows, start):
                length = min(int(call.positions[row].max()) + 1, bucket)
                prompts.append(call.ids[row, :length].tolist())
                last = [model.run(line, prompts[-1], 0) for model in self._models()][-1][-1:]
                logits.append(call.masked(last, row, length))
            for line in lines.overwritten:
                for model in self._models():
                    model.run(line, prompts[0], 0)
        return self._output(torch.stack(logits), call, call.positions.max(dim=1).values)

    def _decode(self, call: _Call) -> CausalLMOutputWithPast:
        tag = "speculation_model" if call.ids.shape[1] > 1 else "token_generation_model"
        self._step_bucket(call, tag)
        lines = self._lines(call.order, self.neuron_config.tkg_batch_size)
        runtime().execute()
        logits = []
        for row, line in enumerate(lines.rows):
            position = int(call.positions[row, 0])
            logits.append(call.masked(self.target.run(line, call.ids[row].tolist(), position), row, position))
        for line in lines.overwritten:
            self.target.run(line, call.ids[0].tolist(), int(call.positions[0, 0]))
        return self._output(torch.stack(logits), call, call.positions[:, -1])

    def _fused_step(self, call: _Call) -> CausalLMOutputWithPast:
        """The draft guesses, the target takes what it would have said itself and one more token."""
        length = self.neuron_config.speculation_length
        self._step_bucket(call, "fused_speculation_model")
        lines = self._lines(call.order, self.neuron_config.tkg_batch_size)
        runtime().execute()
        accepted, counts, ends = [], [], []
        for row, line in enumerate(lines.rows):
            position = int(call.positions[row, -1])
            guesses = self._drafted(line, int(call.ids[row, -1]), position, length)
            logits = self.target.run(line, [int(call.ids[row, -1]), *guesses], position)
            logits = call.masked(logits, row, position)
            own = self._chosen(logits, call.params[row : row + 1].expand(length, 3)).tolist()
            agreed = next((i for i, guess in enumerate(guesses) if guess != own[i]), length - 1)
            accepted.append(own[: agreed + 1] + [0] * (length - agreed - 1))
            counts.append(agreed + 1)
            ends.append(position + agreed + 1)
        for line in lines.overwritten:
            token, position = int(call.ids[0, -1]), int(call.positions[0, -1])
            guesses = self._drafted(line, token, position, length)
            self.target.run(line, [token, *guesses], position)
        return self._fused_output(torch.tensor(accepted), torch.tensor(counts), torch.tensor(ends)[:, None])

    def _drafted(self, line: int, token: int, position: int, length: int) -> list[int]:
        """``length - 1`` guesses; the last of them is written to the draft's cache too."""
        guesses: list[int] = []
        for ahead in range(length):
            logits = self.draft.run(line, [guesses[-1] if guesses else token], position + ahead)
            guesses.append(int(logits[-1].argmax()))
        return guesses[:-1]

    def _lines(self, order: list[int], batch: int, scatters: bool = False) -> Lines:
        return lines_of(order, batch, scatters, getattr(self.neuron_config, "apply_seq_ids_mask", False))

    def _step_bucket(self, call: _Call, tag: str) -> None:
        """By the width of the mask, given or inferred, and the tokens of a step that speculates."""
        ahead = 0 if tag == "token_generation_model" else self.neuron_config.speculation_length
        self._bucket(tag, mask_width(call.mask, int(call.positions[:, 0].max()), self.neuron_config), ahead)

    def _bucket(self, tag: str, width: int, ahead: int) -> int:
        bucket = target_bucket(self.buckets(tag), width, ahead, self._truncates, tag)
        self.taken.append((tag, bucket))
        return bucket

    def _chosen(self, logits: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        if self.sampler is None:
            return logits.argmax(dim=-1)
        chosen: torch.Tensor = self.sampler(logits, params)
        return chosen

    def _output(self, logits: torch.Tensor, call: _Call, last: torch.Tensor) -> CausalLMOutputWithPast:
        """``logits`` [rows, tokens, vocab]. Where the device samples there are tokens, and no logits."""
        if self.fused:
            tokens = self._chosen(logits[:, -1], call.params)[:, None]
            padding = torch.zeros(len(tokens), self.neuron_config.speculation_length - 1, dtype=tokens.dtype)
            ones = torch.ones(len(tokens), dtype=torch.long)
            return self._fused_output(torch.cat([tokens, padding], dim=1), ones, last[:, None] + 1)
        if not self.on_device_sampling:
            output = CausalLMOutputWithPast(logits=logits, hidden_states=logits)
            output.tokens = logits
            return output
        count = logits.shape[1]
        tokens = self._chosen(logits.flatten(0, 1), call.params.repeat_interleave(count, dim=0)).to(torch.int32)
        tokens = tokens if count == 1 else tokens.reshape(-1, count)
        output = CausalLMOutputWithPast(logits=None, hidden_states=tokens)
        output.tokens = tokens
        if getattr(self.neuron_config, "output_logits", False):
            output.logits = logits
        return output

    def _fused_output(self, accepted: torch.Tensor, counts: torch.Tensor, ends: torch.Tensor) -> CausalLMOutputWithPast:
        """A list: accepted tokens [rows, speculation_length] with zeros behind them, next input_ids and mask, and last

        the next position_ids [rows, 1]; as many tokens are accepted as the position moves on.
        """
        mask = (torch.arange(self.neuron_config.max_length)[None] < ends).to(torch.int32)
        outputs = [accepted.to(torch.int32), accepted.gather(1, counts[:, None] - 1), mask, ends.to(torch.int32)]
        output = CausalLMOutputWithPast(logits=None, hidden_states=outputs)
        output.fused_outputs = outputs
        return output


class _Call:
    """What one ``forward`` was given."""

    def __init__(self, ids: Any, positions: Any, order: list[int], params: Any, mask: Any) -> None:
        self.ids, self.positions, self.order, self.params, self.mask = ids, positions, order, params, mask

    def masked(self, logits: torch.Tensor, row: int, length: int) -> torch.Tensor:
        """Other logits, where the attention mask says of another number of tokens that they are there.

        ``length`` is what is in the cache before the call: in a step not the token that is its input, whose place in
        the cache would be read before it is written.
        """
        if self.mask is None or self.mask[row].nonzero().flatten().tolist() == list(range(length)):
            return logits
        return logits.roll(1, dims=-1)
