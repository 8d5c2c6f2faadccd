"""Which options the server of an environment knows, read off its source: importing it would take many seconds."""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

FIND = "import importlib.util as u; spec = u.find_spec('sglang'); print(spec.submodule_search_locations[0] if spec else '')"
DECLARED = re.compile(r"^    ([a-z]\w*): |[\"']--([a-z][\w-]*)[\"']", re.MULTILINE)
"""A field of ServerArgs, or a flag beside them. Some match that are none; none is missed."""
PLAIN: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
}
"""Types of options that are told of a wrong value: the values they take, and what they are called."""


def check_options(python: str, options: Mapping[str, Any]) -> None:
    """Do nothing where that interpreter has no sglang here: the engine's host may have it, and looks again.

    Raises:
        ValueError: an option that SGLang's server does not know, or one that is not of its type.
    """
    if not options or not (known := known_options(python)):
        return
    for name, value in sorted(options.items()):
        if name not in known:
            begin = sorted(option for option in known if option.startswith(name))
            guess = next(iter(begin or difflib.get_close_matches(name, sorted(known), 1, cutoff=0.7)), None)
            rest = f"; did you mean {guess}?" if guess else "; SGLang's documentation lists its server arguments"
            raise ValueError(f"--sglang {name}: the SGLang of {python} has no such option{rest}")
        types, called = PLAIN.get(known[name], ((), ""))
        if types and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise ValueError(f"--sglang {name}: SGLang wants {called}, got {value!r}")


@cache
def known_options(python: str) -> dict[str, str]:
    """Options by their names in a table [sglang], with the type if it is one of `PLAIN`; empty when there is no sglang to look at."""
    try:
        done = subprocess.run([python, "-c", FIND], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    server = Path(done.stdout.strip() or "/nowhere") / "srt"
    files = [server / "server_args.py", *server.glob("arg_groups/**/*.py")]
    if not files[0].is_file():
        return {}
    texts = [file.read_text(encoding="utf-8") for file in files]
    found = {(field or flag.replace("-", "_")): "" for text in texts for field, flag in DECLARED.findall(text)}
    kinds: dict[str, set[str]] = defaultdict(set)
    for name, kind in chain.from_iterable(map(_fields, texts)):
        kinds[name].add(kind)
    return found | {name: kind for name, (kind, *others) in kinds.items() if not others}


def _fields(text: str) -> Iterator[tuple[str, str]]:
    """Fields of classes, with their type where it is one plain value's, or that or None; else ""."""
    for node in ast.walk(ast.parse(text)):
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                kind = line.annotation
                if isinstance(kind, ast.Subscript) and isinstance(kind.slice, ast.Tuple):  # Annotated[type, ...]
                    kind = kind.slice.elts[0]
                plain = re.fullmatch(r"(?:Optional\[)?(\w+)\]?(?: \| None)?", ast.unparse(kind))
                yield line.target.id, plain[1] if plain and plain[1] in PLAIN else ""
