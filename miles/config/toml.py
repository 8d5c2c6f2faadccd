"""Settings from and to TOML: one table per section. Relative paths in a file are relative to the working directory."""

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.config.other_names import nearest, nearest_key
from miles.config.run_config import SECTIONS, RunConfig
from miles.config.schema import settings

SECRETS = ("api_server_token",)
PASSED_THROUGH = ("sglang",)
"""Tables that are one setting each: their keys are another program's."""


@dataclass(slots=True)
class TomlValues:
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read(path: str) -> TomlValues:
    """Read one file. Never raises: what is wrong is in `problems`, each with the file, the table and the key."""
    found = TomlValues()
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        found.problems.append(f"--config {path}: {error.strerror or error}")
        return found
    except ValueError as error:
        found.problems.append(f"--config {path}: not TOML: {error}")
        return found
    known = settings()
    sections = {name: setting.section for name, setting in known.items()}
    for table, content in tables.items():
        if not isinstance(content, dict):
            where = f"; write it below [{known[table].section}]" if table in known else _did_you_mean(nearest_key(table, "", sections))
            found.problems.append(f"{path}: {table} stands outside of any table{where}")
        elif table in PASSED_THROUGH:
            found.values[table] = content
        elif table not in SECTIONS:
            found.problems.append(f"{path}: unknown table [{table}]{_did_you_mean(nearest(table, [*SECTIONS, *PASSED_THROUGH]))}")
        else:
            for key, value in content.items():
                if key not in known:
                    found.problems.append(f"{path}: [{table}] {key}: unknown key{_did_you_mean(nearest_key(key, table, sections))}")
                elif known[key].section != table:
                    found.problems.append(f"{path}: [{table}] {key}: belongs below [{known[key].section}]")
                else:
                    found.values[key] = value
    return found


def _did_you_mean(guess: str | None) -> str:
    return f"; did you mean {guess}?" if guess else ""


def dump(args: RunConfig) -> str:
    """The effective settings as a file that `read` takes back, each with where its value came from.

    Settings without a value, and secrets, stand in comments.
    """
    lines = ["# The settings of this run. Behind each: the file or flag it came from, or default."]
    for table, section in SECTIONS.items():
        lines += ["", f"[{table}]"]
        for name in section.model_fields:
            value, origin = args.__dict__[name], args.origins.get(name, "default")
            if value is None:
                lines.append(f"# {name}: not set")
            elif name in SECRETS:
                lines.append(f"# {name}: not written here  # {origin}")
            else:
                lines.append(f"{name} = {write_value(value)}  # {origin}")
    return "\n".join(lines) + "\n"


def write_value(value: Any) -> str:
    """One value in TOML; entries of a table that are None are left out, which is how TOML says it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, dict):
        entries = [f"{write_value(str(key))} = {write_value(entry)}" for key, entry in value.items() if entry is not None]
        return "{" + ", ".join(entries) + "}"
    return "[" + ", ".join(write_value(entry) for entry in value if entry is not None) + "]"
