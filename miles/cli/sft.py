"""miles sft: supervised fine-tuning."""

from collections.abc import Sequence

from miles.config.cli import parse_args
from miles.ray.guard import tell_plainly


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv, prog="miles sft", preset={"advantage_estimator": "sft", "n_samples_per_prompt": 1})
    tell_plainly()
    from miles.train.sft import main as train

    train(args)
    return 0
