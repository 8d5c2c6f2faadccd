"""miles train: the synchronous driver."""

from collections.abc import Sequence

from miles.cli import driver
from miles.config.run_config import RunConfig


def main(argv: Sequence[str]) -> int:
    return driver.run("train", "miles train", argv, check)


def check(args: RunConfig) -> None:
    """What the driver would refuse first."""
    if args.fully_async:
        raise ValueError("--fully-async: this driver generates and trains in turn; use miles train-async")
