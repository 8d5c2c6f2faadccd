"""Checkpoint stall: seconds in which training stands still because of a save, against those that the save takes until it is on disk.

    python benchmarks/checkpoint_stall.py --size 135m --json stall.json

One trainer with its optimizer's state, in this process. Asynchronous: the call returns when the state is copied; it is written and summed
beside the next steps. Synchronous: the call and the wait together.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from report import machine, summary, table, write
from shapes import SIZES, make_model

from miles.config.run_config import RunConfig
from miles.ray.object_store import ProcessStore
from miles.train.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="ci")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where checkpoints go; default: the system's temporary folder")
    parser.add_argument("--save-hf", action="store_true", help="with a Hugging Face export beside")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    found: dict[str, list[float]] = {"async stall": [], "async until on disk": [], "sync": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        trainer = make_trainer(Path(folder), options)
        for repeat in range(-1, options.repeats):
            for kind in ("async", "sync")[:: 1 if repeat % 2 else -1]:
                call, all_of_it = save(trainer, Path(folder) / f"{kind}-{repeat}", kind == "sync")
                if repeat >= 0:  # the first warms up
                    found["sync"] += [all_of_it] if kind == "sync" else []
                    found["async stall"] += [call] if kind == "async" else []
                    found["async until on disk"] += [all_of_it] if kind == "async" else []
        size = sum(path.stat().st_size for path in (Path(folder) / "sync-0").rglob("*") if path.is_file())
    result: dict[str, Any] = {"machine": machine(options.device), "size": options.size, "bytes": size, "save_hf": options.save_hf}
    result["seconds"] = {name: summary(values) for name, values in found.items()}
    rows = [
        [
            name,
            f"{told['median']:.3f}",
            f"{told['least']:.3f} to {told['most']:.3f}",
            f"{told['median'] / result['seconds']['sync']['median']:.2f}",
        ]
        for name, told in result["seconds"].items()
    ]
    print(f"{options.size}, {size / 1e6:.0f} MB, {options.device}\n{table(['', 'seconds', 'spread', 'of sync'], rows)}")
    write(options.json, result)


def make_trainer(folder: Path, options: argparse.Namespace) -> Trainer:
    make_model(SIZES[options.size], str(folder / "model"))
    args = RunConfig(
        hf_checkpoint=str(folder / "model"), device=options.device, num_rollout=8, run_root=str(folder), save_hf=options.save_hf
    )
    trainer = Trainer(args, "actor", 0, 1, ProcessStore())
    trainer.init("127.0.0.1", 0)
    for parameter in trainer.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()  # so that it has a state
    trainer.step = trainer.updates = 1
    return trainer


def save(trainer: Trainer, folder: Path, force_sync: bool) -> tuple[float, float]:
    """Seconds of the call, and until all is on disk."""
    begun = time.perf_counter()
    trainer.save(0, str(folder), force_sync)
    called = time.perf_counter() - begun
    asyncio.run(written(trainer))
    return called, time.perf_counter() - begun


async def written(trainer: Trainer) -> None:
    await trainer.wait_for_save()


if __name__ == "__main__":
    main()
