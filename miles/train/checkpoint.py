"""Saves and restores one role's training state; any number of ranks may read what any number of ranks wrote."""

from __future__ import annotations

import asyncio
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from miles.config.checkpoint_files import COMPLETE, FileSums, complete, sums
from miles.config.places import newest_checkpoint
from miles.train.lora import Adapters, check_saved
from miles.train.mesh import Ranks
from miles.train.model import TrainedModel
from miles.train.published import PublishedWeights

logger = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
PROGRESS = "progress.json"


@dataclass(slots=True)
class Progress:
    """The counters of a role. `step` counts optimizer steps over the whole run and alone decides the learning rate."""

    rollout_id: int
    step: int
    weight_version: int
    updates: int  # steps that changed the weights: those with a finite gradient
    adapters: dict[str, Any] | None = None  # where adapters alone are trained: what they are (lora.Adapters)
    with_published: bool = False  # whether the last publish's weights, when they are not the model's, lie beside them


def newest_complete(load: str, role: str) -> Path:
    """The folder of `role` in the newest complete and undamaged checkpoint at `load`: a directory of checkpoints, or one checkpoint.

    Raises ValueError if there is none.
    """
    folder = Path(load).expanduser()
    if not (folder / COMPLETE).exists() and (newest := newest_checkpoint(folder)) is not None:
        folder = complete(folder)[newest]
    if (folder / COMPLETE).exists() and (folder / role / PROGRESS).exists():
        return folder / role
    raise ValueError(f"--load: no complete checkpoint with a part for the {role} at {load}")


def _fit(state: dict[str, Tensor], directory: Path) -> None:
    """Leave out of `state` what a CPU's checkpoint cannot have. Raises ValueError when the checkpoint is of another model."""
    saved = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    if "random.device" not in saved:
        state.pop("random.device", None)
    for name, tensor in state.items():
        size = getattr(saved.get(name), "size", None)
        if not name.startswith("random.") and size != tensor.shape:
            there = "is not there" if size is None else f"has shape {list(size)} there"
            text = f"{name} {there}, and {list(tensor.shape)} in --hf-checkpoint (critic: --critic-checkpoint)"
            raise ValueError(f"--load: {directory} is of another model: {text}; give the model that the run began with")


@contextmanager
def _as_exceptions() -> Iterator[None]:
    """torch's own is a BaseException, which nothing on the way would take for a fault; the first rank's error is raised in its place."""
    try:
        yield
    except CheckpointException as error:
        first = next(iter(error.failures.values()))[0]
        raise first if isinstance(first, Exception) else RuntimeError(str(error)) from error


class Checkpointer:
    """Writes what is trained, at most one checkpoint at a time; an asynchronous save copies the state first, so training may go on."""

    def __init__(self, model: TrainedModel, optimizer: torch.optim.Optimizer, ranks: Ranks, adapters: Adapters | None = None) -> None:
        """`adapters`: what they are, where they alone are trained."""
        self.model, self.optimizer, self.ranks, self.adapters = model, optimizer, ranks, adapters
        # One for all saves: it keeps the memory that it copies into, as to be given new memory takes longer than the copy.
        self._stager = DefaultStager(StagingOptions(False, False, use_async_staging=False, use_non_blocking_copy=False))
        self._after = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: list[Future[FileSums]] = []

    def save(self, directory: Path, progress: Progress, force_sync: bool, published: PublishedWeights | None = None) -> None:
        """Write into `directory`, after the save before is done. Every rank calls it. `published`: weights to save beside the model's."""
        self.wait()
        progress.with_published = published is not None
        progress.adapters = None if self.adapters is None else asdict(self.adapters)
        if self.ranks.rank == 0:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / PROGRESS).write_text(json.dumps(asdict(progress)))
        self.ranks.barrier()
        state, group = self._state(with_moments=progress.updates > 0, published=published), self._group()
        writing: Future[Any] | None = None
        if force_sync:
            with _as_exceptions():
                dcp.save(state, checkpoint_id=directory, process_group=group, no_dist=group is None)
        else:
            started = dcp.async_save(state, checkpoint_id=directory, process_group=group, no_dist=group is None, async_stager=self._stager)
            writing = started.upload_completion if isinstance(started, AsyncSaveResponse) else started
        self._running = [self._after.submit(self._sums, directory, writing)]

    def also(self, write: Callable[[], object], directory: Path) -> None:
        """Part of the running save: `write` is called after what is already being written, and fills `directory`."""

        def written() -> FileSums:
            write()
            return sums(directory.parent, (path for path in directory.rglob("*") if path.is_file())) if self.ranks.rank == 0 else {}

        self._running.append(self._after.submit(written))

    def wait(self) -> None:
        """Until the last save is on disk. Raises what went wrong in it."""
        for running in self._running:
            running.result()

    async def written(self) -> dict[str, Mapping[str, int | str]]:
        """As `wait`, without holding up what else the rank does. Returns the checksums of the files that this rank wrote."""
        found: dict[str, Mapping[str, int | str]] = {}
        for running in self._running:
            own: FileSums = await asyncio.wrap_future(running)
            found |= own
        return found

    def _sums(self, directory: Path, writing: Future[Any] | None) -> FileSums:
        if writing is not None:
            with _as_exceptions():
                writing.result()
        own = directory.glob(f"__{self.ranks.rank}_*")
        shared = [directory / PROGRESS, directory / ".metadata"] if self.ranks.rank == 0 else []
        return sums(directory.parent, [*own, *shared])

    def dispose(self) -> None:
        """Finish what is being written."""
        self._after.shutdown()
        self._stager.close()

    def load(self, directory: Path, published: PublishedWeights | None = None) -> Progress:
        """Restore model, optimizer and random state in place, and `published`: where the checkpoint has none, they are the model's."""
        progress = Progress(**json.loads((directory / PROGRESS).read_text()))
        check_saved(progress.adapters, self.adapters, directory)
        own = published if progress.with_published else None
        state, group = self._state(with_moments=progress.updates > 0, published=own), self._group()
        _fit(state, directory)
        with _as_exceptions():
            dcp.load(state, checkpoint_id=directory, process_group=group, no_dist=group is None)
        torch.set_rng_state(state["random.cpu"])
        if "random.device" in state:
            torch.cuda.set_rng_state(state["random.device"])
        if progress.updates > 0:
            for parameter in self._named().values():
                self.optimizer.state[parameter]["step"].fill_(progress.updates)
        if published is not None and own is None:
            published.refresh()
        logger.info("restored rollout %d, optimizer step %d from %s", progress.rollout_id, progress.step, directory)
        return progress

    def _group(self) -> dist.ProcessGroup | None:
        """The ranks that save together; None for one rank alone, which is no accident worth a warning."""
        if self.ranks.saving is None:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        return self.ranks.saving

    def _named(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def _state(self, with_moments: bool, published: PublishedWeights | None) -> dict[str, Tensor]:
        """Flat names to the live tensors; moments that do not exist yet are made, to be read into."""
        state: dict[str, Tensor] = {"random.cpu": torch.get_rng_state()}
        if self.ranks.device.type == "cuda":
            state["random.device"] = torch.cuda.get_rng_state()
        for name, parameter in self._named().items():
            state[f"model.{name}"] = parameter.detach()
            if with_moments:
                own = self.optimizer.state[parameter]
                if not own:
                    own["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    own |= {moment: torch.zeros_like(parameter, requires_grad=False) for moment in MOMENTS}
                state |= {f"{moment}.{name}": own[moment] for moment in MOMENTS}
        if published is not None:
            state |= {f"published.{name}": kept for name, kept in published.kept.items()}
        return state
