"""Every setting as a flag, a TOML key and a help line see it, read off the sections."""

import ast
import sys
import types
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from miles.config.run_config import SECTIONS, RunConfig
from miles.config.section import Section

Kind = Literal["bool", "int", "float", "str", "choice", "list", "dict"]
KIND_OF: dict[Any, Kind] = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "dict", Literal: "choice"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting. `item` is the kind of a list's items or of a table's values ("any" for a table of anything)."""

    name: str
    section: str
    kind: Kind
    optional: bool
    choices: tuple[str, ...] = ()
    item: str = ""

    @property
    def flag(self) -> str:
        return flag(self.name)

    @property
    def default(self) -> Any:
        return RunConfig.model_fields[self.name].get_default(call_default_factory=True)

    @property
    def has_off_flag(self) -> bool:
        """Whether --no-x exists: booleans go off, optional ones lose their value, lists and tables become empty."""
        return self.optional or self.kind in ("bool", "list", "dict")


def flag(name: str) -> str:
    """num_rollout -> --num-rollout"""
    return "--" + name.replace("_", "-")


@cache
def settings() -> dict[str, Setting]:
    """Every setting by name, in the order of the sections."""
    return {
        name: _setting(name, table, RunConfig.model_fields[name].annotation)
        for table, section in SECTIONS.items()
        for name in section.model_fields
    }


def _setting(name: str, table: str, annotation: Any) -> Setting:
    arms = [arm for arm in get_args(annotation) if arm is not type(None)]
    optional = get_origin(annotation) in (Union, types.UnionType) and len(arms) == 1
    if optional:
        annotation = arms[0]
    kind = KIND_OF[get_origin(annotation) or annotation]
    choices, item = (), ""
    if kind == "choice":
        choices = get_args(annotation)
    elif kind in ("list", "dict"):
        inner = get_args(annotation)[-1]
        item = "any" if inner is Any else KIND_OF[get_origin(inner) or inner]
        choices = get_args(inner) if item == "choice" else ()
    return Setting(name, table, kind, optional, choices, item)


@cache
def docstrings() -> dict[str, str]:
    """Setting -> the docstring below its field; table -> what the section's module says of itself."""
    found: dict[str, str] = {}
    for table, section in SECTIONS.items():
        module = ast.parse(Path(str(sys.modules[section.__module__].__file__)).read_text(encoding="utf-8"))
        found[f"[{table}]"] = " ".join((ast.get_docstring(module) or "").split(": ", 1)[-1].split())
        found |= _field_docstrings(module, section)
    return found


def _field_docstrings(module: ast.Module, section: type[Section]) -> dict[str, str]:
    body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == section.__name__)
    found = {}
    for node, below in pairwise(body):
        match node, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = " ".join(text.split())
    return found
