"""What the commands that look at data have in common: a file, a few flags of their own, and the settings of a run."""

import argparse
from collections.abc import Sequence

from miles.config.cli import resolve
from miles.config.run_config import RunConfig


def read(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, RunConfig]:
    """The command's own options, and the settings that all other flags give (--config run.toml, --reward math, ...).

    The data file comes first; without one it is the training data of the settings.

    Raises:
        SystemExit: after help, or for what the parser refuses.
        ValueError: wrong settings, or no data.
    """
    parser.add_argument("data", nargs="?", help="the file, before all flags; default: prompt_data of --config")
    parser.epilog = "Every setting of a run is a flag here too, such as --config run.toml, --hf-checkpoint, --prompt-key, --reward."
    known = {flag for action in parser._actions for flag in action.option_strings}
    takes_value = {flag for action in parser._actions for flag in action.option_strings if action.nargs != 0}
    own = list(argv[:1]) if argv and not argv[0].startswith("-") else []
    rest: list[str] = []
    words = iter(argv[len(own) :])
    for word in words:
        name, equals, _ = word.partition("=")
        (own if name in known else rest).append(word)
        if name in takes_value and not equals:
            own += [value] if (value := next(words, None)) is not None else []
    options = parser.parse_args(own)
    args = resolve(rest, check=False)
    if options.data is not None:
        args = args.model_copy(
            update={"prompt_data": {**args.prompt_data, **resolve(["--prompt-data", options.data], check=False).prompt_data}}
        )
        options.paths = {name: path for name, path in args.prompt_data.items() if path == options.data}
    else:
        options.paths = dict(args.prompt_data)
    if not options.paths:
        raise ValueError("no data: name a file, or a --config that has prompt_data")
    return options, args
