"""Score centering against the definition: the sampler's expectation of the weighted score, over the whole vocabulary, in float64."""

import math

import pytest
import torch

from miles.algorithms.score_centering import coefficients, expected_score

WEIGHTS = {
    "none": torch.ones_like,
    "tis": lambda ratio: ratio.clamp(max=1.2),
    "band": lambda ratio: ratio * ((ratio > 0.7) & (ratio < 1.3)),
}


def two_policies(vocabulary: int = 9, tokens: int = 6, gap: float = 0.5) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the trained policy, with gradient, and log-probs of its sampler."""
    torch.manual_seed(0)
    logits = torch.randn(tokens, vocabulary, dtype=torch.float64) * 2
    sampler = (logits + gap * torch.randn(tokens, vocabulary, dtype=torch.float64)).log_softmax(-1)
    return logits.requires_grad_(), sampler


def definition(logits: torch.Tensor, sampler: torch.Tensor, weight) -> torch.Tensor:
    """sum over v of q_v w_v (e_v - p), token by token."""
    p, q = logits.detach().softmax(-1), sampler.exp()
    found = torch.zeros_like(p)
    for token in range(len(p)):
        for v in range(p.shape[1]):
            score = torch.eye(p.shape[1], dtype=torch.float64)[v] - p[token]
            found[token] += q[token, v] * weight(p[token, v] / q[token, v]) * score
    return found


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_with_the_whole_vocabulary_it_is_the_samplers_expectation(weight) -> None:
    logits, sampler = two_policies()
    expected_score(logits.log_softmax(-1), sampler, weight).sum().backward()
    torch.testing.assert_close(logits.grad, definition(logits, sampler, weight), atol=1e-12, rtol=0)


@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("head", [1, 3, 8])
def test_a_head_is_exact_for_a_sampler_whose_tail_is_the_policys(weight, head) -> None:
    """Of any other sampler it takes the tail for rho p; what it then computes is the expectation under that one."""
    logits, sampler = two_policies()
    values, ids = sampler.topk(head, -1)
    expected_score(logits.log_softmax(-1).gather(-1, ids), values, weight).sum().backward()
    p = logits.detach().softmax(-1)
    outside = torch.ones_like(p, dtype=torch.bool).scatter_(-1, ids, False)
    rho = (1 - values.exp().sum(-1, keepdim=True)) / (p * outside).sum(-1, keepdim=True)
    modelled = torch.where(outside, rho * p, sampler.exp())
    torch.testing.assert_close(modelled.sum(-1), torch.ones(len(p), dtype=torch.float64))
    torch.testing.assert_close(logits.grad, definition(logits, modelled.log(), weight), atol=1e-12, rtol=0)


def test_two_tokens_by_hand() -> None:
    """p = (0.6, 0.4), q = (0.5, 0.5): what the sampler expects of the score is q - p = (-0.1, 0.1); with weights p / q nothing."""
    logits = torch.tensor([[0.6, 0.4]], dtype=torch.float64).log().requires_grad_()
    sampler = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    expected_score(logits.log_softmax(-1), sampler).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.1, 0.1]], dtype=torch.float64))
    logits.grad = None
    expected_score(logits.log_softmax(-1), sampler, lambda ratio: ratio).sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros(1, 2, dtype=torch.float64))


def test_the_centred_gradient_has_no_drift() -> None:
    """Averaged over what the sampler draws, A (w s - E[w s]) is 0 for a constant A, and A w s is not."""
    logits, sampler = two_policies(tokens=1)
    logp = logits.log_softmax(-1)
    weight = WEIGHTS["tis"]
    drawn = (sampler.exp() * weight((logp - sampler).exp()).detach() * logp).sum()  # E_q of w log p
    (drift,) = torch.autograd.grad(drawn, logits, retain_graph=True)
    assert drift.abs().max() > 1e-3
    (centred,) = torch.autograd.grad(drawn - expected_score(logp, sampler, weight).sum(), logits)
    torch.testing.assert_close(centred, torch.zeros_like(centred), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
def test_nothing_is_infinite_whatever_the_policies_do(dtype, weight) -> None:
    logprobs = torch.tensor([[0.0, -200.0], [-1e-8, -18.0], [-100.0, -100.0], [math.log(0.5)] * 2], dtype=dtype).requires_grad_()
    sampler = torch.tensor([[-200.0, 0.0], [-18.0, -1e-8], [-0.7, -0.7], [0.0, -200.0]])
    loss = expected_score(logprobs, sampler, weight).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()
    assert logprobs.grad.abs().max() <= 2


def test_on_policy_nothing_is_taken_off() -> None:
    logits, _ = two_policies()
    logp = logits.detach().log_softmax(-1)
    values, ids = logp.topk(4, -1)
    assert coefficients(values, logp.gather(-1, ids)).abs().max() < 1e-12
