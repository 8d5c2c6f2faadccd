"""Where log-probabilities are subtracted and exponentiated: in which type, and how far."""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 4.9e8: beyond any ratio that means something, and far from the end of float32 even when squared and summed."""


def widened(tensor: Tensor) -> Tensor:
    """float32 for the half types, everything else as it is."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def clamped_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """exp(logprobs - base_logprobs), the exponent held within LOG_RATIO_LIMIT, where the gradient is 0 beyond."""
    return (widened(logprobs) - widened(base_logprobs)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
