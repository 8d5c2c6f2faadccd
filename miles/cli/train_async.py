"""miles train-async: the asynchronous driver."""

import sys
from collections.abc import Sequence

from miles.cli import driver
from miles.config.algorithm_rules import validate_async_off_policy_correction
from miles.config.run_config import RunConfig


def main(argv: Sequence[str]) -> int:
    return driver.run("train_async", "miles train-async", argv, check)


def check(args: RunConfig) -> None:
    """What the driver would refuse first."""
    if args.colocate:
        raise ValueError("--colocate: trainer and engines of an asynchronous run need devices of their own; `miles train` shares them")
    validate_async_off_policy_correction(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
