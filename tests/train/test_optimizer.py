import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from miles.config.train import TrainSection
from miles.train.mesh import Ranks
from miles.train.optimizer import build_adamw, clip_gradients, learning_rate

PEAK = 1e-3
ALONE = Ranks(0, 1, torch.device("cpu"))


def course(total: int, **changes: object) -> list[float]:
    args = TrainSection.model_validate(changes)
    return [learning_rate(step, total, PEAK, args) for step in range(total)]


def test_constant_with_warm_up() -> None:
    assert course(5, lr_warmup_steps=4) == pytest.approx([PEAK / 4, PEAK / 2, 3 * PEAK / 4, PEAK, PEAK])


def test_linear_falls_from_the_peak_to_the_floor() -> None:
    rates = course(10, lr_schedule="linear", lr_warmup_steps=2, min_lr=PEAK / 10)
    assert rates[1] == rates[2] == PEAK
    falls = [a - b for a, b in pairwise(rates[2:])]
    assert falls == pytest.approx([(PEAK - PEAK / 10) / 8] * 7)
    args = TrainSection(lr_schedule="linear", min_lr=PEAK / 10)
    assert learning_rate(10, 10, PEAK, args) == learning_rate(99, 10, PEAK, args) == pytest.approx(PEAK / 10)


def test_cosine_is_half_way_in_the_middle() -> None:
    rates = course(8, lr_schedule="cosine")
    assert rates[0] == PEAK
    assert rates[4] == pytest.approx(PEAK / 2)
    assert rates == sorted(rates, reverse=True)


def test_warm_up_longer_than_the_run() -> None:
    assert course(3, lr_warmup_steps=10, lr_schedule="cosine") == pytest.approx([PEAK / 10, PEAK / 5, 3 * PEAK / 10])


def test_decay_spares_vectors() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    optimizer = build_adamw(model, TrainSection(weight_decay=0.1), PEAK)
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert {name: decayed[id(p)] for name, p in model.named_parameters()} == {"0.weight": 0.1, "0.bias": 0, "1.weight": 0, "1.bias": 0}


@pytest.mark.parametrize("limit", [0.5, 100.0])
def test_clipping_is_that_of_torch(limit: float) -> None:
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(n)) for n in (3, 5)] for _ in range(2))
    for a, b in zip(ours, theirs, strict=True):
        a.grad = torch.randn_like(a)
        b.grad = a.grad.clone()
    norm = clip_gradients(ours, limit, ALONE)
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(theirs, limit)))
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad is not None
        assert torch.allclose(a.grad, b.grad, atol=1e-5)


def test_no_gradient_has_norm_zero_and_infinite_ones_are_told() -> None:
    assert clip_gradients([nn.Parameter(torch.ones(2))], 1.0, ALONE) == 0.0
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([math.inf, 1.0])
    assert clip_gradients([parameter], 1.0, ALONE) == math.inf
