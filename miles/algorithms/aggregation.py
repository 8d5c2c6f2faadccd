"""From losses of tokens to the loss of a step: one weight per sample, exact under any split."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Aggregation = Literal["token_mean", "sequence_mean", "constant"]


def step_totals(num_trained_tokens: Tensor) -> tuple[int, int]:
    """The two global counts of an optimizer step that `token_weights` divides by.

    Args:
        num_trained_tokens: [samples of the step, all ranks and micro-batches], 0 where nothing is trained (unscored).

    Returns:
        trained tokens, and samples that have any. A sample without trained tokens counts in neither, so a step with an
        unscored sample has the loss and the gradient of the step without it.
    """
    return int(num_trained_tokens.sum()), int((num_trained_tokens > 0).sum())


def token_weights(
    aggregation: Aggregation,
    num_trained_tokens: Tensor,
    global_num_tokens: int,
    global_num_samples: int,
    max_response_length: int,
) -> Tensor:
    """The weight that every trained token of each sample has in the loss of its optimizer step.

    loss = sum over samples s and their trained tokens t of weight[s] * loss[s, t], a plain sum over micro-batches and
    ranks: gradients are added, never averaged, and the number is the same for any split.

    - token_mean: 1 / global_num_tokens. Every token counts alike (DAPO, arXiv 2503.14476).
    - sequence_mean: 1 / (tokens of the sample x global_num_samples). Every sample counts alike (GRPO, arXiv 2402.03300).
    - constant: 1 / (global_num_samples x max_response_length). No length in the weight (Dr.GRPO, arXiv 2503.20783).

    Args:
        aggregation: one of the three.
        num_trained_tokens: [samples], of the samples at hand.
        global_num_tokens: trained tokens of the whole step, from `step_totals`.
        global_num_samples: samples with trained tokens of the whole step, from `step_totals`.
        max_response_length: the length limit of responses, for constant.

    Returns:
        float64 [samples]; 0 for samples without trained tokens.
    """
    tokens = num_trained_tokens.double()  # [samples]
    if aggregation == "token_mean":
        denominator = torch.full_like(tokens, global_num_tokens)
    elif aggregation == "sequence_mean":
        denominator = tokens * global_num_samples
    elif aggregation == "constant":
        denominator = torch.full_like(tokens, global_num_samples * max_response_length)
    else:
        raise ValueError(f"loss_aggregation {aggregation!r} is none of token_mean, sequence_mean, constant")
    trained = tokens > 0
    if bool((trained & (denominator <= 0)).any()):
        raise ValueError(
            f"{int(trained.sum())} samples have trained tokens, but the step's totals are {global_num_tokens} tokens in "
            f"{global_num_samples} samples of at most {max_response_length}"
        )
    return torch.where(trained, 1.0 / torch.where(trained, denominator, 1.0), 0.0)
