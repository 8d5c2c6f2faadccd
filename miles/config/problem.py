"""One thing that is wrong with the settings, said with the flags that it is about."""

from typing import NamedTuple

from miles.config.run_config import RunConfig
from miles.config.schema import flag


class Problem(NamedTuple):
    """What is wrong, and the settings that it is about."""

    settings: tuple[str, ...]
    text: str


def wrong(args: RunConfig, names: str, text: str) -> Problem:
    """A problem that begins with the flags and values of the settings that it is about."""
    fields = tuple(names.split())
    return Problem(fields, ", ".join(f"{flag(name)}{_shown(args.__dict__[name])}" for name in fields) + f": {text}")


def _shown(value: object) -> str:
    return "" if value is None or value is True else " " + (str(value) if value != "" else "''")
