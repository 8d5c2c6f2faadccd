"""Rollouts made by hand for trainers of tiny random models."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from miles.config.run_config import RunConfig
from miles.data.rollout_data import pack, split
from miles.train.trainer import Trainer
from miles.types import ObjectRef, PromptGroup, RolloutData, Sample, TrainShare, VersionSpan


class Store:
    """The shortest object store: a table."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def put(self, value: Any) -> ObjectRef:
        ref = ObjectRef(f"o{len(self.values)}")
        self.values[ref.key] = value
        return ref

    def get(self, ref: ObjectRef) -> Any:
        return self.values[ref.key]

    def free(self, refs: Sequence[ObjectRef]) -> None:
        for ref in refs:
            self.values.pop(ref.key, None)

    def count(self) -> int:
        return len(self.values)


def settings(model: str, **changes: Any) -> RunConfig:
    defaults = {"hf_checkpoint": model, "num_rollout": 8, "rollout_batch_size": 4, "n_samples_per_prompt": 4, "device": "cpu", "lr": 1e-3}
    return RunConfig(**(defaults | changes))


def make_groups(seed: int, groups: int = 4, siblings: int = 4, longest: int = 12, prompt: tuple[int, int] = (3, 9)) -> list[PromptGroup]:
    """Groups that share a beginning with each other, siblings that write partly alike, masks with holes."""
    rng = np.random.default_rng(seed)
    system = rng.integers(3, 500, 4).tolist()
    made = []
    for g in range(groups):
        prompt_ids = system + rng.integers(3, 500, int(rng.integers(*prompt))).tolist()
        stem = rng.integers(3, 500, longest).tolist()
        samples = []
        for s in range(siblings):
            n = int(rng.integers(1, longest + 1))
            alike = int(rng.integers(0, n + 1))
            response = stem[:alike] + rng.integers(3, 500, n - alike).tolist()
            mask = (rng.random(n) < 0.9).astype(int).tolist()
            mask[-1] = 1
            logprobs = (-rng.random(n) * 3 - 4).tolist()
            samples.append(
                Sample(
                    sample_index=g * siblings + s,
                    group_index=g,
                    prompt="",
                    prompt_ids=prompt_ids,
                    response_ids=response,
                    loss_mask=mask,
                    rollout_logprobs=[lp if m else 0.0 for lp, m in zip(logprobs, mask, strict=True)],
                    version_spans=[VersionSpan(0, n, 1)],
                    reward=float(rng.integers(0, 3)),
                )
            )
        made.append(PromptGroup(g, g, 0, samples))
    return made


def make_data(seed: int, **shape: Any) -> RolloutData:
    return pack(make_groups(seed, **shape))


def make_shares(seed: int, ranks: int = 1, samples_per_step: int = 16, **shape: Any) -> list[TrainShare]:
    return split(make_data(seed, **shape), ranks, samples_per_step, rollout_id=seed, weight_version=1)


def make_trainer(args: RunConfig, store: Store, role: Any = "actor") -> Trainer:
    trainer = Trainer(args, role, 0, 1, store)
    trainer.init("127.0.0.1", 0)
    return trainer
