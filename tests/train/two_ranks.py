"""What two real processes do together over gloo; `python -m tests.train.two_ranks RANK PORT FOLDER MODEL`.

Each scenario returns what the tests look at; rank 0 writes all of it to FOLDER/results.pt.
"""

import asyncio
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from miles.algorithms.aggregation import token_weights
from miles.train import publish
from miles.train.lora import is_adapter
from miles.train.mesh import Ranks
from miles.train.optimizer import clip_gradients
from miles.train.sharding import add_gradients, full
from miles.train.trainer import Trainer
from miles.weights.receiver import WeightLoader
from tests.train.rollouts import Store, make_shares, settings

CPU = torch.device("cpu")
GRPO = {"num_trainers": 2, "global_batch_size": 8, "max_tokens_per_micro_batch": 40, "weight_bucket_mb": 1}
LORA = GRPO | {"lora_rank": 3, "lora_alpha": 6.0}
PPO = {
    "num_trainers": 2,
    "advantage_estimator": "ppo",
    "use_rollout_logprobs": True,
    "critic_lr": 1e-3,
    "normalize_advantages": True,
    "adam_eps": 1e-6,
}


def scalar_gradients(ranks: Ranks) -> dict[str, Any]:
    """loss = w x per token: rank 0 holds 2 tokens x = 1, rank 1 holds 8 tokens x = 0, in one sample or several, one pass or more."""
    found = {}
    for name, samples in {"one": ([[1.0, 1.0]], [[0.0] * 8]), "three": ([[1.0], [1.0]], [[0.0] * 8])}.items():
        for passes in (1, 2):
            model = nn.Linear(1, 1, bias=False)
            nn.init.ones_(model.weight)
            assert ranks.mesh is not None
            fully_shard(model, mesh=ranks.mesh)
            add_gradients(model)
            own = samples[ranks.rank]
            weights = token_weights("token_mean", torch.tensor([len(s) for s in own]), 10, 2 if name == "one" else 3, 100)
            tokens = torch.tensor([x for s in own for x in s])
            weight = torch.cat([w.repeat(len(s)) for w, s in zip(weights, own, strict=True)]).float()
            for part in range(passes):
                (model(tokens[part::passes, None])[:, 0] * weight[part::passes]).sum().backward()
            norm = clip_gradients(model.parameters(), 10.0, ranks)
            assert model.weight.grad is not None
            found[f"{name}-{passes}"] = (float(full(model.weight.grad)), norm)
    return found


def train(trainer: Trainer, store: Store, rank: int, seeds: range, values: Any = None) -> list[Any]:
    results = []
    for seed in seeds:
        share = store.put(make_shares(seed, ranks=2, samples_per_step=trainer.args.samples_per_step)[rank])
        results.append(trainer.train(seed, share, values))
    return results


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: full(p.detach()).clone() for name, p in trainer.model.named_parameters()}


class Gathered:
    """Stands before `full` in a publish and notes how many bytes of whole tensors live at once."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0

    def __call__(self, shard: torch.Tensor) -> torch.Tensor:
        whole = full(shard)
        self.made.append(weakref.ref(whole))
        self.peak = max(self.peak, sum(tensor.nbytes for made in self.made if (tensor := made()) is not None))
        return whole


def published(trainer: Trainer) -> dict[str, Any]:
    """One publish into parameters of our own, beside which it is compared."""
    publish.full = gathered = Gathered()
    target = {name: torch.zeros(p.shape, dtype=trainer.dtype) for name, p in trainer.model.hf.named_parameters() if not is_adapter(name)}
    loader = WeightLoader(target)
    plan = trainer.plan_publish(1)
    if trainer.ranks.rank == 0:
        loader.begin(plan, 0)
    for index in range(len(plan.buckets)):
        trainer.send_bucket(index)
        if trainer.ranks.rank == 0:
            loader.receive(index)
    received = loader.finish() if trainer.ranks.rank == 0 else {}
    loader.dispose()
    sent = trainer.end_publish()
    publish.full = full
    largest = max(tensor.nbytes for tensor in target.values())
    assert gathered.peak <= 2 * largest, "on every rank"
    return {
        "peak": gathered.peak,
        "largest": largest,
        "target": target,
        "sent": sent,
        "received": received,
        "buckets": len(plan.buckets),
        "checksums": trainer.weights_checksum(),
    }


def adapters(ranks: Ranks, store: Store, folder: Path, model: str) -> dict[str, Any]:
    """Low-rank adapters on a sharded base, in both types, resumed from what one rank saved."""
    found: dict[str, Any] = {}
    for name, changes in {"lora": {}, "lora_resumed": {"load": str(folder / "lora_from_one")}, "lora_bf16": {"dtype": "bfloat16"}}.items():
        trainer = Trainer(settings(model, **(LORA | changes)), "actor", ranks.rank, 2, store)
        trainer.ranks = ranks
        trainer.init("", 0)
        found[name] = {"metrics": [r.metrics_per_step for r in train(trainer, store, ranks.rank, range(2 if not changes else 1))]}
        found[name] |= {"weights": weights(trainer), "publish": published(trainer)}
        if not changes:
            trainer.export_hf(str(folder / "lora_hf"))
    return found


def main(rank: int, port: int, folder: Path, model: str) -> None:
    store = Store()
    found: dict[str, Any] = {}
    trainer = Trainer(settings(model, **GRPO), "actor", rank, 2, store)
    trainer.init("127.0.0.1", port)
    found["scalar"] = scalar_gradients(trainer.ranks)
    found["metrics"] = [r.metrics_per_step for r in train(trainer, store, rank, range(2))]
    found["weights"] = weights(trainer)
    found["tied"] = trainer.model.hf.get_input_embeddings().weight is trainer.model.hf.get_output_embeddings().weight
    found["publish"] = published(trainer)
    trainer.save(1, str(folder / "from_two"), force_sync=False)
    found["next"] = [r.metrics_per_step for r in train(trainer, store, rank, range(2, 3))]
    asyncio.run(trainer.wait_for_save())
    (folder / "from_two" / "COMPLETE").touch()
    found["weights_next"] = weights(trainer)
    trainer.export_hf(str(folder / "hf"))
    trainer.offload()
    trainer.onload()

    # few samples, and a rank whose samples have nothing to learn
    for seed, shape in ((7, {"groups": 1, "siblings": 3}), (8, {"groups": 1, "siblings": 1})):
        share = make_shares(seed, ranks=2, samples_per_step=8, **shape)[rank]
        found[f"few-{seed}"] = trainer.train(seed, store.put(share)).metrics_per_step

    resumed = Trainer(settings(model, **GRPO, load=str(folder / "from_one")), "actor", rank, 2, store)
    resumed.ranks = trainer.ranks
    resumed.init("", 0)
    train(resumed, store, rank, range(2, 3))
    found["weights_resumed"] = weights(resumed)

    found |= adapters(trainer.ranks, store, folder, model)

    args = settings(model, **PPO)
    critic = Trainer(args, "critic", rank, 2, store)
    actor = Trainer(args, "actor", rank, 2, store)
    for member in (critic, actor):
        member.ranks = trainer.ranks
        member.init("", 0)
    share = store.put(make_shares(0, ranks=2)[rank])
    first = critic.train(0, share)
    found["critic"], found["actor"] = first.metrics_per_step, actor.train(0, share, first.values).metrics_per_step
    found["critic_weights"], found["actor_weights"] = weights(critic), weights(actor)
    trainer.dispose()
    if rank == 0:
        torch.save(found, folder / "results.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
