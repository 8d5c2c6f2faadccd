"""How a name becomes a function or a class: a built-in name, or a dotted path into the user's own code."""

from __future__ import annotations

import importlib
import re
import sys
import threading
import traceback
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_OTHER_WAYS = ("import *", "__getattr__", "globals()", "setattr", "exec(")
"""How a module may have a name that its text does not show."""
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
        ValueError: names the flag, the path and what was looked for, or the line at which the module cannot be imported.
    """
    module_name, attribute = _place(name, builtin, setting)
    try:
        with _one_at_a_time:
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise _not_importable(module_name, error, setting) from error
        raise _no_module(module_name, name, setting) from error
    except Exception as error:  # the border to the user's code
        raise _not_importable(module_name, error, setting) from error
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise _no_attribute(module_name, attribute, setting) from None


def check(name: str, builtin: Mapping[str, str] | None = None, *, setting: str = "") -> None:
    """Raise the ValueError that `load` would, as far as that can be told without running the module: it may be heavy, and the
    process that checks a name early is not the one that will use it."""
    if builtin is not None and name in builtin:
        return
    module_name, attribute = _place(name, builtin, setting)
    spec = _find(module_name)
    if spec is None:
        raise _no_module(module_name, name, setting)
    if spec.origin is None or not spec.origin.endswith(".py") or _find(f"{module_name}.{attribute}") is not None:
        return
    source = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    try:
        compile(source, spec.origin, "exec")
    except SyntaxError as error:
        raise _not_importable(module_name, error, setting) from None
    if not re.search(rf"\b{re.escape(attribute)}\b", source) and not any(way in source for way in _OTHER_WAYS):
        raise _no_attribute(module_name, attribute, setting)


def _place(name: str, builtin: Mapping[str, str] | None, setting: str) -> tuple[str, str]:
    """Module and attribute; from here on the current directory is searched."""
    path = (builtin or {}).get(name, name)
    module_name, _, attribute = path.rpartition(".")
    if not module_name:
        known = f"; built in are {', '.join(sorted(builtin))}" if builtin else ""
        raise ValueError(f"{_blame(setting)}{name!r} is neither built in nor a dotted path such as my_module.my_function{known}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    return module_name, attribute


def _find(module_name: str) -> ModuleSpec | None:
    """As importlib.util.find_spec, which would import the parents."""
    top, *parts = module_name.split(".")
    spec = find_spec(top) if top else None
    for part in parts:
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(part, spec.submodule_search_locations)
    return spec


def _blame(setting: str) -> str:
    return f"{setting}: " if setting else ""


def _no_module(module_name: str, name: str, setting: str) -> ValueError:
    return ValueError(f"{_blame(setting)}no module {module_name!r} for {name!r} (searched the current directory and sys.path)")


def _not_importable(module_name: str, error: Exception, setting: str) -> ValueError:
    if isinstance(error, SyntaxError):
        file, line, why = error.filename, error.lineno, error.msg
    else:
        last = traceback.extract_tb(error.__traceback__)[-1]
        file, line, why = last.filename, last.lineno, str(error)
    return ValueError(f"{_blame(setting)}module {module_name!r} cannot be imported: {type(error).__name__}: {why} ({file}, line {line})")


def _no_attribute(module_name: str, attribute: str, setting: str) -> ValueError:
    return ValueError(f"{_blame(setting)}module {module_name!r} has no {attribute!r}")
