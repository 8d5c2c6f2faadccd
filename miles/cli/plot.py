"""miles plot RUN: a picture of it."""

import sys
from collections.abc import Sequence
from pathlib import Path

from miles.cli import runs


def main(argv: Sequence[str]) -> int:
    parser = runs.parser("plot", "Reward, held-out accuracy, lag and timeline of a run, as a PNG.")
    parser.add_argument("--out", type=Path, help="the picture's file; default: plot.png in the run folder")
    options = parser.parse_args(argv)
    from miles.tracking.plots import plot_run

    try:
        print(plot_run(options.run, options.out))
    except ValueError as error:
        print(f"miles plot: {error}", file=sys.stderr)
        return 1
    return 0
