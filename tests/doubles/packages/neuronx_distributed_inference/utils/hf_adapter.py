"""Reading a checkpoint's configuration, and ``generate`` in the manner of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig

from neuronx_distributed_inference._played import played, trimmed, version
from neuronx_distributed_inference.modules.generation.sampling import prepare_sampling_params

_HERE = "utils.hf_adapter"


@played(f"{_HERE}.load_pretrained_config")
def load_pretrained_config(model_path_or_name: Any = None, hf_config: Any = None) -> Callable[[Any], None]:
    """A hook for InferenceConfig, which sets all that config.json says."""

    def load_config(self: Any) -> None:
        config = AutoConfig.from_pretrained(model_path_or_name) if hf_config is None else hf_config
        plain = config.to_dict()
        rope = plain.get("rope_parameters") or {}
        if "rope_theta" in rope:
            plain.setdefault("rope_theta", rope["rope_theta"])
        for name, value in plain.items():
            setattr(self, name, value)
        for alias, name in getattr(config, "attribute_map", {}).items():
            if hasattr(config, name):
                setattr(self, alias, getattr(config, name))
        for name in ("pad_token_id", "rope_scaling", "tie_word_embeddings", "head_dim"):
            if not hasattr(self, name):
                setattr(self, name, getattr(config, name, None))
        self.hf_config = {name: value for name, value in plain.items() if name not in ("model_type", "torch_dtype")}
        self.hf_config.pop("dtype", None)
        self._name_or_path = str(model_path_or_name or config._name_or_path)
        dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
        if not self.neuron_config.overrides_torch_dtype and isinstance(dtype, torch.dtype):
            self.neuron_config.torch_dtype = dtype
        for name in ("torch_dtype", "dtype"):
            vars(self).pop(name, None)

    return load_config


@trimmed
class HuggingFaceGenerationAdapter:
    @played(f"{_HERE}.HuggingFaceGenerationAdapter.__init__")
    def __init__(self, model: Any, input_start_offsets: Any = None, capture_draft_logits: bool = False) -> None:
        self.neuron_model = model
        self.neuron_config = model.neuron_config
        self.config = model.config

    @played(f"{_HERE}.HuggingFaceGenerationAdapter.generate")
    def generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``[batch, prompt and answer]`` of right-padded prompts. Only the compiled batch; no beam search.

        0.7 and 0.8 fail at every call. From 0.3 on ``sampling_params`` is replaced by what the GenerationConfig says,
        do_sample or not. Logits on the host are warped by transformers, and by the package's sampler once more.
        """
        if version() in ("0.7", "0.8"):
            raise NameError("name 'tensor_capture_hook' is not defined")
        call_arguments = _GenerateArguments(*args, **kwargs)
        if call_arguments.num_beams != 1:
            raise NotImplementedError("beam search is not supported")
        model, ids = self.neuron_model, call_arguments.input_ids
        compiled = self.neuron_config.batch_size
        if len(ids) != compiled:
            raise ValueError(f"the batch has {len(ids)} rows, the compiled batch size is {compiled}")
        model.reset()
        mask = torch.ones_like(ids) if call_arguments.attention_mask is None else call_arguments.attention_mask
        lengths = mask.sum(dim=1)
        positions = (mask.cumsum(dim=1) - 1).masked_fill(mask == 0, 0)
        params = prepare_sampling_params(
            len(ids), [call_arguments.top_k], [call_arguments.top_p], [call_arguments.temperature]
        )
        if call_arguments.streamer is not None:
            call_arguments.streamer.put(ids)
        call = {"sampling_params": params}
        if version() == "0.2" and call_arguments.sampling_params is not None:
            call = {"sampling_params": call_arguments.sampling_params}
        output = model.forward(input_ids=ids, attention_mask=mask, position_ids=positions, **call)
        answer = torch.empty(len(ids), 0, dtype=torch.long)
        ended = torch.zeros(len(ids), dtype=torch.bool)
        most = min(call_arguments.most(ids.shape[1]), self.neuron_config.max_length - int(lengths.max()))
        while True:
            for column in self._tokens(output, params, call_arguments.do_sample).unbind(dim=1):
                tokens = column.masked_fill(ended, call_arguments.pad_token_id)
                answer = torch.cat([answer, tokens[:, None]], dim=1)
                if call_arguments.streamer is not None:
                    call_arguments.streamer.put(tokens)
                ended |= torch.isin(tokens, torch.tensor(call_arguments.eos, dtype=torch.long))
                if bool(ended.all()) or answer.shape[1] >= most:
                    if call_arguments.streamer is not None:
                        call_arguments.streamer.end()
                    return torch.cat([ids, answer], dim=1)
            step = (lengths + answer.shape[1] - 1)[:, None]
            there = torch.arange(int(step.max()))[None] < step  # the mask grows by a token with every step
            output = model.forward(input_ids=answer[:, -1:], position_ids=step, attention_mask=there.long(), **call)

    def _tokens(self, output: Any, params: torch.Tensor, samples: bool) -> torch.Tensor:
        """[batch, how many are new]; several only of one row that speculates."""
        if self.neuron_model.fused:
            accepted, mask = output.fused_outputs[0].long(), output.fused_outputs[0] != 0
            count = int(mask[0].nonzero().max()) + 1 if len(accepted) == 1 and bool(mask.any()) else 1
            return accepted[:, :count]
        if self.neuron_model.on_device_sampling:
            tokens: torch.Tensor = output.tokens.reshape(-1, 1).long()
            return tokens
        logits = output.logits[:, -1]
        if not samples:
            return logits.argmax(dim=-1, keepdim=True)
        drawn = []
        for row, (top_k, top_p, temperature) in zip(logits, params.tolist(), strict=True):
            best, places = row.topk(min(int(top_k), len(row)) if top_k > 0 else len(row))
            shares = torch.softmax(best / temperature, dim=-1)
            scores = (best / temperature).masked_fill(shares.cumsum(-1) - shares >= top_p, float("-inf"))
            again = torch.softmax(scores / temperature if top_k > 0 else torch.zeros_like(scores), dim=-1)
            drawn.append(places[torch.multinomial(again, 1)])
        return torch.stack(drawn)


