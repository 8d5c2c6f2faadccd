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

from miles.train.adapter_export import gathered_adapters, write_adapter
from miles.train.hf_weights import HFWeights
from miles.train.lora import Adapters
from miles.train.mesh import Ranks
from miles.train.model import TrainedModel
from miles.train.sharding import full

logger = logging.getLogger(__name__)

SHARD_BYTES = 4 << 30


class Exporter:
    """Writes a model's weights in `dtype`, its config, and the tokenizer of `source`. Every rank calls it, rank 0 writes.

    The result loads with AutoModelForCausalLM.from_pretrained(directory). Where adapters are trained, the weights are base plus
    adapter, and directory/adapter has the adapter by itself, which peft.PeftModel.from_pretrained puts on the base.
    """

    def __init__(self, model: TrainedModel, source: str, dtype: torch.dtype, ranks: Ranks, adapters: Adapters | None = None) -> None:
        self.model, self.source, self.dtype, self.ranks, self.adapters = model, source, dtype, ranks, adapters
        self._weights = HFWeights(model)

    def now(self, directory: Path) -> None:
        tensors, own = self._gathered(), gathered_adapters(self._weights)
        if self.ranks.rank == 0:
            self._write(tensors, own, directory)
        else:
            for _ in tensors:
                pass
        self.ranks.barrier()

    def later(self, directory: Path) -> Callable[[], None]:
        """Of the weights as they are now: rank 0 copies them to host memory, and the function that is returned writes them.

        Every rank calls both; the function may be called in another thread, while training goes on.
        """
        kept = [(name, tensor.clone() if self.ranks.rank == 0 else None) for name, tensor in self._gathered()]
        own = gathered_adapters(self._weights)

        def write() -> None:
            if self.ranks.rank == 0:
                self._write(((name, tensor) for name, tensor in kept if tensor is not None), own, directory)
            kept.clear()

        return write

    def _gathered(self) -> Iterator[tuple[str, Tensor]]:
        hf = self.model.hf
        for name in self._weights.shapes:
            yield name, full(self._weights.shard(name, self.dtype)).cpu()
        persistent = hf.state_dict().keys() - {name for name, _ in hf.named_parameters(remove_duplicate=False)}
        buffers = dict(hf.named_buffers())
        for name in sorted(persistent):
            yield name, buffers[name].detach().cpu()

    def _write(self, tensors: Iterable[tuple[str, Tensor]], own: dict[str, Tensor], directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for old in directory.glob("*.safetensors*"):
            old.unlink()
        writer = _ShardWriter(directory)
        for name, tensor in tensors:
            writer.add(name, tensor)
        writer.finish()
        _write_companions(self.model, self.source, directory, self.dtype)
        if self.adapters is not None:
            write_adapter(directory / "adapter", own, self.adapters, self.model.hf)


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
