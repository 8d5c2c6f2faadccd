"""One log format for every process."""

import logging
import re
import sys
import time
from pathlib import Path
from typing import TextIO

NOISY = ("httpx", "httpcore", "urllib3", "matplotlib", "PIL", "fsspec", "filelock", "asyncio", "h5py", "numexpr")


TAIL = re.compile(r"(?<=the last lines:\n)(?:  .*(?:\n|\Z))+")


class Tails:
    """The ends of logs that errors bring along. One worker's death is told by all who waited for it: the first one is enough."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def once(self, text: str) -> str:
        """The text, without ends of logs that were shown already."""
        return TAIL.sub(self._first, text)

    def _first(self, found: re.Match[str]) -> str:
        tail = found[0].rstrip()
        if tail in self._shown:
            return "  (shown above)" + found[0][len(tail) :]
        self._shown.add(tail)
        return found[0]


on_terminal = Tails()


class _Format(logging.Formatter):
    def __init__(self, tails: Tails) -> None:
        super().__init__()
        self._tails = tails

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        text = f"{clock} {record.levelname[0]} {record.name.removeprefix('miles.')}: {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        text = self._tails.once(text)
        return text + ("\n" + self.formatStack(record.stack_info) if record.stack_info else "")


class _Terminal(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to whatever sys.stderr is at the time: the live view puts itself in its place."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def setup(level: str = "info", file: str | Path | None = None) -> None:
    """Log to stderr, and to `file` when given. Called once per process; again replaces the first set-up.

    Args:
        level: debug, info, warning or error.
        file: appended to; its folder is made. It gets everything from info on, whatever the terminal shows.
    """
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler.formatter, _Format)]:
        root.removeHandler(handler)
        handler.close()
    terminal = _Terminal()
    terminal.setLevel(level.upper())
    handlers: list[logging.Handler] = [terminal]
    if file is not None:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(_Format(on_terminal if handler is terminal else Tails()))
        root.addHandler(handler)
    root.setLevel(logging.DEBUG if level == "debug" else logging.INFO if file is not None else level.upper())
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
