"""The bounds of parameters for sampling on the device: ``[rows, 3]`` of top_k, top_p and temperature."""

from __future__ import annotations

from typing import Any

import torch

from neuronx_distributed_inference._played import version


def validate_sampling_params(params: torch.Tensor, on_device_sampling_config: Any) -> None:
    """Raises ValueError, and NotImplementedError for what is accepted, but not greedy."""
    most = on_device_sampling_config.global_topk
    greedy_at_0 = version() >= "0.6"  # a temperature of 0, but only with a top_k; earlier ones refuse a top_k of 0, too
    for top_k, top_p, temperature in params.tolist():
        if top_k != int(top_k) or not (top_k == -1 or 1 - greedy_at_0 <= top_k <= most):
            raise ValueError(
                f"Invalid top-k values. top-k should be -1 or from {1 - greedy_at_0} to {most}, found {top_k}"
            )
        if not 0 < top_p <= 1:
            raise ValueError(f"Invalid top-p values, found {top_p}")
        if temperature < 0 or (temperature == 0 and not (greedy_at_0 and top_k >= 1)):
            raise ValueError(f"Invalid temperature values, found {temperature}")
        if top_k != 1:
            raise NotImplementedError("a draw")
