"""--verify-first-step on the trainer's side: log-probs, KL and ratio of the first step, and of which kind a fault in them is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.config.run_config import RunConfig
from miles.protocols import FirstStepWrong
from miles.train import forward
from miles.train.mesh import Ranks
from miles.train.micro_batches import MicroBatch, PackingRule, pack
from miles.train.model import PolicyModel
from miles.train.targets import TokenColumns
from miles.types import TrainShare


class Noise(NamedTuple):
    """What rounding may do to the log-prob of a token."""

    mean: float
    largest: float


NOISE = {"float32": Noise(1e-4, 5e-3), "bfloat16": Noise(0.05, 1.5)}
"""By --dtype: well above what an engine and a trainer of equal weights differ by: random:tiny by 4e-7 and 4e-3 on average, a Qwen3 of 0.6 B
with peaked logits in bfloat16 on a GPU by 0.01 on average and 0.5 at most."""
SAMPLES = 4
"""Samples of a rank that are looked at more closely once something is wrong."""


@dataclass(slots=True)
class FirstStep:
    """Checks one rank's part; the ranks' numbers are brought together first, so that all of them come to one verdict."""

    args: RunConfig
    model: PolicyModel
    ranks: Ranks
    rule: PackingRule
    share: TrainShare
    columns: TokenColumns
    batches: list[MicroBatch]  # of the first step
    found: dict[str, float] = field(default_factory=dict)  # metrics

    @property
    def noise(self) -> Noise:
        return NOISE[self.args.dtype]

    @property
    def tokens(self) -> Tensor:
        """int64 [trained tokens of the first step] their places in the columns."""
        return torch.cat([batch.tokens for batch in self.batches]).to(self.columns.weights.device)

    def check_logprobs(self, on_policy: bool) -> None:
        """Before the step: against the engines', and against the reference if it is the same model.

        Args:
            on_policy: whether the weights are still those that the reference has.

        Raises:
            FirstStepWrong: staleness, tokenisation, sampling filter or numerics.
        """
        own = self._evaluate(self.batches)
        mean, largest = self._distance(own, self.columns.rollout_logprobs, self.tokens)
        self.found = {"verify/logprob_abs_diff": mean, "verify/logprob_abs_diff_max": largest}
        if not self._within(mean, largest):
            raise self._diagnosis(own, f"the trainer's log-probs differ from the engines' by {mean:.3g} on average, {largest:.3g} at most")
        if on_policy and self.columns.ref_logprobs is not None:
            mean, largest = self._distance(own, self.columns.ref_logprobs, self.tokens)
            self.found["verify/reference_abs_diff_max"] = largest
            if not self._within(mean, largest):
                what = f"the reference model is the actor's own checkpoint, and yet log-probs differ by {largest:.3g}: the KL is not 0"
                raise FirstStepWrong("numerics", what)

    def check_ratio(self, metrics: dict[str, float], exact: bool) -> dict[str, float]:
        """After the step, with its metrics; returns what there is to add to them. `exact`: the ratio's base is the step's own pass.

        Raises:
            FirstStepWrong: numerics.
        """
        deviation = metrics.get("train/ratio_deviation_max", 0.0)  # sft has no ratio
        if deviation > (0.0 if exact else np.expm1(self.noise.largest)):
            raise FirstStepWrong("numerics", f"the policy ratio is {deviation:.3g} away from 1, although nothing was trained yet")
        return self.found

    def _evaluate(self, batches: list[MicroBatch]) -> Tensor:
        out = torch.zeros_like(self.columns.weights)
        forward.evaluate(self.model, batches, out)
        return out

    def _within(self, mean: float, largest: float) -> bool:
        return mean <= self.noise.mean and largest <= self.noise.largest

    def _distance(self, ours: Tensor, theirs: Tensor, tokens: Tensor) -> tuple[float, float]:
        """Mean and largest difference over all ranks' tokens at these places. NaN without any."""
        gap = (ours[tokens] - theirs[tokens]).abs().double()
        total, count = self.ranks.sum(torch.stack([gap.sum(), gap.new_tensor(float(len(gap)))])).tolist()
        largest = self.ranks.max(gap.max() if len(gap) else gap.sum())
        return (total / count if count else float("nan")), float(largest)

    # ---- which of them it is; every rank walks the same way

    def _diagnosis(self, own: Tensor, what: str) -> FirstStepWrong:
        rollout, tokens = self.columns.rollout_logprobs, self.tokens
        lags = self.columns.lags[tokens]
        stale = int(self.ranks.sum((lags > 0).sum().double()))
        if stale and self._within(*self._distance(own, rollout, tokens[lags <= 0])):
            return FirstStepWrong("staleness", f"{what}; only on the {stale} tokens that older weights than the trainer's have written")
        for by in (1, -1):
            if self._within(*self._distance(own, torch.roll(rollout, by), self._with_neighbour(by))):
                return FirstStepWrong("tokenisation", f"{what}; they fit once they are shifted by one token")
        if (temperature := self._temperature()) is not None:
            asked = f"they are those of temperature {temperature:.3g}, not of --temperature {self.args.temperature:g}"
            return FirstStepWrong("sampling filter", f"{what}; {asked}")
        lower = (own[tokens] - rollout[tokens]).max() if len(tokens) else own.sum() * 0
        if float(self.ranks.max(lower)) <= self.noise.largest:
            cut = "they are nowhere lower, as those of a distribution that was cut (top-p, top-k, min-p) and normalised again"
            return FirstStepWrong("sampling filter", f"{what}; {cut}")
        alone, places = self._alone()
        if self._within(*self._distance(alone, own, places)):
            whose = "ids and temperature are the same, and a pass of single samples agrees with the trainer's packed one"
        elif self._within(*self._distance(alone, rollout, places)):
            whose = "a pass of single samples agrees with the engines, the trainer's packed one does not"
        else:
            whose = "a pass of single samples agrees with neither the engines nor the trainer's packed one"
        if stale:
            whose += f"; {stale} tokens are of older weights"
        return FirstStepWrong("numerics", f"{what}; {whose}")

    def _with_neighbour(self, by: int) -> Tensor:
        """Trained tokens for which the token `by` places before is trained as well."""
        trained = torch.from_numpy(self.columns.trained).to(self.tokens.device)
        return self.tokens[torch.roll(trained, by)[self.tokens]]

    def _alone(self) -> tuple[Tensor, Tensor]:
        """Log-probs of a few samples, each computed by itself, and the places of their trained tokens."""
        data, rule = self.share.data, self.rule
        few = torch.unique(self.columns.sample_of[self.tokens]).tolist()[:SAMPLES]
        single = PackingRule(max_tokens=1, share=False, dense_mask=rule.dense_mask, hidden_size=rule.hidden_size)
        packed = pack(data.token_ids, data.offsets, self.columns.trained.astype(np.uint8), few, single)
        batches = forward.equalize(packed, self.ranks, rule.dense_mask)
        return self._evaluate(batches), torch.cat([batch.tokens for batch in batches]).to(self.tokens.device)

    def _temperature(self) -> float | None:
        """Another temperature at which the trainer's log-probs are the engines'. None: there is none between 1/8 and 8 times ours."""
        model, ours = self.model, self.model.scale

        def gaps(octaves: float) -> Tensor:
            model.scale = ours / 2.0**octaves
            logprobs, places = self._alone()
            return (logprobs - self.columns.rollout_logprobs)[places].double()

        def mean(gap: Tensor) -> float:
            total, count = self.ranks.sum(torch.stack([gap.abs().sum(), gap.new_tensor(float(len(gap)))])).tolist()
            return total / count if count else float("nan")

        try:
            octaves: float = min(range(-3, 4), key=lambda whole: mean(gaps(whole)))
            for _ in range(6):  # Gauss and Newton: at the right one all gaps are 0 at once
                gap = gaps(octaves)
                slope = (gaps(octaves + 1e-3) - gap) / 1e-3
                along, length = self.ranks.sum(torch.stack([slope @ gap, slope @ slope])).tolist()
                octaves -= max(-1.0, min(1.0, along / length)) if length else 0.0
            found = mean(gaps(octaves)) <= self.noise.mean and abs(octaves) > 1e-3
            return self.args.temperature * 2.0**octaves if found else None
        finally:
            model.scale = ours
