import pytest
import torch
from torch import Tensor

from miles.train import output_layer
from miles.train.output_layer import token_logprobs


def plain(hidden: Tensor, weight: Tensor, state_of: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    log_p = (hidden @ weight.T * scale).log_softmax(-1)
    return log_p[state_of, targets], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("chunk", [7, 40, 1 << 24])
@pytest.mark.parametrize("keep", [0, 1 << 28])
@pytest.mark.parametrize("entropy_weight", [0.0, 0.3])
@pytest.mark.parametrize("scale", [1.0, 1.7])
def test_equals_plain_torch_in_value_and_gradient(
    monkeypatch: pytest.MonkeyPatch, chunk: int, keep: int, entropy_weight: float, scale: float
) -> None:
    monkeypatch.setattr(output_layer, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(output_layer, "KEEP_ELEMENTS", keep)
    torch.manual_seed(0)
    states, vocabulary, tokens = 9, 7, 15
    state_of = torch.randint(0, states, (tokens,)).sort()[0]
    targets = torch.randint(0, vocabulary, (tokens,))
    upstream = torch.randn(tokens, dtype=torch.float64)
    results = []
    for function in (plain, token_logprobs):
        torch.manual_seed(1)
        hidden = torch.randn(states, 4, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(vocabulary, 4, dtype=torch.float64, requires_grad=True)
        logprobs, entropies = function(hidden, weight, state_of, targets, scale)
        loss = (upstream * logprobs).sum()
        if entropy_weight:
            loss = loss + entropy_weight * entropies.sin().sum()
        loss.backward()
        results.append((logprobs, entropies, hidden.grad, weight.grad))
    for want, got in zip(*results, strict=True):
        assert torch.allclose(want, got, atol=1e-12)


def test_half_precision_comes_out_in_float32_and_frozen_weights_get_no_gradient() -> None:
    hidden = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    logprobs, entropies = token_logprobs(hidden, torch.randn(5, 4, dtype=torch.bfloat16), torch.tensor([0, 2]), torch.tensor([1, 4]))
    assert logprobs.dtype == entropies.dtype == torch.float32
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad[1].abs().sum() == 0


def test_improbable_tokens_keep_finite_gradients() -> None:
    hidden = torch.tensor([[1000.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], requires_grad=True)
    logprobs, entropies = token_logprobs(hidden, weight, torch.tensor([0]), torch.tensor([1]))
    assert logprobs[0].item() == -1000.0
    (logprobs.sum() + entropies.sum()).backward()
    assert hidden.grad is not None
    assert torch.isfinite(hidden.grad).all()
    assert weight.grad is not None
    assert torch.isfinite(weight.grad).all()


def test_a_large_vocabulary_costs_no_precision() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(16, 9), torch.randn(49152, 9)
    hidden[:, 8], weight[:, 8], weight[7, 8] = 18.0, 0.0, 1.0  # one likely token, and tens of thousands that add up
    state_of, targets = torch.arange(16), torch.full((16,), 7)
    wide = plain(hidden.double(), weight.double(), state_of, targets, 1.0)
    for want, got in zip(wide, token_logprobs(hidden, weight, state_of, targets), strict=True):
        assert (want - got).abs().max() < 5e-6
