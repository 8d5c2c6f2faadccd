"""What settings name on the disk: whether it is there, or can be."""

import json
import os
import re
from pathlib import Path

from miles.config.checkpoint_files import complete, damage


def there(path: str) -> bool:
    """Whether a data set can be there: a path that exists, or something with a scheme, which its reader judges."""
    return Path(path).expanduser().exists() or bool(re.match(r"[a-z][a-z0-9_+.-]+:", path))


RANDOM_MODELS = ("tiny", "tiny-4k", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b")
"""Shapes that `random:NAME` makes; miles/train/random_model.py has their sizes."""


def model_missing(name: str) -> str | None:
    """Why this cannot be a model: neither a directory, nor random:..., nor a name that the hub could know."""
    path = Path(name).expanduser()
    if name.startswith("random:"):
        known = name.removeprefix("random:") in RANDOM_MODELS
        return None if known else f"no such random model; there are {', '.join(RANDOM_MODELS)}"
    if path.is_dir():
        return _weights_missing(path) if (path / "config.json").exists() else "no config.json in that directory"
    first, _, rest = name.partition("/")
    like_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and first not in (".", "..", "models") and not Path(first).is_dir()
    if not like_hub:
        return "no such directory"
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") and not _hub_cache(f"models--{first}--{rest}").is_dir():
        return "not in the local hub cache, and HF_HUB_OFFLINE forbids to download it"
    return None


def _weights_missing(folder: Path) -> str | None:
    """As far as names, sizes and headers tell."""
    index = folder / "model.safetensors.index.json"
    names = [path.name for path in folder.glob("*.safetensors")]
    try:
        if index.exists():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        for path in map(folder.joinpath, names):
            if not path.exists():
                return f"{path.name} is not in that directory, and {index.name} names it"
            size = path.stat().st_size
            with path.open("rb") as file:
                header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), size)))
                whole = file.tell() + max((entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"), default=0)
            if size != whole:
                return f"{path.name} has {size} bytes, and {whole} by its header: it was not copied to its end"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its weights cannot be read: {error!r}"
    return None if names or any(folder.glob("*.bin")) else "no weights in that directory (*.safetensors)"


def _hub_cache(folder: str) -> Path:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")) / folder


def unwritable(folder: str) -> str | None:
    """Why nothing can be written there. A folder that is not there yet will be made in the nearest one that is."""
    path = Path(folder).expanduser().absolute()
    nearest = next(place for place in (path, *path.parents) if place.exists())
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"nothing can be written in {nearest}"


def newest_checkpoint(folder: Path) -> int | None:
    """Rollout id of the newest complete checkpoint in a folder of checkpoints, or of the one that the folder is.

    One whose files are not as they were written does not count; a warning says which.
    """
    found = complete(folder)
    return next((rollout_id for rollout_id in sorted(found, reverse=True) if not damage(found[rollout_id])), None)
