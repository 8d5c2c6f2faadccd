"""Running one of the drivers, train_async.py or train.py, as the scripts that they are."""

import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from miles.config.cli import parse_args
from miles.config.run_config import RunConfig


def run(module: str, prog: str, argv: Sequence[str], check: Callable[[RunConfig], None] | None = None) -> int:
    """Run a driver with these settings; wrong ones are said before anything heavy is imported.

    Args:
        module: the driver's module, installed beside the package or lying in the working tree.
        check: the driver's own refusal, a ValueError, asked early too.
    """
    args = parse_args(argv, prog=prog)
    try:
        if check is not None:
            check(args)
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    if find_spec(module) is None:
        print(f"{prog}: {module}.py is not installed; run it from a checkout, or install the package again", file=sys.stderr)
        return 1
    sys.argv = [prog, *argv]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0
