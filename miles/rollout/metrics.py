"""The rollout/* metrics of one batch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from miles.types import PromptGroup, RolloutData, SampleStatus


def rollout_metrics(groups: Sequence[PromptGroup], data: RolloutData, weight_version: int) -> dict[str, float]:
    """Of the batch as it will be trained. `weight_version` is the engines' at the drain: lag is counted from it, per trained token."""
    samples = [sample for group in groups for sample in group.samples]
    scored = data.rewards[~np.isnan(data.rewards)].astype(np.float64)
    lengths = np.diff(data.offsets) - data.prompt_lengths
    versions = data.weight_versions[data.weight_versions >= 0]
    status = Counter(sample.status for sample in samples)
    count = max(len(samples), 1)
    metrics = {
        "rollout/response_length": _mean(lengths),
        "rollout/response_length_max": float(lengths.max(initial=0)),
        "rollout/prompt_length": _mean(data.prompt_lengths),
        "rollout/truncated_share": status[SampleStatus.TRUNCATED] / count,
        "rollout/unscored": float(data.num_samples - len(scored)),
        "rollout/reward_failed": float(sum(sample.reward is None and sample.error is not None for sample in samples)),
        "rollout/weight_version": float(weight_version),
        "rollout/weight_lag_mean": float(weight_version - versions.mean()) if len(versions) else 0.0,
        "rollout/weight_lag_max": float(weight_version - versions.min()) if len(versions) else 0.0,
        "rollout/stale_cache_tokens": float(sum(sample.stale_cache_tokens for sample in samples)),
        "rollout/cached_prompt_share": sum(sample.cached_tokens for sample in samples) / max(int(data.prompt_lengths.sum()), 1),
    }
    if len(scored):
        metrics["rollout/reward"] = float(scored.mean())
        metrics["rollout/reward_std"] = float(scored.std())
        metrics["rollout/uniform_groups_share"] = sum(map(_uniform, groups)) / len(groups)
    return metrics | _by_data_set(groups) | _details(groups)


def _uniform(group: PromptGroup) -> bool:
    rewards = {sample.reward for sample in group.samples if sample.reward is not None}
    return len(rewards) <= 1


def _by_data_set(groups: Sequence[PromptGroup]) -> dict[str, float]:
    rewards: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        if group.data_set:
            rewards[group.data_set] += [sample.reward for sample in group.samples if sample.reward is not None]
    return {f"rollout/reward/{name}": _mean(values) for name, values in sorted(rewards.items()) if values}


def _details(groups: Sequence[PromptGroup]) -> dict[str, float]:
    parts: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        for sample in group.samples:
            for name, value in sample.reward_details.items():
                parts[name].append(value)
    return {f"rollout/reward_details/{name}": _mean(values) for name, values in sorted(parts.items())}


def without_marker(metrics: Mapping[str, float]) -> list[str]:
    """Rewards that found in no answer of the batch the marker that they look for, such as </think>."""
    names = [name.removeprefix("rollout/reward_details/") for name, value in metrics.items() if name.endswith("/marked") and value == 0]
    return [name.removesuffix("marked").rstrip("/") or "the reward" for name in names]


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else 0.0
