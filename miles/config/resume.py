"""Going on with a run: `--resume RUN`, or the same command once more.

--resume RUN       the settings of that run, its folder, its newest complete checkpoint; flags and files given beside it are stronger
the same command   goes on with the run of that name, when that is unfinished, has a checkpoint, and had the same settings;
                   otherwise, or with --no-load, the earlier folder is moved aside and the run starts anew
"""

import json
from pathlib import Path
from typing import Any

from miles.config import toml
from miles.config.run_config import RunConfig
from miles.config.schema import flag, settings
from miles.config.validate import lacks_last_eval, newest_checkpoint

ORIGIN = "resume"
OF_ONE_PROCESS = ("load", "start_rollout_id", "debug_exit_after_rollout", "debug_kill", "console", "log_level")
"""Settings that say how one process goes about it and not what the run is; a resumed run takes none of the first four over."""


def settings_of(run: str) -> toml.TomlValues:
    """The settings of the run with this name, or in this folder, for another process that goes on with it."""
    folder = next((path for path in (Path(run).expanduser(), Path("runs") / run) if (path / "config.toml").exists()), None)
    if folder is None:
        found = toml.TomlValues()
        found.problems.append(f"--resume {run}: no run of that name in runs/, and no folder with a config.toml")
        return found
    found = toml.read(str(folder / "config.toml"))
    if not found.values and not found.problems:
        found.problems.append(
            f"--resume {run}: {folder / 'config.toml'} has no settings; put it back as it was, or give --load and all flags"
        )
    found.values = {name: value for name, value in found.values.items() if name not in OF_ONE_PROCESS[:4]}
    found.values |= {"name": folder.resolve().name, "run_root": str(folder.parent)}
    return found


def going_on(args: RunConfig) -> RunConfig:
    """`args` for a process that goes on in the run's own folder; without a complete checkpoint it begins at the beginning."""
    load = args.checkpoint_dir if newest_checkpoint(Path(args.checkpoint_dir).expanduser()) is not None else None
    return args.model_copy(update={"load": load, "goes_on": load is not None, "origins": args.origins | {"load": ORIGIN}})


def is_same_unfinished(args: RunConfig) -> bool:
    """Whether the run's folder holds a run of the same settings that has a checkpoint, and something is left to do."""
    file = Path(args.run_dir) / "config.toml"
    if args.load is not None or args.start_rollout_id is not None or args.origins.get("load") == "flag" or not file.exists():
        return False
    newest = newest_checkpoint(Path(args.checkpoint_dir).expanduser())
    if newest is None or (newest + 1 >= _num_rollout(args, newest) and not lacks_last_eval(args, newest)):
        return False
    return not changed(args, file.parent)


def changed(args: RunConfig, folder: Path) -> list[str]:
    """Settings that are not those of the run in this folder, as "--lr 0.001 (was 0.01)"."""
    was, now = _compared(toml.read(str(folder / "config.toml")).values), _compared(args.__dict__)
    names = [name for name in settings() if was.get(name) != now.get(name)]
    return [f"{flag(name)} {now.get(name)} (was {was.get(name)})" for name in names]


def _num_rollout(args: RunConfig, newest: int) -> int:
    """Of the run that saved that checkpoint: epochs give a number that only the data know."""
    folder = Path(args.checkpoint_dir).expanduser()
    own = folder if folder.name.startswith("rollout_") else folder / f"rollout_{newest:06d}"
    try:
        return int(json.loads((own / "executor.json").read_text(encoding="utf-8"))["num_rollout"])
    except (OSError, ValueError, KeyError):
        return args.num_rollout or 0


def _compared(values: dict[str, Any]) -> dict[str, Any]:
    names = [name for name in settings() if name not in OF_ONE_PROCESS and name not in toml.SECRETS]
    return {name: values[name] for name in names if values.get(name) is not None}
