"""Writes a Hugging Face checkpoint tensor by tensor: no rank ever holds more than one shard file's worth."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from miles.train.mesh import Ranks
from miles.train.model import TrainedModel
from miles.train.sharding import full, hf_tensors

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30


def export(model: TrainedModel, source: str, directory: Path, dtype: torch.dtype, ranks: Ranks) -> None:
    """Write weights in `dtype`, config, and the tokenizer of `source` into `directory`. Every rank calls it, rank 0 writes.

    The result loads with AutoModelForCausalLM.from_pretrained(directory).
    """
    if ranks.rank == 0:
        _write(_gathered(model, dtype), model, source, directory, dtype)
    else:
        for _ in _gathered(model, dtype):
            pass
    ranks.barrier()


def export_later(model: TrainedModel, source: str, directory: Path, dtype: torch.dtype, ranks: Ranks) -> Callable[[], None]:
    """As `export`, of the weights as they are now: rank 0 copies them to host memory, and the function that is returned writes them.

    Every rank calls both; the function may be called in another thread, while training goes on.
    """
    kept = [(name, tensor.clone() if ranks.rank == 0 else None) for name, tensor in _gathered(model, dtype)]

    def write() -> None:
        if ranks.rank == 0:
            _write(((name, tensor) for name, tensor in kept if tensor is not None), model, source, directory, dtype)
        kept.clear()

    return write


def _write(tensors: Iterable[tuple[str, Tensor]], model: TrainedModel, source: str, directory: Path, dtype: torch.dtype) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    writer = _ShardWriter(directory)
    for name, tensor in tensors:
        writer.add(name, tensor)
    writer.finish()
    _write_companions(model, source, directory, dtype)


def _gathered(model: TrainedModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in hf_tensors(model):
        yield name, full(parameter.detach()).to("cpu", dtype)
    persistent = model.hf.state_dict().keys() - {name for name, _ in model.hf.named_parameters(remove_duplicate=False)}
    buffers = dict(model.hf.named_buffers())
    for name in sorted(persistent):
        yield name, buffers[name].detach().cpu()


def _write_companions(model: TrainedModel, source: str, directory: Path, dtype: torch.dtype) -> None:
    config = type(model.hf.config).from_dict(model.hf.config.to_dict())
    config.dtype = dtype
    config.architectures = [type(model.hf).__name__.removeprefix("FSDP")]
    config.save_pretrained(directory)
    if isinstance(model.hf.generation_config, GenerationConfig):
        model.hf.generation_config.save_pretrained(directory)
    try:
        AutoTokenizer.from_pretrained(source).save_pretrained(directory)
    except (OSError, ValueError) as error:
        logger.warning("no tokenizer in %s, so none beside the exported weights: %s", source, error)


class _ShardWriter:
    """Fills model-0000n.safetensors files and the index over them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.waiting: dict[str, Tensor] = {}
        self.files: list[tuple[Path, list[str]]] = []
        self.nbytes = self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self.waiting and self.nbytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self.waiting[name] = tensor.contiguous()
        self.nbytes += tensor.nbytes
        self.total += tensor.nbytes

    def _flush(self) -> None:
        path = self.directory / f"part-{len(self.files) + 1}.safetensors"
        save_file(self.waiting, path, metadata={"format": "pt"})
        self.files.append((path, list(self.waiting)))
        self.waiting, self.nbytes = {}, 0

    def finish(self) -> None:
        self._flush()
        if len(self.files) == 1:
            self.files[0][0].rename(self.directory / "model.safetensors")
            return
        place: dict[str, str] = {}
        for number, (path, names) in enumerate(self.files, 1):
            final = f"model-{number:05d}-of-{len(self.files):05d}.safetensors"
            path.rename(self.directory / final)
            place |= dict.fromkeys(names, final)
        index = {"metadata": {"total_size": self.total}, "weight_map": place}
        (self.directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
