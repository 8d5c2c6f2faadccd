from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from miles.config.run_config import RunConfig
from miles.tracking import tracking


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., RunConfig]:
    """Settings of a run below tmp_path, silent unless asked otherwise."""
    return lambda **changes: RunConfig(**{"name": "r", "run_root": str(tmp_path / "runs"), "console": "quiet", "num_rollout": 8, **changes})


@pytest.fixture(autouse=True)
def _finished() -> Iterator[None]:
    yield
    tracking.finish()


@pytest.fixture
def checkpoint() -> Callable[[RunConfig, int], str]:
    """Put a complete checkpoint into a run."""

    def save(args: RunConfig, rollout_id: int) -> str:
        folder = Path(args.checkpoint_dir) / f"rollout_{rollout_id:06d}"
        folder.mkdir(parents=True)
        (folder / "COMPLETE").write_text('{"files": {}}')
        return args.checkpoint_dir

    return save


@pytest.fixture(scope="session")
def make_settings() -> Callable[..., RunConfig]:
    """Settings of a run that writes nothing."""
    return lambda **changes: RunConfig(**{"num_rollout": 8, **changes})
