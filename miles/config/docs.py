"""What the settings say of themselves: help on the terminal, and docs/settings.md."""

import shutil
import textwrap

from miles.config.run_config import SECTIONS
from miles.config.schema import Setting, docstrings, settings
from miles.config.toml import write_value

USAGE = """usage: {prog} [--config run.toml ...] [--flag value ...]
       {prog} --resume RUN [--flag value ...]

--resume goes on with the run of that name or folder. So does the same command again, where the run was not finished.
Defaults < --config files (one table per section; later files win) < flags. Lists and tables on the command line:
--stop A B, --eval-data easy=a.jsonl hard=b.jsonl, or JSON. --no-x turns a boolean off and empties the others."""

INTRODUCTION = """# Settings

Made from the sections in `miles/config/` by `miles settings-doc`; change a docstring there, not this page.

Defaults are weaker than `--config run.toml` (one table per section, several files allowed, later ones win), and files are weaker than
flags. A flag is the name in kebab-case: `num_rollout` is `--num-rollout`. Relative paths, in files too, are relative to the working
directory. `config.toml` in the run folder holds the effective settings, each with the flag or file it came from.

- Booleans: `--fully-async`, `--no-fully-async`.
- `--no-load` takes the value of an optional setting away; a list or table becomes empty.
- Lists: `--stop A B`, or `--stop A --stop B`, or `--stop '["A", "B"]'`. They replace the file's list.
- Tables: `--eval-data easy=a.jsonl hard=b.jsonl`, or a JSON object.
- A value that begins with `--` is written with `=`: `--stop=--`.

`--resume RUN` takes the settings of a run, by its name in `runs/` or its folder, and goes on with it ([resume.md](resume.md)); files and
flags beside it are stronger.

Everything that is wrong is said at once, with exit code 2: unknown names (abbreviations are unknown too) with the nearest known one,
wrong values, wrong combinations, missing files. What only this kind of run refuses, such as `--colocate` in an
asynchronous one, comes after that.
"""


def kind_text(setting: Setting) -> str:
    """How a value is written, for a reader."""
    choices = "|".join(setting.choices)
    if setting.kind == "dict":
        return "NAME=VALUE ..."
    if setting.kind == "list":
        return f"{choices or setting.item.upper()} ..."
    return "" if setting.kind == "bool" else choices or {"str": "TEXT", "int": "INT", "float": "FLOAT"}[setting.kind]


def default_text(setting: Setting) -> str:
    """The default as TOML writes it, or nothing where the docstring says what a missing value means."""
    return "" if setting.default is None or setting.default in ("", [], {}) else write_value(setting.default)


def help_text(prog: str, width: int | None = None) -> str:
    """All settings by section, for a terminal of `width` columns."""
    width = width or min(shutil.get_terminal_size((110, 24)).columns, 140)
    docs = docstrings()
    lines = [USAGE.format(prog=prog)]
    for table in SECTIONS:
        lines += ["", f"[{table}] {docs[f'[{table}]']}"]
        for setting in settings().values():
            if setting.section == table:
                default = default_text(setting)
                lines.append(f"  {setting.flag} {kind_text(setting)}".rstrip())
                text = docs[setting.name] + (f" (default: {default})" if default else "")
                lines += textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 8)
    return "\n".join(lines)


def settings_markdown() -> str:
    """The page docs/settings.md."""
    docs = docstrings()
    lines = [INTRODUCTION]
    for table in SECTIONS:
        lines += [f"## [{table}]", "", _upper(docs[f"[{table}]"]), "", "| setting | values | default | meaning |", "|---|---|---|---|"]
        for setting in settings().values():
            if setting.section == table:
                cells = (f"`{setting.name}`", _code(kind_text(setting) or "true, false"), _code(default_text(setting)), docs[setting.name])
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
