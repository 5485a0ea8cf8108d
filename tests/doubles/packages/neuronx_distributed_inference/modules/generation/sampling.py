"""Sampling on the device, by ``[rows, 3]`` of top_k, top_p and temperature."""

from __future__ import annotations

from typing import Any

import torch

from neuronx_distributed_inference._played import has, played, trimmed

_HERE = "modules.generation.sampling"


@played(f"{_HERE}.prepare_sampling_params")
def prepare_sampling_params(
    batch_size: int,
    top_k: Any = [1],  # noqa: B006 - as recorded
    top_p: Any = [1.0],  # noqa: B006
    temperature: Any = [1.0],  # noqa: B006
) -> torch.Tensor:
    columns = [
        torch.as_tensor(column, dtype=torch.float32).broadcast_to(batch_size) for column in (top_k, top_p, temperature)
    ]
    return torch.stack(columns, dim=1)


def check(params: torch.Tensor, on_device_sampling_config: Any) -> None:
    """Raises ValueError. top_k may be 0 and -1, though what comes of that is one token drawn from all."""
    if params.dim() != 2 or params.shape[1] != 3:
        raise ValueError(f"sampling_params must be [batch, 3], not {list(params.shape)}")
    most = on_device_sampling_config.global_topk
    for top_k, top_p, temperature in params.tolist():
        if top_k != int(top_k) or not (top_k in (-1, 0) or 1 <= top_k <= most):
            raise ValueError(f"Invalid top-k values. top-k should be -1, 0 or from 1 to {most}, found {top_k}")
        if not 0 < top_p <= 1:
            raise ValueError(f"Invalid top-p values, found {top_p}")
        if temperature <= 0:
            raise ValueError(f"Invalid temperature values, found {temperature}")


if has(f"{_HERE}.validate_sampling_params"):

    @played(f"{_HERE}.validate_sampling_params")
    def validate_sampling_params(params: torch.Tensor, on_device_sampling_config: Any) -> None:
        check(params, on_device_sampling_config)


@trimmed
class Sampler(torch.nn.Module):
    @played(f"{_HERE}.Sampler.__init__")
    def __init__(self, neuron_config: Any, do_sample: bool | None = None) -> None:
        super().__init__()
        self.how = neuron_config.on_device_sampling_config
        self.do_sample = self.how.do_sample if do_sample is None else do_sample

    @played(f"{_HERE}.Sampler.forward")
    def forward(
        self,
        token_logits: torch.Tensor,
        sampling_params: torch.Tensor,
        return_values: bool = False,
        rank_id: Any = None,
    ) -> torch.Tensor:
        """One token for each row of ``[rows, vocab]``. Without do_sample it is the largest logit, whatever is asked."""
        if not self.do_sample:
            return token_logits.argmax(dim=-1)
        if not self.how.dynamic:
            fixed = [self.how.top_k, self.how.top_p, self.how.temperature]
            sampling_params = torch.tensor([fixed] * len(token_logits), dtype=torch.float32)
        rows = zip(token_logits, sampling_params.tolist(), strict=True)
        return torch.stack([self._one(logits, *params) for logits, params in rows])

    def _one(self, logits: torch.Tensor, top_k: float, top_p: float, temperature: float) -> torch.Tensor:
        if top_k <= 0:
            return torch.randint(len(logits), ())  # no cut: uniform over all, and not "top_k is off"
        best, ids = logits.topk(min(int(top_k), len(logits)))
        shares = torch.softmax(best / temperature, dim=-1)
        nucleus = shares.cumsum(-1) - shares < top_p
        point = torch.tensor(0.5) if self.how.deterministic else torch.rand(())
        ends = (shares * nucleus).cumsum(-1)
        return ids[int(torch.searchsorted(ends, point * ends[-1]).clamp(max=int(nucleus.sum()) - 1))]
