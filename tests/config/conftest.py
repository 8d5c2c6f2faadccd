"""A command line that nothing is wrong with, to be made wrong in one place."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from miles.config.cli import SettingsError, resolve
from miles.config.run_config import RunConfig


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """The flags of a valid run."""
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({}))
    save_file({"w": np.zeros(2)}, tmp_path / "model" / "model.safetensors")
    return ["--prompt-data", str(tmp_path / "train.jsonl"), "--hf-checkpoint", str(tmp_path / "model"), "--num-rollout", "4"]


@pytest.fixture
def run(good) -> Callable[..., RunConfig]:
    """Resolve the valid run with more flags."""
    return lambda *flags: resolve([*good, *flags])


@pytest.fixture
def refusal(good) -> Callable[..., str]:
    """What is said of the valid run with more flags; it must be refused."""

    def refuse(*flags: str) -> str:
        with pytest.raises(SettingsError) as caught:
            resolve([*good, *flags])
        return str(caught.value)

    return refuse
