"""Rules on where prompts come from and how answers are scored."""

import math
from collections.abc import Iterator
from pathlib import Path

from miles.config.places import there
from miles.config.problem import Problem, wrong
from miles.config.run_config import RunConfig


def training_data(args: RunConfig) -> Iterator[Problem]:
    if not args.prompt_data:
        yield Problem(("prompt_data",), "--prompt-data: a file of training prompts is needed")
    for name, path in args.prompt_data.items():
        if not name or "/" in name:
            yield Problem(
                ("prompt_data",), f"--prompt-data {name}={path}: the name becomes part of rollout/reward/NAME: no slash, not empty"
            )
        if not there(path):
            yield Problem(("prompt_data",), f"--prompt-data {path}: no such file (looked from {Path.cwd()})")
    if args.prompt_weights and set(args.prompt_weights) != set(args.prompt_data):
        yield wrong(args, "prompt_weights", f"wants one weight for each of {', '.join(args.prompt_data) or 'the sets of --prompt-data'}")
    if any(not (math.isfinite(weight) and weight > 0) for weight in args.prompt_weights.values()):
        yield wrong(args, "prompt_weights", "weights must be finite and above 0")
    if args.curriculum == "pass_rate" and args.prompt_weights:
        yield wrong(args, "curriculum prompt_weights", "measured pass rates order whole epochs of all rows; choose one")
    if args.advantage_estimator == "sft":
        for name in ("prompt_weights", "curriculum", "lazy_data"):
            if args.__dict__[name]:
                yield wrong(args, f"{name} advantage_estimator", "supervised training takes every row once an epoch, in memory")


def rewards(args: RunConfig) -> Iterator[Problem]:
    if args.reward == "remote" and not args.reward_url:
        yield wrong(args, "reward", "needs --reward-url")
