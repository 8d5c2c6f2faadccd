"""What every section of the settings is: typed, read-only, and documented by the docstring below each field.

Start-up speed is why sections hold real annotations (no `from __future__ import annotations`: pydantic would compile each string),
why their schema is built on first use, and why the docstrings are read from the source only when help is asked for.
"""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the settings. All sections are bases of one flat `RunConfig`, so a room names the section that it needs."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True, validate_default=True)
