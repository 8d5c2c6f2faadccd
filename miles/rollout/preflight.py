"""What can be said of a run's data and plugs before anything starts: without a model, a tokenizer, or the user's code."""

from __future__ import annotations

import sys
from pathlib import Path

from miles.config.reward import parts_of
from miles.config.run_config import RunConfig
from miles.data.dataset import FirstRows, check_prompts
from miles.data.mix import difficulty_field
from miles.engines.sglang.known_options import check_options
from miles.plugins import check
from miles.rewards import call
from miles.rollout import filters, functions, generate, rollout_executor

COMPARE_WITH_LABEL = frozenset({"math", "gsm8k", "dapo", "multiple_choice", "exact", "last_number", "f1"})


def check_run(args: RunConfig) -> None:
    """Called by the driver first of all. The executor looks again, and at everything; this is so that mistakes are told at once.

    Raises:
        ValueError: a name that is nothing, an option that SGLang's server does not know, a row that cannot be used, a file with too
            few rows, or without labels.
    """
    check_plugs(args)
    if args.engine == "sglang":
        check_options(args.sglang_python or sys.executable, args.sglang)
    field = difficulty_field(args)
    found = [check_data(args, path, args.reward_by_set.get(name, args.reward), field) for name, path in args.prompt_data.items()]
    rows = sum(part.count for part in found if part is not None)
    if rows < args.rollout_batch_size and all(part is not None and part.is_all for part in found):
        raise rollout_executor.too_few(args, rows)
    if args.eval_mode == "shared":
        for name, path in args.eval_data.items():
            check_data(args, path, args.reward_by_set.get(name, args.eval_reward or args.reward))


def check_plugs(args: RunConfig) -> None:
    names = (
        *((part, call.BUILTIN, "--reward") for part in parts_of(args.reward)),
        *((part, call.BUILTIN, "--eval-reward") for part in parts_of(args.eval_reward or args.reward)),
        *((part, call.BUILTIN, "--reward-by-set") for mix in args.reward_by_set.values() for part in parts_of(mix)),
        (args.rollout_function, functions.BUILTIN, "--rollout-function"),
        (args.generate_function, generate.BUILTIN, "--generate-function"),
        (args.group_filter, filters.BUILTIN, "--group-filter"),
        (args.tool_functions, None, "--tool-functions"),
        (args.eval_function, None, "--eval-function"),
    )
    for name, builtin, setting in names:
        if name is not None:
            check(name, builtin, setting=setting)


def check_data(args: RunConfig, path: str, reward_name: str, difficulty: str | None = None) -> FirstRows | None:
    """The first rows of a file. A folder of datasets.save_to_disk is left to the executor: its library takes seconds to import."""
    if Path(path).expanduser().is_dir():
        return None
    found = check_prompts(path, args, difficulty)
    if found.labelled == 0 and COMPARE_WITH_LABEL & parts_of(reward_name).keys():
        raise ValueError(
            f"{path}: no row has a field {args.label_key!r} (--label-key), and the reward {reward_name!r} compares answers with it"
        )
    return found
