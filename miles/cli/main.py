"""The `miles` command. Nothing but the chosen sub-command is imported, so help is instant."""

import os
import sys
from collections.abc import Sequence

from miles.plugins import load

COMMANDS = {
    "train-async": "train while the engines generate the next rollout",
    "train": "train and generate in turn, on shared devices when colocated",
    "sft": "supervised fine-tuning on conversations",
    "get-model": "get a small model to try things with",
    "show": "a run as a table: its steps and its last metrics",
    "why": "why a run is slow, stuck or dead",
    "plot": "a run as a picture: reward, held-out accuracy, lag, timeline",
    "ledger": "what became of every prompt group of a run, and whether the books balance",
    "show-data": "rows of a data file as the model sees them, and what of it is trained",
    "check-reward": "whether a reward tells gold answers from wrong and empty ones",
    "settings-doc": "write docs/settings.md from the settings",
}
"""Sub-command -> what it does. Each is `main(argv) -> exit code` in the file of its name."""


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "usage: miles COMMAND [...]\n\n" + "\n".join(lines) + "\n\nmiles COMMAND --help tells more."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one sub-command; its exit code."""
    command, *rest = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    if command in ("-h", "--help", "help"):
        print(usage())
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(f"miles {version('miles')}")
        return 0
    if command not in COMMANDS:
        from difflib import get_close_matches

        guess = get_close_matches(command, COMMANDS, 1, cutoff=0.4)
        print(f"miles: unknown command {command!r}" + (f"; did you mean {guess[0]}?" if guess else "") + f"\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        code: int = load(f"miles.cli.{command.replace('-', '_')}.main")(rest)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit finds somebody
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
