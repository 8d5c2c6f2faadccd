"""What generated groups depend on: a resumed run trains on a checkpoint's groups only where all of this is as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from miles.config.data import DataSection
from miles.config.reward import RewardSection
from miles.config.rollout import RolloutSection
from miles.config.run_config import RunConfig
from miles.config.schema import flag

ELSEWHERE = ("seed", "deterministic", "teacher_checkpoint", "teacher_urls", "score_centering")
NO_MATTER = {
    *(
        "num_rollout",
        "start_rollout_id",
        "num_epoch",
        "prompt_data",
        "lazy_data",
        "skip_bad_rows",
        "buffer_factor",
        "max_concurrent_groups",
    ),
    *("sample_timeout", "generate_timeout", "group_retries", "group_filter_limit", "reward_timeout", "reward_workers", "reward_memory_gb"),
    *("code_timeout", "code_memory_mb", "judge_key", "judge_concurrency"),
}
"""Settings of these sections that say how long, how much at once and within which limits, and not what comes out. The data may move:
what is in them is compared instead."""


def made_with(args: RunConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """Setting -> value, and what the data source says of itself, as JSON gives it back."""
    names = [name for section in (DataSection, RolloutSection, RewardSection) for name in section.model_fields]
    values = {name: args.__dict__[name] for name in [*names, *ELSEWHERE] if name not in NO_MATTER}
    values |= {f"{name} of the data": value for name, value in data.items()}
    found: dict[str, Any] = json.loads(json.dumps(values))
    return found


def changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs, as "--temperature 0.7 (was 1.0)"; what only one of the two knows is None in the other."""
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return [f"{flag(name) if name in RunConfig.model_fields else name} {now.get(name)} (was {was.get(name)})" for name in names]
