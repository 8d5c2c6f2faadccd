"""Group advantages, GAE and normalisation against plain loops over Python floats, and the reported cases."""

import itertools
import math
import random

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from miles.algorithms.advantages import (
    GroupForm,
    discounted_returns,
    distillation_advantages,
    gae,
    group_advantages,
    moments,
    normalize,
    outcome_rewards,
)

NAN = math.nan
REWARDS = st.one_of(st.sampled_from([NAN, 0.0, 1.0, 0.1, 0.3]), st.floats(-100, 100, width=32))
GROUPS = st.lists(st.tuples(REWARDS, st.integers(-3, 3)), min_size=1, max_size=24)


FORMS: list[GroupForm] = ["std", "mean", "leave_one_out", "mean_ratio"]


def group_reference(rewards: list[float], group_ids: list[int], form: GroupForm) -> list[float]:
    """A loop over Python floats, written from the formulas."""
    result = []
    for reward, group in zip(rewards, group_ids, strict=True):
        own = [r for r, g in zip(rewards, group_ids, strict=True) if g == group and not math.isnan(r)]
        if math.isnan(reward) or len(own) < 2 or max(own) - min(own) <= 4 * 2.0**-23 * max(map(abs, own)):
            result.append(0.0)
            continue
        mean = math.fsum(own) / len(own)
        if form == "std":
            result.append((reward - mean) / math.sqrt(math.fsum((r - mean) ** 2 for r in own) / (len(own) - 1)))
        elif form == "leave_one_out":
            others = list(own)
            others.remove(reward)
            result.append(reward - math.fsum(others) / len(others))
        else:
            result.append((reward - mean) / (mean if form == "mean_ratio" else 1.0))
    return result


def one_group(rewards: list[float], form: GroupForm = "std", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return group_advantages(torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards), dtype=torch.int64), form)


def fit_for(form: GroupForm, pairs: list[tuple[float, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = torch.tensor([reward for reward, _ in pairs])
    return rewards.abs() if form == "mean_ratio" else rewards, torch.tensor([group for _, group in pairs])


@pytest.mark.parametrize("form", FORMS)
@given(pairs=GROUPS)
def test_group_advantages_are_those_of_the_formula(form: GroupForm, pairs: list[tuple[float, int]]) -> None:
    rewards, groups = fit_for(form, pairs)
    expected = group_reference(rewards.tolist(), groups.tolist(), form)
    got = group_advantages(rewards, groups, form)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(torch.tensor(expected).tolist(), rel=1e-6, abs=1e-9 if form == "leave_one_out" else 1e-12)


@pytest.mark.parametrize("form", FORMS)
@given(pairs=GROUPS, shuffler=st.randoms(use_true_random=False))
def test_group_advantages_do_not_depend_on_order_or_on_other_groups(
    form: GroupForm, pairs: list[tuple[float, int]], shuffler: random.Random
) -> None:
    rewards, groups = fit_for(form, pairs)
    whole = group_advantages(rewards, groups, form)
    order = list(range(len(pairs)))
    shuffler.shuffle(order)
    assert torch.allclose(group_advantages(rewards[order], groups[order], form), whole[order], rtol=1e-6, atol=1e-12)
    own = groups == groups[0]
    assert torch.allclose(group_advantages(rewards[own], groups[own], form), whole[own], rtol=1e-6, atol=1e-12)


@given(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=12))
def test_normalised_advantages_have_mean_0_and_sample_variance_1(rewards: list[float]) -> None:
    advantages = one_group(rewards, dtype=torch.float64)
    assert float(advantages.mean()) == pytest.approx(0, abs=1e-9)
    if advantages.any():
        assert float(advantages.var()) == pytest.approx(1, rel=1e-6)


@pytest.mark.case("C36")
@pytest.mark.parametrize("rewards", [[1.0] * 4, [0.0] * 8, [0.3] * 6, [9.61] * 31, [-1e30] * 5, [0.7], [NAN, 0.7]])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_group_without_spread_gets_exactly_0(rewards: list[float], form: GroupForm, dtype: torch.dtype) -> None:
    if form == "mean_ratio":
        rewards = [abs(reward) for reward in rewards]
    assert one_group(rewards, form, dtype).tolist() == [0.0] * len(rewards)


@pytest.mark.case("C36")
def test_spread_that_is_only_rounding_is_none() -> None:
    assert one_group([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64).tolist() == [0.0] * 3
    almost = torch.tensor([0.3, 0.3]).nextafter(torch.tensor([0.3, 1.0]))
    assert group_advantages(almost, torch.zeros(2), "std").tolist() == [0.0, 0.0]
    assert one_group([1e-12, 0.0]).tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)]), "small rewards are signal"
    assert one_group([1000.0, 1000.01]).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


