"""Where seeded random models lie. Needs no torch, so that one can see cheaply whether a model is there already."""

from __future__ import annotations

import os
from pathlib import Path

PREFIX = "random:"
FORMAT = 1
"""Part of the cached name: raise it when what is made changes."""


def cache_directory() -> Path:
    return Path(os.environ.get("MILES_CACHE") or Path.home() / ".cache" / "miles") / "models"


def place_of(name: str, seed: int, directory: Path | None = None) -> Path:
    """The directory of the random model `name` ("random:<shape>"), whether or not it is made yet."""
    return (directory or cache_directory()) / f"{name.removeprefix(PREFIX)}-seed{seed}-v{FORMAT}"
