"""Packed and shared computation equals every sample computed alone: log-probs, values, gradients."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from miles.train import forward
from miles.train.micro_batches import MicroBatch, PackingRule, empty_micro_batch, pack
from miles.train.model import PolicyModel
from miles.types import RolloutData
from tests.train.rollouts import make_data

TEMPERATURE = 0.7


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def policy(request: pytest.FixtureRequest, tiny: str) -> PolicyModel:
    hf = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float64, attn_implementation=request.param)
    return PolicyModel(hf.eval(), TEMPERATURE)


def alone(policy: PolicyModel, data: RolloutData) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [tokens] of every sample by itself, through the plain Hugging Face forward."""
    logprobs, entropies = [], []
    for start, end in zip(data.offsets[:-1], data.offsets[1:], strict=True):
        ids = torch.tensor(data.token_ids[start:end], dtype=torch.long)
        log_p = (policy.hf(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        zero = log_p.new_zeros(1)
        logprobs.append(torch.cat([zero, log_p.gather(-1, ids[1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(log_p.exp() * log_p).sum(-1)]))
    return torch.cat(logprobs), torch.cat(entropies)


def packed(policy: PolicyModel, batches: list[MicroBatch], size: int) -> tuple[Tensor, Tensor]:
    places = torch.cat([batch.tokens for batch in batches])
    assert len(places) == len(places.unique()), "a token is computed once"
    first, second = zip(*(forward.run(policy, batch) for batch in batches), strict=True)
    zeros = torch.zeros(size, dtype=first[0].dtype)
    return zeros.index_put((places,), torch.cat(first)), zeros.index_put((places,), torch.cat(second))


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("max_tokens", [20, 64, 4096])
def test_packing_equals_samples_alone(policy: PolicyModel, share: bool, max_tokens: int) -> None:
    data = make_data(3, longest=20)
    batches = pack(
        data.token_ids,
        data.offsets,
        data.loss_mask,
        range(data.num_samples),
        PackingRule(max_tokens, share, dense_mask=True, hidden_size=128),
    )
    mask = torch.tensor(data.loss_mask, dtype=torch.float64)
    weights = torch.randn(len(mask), generator=torch.Generator().manual_seed(0), dtype=torch.float64) * mask
    results = []
    for logprobs, entropies in (alone(policy, data), packed(policy, batches, len(mask))):
        policy.zero_grad()
        (weights * (logprobs + 0.3 * entropies)).sum().backward()
        results.append((logprobs * mask, entropies * mask, [p.grad.clone() for p in policy.parameters() if p.grad is not None]))
    (want, want_entropy, want_grads), (got, got_entropy, got_grads) = results
    assert torch.allclose(want, got, rtol=0, atol=1e-5)
    assert torch.allclose(want_entropy, got_entropy, rtol=0, atol=1e-5)
    assert len(want_grads) == len(got_grads)
    for a, b in zip(want_grads, got_grads, strict=True):
        # norms, and eager's softmax, are float32 inside whatever the model is
        assert (a - b).abs().max() <= 2e-6 * a.abs().max()


def test_sharing_computes_less_and_budget_holds() -> None:
    data = make_data(5, groups=6, siblings=8)
    nodes = {}
    for share in (True, False):
        batches = pack(data.token_ids, data.offsets, data.loss_mask, range(48), PackingRule(128, share, dense_mask=True, hidden_size=128))
        assert all(batch.input_ids.numel() <= 128 for batch in batches)
        nodes[share] = sum(batch.num_nodes for batch in batches)
    assert nodes[False] == len(data.token_ids)
    assert nodes[True] < 0.7 * nodes[False]


def test_a_sample_longer_than_the_budget_gets_a_row_of_its_own() -> None:
    data = make_data(1, groups=1, siblings=3, longest=30)
    batches = pack(data.token_ids, data.offsets, data.loss_mask, range(3), PackingRule(5, False, dense_mask=True, hidden_size=128))
    assert [batch.input_ids.shape[0] for batch in batches] == [1, 1, 1]


def test_nothing_trained_packs_to_nothing() -> None:
    data = make_data(1)
    first = np.zeros_like(data.loss_mask)
    first[data.offsets[:-1]] = 1  # has no token before it that could tell its probability
    for mask in (np.zeros_like(data.loss_mask), first):
        assert pack(data.token_ids, data.offsets, mask, range(16), PackingRule(64, True, True, 128)) == []
    assert empty_micro_batch(True).num_trained == 0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(8, 200), st.booleans())
def test_every_trained_token_is_computed_once_and_sees_its_own_past(seed: int, max_tokens: int, share: bool) -> None:
    data = make_data(seed, groups=3, siblings=3)
    batches = pack(data.token_ids, data.offsets, data.loss_mask, range(9), PackingRule(max_tokens, share, True, 128))
    seen = np.concatenate([batch.tokens.numpy() for batch in batches])
    assert sorted(seen.tolist()) == np.flatnonzero(data.loss_mask).tolist()
    for batch in batches:
        assert batch.mask is not None
        length = batch.input_ids.shape[1]
        for token, edge in zip(batch.tokens.tolist(), batch.edge_of.tolist(), strict=True):
            sample = int(np.searchsorted(data.offsets, token, "right")) - 1
            past = data.token_ids[data.offsets[sample] : token].tolist()
            state = int(batch.states[batch.state_of[edge]])
            row, place = divmod(state, length)
            visible = batch.mask[row, 0, place].nonzero()[:, 0]
            assert batch.targets[edge] == data.token_ids[token]
            assert batch.position_ids[row, visible].tolist() == list(range(len(past)))
            assert batch.input_ids[row, visible].tolist() == past
