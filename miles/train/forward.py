"""Passes without gradients: a number for every trained token of a share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from miles.train.mesh import Ranks
from miles.train.micro_batches import MicroBatch, empty_micro_batch
from miles.train.model import TrainedModel


def run(model: TrainedModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """The model's two outputs for each trained token of `batch`, in the order of batch.tokens: float32 [trained tokens] each."""
    by_edge, by_state = model(batch)
    state_of_token = batch.state_of.index_select(0, batch.edge_of)
    return by_edge.index_select(0, batch.edge_of), by_state.index_select(0, state_of_token)


def run_with_likeliest(model: TrainedModel, batch: MicroBatch, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `run`, and the log-probs of other tokens in the place of each trained one: ids int [trained tokens, n] -> float32 [same]."""
    if not len(batch.tokens):
        return *run(model, batch), torch.zeros(ids.shape, device=ids.device)
    edges, count = len(batch.targets), ids.shape[1]
    state_of_token = batch.state_of.index_select(0, batch.edge_of)
    state_of, order = torch.cat([batch.state_of, state_of_token.repeat_interleave(count)]).sort(stable=True)
    targets = torch.cat([batch.targets, ids.flatten().long()])[order]
    by_edge, by_state = model(replace(batch, state_of=state_of, targets=targets))
    in_order = torch.empty_like(by_edge).index_copy(0, order, by_edge)
    own = in_order[:edges].index_select(0, batch.edge_of)
    return own, by_state.index_select(0, state_of_token), in_order[edges:].view(-1, count)


def equalize(batches: list[MicroBatch], ranks: Ranks, dense_mask: bool) -> list[MicroBatch]:
    """The same number of passes on every rank: FSDP's collectives must match. At least one."""
    count = int(ranks.max(torch.tensor(max(1, len(batches)), device=ranks.device)))
    return batches + [empty_micro_batch(dense_mask)] * (count - len(batches))


@torch.no_grad()
def evaluate(model: TrainedModel, batches: Sequence[MicroBatch], out: Tensor) -> None:
    """Write the model's log-probs (or values) of the batches' trained tokens into `out`: float32 [own tokens]."""
    for batch in batches:
        moved = batch.to(out.device)
        out[moved.tokens] = run(model, moved)[0].to(out.dtype)