@pytest.mark.case("C38")
def test_unscored_samples_are_left_out_and_get_0() -> None:
    assert one_group([1, 0, NAN, 0]).tolist() == pytest.approx([1.15470, -0.57735, 0, -0.57735], abs=1e-5)
    assert one_group([1, 0, NAN, 0], "mean").tolist() == pytest.approx([2 / 3, -1 / 3, 0, -1 / 3])
    assert one_group([1, 0, NAN, 0], "leave_one_out").tolist() == pytest.approx([1, -1 / 2, 0, -1 / 2])
    assert one_group([1, 0, NAN, 0], "mean_ratio").tolist() == pytest.approx([2, -1, 0, -1])
    for form in FORMS:
        assert one_group([NAN, NAN, 1, NAN], form).tolist() == [0.0] * 4
        assert one_group([NAN] * 4, form).tolist() == [0.0] * 4
        assert one_group([], form).tolist() == []


def test_what_group_advantages_refuse() -> None:
    with pytest.raises(ValueError, match=r"infinite rewards at samples \[1\]"):
        one_group([0.0, math.inf])
    with pytest.raises(ValueError, match=r"--advantage-estimator maxrl .* samples \[2\] are negative"):
        one_group([0.0, NAN, -1.0], "mean_ratio")
    with pytest.raises(ValueError, match="form 'median'"):
        one_group([0.0], "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(2,\) and group_ids \(3,\)"):
        group_advantages(torch.zeros(2), torch.zeros(3), "std")


def gae_reference(rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float) -> tuple[list[float], list[float]]:
    """The definition: a sum of discounted temporal differences over the trained tokens that follow."""
    steps = [t for t, trained in enumerate(mask) if trained]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, t in enumerate(steps):
        terms = []
        for j in range(i, len(steps)):
            following = values[steps[j + 1]] if j + 1 < len(steps) else 0.0
            terms.append((gamma * lam) ** (j - i) * (rewards[steps[j]] + gamma * following - values[steps[j]]))
        advantages[t] = math.fsum(terms)
        returns[t] = advantages[t] + values[t]
    return advantages, returns


NUMBERS = st.floats(-10, 10, width=32)
TOKENS = st.lists(st.tuples(NUMBERS, NUMBERS, st.integers(0, 1)), min_size=1, max_size=20)


