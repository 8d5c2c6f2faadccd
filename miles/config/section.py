"""What every section of the settings is: typed, read-only, and documented by the docstring below each field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of the settings. All sections are bases of one flat `RunConfig`, so a room names the section that it needs."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, validate_default=True)
