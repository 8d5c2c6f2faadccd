"""Rules on where prompts come from and how answers are scored."""

import math
from collections.abc import Iterator
from pathlib import Path

from miles.config.places import there
from miles.config.problem import Problem, wrong
from miles.config.reward import parts_of
from miles.config.run_config import RunConfig
from miles.config.schema import flag


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
    for path in args.prompt_data.values():
        if args.lazy_data and Path(path).suffix == ".json":
            text = f"{path} can only be read whole; .jsonl, .parquet and saved datasets can be read row by row"
            yield wrong(args, "lazy_data", text)
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
    named = {"reward": args.reward, "eval_reward": args.eval_reward or args.reward, **args.reward_by_set}
    used: set[str] = set()
    for name, mix in named.items():
        setting = name if name in ("reward", "eval_reward") else "reward_by_set"
        try:
            parts = parts_of(mix).keys()
        except ValueError as error:
            yield Problem((setting,), f"{flag(setting)}: {error}")
            continue
        used |= parts
        trains = name in args.prompt_data or (name == "reward" and not args.prompt_data.keys() <= args.reward_by_set.keys())
        if trains and args.advantage_estimator == "maxrl" and "dapo" in parts:
            yield wrong(args, f"advantage_estimator {setting}", "maxrl divides by a group's mean reward, and dapo's wrong answers have -1")
    if unknown := args.reward_by_set.keys() - args.prompt_data.keys() - args.eval_data.keys():
        known = ", ".join(args.prompt_data | args.eval_data) or "none"
        yield wrong(args, "reward_by_set", f"no set is called {', '.join(sorted(unknown))}; there are {known}")
    if "remote" in used and not args.reward_url:
        yield wrong(args, "reward", "needs --reward-url")
    if "judge" in used and not (args.judge_url and args.judge_model):
        yield wrong(args, "reward", "needs --judge-url and --judge-model")
    if args.judge_key is not None and not args.judge_key.startswith(("file:", "env:")):
        yield wrong(args, "judge_key", "wants file:PATH or env:NAME, not the key itself")
