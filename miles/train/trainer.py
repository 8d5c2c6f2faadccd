"""One rank of one role: takes its share of a rollout, makes optimizer steps of it, saves, exports, publishes."""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from miles.config.checkpoint_files import FileSums
from miles.config.run_config import RunConfig
from miles.fault_tolerance.kill_points import reached
from miles.protocols import ObjectStore
from miles.train import forward, offload
from miles.train.checkpoint import Checkpointer, Progress, newest_complete
from miles.train.first_step import FirstStep
from miles.train.frozen_models import FrozenModels
from miles.train.hf_export import Exporter
from miles.train.loading import DTYPES, load_asked, load_trained
from miles.train.loss import Sums, actor_loss, add_sums, critic_loss
from miles.train.mesh import Ranks, pick_device
from miles.train.metrics import StepFacts, step_metrics
from miles.train.micro_batches import MicroBatch, PackingRule, pack
from miles.train.model import PolicyModel, TrainedModel, hidden_size
from miles.train.optimizer import build_adamw, clip_gradients, learning_rate, set_learning_rate, total_steps
from miles.train.publish import Publisher
from miles.train.published import PublishedWeights, keeps_published
from miles.train.sharding import needs_sharding
from miles.train.targets import TokenColumns, fill_advantages, samples_with, token_columns
from miles.types import ObjectRef, PublishPlan, Role, TrainResult, TrainShare

logger = logging.getLogger(__name__)


