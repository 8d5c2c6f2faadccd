"""The settings of a run from defaults < --config files < flags, with everything that is wrong said at once.

The command line is read by `flags`, not by pydantic-settings: importing that package alone takes longer than the half second that help
may take, and its errors come one at a time and without the nearest known name. Values are checked by pydantic, in strict mode.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from miles.config import flags, resume, toml
from miles.config.docs import help_text
from miles.config.run_config import RunConfig
from miles.config.schema import Setting, settings
from miles.config.validate import SettingsError, problems_of

PRESET = "preset"


def parse_args(argv: Sequence[str] | None = None, *, prog: str | None = None, preset: Mapping[str, Any] | None = None) -> RunConfig:
    """The settings of this run.

    Args:
        argv: the command line without the program's name; default: this process's.
        prog: the program's name in help and errors.
        preset: values that a command stands for (sft sets its estimator); stronger than files, weaker than flags.

    Raises:
        SystemExit: 0 after help, 2 after an error, which is on stderr.
    """
    argv = sys.argv[1:] if argv is None else argv
    prog = prog or sys.argv[0].rsplit("/", 1)[-1]
    found = flags.read(argv)
    if found.help:
        _print(help_text(prog))
        raise SystemExit(0)
    try:
        return resolve(argv, preset=preset)
    except SettingsError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _print(text: str) -> None:
    """To stdout, also when that is `head` and goes away."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def resolve(argv: Sequence[str], *, preset: Mapping[str, Any] | None = None, check: bool = True) -> RunConfig:
    """As `parse_args`, without exits; `check` off leaves out the rules that look at the disk and across fields.

    Raises:
        SettingsError: with every problem found.
    """
    found = flags.read(argv)
    problems = list(found.problems)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    files = [(path, toml.read(path)) for path in found.configs]
    if found.resume is not None:
        files.insert(0, (f"--resume {found.resume}", resume.settings_of(found.resume)))
    for path, file in files:
        problems += file.problems
        values |= file.values
        origins |= dict.fromkeys(file.values, path)
    if any(file.problems and not file.values for _, file in files):
        raise SettingsError(problems)  # what such a file would have said is missing now, and need not be told
    for source, origin in ((preset or {}, PRESET), (found.values, "flag")):
        values |= source
        origins |= dict.fromkeys(source, origin)
    args, faulty = _build(values, origins, problems)
    faulty |= found.faulty
    if check and args.load is None and found.resume is not None:
        args = resume.going_on(args)
    if check:
        problems += [problem.text for problem in problems_of(args) if not faulty & set(problem.settings)]
    if problems:
        raise SettingsError(problems)
    return resume.going_on(args) if check and resume.is_same_unfinished(args) else args


def _build(values: dict[str, Any], origins: dict[str, str], problems: list[str]) -> tuple[RunConfig, set[str]]:
    """The settings, with defaults where a value is impossible; those are the second result, and are said in `problems`."""
    try:
        return RunConfig.model_validate({**values, "origins": origins}, strict=True), set()
    except ValidationError as error:
        faulty: dict[str, str] = {}
        for detail in error.errors(include_url=False):
            name, *inside = detail["loc"]
            faulty.setdefault(str(name), _reason(settings()[str(name)], dict(detail), inside))
    for name, reason in faulty.items():
        origin = origins[name]
        problems.append(f"{settings()[name].flag}: {reason}" + (f" ({origin})" if origin != "flag" else ""))
    good = {name: value for name, value in values.items() if name not in faulty}
    return RunConfig.model_validate({**good, "origins": origins}, strict=True), set(faulty)


LIMITS = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a table",
}


def _reason(setting: Setting, detail: dict[str, Any], inside: list[Any]) -> str:
    wanted = LIMITS.get(detail["type"], "").format(**detail.get("ctx", {}))
    if detail["type"] == "literal_error":
        wanted = ("one of " if len(setting.choices) > 1 else "") + ", ".join(setting.choices)
    at = f"entry {inside[0]}: " if inside and setting.kind in ("list", "dict") else ""
    return f"{at}must be {wanted}, got {detail['input']!r}" if wanted else f"{at}{detail['msg']}, got {detail['input']!r}"
