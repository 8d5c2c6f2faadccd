"""The control API's token, in the run folder."""

import os
from pathlib import Path

TOKEN_FILE = "api_token"


def token_path(run_dir: str) -> Path:
    return Path(run_dir) / TOKEN_FILE


def write_token(path: Path, token: str) -> None:
    """Readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(token + "\n")


def read_token(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip()