class _GenerateArguments:
    """The arguments of ``generate``. Raises TypeError for one that this stand-in does not know."""

    def __init__(
        self,
        input_ids: Any = None,
        *,
        generation_config: Any = None,
        attention_mask: Any = None,
        max_new_tokens: int | None = None,
        max_length: int | None = None,
        streamer: Any = None,
        sampling_params: Any = None,
        **plain: Any,
    ) -> None:
        self.input_ids = plain.pop("inputs", input_ids)
        self.attention_mask, self.streamer, self.sampling_params = attention_mask, streamer, sampling_params
        usual = {"do_sample": False, "temperature": 1.0, "top_k": 50, "top_p": 1.0, "num_beams": 1}
        usual |= {"eos_token_id": None, "pad_token_id": 0}
        if unknown := set(plain) - set(usual):
            raise TypeError(f"generate() got unexpected keyword arguments {sorted(unknown)}")
        configured = {name: getattr(generation_config, name, None) for name in usual}
        self.__dict__.update(usual | {name: value for name, value in configured.items() if value is not None} | plain)
        eos = self.__dict__["eos_token_id"]
        self.eos = [] if eos is None else list(eos) if isinstance(eos, (list, tuple, set)) else [eos]
        self.max_new_tokens = max_new_tokens or getattr(generation_config, "max_new_tokens", None)
        self.max_length = max_length or getattr(generation_config, "max_length", None)

    do_sample: bool
    num_beams: int
    pad_token_id: int
    temperature: float
    top_k: int
    top_p: float

    def most(self, prompt: int) -> int:
        """How many tokens may come."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return (self.max_length or 20) - prompt