class Trainer:
    """All ranks of a role get the same calls in the same order; every method returns when its work is done.

    Example: trainer = Trainer(args, "actor", 0, 1, store); trainer.init("127.0.0.1", 0); trainer.train(0, share_ref).
    """

    def __init__(self, args: RunConfig, role: Role, rank: int, world_size: int, store: ObjectStore) -> None:
        self.args, self.role, self.store = args, role, store
        self.device = pick_device(args.device)
        self.ranks = Ranks(rank, world_size, self.device)
        self.dtype = DTYPES[args.dtype]
        self.step = 0
        self.updates = 0  # optimizer steps that were not left out
        self.version = -1
        self.verified = args.load is not None
        self.frozen = FrozenModels(args, lambda source, setting: load_asked(args, source, setting, self.ranks))
        self.published: PublishedWeights | None = None
        self._closing = ExitStack()

    def init(self, master_address: str, master_port: int) -> int | None:
        """Meet the other ranks, load model and optimizer, restore from --load. Returns the restored rollout id, or None."""
        args = self.args
        if self.device.type == "cpu":
            torch.set_num_threads(args.trainer_threads or 1)
        torch.manual_seed(args.seed)
        torch.use_deterministic_algorithms(args.deterministic)
        self._closing.callback(self.ranks.leave)
        self.ranks.join(master_address, master_port, args.train_timeout, needs_sharding(self.ranks.world_size, self.dtype))
        loaded = load_trained(args, self.role, self.ranks)
        self.model = loaded.model
        self.peak_lr = args.critic_lr if self.role == "critic" else args.lr
        self.optimizer = build_adamw(self.model, args, self.peak_lr)
        self.checkpointer = Checkpointer(self.model, self.optimizer, self.ranks, loaded.adapters)
        self._closing.callback(self.checkpointer.dispose)
        self.rule = PackingRule.of(args, hidden_size(self.model.hf))
        self.published = PublishedWeights(self.model) if keeps_published(args, self.role) else None
        self.publisher = Publisher(self.model, args, self.dtype, self.ranks, self.published)
        self._closing.callback(self.publisher.dispose)
        self.exporter = Exporter(self.model, loaded.source, self.dtype, self.ranks, loaded.adapters)
        if args.load is None:
            return None
        progress = self.checkpointer.load(newest_complete(args.load, self.role), self.published)
        self.step, self.version, self.updates = progress.step, progress.weight_version, progress.updates
        return progress.rollout_id

    # ---- training

    def train(self, rollout_id: int, share: ObjectRef, values: ObjectRef | None = None) -> TrainResult:
        """Make the optimizer steps of one rollout out of this rank's share.

        Args:
            values: actor with ppo: the critic's values of this share.

        Returns:
            metrics of each step, global over ranks. A critic also returns its values from before the first step.
        """
        started = time.perf_counter()
        own: TrainShare = self.store.get(share)
        critic_values = None if values is None else torch.tensor(self.store.get(values))
        columns, micro_batches = self._prepare(own, critic_values)
        values_ref = None
        if self.role == "critic":
            assert columns.old_values is not None
            values_ref = self.store.put(columns.old_values.cpu().numpy())
        first = self._first_step(own, columns, micro_batches)
        bases = self._ratio_bases(micro_batches, columns)
        metrics = []
        for batches, columns.old_logprobs in zip(micro_batches, bases, strict=True):
            reached(self.args, "before_step", rollout_id)
            metrics.append(self._optimizer_step(batches, columns))
            reached(self.args, "after_step", rollout_id)
        if first is not None:
            metrics[0] |= first.check_ratio(metrics[0], exact=bases[0] is None)
        return TrainResult(metrics, self.step, time.perf_counter() - started, values_ref)

    def _first_step(self, share: TrainShare, columns: TokenColumns, steps: list[list[MicroBatch]]) -> FirstStep | None:
        """With --verify-first-step, before this process' first step of the actor: its check, the first half of which is done."""
        args = self.args
        if self.verified or not steps or not isinstance(self.model, PolicyModel) or not args.verify_first_step:
            return None
        self.verified = True
        check = FirstStep(args, self.model, self.ranks, self.rule, share, columns, steps[0])
        check.check_logprobs(on_policy=self.step == 0 and args.ref_checkpoint in (None, args.hf_checkpoint))
        return check

    def mean_nll(self, share: ObjectRef) -> float:
        """Mean negative log-likelihood of the trained tokens of all ranks' shares under the current weights."""
        own: TrainShare = self.store.get(share)
        columns = token_columns(own, self.args, self.device)
        steps = [self._pack(own, columns, step, everything=True) for step in range(own.num_steps)]
        logprobs = self._evaluate(self.model, steps, columns).double()
        total, count = self.ranks.sum(torch.stack([logprobs.sum(), logprobs.new_tensor(float(columns.trained.sum()))])).tolist()
        return -total / max(1.0, count)

    def _prepare(self, share: TrainShare, critic_values: Tensor | None) -> tuple[TokenColumns, list[list[MicroBatch]]]:
        """The columns of the whole share, and each step's micro-batches, equally many on every rank."""
        args = self.args
        columns = token_columns(share, args, self.device, self.version)
        with_reference = args.kl_coef or (args.kl_loss_coef and self.role == "actor")
        with_teacher = args.teacher_checkpoint is not None
        if with_reference or with_teacher or self.role == "critic":
            every = [self._pack(share, columns, step, everything=True) for step in range(share.num_steps)]
            if with_reference:
                with self.frozen.reference(self.model) as reference:
                    columns.ref_logprobs = self._evaluate(reference, every, columns)
            if with_teacher:
                columns.teacher_logprobs = self._evaluate(self.frozen.get("teacher"), every, columns)
            if self.role == "critic":
                critic_values = self._evaluate(self.model, every, columns)
        fill_advantages(columns, share, args, self.ranks, critic_values)
        steps = [self._pack(share, columns, step, everything=False) for step in range(share.num_steps)]
        return columns, steps

    def _pack(self, share: TrainShare, columns: TokenColumns, step: int, everything: bool) -> list[MicroBatch]:
        """Micro-batches of one step's samples; unless `everything`, of those that have a gradient.

        A sample has none if its advantages are all 0 and neither KL nor entropy is in the loss. A rank without any
        such sample computes one all the same, so that a step always has log-probs to compare with the engines'.
        """
        data, args = share.data, self.args
        mine = np.flatnonzero(share.batch.step_of[share.positions] == step).tolist()
        trained = columns.trained.astype(np.uint8)
        if not everything and self.role == "actor" and not args.kl_loss_coef and not args.entropy_coef:
            mine = samples_with(mine, columns.advantages.cpu().numpy(), data.offsets) or samples_with(mine, trained, data.offsets)[:1]
        batches = pack(data.token_ids, data.offsets, trained, mine, self.rule)
        return forward.equalize(batches, self.ranks, self.rule.dense_mask)

    def _evaluate(self, model: TrainedModel, steps: list[list[MicroBatch]], columns: TokenColumns) -> Tensor:
        out = torch.zeros_like(columns.weights)
        for batches in steps:
            forward.evaluate(model, batches, out)
        return out

    def _ratio_bases(self, steps: list[list[MicroBatch]], columns: TokenColumns) -> list[Tensor | None]:
        """For each step, the log-probs that its policy ratio starts from. None: its own forward pass gives them.

        Recomputed ones are those of the weights before the first step, so the first step needs no pass of its own.
        """
        if self.role == "critic" or self.args.advantage_estimator == "sft" or not steps:
            return [None] * len(steps)
        if self.args.use_rollout_logprobs:
            return [columns.rollout_logprobs] * len(steps)
        if self.args.keep_old_actor:
            assert self.published is not None
            with self.published.in_place():
                return [self._evaluate(self.model, steps, columns)] * len(steps)
        later = steps[1:]
        return [None] + [self._evaluate(self.model, later, columns)] * len(later) if later else [None]

    def _optimizer_step(self, batches: list[MicroBatch], columns: TokenColumns) -> dict[str, float]:
        started = time.perf_counter()
        if self.args.lora_dropout:  # the same masks however the run came here
            torch.manual_seed((self.args.seed + self.step * self.ranks.world_size + self.ranks.rank) % 2**63)
        sums: Sums = {}
        for batch in batches:
            sums = add_sums(sums, self._backward(batch.to(self.device), columns))
        norm = clip_gradients(self.model.parameters(), self.args.max_grad_norm, self.ranks)
        lr = learning_rate(self.step, total_steps(self.args, self.role), self.peak_lr, self.args)
        set_learning_rate(self.optimizer, lr)
        if math.isfinite(norm):
            self.optimizer.step()
            self.updates += 1
        else:
            logger.error("optimizer step %d is left out: its gradient norm is %s", self.step, norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        facts = StepFacts(
            role=self.role,
            versions=columns.versions[np.concatenate([batch.tokens.numpy() for batch in batches])],
            version=self.version,
            nodes=sum(batch.num_nodes for batch in batches),
            places=sum(batch.input_ids.numel() for batch in batches),
            grad_norm=norm,
            lr=lr,
            seconds=time.perf_counter() - started,
        )
        return step_metrics(sums, facts, self.ranks)

    def _backward(self, batch: MicroBatch, columns: TokenColumns) -> Sums:
        if self.role == "critic":
            loss, sums = critic_loss(forward.run(self.model, batch)[0], columns, batch.tokens, self.args)
        elif columns.likeliest_ids is not None:
            logprobs, entropy, likeliest = forward.run_with_likeliest(self.model, batch, columns.likeliest_ids[batch.tokens])
            loss, sums = actor_loss(logprobs, entropy, columns, batch.tokens, self.args, likeliest=likeliest)
        else:
            loss, sums = actor_loss(*forward.run(self.model, batch), columns, batch.tokens, self.args)
        loss.backward()
        return sums

    # ---- publishing

    def plan_publish(self, version: int, num_receivers: int = 1, one_host: bool = True) -> PublishPlan:
        """Open a publish. All ranks call the four methods of a publish, as shards are gathered; rank 0 sends.

        A version that was published before is published again as it was, also when the weights have been trained since.

        Args:
            num_receivers: engines that take part.
            one_host: whether all of them are on this host.
        """
        return self.publisher.plan(version, num_receivers, one_host, again=version == self.version)

    def send_bucket(self, index: int) -> None:
        self.publisher.send_bucket(index)
        reached(self.args, "bucket_sent", self.publisher.version)

    def end_publish(self) -> dict[str, str]:
        """Returns the checksums of what was sent, by name; {} on ranks other than 0 and when verification is off."""
        self.version, checksums = self.publisher.end()
        return checksums

    def abort_publish(self) -> None:
        """Called instead of end_publish when a publish failed. Idempotent."""
        self.publisher.abort()

    def weights_checksum(self) -> dict[str, str]:
        """Checksum of every weight as a publish would send it, by name; {} on ranks other than 0."""
        return self.publisher.checksum_all()

    # ---- saving

    def save(self, rollout_id: int, directory: str, force_sync: bool) -> None:
        """Write this role's part of the checkpoint in `directory`; unless forced, training may go on while it is written.

        With --save-hf the actor exports a Hugging Face checkpoint beside it.
        """
        # Where a publish is due after this rollout, a resumed run begins with it, and nobody asks for the last one's weights.
        waits = (rollout_id + 1) % self.args.update_weights_interval != 0
        progress = Progress(rollout_id, self.step, self.version, self.updates)
        self.checkpointer.save(Path(directory) / self.role, progress, force_sync, self.published if waits else None)
        if self.args.save_hf and self.role == "actor":
            folder = Path(directory) / "hf"
            self.checkpointer.also(self.exporter.later(folder), folder)

    async def wait_for_save(self) -> FileSums:
        """Until the last save is on disk; training may go on meanwhile. Returns the checksums of the files that this rank wrote."""
        return await self.checkpointer.written()

    def export_hf(self, path: str) -> None:
        """A Hugging Face checkpoint of the actor's weights in --dtype."""
        assert self.role == "actor", "a critic has no Hugging Face form"
        self.exporter.now(Path(path))

    # ---- memory

    def offload(self) -> None:
        """Weights and optimizer state leave the device. Idempotent."""
        self._move(torch.device("cpu"))

    def onload(self) -> None:
        """They come back. Idempotent."""
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        offload.move(self.model, self.optimizer, device)
        self.frozen.move(device)
        if self.published is not None:
            self.published.move(device)

    def dispose(self) -> None:
        """Finish what is being saved, leave the group. Idempotent, and fine after an init that failed."""
        self._closing.close()
