"""How a name becomes a function or a class: a built-in name, or a dotted path into the user's own code."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_one_at_a_time = threading.RLock()
"""Workers in one process load their classes in threads, and two threads inside one circle of imports see half-made modules."""


def load(name: str, builtin: Mapping[str, str] | None = None, *, setting: str = "") -> Any:
    """Return what `name` stands for.

    Args:
        name: a key of `builtin` ("math"), or a dotted path ("my_rewards.score", "pkg.mod.Class"). The current
            directory is searched too, so a file beside run.toml works as it lies.
        builtin: built-in names and the dotted paths that they stand for.
        setting: the flag that brought the name, for the error.

    Raises:
        ValueError: names the flag, the path and what was looked for.
    """
    path = (builtin or {}).get(name, name)
    blame = f"{setting}: " if setting else ""
    if "." not in path:
        known = f"; built in are {', '.join(sorted(builtin))}" if builtin else ""
        raise ValueError(f"{blame}{name!r} is neither built in nor a dotted path such as my_module.my_function{known}")
    module_name, _, attribute = path.rpartition(".")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        with _one_at_a_time:
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise
        raise ValueError(f"{blame}no module {module_name!r} for {name!r} (searched the current directory and sys.path)") from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise ValueError(f"{blame}module {module_name!r} has no {attribute!r}") from None