@given(TOKENS, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_discounted_sum_over_trained_tokens(tokens: list[tuple[float, float, int]], gamma: float, lam: float) -> None:
    rewards, values, mask = (list(column) for column in zip(*tokens, strict=True))
    columns = (torch.tensor(rewards, dtype=torch.float64), torch.tensor(values, dtype=torch.float64), torch.tensor(mask, dtype=torch.uint8))
    advantages, returns = gae(*columns, gamma, lam)
    expected_advantages, expected_returns = gae_reference(rewards, values, mask, gamma, lam)
    assert advantages.tolist() == pytest.approx(expected_advantages, rel=1e-12, abs=1e-10)
    assert returns.tolist() == pytest.approx(expected_returns, rel=1e-12, abs=1e-10)


@given(TOKENS)
def test_with_gamma_and_lambda_1_returns_are_the_rewards_to_come(tokens: list[tuple[float, float, int]]) -> None:
    rewards, values, mask = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    _, returns = gae(rewards, values, mask, 1.0, 1.0)
    to_come = (rewards * mask).flip(0).cumsum(0).flip(0) * mask
    assert returns.tolist() == pytest.approx(to_come.tolist(), abs=1e-9)


@given(TOKENS, NUMBERS, NUMBERS)
def test_what_lies_on_masked_tokens_is_never_seen(tokens: list[tuple[float, float, int]], reward: float, value: float) -> None:
    rewards, values, mask = (torch.tensor(column, dtype=torch.float32) for column in zip(*tokens, strict=True))
    other = gae(torch.where(mask == 0, reward, rewards), torch.where(mask == 0, value, values), mask, 0.9, 0.95)
    assert all(torch.equal(a, b) for a, b in zip(gae(rewards, values, mask, 0.9, 0.95), other, strict=True))


@pytest.mark.case("C44")
def test_gae_skips_masked_tokens() -> None:
    mask = torch.tensor([1, 1, 0])
    advantages, returns = gae(torch.tensor([0.0, 1.0, 0.0]), torch.tensor([0.0, 0.0, 100.0]), mask, 1.0, 0.95)
    assert advantages.tolist() == pytest.approx([0.95, 1.0, 0.0])
    assert returns.tolist() == pytest.approx([0.95, 1.0, 0.0])
    mask = torch.tensor([1, 1, 0, 0])
    advantages, _ = gae(outcome_rewards(1.0, mask), torch.zeros(4), mask, 1.0, 0.9)
    assert advantages.tolist() == pytest.approx([0.9, 1.0, 0.0, 0.0])
    between = gae(torch.tensor([0.0, -5.0, 1.0]), torch.tensor([0.0, 100.0, 0.0]), torch.tensor([1, 0, 1]), 1.0, 0.95)
    assert between[0].tolist() == pytest.approx([0.95, 0.0, 1.0])


def test_outcome_rewards_and_gae_of_nothing_trained() -> None:
    mask = torch.tensor([0, 0])
    assert outcome_rewards(1.0, mask).tolist() == [0.0, 0.0]
    assert [each.tolist() for each in gae(torch.ones(2), torch.ones(2), mask, 1.0, 1.0)] == [[0.0, 0.0]] * 2
    with pytest.raises(ValueError, match=r"must be \[tokens\] all"):
        gae(torch.ones(2), torch.ones(3), mask, 1.0, 1.0)


@given(st.lists(st.tuples(st.floats(-50, 50, width=32), st.integers(0, 1)), min_size=1, max_size=30), st.integers(0, 30))
def test_normalize_is_the_same_for_any_split(tokens: list[tuple[float, int]], cut: int) -> None:
    advantages, mask = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))
    whole = normalize(advantages, mask, moments(advantages, mask))
    total = moments(advantages[:cut], mask[:cut]) + moments(advantages[cut:], mask[cut:])
    parts = torch.cat([normalize(advantages[:cut], mask[:cut], total), normalize(advantages[cut:], mask[cut:], total)])
    assert torch.allclose(parts, whole, rtol=1e-9, atol=1e-9)
    own = whole[mask == 1]
    assert not whole[mask == 0].any()
    if own.any():
        assert float(own.mean()) == pytest.approx(0, abs=1e-6)
        assert float(own.var(correction=0)) == pytest.approx(1, abs=1e-6)


def test_normalize_of_equal_or_no_advantages_is_0() -> None:
    for values, dtype in itertools.product(([0.1] * 7, [0.3] * 1000, [0.0] * 3, [1e6] * 5, [2.5]), (torch.float32, torch.float64)):
        advantages = torch.tensor(values, dtype=dtype)
        mask = torch.ones(len(values))
        assert not normalize(advantages, mask, moments(advantages, mask)).any()
        assert not normalize(advantages, mask * 0, moments(advantages, mask * 0)).any()


@pytest.mark.case("C44")
@given(TOKENS, st.floats(0, 1))
def test_returns_of_reinforce_plus_plus_are_the_formula(tokens: list[tuple[float, float, int]], gamma: float) -> None:
    rewards, _, mask = (list(column) for column in zip(*tokens, strict=True))
    trained = [t for t, m in enumerate(mask) if m]
    expected = [0.0] * len(mask)
    for i, t in enumerate(trained):
        expected[t] = math.fsum(gamma**j * rewards[later] for j, later in enumerate(trained[i:]))
    got = discounted_returns(torch.tensor(rewards, dtype=torch.float64), torch.tensor(mask), gamma)
    assert got.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-10)


def test_the_mean_of_distillation_advantages_is_minus_the_reverse_kl_and_so_is_their_policy_gradient() -> None:
    logits = torch.tensor([0.3, -0.7, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.tensor([0.0, 0.2, 0.9, -1.0], dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    divergence = (policy.exp() * (policy - teacher)).sum()
    advantages = distillation_advantages(policy, teacher, 1.0)
    assert not advantages.requires_grad
    assert (policy.exp() * advantages).sum().item() == pytest.approx(-divergence.item(), rel=1e-12)
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    (estimated,) = torch.autograd.grad(-(policy.exp().detach() * advantages * policy).sum(), logits)
    assert torch.allclose(exact, estimated, rtol=1e-12, atol=1e-14)
    assert torch.equal(distillation_advantages(policy, teacher, 0.5), 0.5 * advantages)
