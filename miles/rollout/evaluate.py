"""Evaluation on the training engines: several sets, mean, count and pass@k of each, at one weight version."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import comb, fsum
from typing import Any

from miles.config.run_config import RunConfig
from miles.data.data_source import make_group
from miles.data.dataset import PromptRow, load_prompts
from miles.data.seeds import sample_seed
from miles.plugins import load
from miles.rewards.reward import RewardScorer
from miles.rollout.context import RolloutContext, eval_sampling
from miles.rollout.generate import build_generate, load_generate
from miles.rollout.group import renewed
from miles.rollout.waves import run_wave
from miles.types import EvalResult, PromptGroup, SampleStatus

logger = logging.getLogger(__name__)

RIGHT = 1.0 - 1e-6
"""A sample counts as solved, for pass@k, from this reward on."""


class Evaluator:
    """Reads all sets once, at construction, so that a bad file ends the run at its start.

    A set that fails later costs its own point, with a reason, and never the run.
    """

    def __init__(self, args: RunConfig, context: RolloutContext):
        self.args = args
        room = args.engine_max_context
        self.sets = {name: load_prompts(path, context.tokenizer, args, room=room).rows for name, path in sorted(args.eval_data.items())}
        self.scorer = RewardScorer(args, args.eval_reward)
        # A whole set is one wave, whose last samples wait for all others: --eval-timeout alone ends it.
        self.context = replace(context, sampling=eval_sampling(args), scorer=self.scorer, group_limit=None, teacher=None)
        self.context.generate = build_generate(load_generate(args.generate_function), self.context)
        self.function = load(args.eval_function, setting="--eval-function") if args.eval_function else None
        self.count = 0

    async def __call__(self, rollout_id: int, hf_dir: str | None, weight_version: int) -> EvalResult:
        """Evaluate all sets one after another, or hand `hf_dir` to the user's evaluator in snapshot mode."""
        result = EvalResult(rollout_id, weight_version, {})
        reasons: list[str] = []
        if self.args.eval_mode == "snapshot":
            await self._border("eval_function", self._external(result, hf_dir), reasons)
        else:
            self.count += 1
            for name, rows in self.sets.items():
                await self._border(name, self._set(name, rows, result, reasons), reasons)
            if not self.sets:
                reasons.append("no --eval-data")
        result.reason = "; ".join(reasons) or None
        if result.reason:
            logger.warning("evaluation at rollout %d: %s", rollout_id, result.reason)
        return result

    async def _border(self, name: str, work: Any, reasons: list[str]) -> None:
        limit = self.args.eval_timeout
        try:
            async with asyncio.timeout(limit):
                await work
        except TimeoutError:
            reasons.append(f"{name}: not done within --eval-timeout {limit:g} s")
        except Exception as error:  # an eval point costs a point, never the run
            logger.warning("evaluation %s failed", name, exc_info=error)
            reasons.append(f"{name}: crashed: {type(error).__name__}: {error}")

    async def _external(self, result: EvalResult, hf_dir: str | None) -> None:
        assert self.function is not None, "--eval-mode snapshot needs --eval-function"
        metrics: Mapping[str, float] = await self.function(hf_dir, result.rollout_id)
        result.metrics |= {key if key.startswith("eval/") else f"eval/{key}": float(value) for key, value in metrics.items()}

    async def _set(self, name: str, rows: Sequence[PromptRow], result: EvalResult, reasons: list[str]) -> None:
        context = replace(self.context, seed=sample_seed(self.args.seed, zlib.crc32(name.encode()), 0))
        n = self.args.eval_samples_per_prompt
        items = [make_group(row, place, place, 0, n, data_set=name) for place, row in enumerate(rows)]
        done: list[PromptGroup] = []
        failed: list[str] = []
        todo = items
        for attempt in range(self.args.group_retries + 1):
            outcomes = await run_wave(context, f"e{self.count}.{name}.{attempt}", todo)
            again = []
            for item, failure in zip(todo, outcomes, strict=True):
                if failure is None:
                    done.append(item)
                elif failure.again and attempt < self.args.group_retries:
                    again.append(renewed(item))
                else:
                    failed.append(failure.reason)
            todo = again
            if not todo:
                break
        if failed:
            reasons.append(f"{name}: {len(failed)} of {len(items)} prompts failed, the first: {failed[0]}")
        versions = sorted({span.version for item in done for sample in item.samples for span in sample.version_spans})
        if len(versions) > 1:
            reasons.append(f"{name}: answered under several weight versions {versions}")
        if versions:
            result.weight_version = versions[-1]
        result.metrics |= set_metrics(name, done, n) | {f"eval/{name}/failed": float(len(failed))}


def set_metrics(name: str, items: Sequence[PromptGroup], n: int) -> dict[str, float]:
    """Mean over items of each item's mean reward; pass@k for powers of two up to n; counts. Nothing scored: no means, count 0."""
    scored = [rewards for item in items if (rewards := [sample.reward for sample in item.samples if sample.reward is not None])]
    samples = [sample for item in items for sample in item.samples]
    metrics = {
        f"eval/{name}/count": float(len(scored)),
        f"eval/{name}/unscored": float(sum(sample.reward is None for sample in samples)),
    }
    if scored:
        metrics[f"eval/{name}/reward"] = fsum(fsum(rewards) / len(rewards) for rewards in scored) / len(scored)
        metrics |= {f"eval/{name}/pass@{k}": value for k, value in pass_at(scored, n).items()}
    if samples:
        metrics[f"eval/{name}/response_length"] = sum(len(sample.response_ids) for sample in samples) / len(samples)
        metrics[f"eval/{name}/truncated_share"] = sum(sample.status is SampleStatus.TRUNCATED for sample in samples) / len(samples)
    return metrics


def pass_at(items: Sequence[Sequence[float]], n: int) -> dict[int, float]:
    """k -> mean over the items with at least k samples of the unbiased estimate (Chen et al. 2021), k = 1, 2, 4, .. <= n."""
    values: dict[int, float] = {}
    k = 1
    while k <= n:
        estimates = [
            estimate for rewards in items if (estimate := pass_at_k(len(rewards), sum(r >= RIGHT for r in rewards), k)) is not None
        ]
        if estimates:
            values[k] = fsum(estimates) / len(estimates)
        k *= 2
    return values


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """Probability that k of n samples, c of them right, drawn without replacement, hold a right one. None when k > n."""
    if k > n:
        return None
    return 1.0 - comb(n - c, k) / comb(n, k)
