"""Naming a run on the command line."""

import argparse
from pathlib import Path


def parser(command: str, summary: str) -> argparse.ArgumentParser:
    """A parser with the run as its first argument."""
    made = argparse.ArgumentParser(prog=f"miles {command}", description=summary, allow_abbrev=False)
    made.add_argument("run", type=folder, help="a run's name, or its folder")
    return made


def folder(run: str) -> Path:
    """The folder of a run: the path itself, or runs/NAME.

    Raises:
        argparse.ArgumentTypeError: neither is the folder of a run.
    """
    for path in (Path(run), Path("runs") / run):
        if (path / "config.toml").exists():
            return path
    runs = sorted(path.parent.name for path in Path("runs").glob("*/config.toml"))
    raise argparse.ArgumentTypeError(f"no run {run!r}; in runs/ there are {', '.join(runs) or 'none'}")
