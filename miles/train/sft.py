"""Supervised fine-tuning on conversations, with the trainer of everything else: `miles sft`.

A row is a conversation ({"messages": [...]}), or a prompt and its answer (fields prompt_key and label_key). The loss is
the negative log-likelihood of what the assistant wrote. A "rollout" is one batch of rollout_batch_size rows.
"""

from __future__ import annotations

import json
import logging
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing

from miles.config.checkpoint_files import COMPLETE, sums
from miles.config.run_config import RunConfig
from miles.data.conversation import Row, load_conversations
from miles.data.rollout_data import pack, split
from miles.data.tokenizer import load_tokenizer
from miles.tracking import tracking
from miles.train.random_model import resolve_checkpoint
from miles.train.trainer import Trainer
from miles.types import ObjectRef, PromptGroup, Sample, TrainShare

logger = logging.getLogger(__name__)


class Shares:
    """An object store for one process: a table."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._made = 0

    def put(self, value: Any) -> ObjectRef:
        self._made += 1
        self._values[str(self._made)] = value
        return ObjectRef(str(self._made))

    def get(self, ref: ObjectRef) -> Any:
        return self._values[ref.key]

    def free(self, refs: Sequence[ObjectRef]) -> None:
        for ref in refs:
            self._values.pop(ref.key, None)

    def count(self) -> int:
        return len(self._values)


def main(args: RunConfig) -> None:
    """The whole command: a run folder, training on num_trainers ranks of this host, checkpoints, a Hugging Face model."""
    if args.hf_checkpoint:
        resolve_checkpoint(args.hf_checkpoint, args.seed)
    tracking.init(args)
    try:
        if args.num_trainers == 1:
            train(args)
            return
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        others = torch.multiprocessing.start_processes(
            _other_rank, args=(args, port), nprocs=args.num_trainers - 1, join=False, start_method="spawn"
        )
        try:
            train(args, port=port)
        finally:
            for process in others.processes:
                process.join(args.shutdown_timeout)
                process.kill()
    finally:
        tracking.finish()


def _other_rank(index: int, args: RunConfig, port: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(index + 1)
    train(args, rank=index + 1, port=port)


def train(args: RunConfig, rank: int = 0, port: int = 0) -> list[dict[str, float]]:
    """One rank's part. Returns the metrics of every optimizer step, after logging them (rank 0).

    Raises:
        ValueError: the data cannot be used, with file and line; fewer rows than one batch.
    """
    tokenizer = load_tokenizer(args.model_copy(update={"hf_checkpoint": resolve_checkpoint(args.hf_checkpoint, args.seed)}))
    rows = [row for path in args.prompt_data.values() for row in load_conversations(path, tokenizer, args)]
    held_out = {name: load_conversations(path, tokenizer, args) for name, path in args.eval_data.items()}
    per_epoch = len(rows) // args.rollout_batch_size
    if not per_epoch:
        raise ValueError(
            f"--prompt-data: {len(rows)} conversations in {' '.join(args.prompt_data.values())}, fewer than --rollout-batch-size"
        )
    if args.num_rollout is None:
        args.fill(num_rollout=per_epoch * (args.num_epoch or 1))
    assert args.num_rollout is not None
    store = Shares()
    trainer = Trainer(args, "actor", rank, args.num_trainers, store)
    restored = trainer.init("127.0.0.1", port)
    history: list[dict[str, float]] = []
    try:
        for batch in range(0 if restored is None else restored + 1, args.num_rollout):
            if args.eval_interval and batch % args.eval_interval == 0 and not (batch == 0 and args.skip_eval_before_train):
                _evaluate(trainer, held_out, batch - 1, store)
            chosen = batch_rows(batch, len(rows), args)
            with tracking.timeline().span("actor", "train", rollout_id=batch):
                history += _train_batch(trainer, [rows[row] for row in chosen], batch, store)
            last = batch == args.num_rollout - 1
            if args.save_interval and ((batch + 1) % args.save_interval == 0 or last):
                _save(trainer, batch, args)
        if args.eval_interval:
            _evaluate(trainer, held_out, args.num_rollout - 1, store)
        trainer.export_hf(f"{args.checkpoint_dir}/hf")
    finally:
        trainer.dispose()
    return history


def batch_rows(batch: int, num_rows: int, args: RunConfig) -> list[int]:
    """The rows of one batch: every row at most once in an epoch, in a new order each epoch if shuffle is on."""
    per_epoch = num_rows // args.rollout_batch_size
    epoch, place = divmod(batch, per_epoch)
    order = np.random.default_rng([args.seed % 2**64, epoch]).permutation(num_rows) if args.shuffle else np.arange(num_rows)
    return order[place * args.rollout_batch_size : (place + 1) * args.rollout_batch_size].tolist()


def make_shares(rows: Sequence[Row], batch: int, args: RunConfig) -> list[TrainShare]:
    """One share per rank: each row a group of one, its prompt all that comes before the assistant's first token."""
    groups = []
    for place, (ids, mask) in enumerate(rows):
        first = max(1, mask.index(1))
        response = len(ids) - first
        sample = Sample(
            sample_index=place,
            group_index=place,
            prompt="",
            prompt_ids=ids[:first],
            response_ids=ids[first:],
            loss_mask=mask[first:],
            rollout_logprobs=[0.0] * response,
            reward=0.0,
        )
        groups.append(PromptGroup(place, place, 0, [sample]))
    return split(pack(groups), args.num_trainers, args.global_batch_size or len(rows), rollout_id=batch, weight_version=-1)


def _train_batch(trainer: Trainer, rows: Sequence[Row], batch: int, store: Shares) -> list[dict[str, float]]:
    ref = store.put(make_shares(rows, batch, trainer.args)[trainer.ranks.rank])
    result = trainer.train(batch, ref)
    store.free([ref])
    if trainer.ranks.rank == 0:
        for place, metrics in enumerate(result.metrics_per_step):
            tracking.log(metrics, batch, result.step - len(result.metrics_per_step) + place + 1)
    return result.metrics_per_step


def _evaluate(trainer: Trainer, held_out: dict[str, list[Row]], batch: int, store: Shares) -> None:
    """Log the mean negative log-likelihood of each held-out set's assistant tokens."""
    for name, rows in held_out.items():
        ref = store.put(make_shares(rows, batch, trainer.args.model_copy(update={"global_batch_size": None}))[trainer.ranks.rank])
        loss = trainer.mean_nll(ref)
        store.free([ref])
        if trainer.ranks.rank == 0:
            tracking.log({f"eval/{name}/loss": loss, f"eval/{name}/count": len(rows)}, batch)


def _save(trainer: Trainer, batch: int, args: RunConfig) -> None:
    """The checkpoint grows under another name, and gets its own when it is whole."""
    folder = Path(args.checkpoint_dir).expanduser() / f"rollout_{batch:06d}"
    growing = folder.with_name(f".{folder.name}.saving")
    if trainer.ranks.rank == 0:
        shutil.rmtree(growing, ignore_errors=True)
    trainer.ranks.barrier()
    trainer.save(batch, str(growing), force_sync=True)
    trainer.checkpointer.wait()
    trainer.ranks.barrier()
    if trainer.ranks.rank == 0:
        files = sums(growing, (path for path in growing.rglob("*") if path.is_file()))
        (growing / COMPLETE).write_text(json.dumps({"rollout_id": batch, "files": files}, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        growing.rename(folder)
