"""A step's sums into its metrics, global over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from miles.algorithms.corrections import effective_sample_share
from miles.train.loss import LAGS, Sums
from miles.train.mesh import Ranks
from miles.types import Role


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What one rank knows of an optimizer step beside its sums."""

    role: Role
    versions: np.ndarray  # int32 [computed trained tokens] weights that wrote each, -1: unknown
    version: int  # the newest published weights, -1: none
    nodes: int  # tokens that the backbone saw
    places: int  # with padding
    grad_norm: float
    lr: float
    seconds: float


def step_metrics(sums: Sums, facts: StepFacts, ranks: Ranks) -> dict[str, float]:
    """Means over the trained tokens that were computed: those of samples with a gradient (Trainer._pack says which).
    Names that begin with `seq_` are means over their samples, those that end in `/lag_N` over tokens of that weight lag.

    loss, policy_loss and value_loss are the weighted sums themselves, exact for the whole step. num_tokens counts the
    computed trained tokens, computed_tokens what the backbone saw for them, prompts and all, shared ones once.
    """
    known = facts.versions[facts.versions >= 0]
    lags = (facts.version - known) if facts.version >= 0 else known * 0
    local = {"_known": len(known), "_lag": int(lags.sum()), "_nodes": facts.nodes, "_places": facts.places}
    names = sorted(name for name in sums if not name.endswith("_max"))
    highest = sorted(name for name in sums if name.endswith("_max"))
    added = torch.cat([*(sums[name].reshape(-1) for name in names), sums[names[0]].new_tensor(list(local.values()))])
    total = dict(zip([each for name in names for each in _parts(name)] + list(local), ranks.sum(added).tolist(), strict=True))
    peaks = torch.stack([*(sums[name] for name in highest), sums[names[0]].new_tensor(float(lags.max()) if len(lags) else 0.0)])
    peak = dict(zip([*highest, "weight_lag_max"], ranks.max(peaks).tolist(), strict=True))

    num_tokens = total.pop("tokens")
    metrics = {}
    for name in (name for name in total if not name.startswith(("_", "tokens/"))):
        if name == "loss" or name.endswith("_loss"):
            metrics[name] = total[name]
        elif "/lag_" in name:
            if of_lag := total["tokens/" + name.rpartition("/")[2]]:
                metrics[name] = total[name] / of_lag
        else:
            count = total["_sequences"] if name.startswith("seq_") else num_tokens
            metrics[name] = total[name] / count if count else float("nan")
    if "_ratio" in total:
        metrics["ess"] = effective_sample_share(total["_ratio"], total["_ratio_squared"], num_tokens)
        metrics["seq_ess"] = effective_sample_share(total["_seq_ratio"], total["_seq_ratio_squared"], total["_sequences"])
    metrics |= {"grad_norm": facts.grad_norm, "lr": facts.lr, "num_tokens": num_tokens, "computed_tokens": total["_nodes"]}
    if facts.role == "critic":
        metrics["value_explained_variance"] = _explained_variance(total, num_tokens)
        named = {f"train/{name}" if name.startswith("value_") else f"critic/{name}": value for name, value in metrics.items()}
        return named | {"perf/critic_tokens_per_second": total["_nodes"] / facts.seconds}
    metrics |= {"weight_lag": total["_lag"] / total["_known"] if total["_known"] else 0.0} | peak
    named = {f"train/{name}": value for name, value in metrics.items()}
    padding = 1.0 - total["_nodes"] / total["_places"] if total["_places"] else 0.0
    return named | {"perf/train_tokens_per_second": total["_nodes"] / facts.seconds, "perf/train_padding_share": padding}


def _parts(name: str) -> list[str]:
    return [f"{name}_{lag}" for lag in range(LAGS)] if name.endswith("/lag") else [name]


def _explained_variance(total: dict[str, float], tokens: float) -> float:
    """1 - variance of (returns - values) / variance of returns; NaN where returns do not vary."""
    if not tokens:
        return float("nan")
    returns = total["_returns_squared"] / tokens - (total["return_mean"] / tokens) ** 2
    errors = total["_errors_squared"] / tokens - (total["_errors"] / tokens) ** 2
    return 1.0 - errors / returns if returns > 1e-12 else float("nan")
