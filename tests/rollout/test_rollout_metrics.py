from __future__ import annotations

import math

import pytest

from miles.data.rollout_data import pack
from miles.rollout.generate import append_completion, append_environment
from miles.rollout.metrics import rollout_metrics
from miles.types import Completion, FinishReason, PromptGroup, Sample, SampleStatus, VersionSpan


def sample(index: int, reward: float | None, spans: list[tuple[int, int, int]], mask: list[int], status: SampleStatus) -> Sample:
    tokens = len(mask)
    return Sample(
        index, index // 2, "", [1, 2, 3], response_ids=[5] * tokens, loss_mask=mask, rollout_logprobs=[-0.1] * tokens, status=status,
        version_spans=[VersionSpan(*span) for span in spans], reward=reward, reward_details={"format": 1.0} if index else {},
        cached_tokens=index,
    )  # fmt: skip


def test_the_metrics_of_a_batch() -> None:
    groups = [
        PromptGroup(0, 0, 0, [
            sample(0, 1.0, [(0, 2, 3)], [1, 1], SampleStatus.COMPLETED),
            sample(1, 0.0, [(0, 1, 3), (1, 4, 5)], [1, 0, 0, 1], SampleStatus.TRUNCATED),
        ], data_set="sums"),
        PromptGroup(1, 1, 0, [
            sample(2, None, [(0, 1, 5)], [1], SampleStatus.COMPLETED),
            sample(3, 0.5, [(0, 1, 5)], [1], SampleStatus.COMPLETED),
        ]),
    ]  # fmt: skip
    metrics = rollout_metrics(groups, pack(groups), weight_version=5)
    assert metrics["rollout/reward"] == 0.5
    assert metrics["rollout/reward_std"] == pytest.approx((1 / 6) ** 0.5)
    assert metrics["rollout/unscored"] == 1
    assert metrics["rollout/response_length"] == 2
    assert metrics["rollout/truncated_share"] == 0.25
    assert metrics["rollout/weight_lag_max"] == 2
    assert metrics["rollout/weight_lag_mean"] == pytest.approx((2 + 2 + 2 + 0 + 0 + 0) / 6), "per token of the policy, tools' left out"
    assert metrics["rollout/reward/sums"] == 0.5
    assert metrics["rollout/reward_details/format"] == 1.0
    assert metrics["rollout/uniform_groups_share"] == 0.5
    assert metrics["rollout/cached_prompt_share"] == 6 / 12


def test_tokens_that_read_an_older_cache_are_told_one_by_one_and_counted() -> None:
    """Two turns, each with a publish in place: their offsets are those of the whole response."""
    whole = Sample(0, 0, "", [1, 2, 3])
    for turn in range(2):
        spans = [VersionSpan(0, 2, turn), VersionSpan(2, 5, turn + 1)]
        stale = [VersionSpan(2, 5, turn)]
        append_completion(whole, Completion(f"t{turn}", [7] * 5, [-0.1] * 5, FinishReason.STOP, spans, 0, 3, stale))
        append_environment(whole, [8, 8])
    whole.reward = 1.0
    assert whole.cache_spans == [(2, 5, 0), (9, 12, 1)]
    groups = [PromptGroup(0, 0, 0, [whole])]
    assert rollout_metrics(groups, pack(groups), weight_version=2)["rollout/stale_cache_tokens"] == 6


def test_a_batch_without_scores_has_no_reward_and_no_nan() -> None:
    groups = [PromptGroup(0, 0, 0, [sample(0, None, [], [], SampleStatus.COMPLETED)])]
    metrics = rollout_metrics(groups, pack(groups), weight_version=1)
    assert "rollout/reward" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())
