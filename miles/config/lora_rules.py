"""Rules for the adapters of [train], and which checkpoints fit them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles.config.checkpoint_files import complete
from miles.config.places import newest_checkpoint
from miles.config.problem import Problem, wrong
from miles.config.run_config import RunConfig

DETAILS = ("lora_alpha", "lora_dropout", "lora_targets")


def lora(args: RunConfig) -> Iterator[Problem]:
    if not args.lora_rank:
        for name in DETAILS:
            if args.__dict__[name] != type(args).model_fields[name].get_default(call_default_factory=True):
                yield wrong(args, name, "is of adapters, and without --lora-rank there are none")
    elif args.lora_dropout and args.verify_first_step:
        yield wrong(args, "lora_dropout verify_first_step", "with dropout the policy ratio does not start at 1, so it cannot be checked")
    if args.load is not None and (text := _unlike_saved(Path(args.load).expanduser(), args)):
        yield Problem(("load", "lora_rank"), f"--load {args.load}: {text}")


def _unlike_saved(folder: Path, args: RunConfig) -> str:
    newest = newest_checkpoint(folder)
    if newest is None:
        return ""  # another rule's matter
    progress = complete(folder)[newest] / "actor" / "progress.json"
    return unlike(json.loads(progress.read_text()).get("adapters"), args.lora_rank, args.lora_alpha) if progress.exists() else ""


def unlike(saved: Mapping[str, Any] | None, rank: int, alpha: float) -> str:
    """Why a checkpoint cannot go on with these settings; "" when it can.

    Args:
        saved: what it says of its adapters; None: it holds all weights.
    """
    if saved is None and rank:
        return (
            "it holds all weights of a model, not adapters; leave out --lora-rank to go on with it, or start adapters on its export:"
            " --hf-checkpoint with the hf folder that --save-hf writes"
        )
    if saved is not None and not rank:
        return f"it holds adapters alone; go on with --lora-rank {saved['rank']} --lora-alpha {saved['alpha']:g}"
    if saved is not None and (saved["rank"], saved["alpha"]) != (rank, alpha):
        return (
            f"its adapters are --lora-rank {saved['rank']} --lora-alpha {saved['alpha']:g}, not --lora-rank {rank} --lora-alpha {alpha:g}"
        )
    return ""
