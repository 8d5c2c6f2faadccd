"""The estimators of the KL: values, derivatives, accuracy for small and calm for large differences."""

import decimal
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from miles.algorithms.kl import Estimator, kl

ESTIMATORS: list[Estimator] = ["k1", "k2", "k3", "k3_bounded"]


def value_and_derivative(policy: float, reference: float, estimator: Estimator, dtype: torch.dtype = torch.float32) -> tuple[float, float]:
    logprobs = torch.tensor([policy], dtype=dtype, requires_grad=True)
    value = kl(logprobs, torch.tensor([reference], dtype=dtype), estimator)
    value.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.dtype == dtype
    return value.item(), logprobs.grad.item()


@pytest.mark.case("C42")
@pytest.mark.parametrize(
    ("estimator", "reference", "value", "derivative"),
    [
        ("k1", -2.0, 1.0, 1.0),
        ("k2", -2.0, 0.5, 1.0),
        ("k3", -2.0, 0.36788, 0.63212),
        ("k3", -0.5, 0.14872, -0.64872),
        ("k3", -1.0, 0.0, 0.0),
        ("k3_bounded", -2.0, 0.36788, 0.63212),
        ("k3_bounded", -0.5, 0.14872, -0.64872),
    ],
)
def test_known_values_and_derivatives(estimator: Estimator, reference: float, value: float, derivative: float) -> None:
    assert value_and_derivative(-1.0, reference, estimator) == pytest.approx((value, derivative), abs=1e-5)


@pytest.mark.case("C42")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_bounded"])
@pytest.mark.parametrize("difference", [100.0, -100.0, 1000.0, 10000.0])
def test_extremes_are_finite_and_an_optimizer_step_leaves_weights_finite(
    dtype: torch.dtype, estimator: Estimator, difference: float
) -> None:
    weight = torch.nn.Parameter(torch.tensor([-difference], dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    value = kl(weight, torch.zeros(1, dtype=dtype), estimator)
    value.sum().backward()
    assert value.isfinite().all()
    assert weight.grad is not None
    assert weight.grad.isfinite().all()
    if estimator != "k1":
        assert (weight.grad < 0).item() == (difference > 0), "the step leads back to the reference"
    optimizer.step()
    assert weight.isfinite().all()
    plain = torch.nn.Parameter(torch.tensor([-difference], dtype=dtype))
    kl(plain, torch.zeros(1, dtype=dtype), estimator).sum().backward()
    torch.optim.SGD([plain], lr=1.0).step()
    assert plain.isfinite().all()


@given(st.floats(-30, 0, width=32), st.floats(-30, 0, width=32))
def test_k3_is_never_negative_and_grows_away_from_the_reference(policy: float, reference: float) -> None:
    for estimator in ESTIMATORS[2:]:
        value, derivative = value_and_derivative(policy, reference, estimator)
        assert value >= 0
        assert derivative * (policy - reference) >= 0


@given(st.floats(-19, 19).filter(lambda d: abs(d) > 1e-6))
def test_k3_is_accurate_down_to_tiny_differences(difference: float) -> None:
    with decimal.localcontext() as context:
        context.prec = 60
        exact = decimal.Decimal(difference).exp() - 1 - decimal.Decimal(difference)
    assert value_and_derivative(-difference, 0.0, "k3", torch.float64)[0] == pytest.approx(float(exact), rel=1e-8)


def test_small_differences_in_float32_are_not_lost() -> None:
    value, _ = value_and_derivative(-1e-4, 0.0, "k3")
    assert value == pytest.approx(5.00016667e-9, rel=1e-6)


def test_k3_goes_on_along_its_tangent() -> None:
    at, slope = value_and_derivative(-20.0, 0.0, "k3", torch.float64)
    assert (at, slope) == pytest.approx((math.exp(20) - 21, -(math.exp(20) - 1)))
    beyond, same_slope = value_and_derivative(-23.0, 0.0, "k3", torch.float64)
    assert same_slope == pytest.approx(slope)
    assert beyond == pytest.approx(at - 3 * slope)


@given(st.floats(-40, 40), st.sampled_from(["k1", "k2", "k3", "k3_bounded"]))
def test_values_and_derivatives_are_those_of_the_formula(difference: float, estimator: Estimator) -> None:
    limit = {"k3": 20.0, "k3_bounded": math.log(11)}.get(estimator, math.inf)
    near = min(difference, limit)
    value, derivative = {
        "k1": (-difference, 1.0),
        "k2": (difference**2 / 2, -difference),
    }.get(estimator) or (math.exp(near) - 1 - near + (difference - near) * (math.exp(near) - 1), 1 - math.exp(near))
    got = value_and_derivative(-difference, 0.0, estimator, torch.float64)
    assert got == pytest.approx((value, derivative), rel=1e-9, abs=1e-12)


def test_k3_bounded_pulls_no_harder_than_10() -> None:
    for difference in (2.3, 2.4, 5.0, 30.0, 1e4):
        value, derivative = value_and_derivative(-difference, 0.0, "k3_bounded", torch.float64)
        assert -10 - 1e-9 <= derivative <= -8
        assert value <= 10 * difference


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_k1_and_k3_have_the_kl_as_their_mean_and_no_gradient_reaches_the_reference(estimator: Estimator) -> None:
    policy = torch.log_softmax(torch.tensor([0.3, -0.7, 1.1, 0.0], dtype=torch.float64), 0).requires_grad_()
    reference = torch.log_softmax(torch.tensor([0.0, 0.2, 0.9, -1.0], dtype=torch.float64), 0).requires_grad_()
    mean = (policy.exp().detach() * kl(policy, reference, estimator)).sum()
    exact = float((policy.exp() * (policy - reference)).sum().detach())
    if estimator != "k2":
        assert mean.item() == pytest.approx(exact, rel=1e-12)
    mean.backward()
    assert reference.grad is None


def test_types_and_names() -> None:
    half = torch.tensor([-1.0], dtype=torch.bfloat16)
    assert kl(half, half, "k3").dtype == torch.float32
    assert kl(half, half.double(), "k3").dtype == torch.float64
    with pytest.raises(ValueError, match="kl_estimator 'k4'"):
        kl(half, half, "k4")  # type: ignore[arg-type]
