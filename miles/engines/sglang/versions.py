"""What differs between the versions of SGLang that are supported, 0.5.15 to 0.5.23. The only place that knows."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

logger = logging.getLogger(__name__)

OLDEST, NEWEST = (0, 5, 15), (0, 5, 23)


@dataclass(frozen=True, slots=True)
class Version:
    """One server's version, and what follows from it."""

    text: str

    @classmethod
    def of(cls, text: str) -> Version:
        """Raises ValueError for a version that is too old."""
        version = cls(text)
        if version.number < OLDEST:
            raise ValueError(f"SGLang {text}: too old, {_dotted(OLDEST)} to {_dotted(NEWEST)} are supported")
        if version.number > NEWEST:
            logger.warning("SGLang %s is newer than %s, the newest that miles was tried with", text, _dotted(NEWEST))
        return version

    @property
    def number(self) -> tuple[int, ...]:
        return tuple(int(part) for part in re.findall(r"\d+", self.text)[:3])

    @property
    def update_session(self) -> bool:
        """Weights change only between POST /begin_weight_update and /end_weight_update."""
        return self.number >= (0, 5, 21)

    @property
    def version_spans(self) -> bool:
        """A reply tells which tokens were sampled under which weights."""
        return self.number >= (0, 5, 19)


def _dotted(number: tuple[int, ...]) -> str:
    return ".".join(map(str, number))
