"""Which options the server of an environment knows, read off its source: importing it would take many seconds."""

from __future__ import annotations

import difflib
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path

FIND = "import importlib.util as u; spec = u.find_spec('sglang'); print(spec.submodule_search_locations[0] if spec else '')"
DECLARED = re.compile(r"^    ([a-z]\w*): |[\"']--([a-z][\w-]*)[\"']", re.MULTILINE)
"""A field of ServerArgs, or a flag beside them. Some match that are none; none is missed."""


def check_options(python: str, names: Iterable[str]) -> None:
    """Do nothing where that interpreter has no sglang here: the engine's host may have it, and looks again.

    Raises:
        ValueError: an option that SGLang's server does not know.
    """
    names = sorted(names)
    if not names or not (known := known_options(python)):
        return
    for name in names:
        if name not in known:
            begin = sorted(option for option in known if option.startswith(name))
            guess = next(iter(begin or difflib.get_close_matches(name, sorted(known), 1, cutoff=0.7)), None)
            rest = f"; did you mean {guess}?" if guess else "; SGLang's documentation lists its server arguments"
            raise ValueError(f"--sglang {name}: the SGLang of {python} has no such option{rest}")


@cache
def known_options(python: str) -> frozenset[str]:
    """Options by their names in a table [sglang]; empty when there is no sglang to look at."""
    try:
        done = subprocess.run([python, "-c", FIND], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    server = Path(done.stdout.strip() or "/nowhere") / "srt"
    files = [server / "server_args.py", *server.glob("arg_groups/**/*.py")]
    if not files[0].is_file():
        return frozenset()
    found = (match for file in files for match in DECLARED.findall(file.read_text(encoding="utf-8")))
    return frozenset((field or flag.replace("-", "_")) for field, flag in found)
